//! Shared parts of all pictures: headings, legends, fonts, colors in light and dark mode, and axis
//! labels.

use std::{fmt::Write, io, sync::LazyLock};

use plotters::{
    chart::MeshStyle,
    coord::{Shift, ranged1d::Ranged},
    drawing::DrawingAreaErrorKind,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::error::Result;

/// The result of drawing.
pub(crate) type DrawResult<T = ()> = Result<T, DrawingAreaErrorKind<io::Error>>;
/// An area of a picture, with coordinates in pixels.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(crate) const FONT: &str = "sans-serif";
/// The font size of names and numbers. plotters renders it at 13.7 pixels.
pub(crate) const TEXT: f64 = 17.0;

/// The left edge of headings and axis names.
pub(crate) const LEFT: i32 = 14;
/// The height of a heading.
pub(crate) const HEADING: u32 = 66;
/// The height of a legend line.
pub(crate) const LEGEND: u32 = 26;

/// The anchor of a text to the right of its point, vertically centered.
const AFTER: Pos = Pos { h_pos: HPos::Left, v_pos: VPos::Center };

pub(crate) const INK: RGBColor = RGBColor(45, 49, 58);
pub(crate) const FAINT: RGBColor = RGBColor(105, 111, 123);
pub(crate) const GRID: RGBColor = RGBColor(226, 229, 234);
/// The color of a plan that fits its budget.
pub(crate) const FITS: RGBColor = RGBColor(23, 120, 75);
/// The color of a limit, and of a plan beyond its limit.
pub(crate) const LIMIT: RGBColor = RGBColor(192, 38, 45);

// Okabe and Ito's palette, which stays distinguishable for color-blind readers and in grayscale.
pub(crate) const BLUE: RGBColor = RGBColor(0, 114, 178);
pub(crate) const ORANGE: RGBColor = RGBColor(230, 159, 0);
pub(crate) const GREEN: RGBColor = RGBColor(0, 158, 115);
pub(crate) const PURPLE: RGBColor = RGBColor(204, 121, 167);

// The memory of a rank besides its parameters. Parameters are dark and cool, so the parts drawn on
// top of them are light and mostly warm.
pub(crate) const GRADIENTS: RGBColor = RGBColor(252, 221, 143);
pub(crate) const OPTIMIZER: RGBColor = RGBColor(247, 190, 150);
pub(crate) const GATHERED: RGBColor = RGBColor(160, 140, 196);
pub(crate) const ACTIVATIONS: RGBColor = RGBColor(204, 226, 203);

/// Colors that change in dark mode, with the colors that replace them. Block colors stay the same.
const DARK_MODE: [(RGBColor, RGBColor); 6] = [
    (INK, RGBColor(225, 228, 234)),
    (FAINT, RGBColor(158, 165, 178)),
    (GRID, RGBColor(49, 54, 64)),
    (FITS, RGBColor(88, 196, 142)),
    (LIMIT, RGBColor(240, 106, 106)),
    (BLUE, RGBColor(44, 140, 204)),
];

/// The background in dark mode.
const DARK_BACKGROUND: RGBColor = RGBColor(24, 27, 33);

/// CSS rules for dark mode.
///
/// They select elements by color and are the same for all pictures, so several pictures on one page
/// do not interfere.
pub(crate) static STYLE: LazyLock<String> = LazyLock::new(|| {
    let mut style = format!(
        "@media screen and (prefers-color-scheme: dark) {{\nsvg rect[fill=\"{}\"] {{ fill: {} }}\n",
        hex(WHITE),
        hex(DARK_BACKGROUND)
    );
    for (light, dark) in DARK_MODE.map(|(light, dark)| (hex(light), hex(dark))) {
        for attribute in ["fill", "stroke"] {
            // Writing to a string cannot fail.
            let _ = writeln!(style, "svg [{attribute}=\"{light}\"] {{ {attribute}: {dark} }}");
        }
    }
    style + "}\n"
});

/// Draws an SVG document of this size in pixels.
pub(crate) fn document(
    size: (u32, u32),
    draw: impl FnOnce(Area<'_>) -> DrawResult,
) -> Result<String> {
    let mut document = String::new();
    let area = SVGBackend::with_string(&mut document, size).into_drawing_area();
    area.fill(&WHITE)?;
    draw(area)?;
    // The style is the first child of the document.
    Ok(document.replacen(">\n", &format!(">\n{}", style_element()), 1).trim_end().to_owned() + "\n")
}

/// Prepares a document for an HTML page with the [`STYLE`]: removes its style and its namespace.
pub(crate) fn inline(document: &str) -> String {
    document.replacen(&style_element(), "", 1).replacen(
        " xmlns=\"http://www.w3.org/2000/svg\"",
        "",
        1,
    )
}

fn style_element() -> String {
    format!("<style>\n{}</style>\n", *STYLE)
}

fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// Draws the title of a picture, with its figures below.
pub(crate) fn draw_heading(
    area: &Area<'_>,
    title: &str,
    figures: &str,
    color: RGBColor,
) -> DrawResult {
    let (width, _) = area.dim_in_pixel();
    // Shrink a long title to fit on one line: a bold character is about half as wide as high.
    let size = (1.9 * f64::from(width) / title.chars().count().max(1) as f64).min(21.0);
    let style = TextStyle::from((FONT, size, FontStyle::Bold)).color(&INK);
    area.draw(&Text::new(title, (LEFT, 14), style))?;
    let style = TextStyle::from((FONT, TEXT)).color(&color).pos(AFTER);
    area.draw(&Text::new(figures, (LEFT, 50), style))
}

/// The symbol of a legend entry.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    Block,
    Dot,
    Line,
}

/// Draws a legend line that begins at a point.
pub(crate) fn draw_legend(
    area: &Area<'_>,
    (mut x, y): (i32, i32),
    entries: &[(Mark, RGBColor, &str)],
) -> DrawResult {
    for &(mark, color, name) in entries {
        draw_symbol(area, mark, color, (x, y))?;
        let style = TextStyle::from((FONT, TEXT)).color(&INK).pos(AFTER);
        area.draw(&Text::new(name, (x + 24, y), style))?;
        x += 24 + text_width(name) + 24;
    }
    Ok(())
}

/// Draws the symbol of a legend entry.
fn draw_symbol(area: &Area<'_>, mark: Mark, color: RGBColor, (x, y): (i32, i32)) -> DrawResult {
    match mark {
        Mark::Block => {
            area.draw(&Rectangle::new([(x + 3, y - 6), (x + 16, y + 7)], color.filled()))
        }
        Mark::Dot => area.draw(&Circle::new((x + 10, y), 3, color.mix(0.45).filled())),
        Mark::Line => area.draw(&PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))),
    }
}

/// Estimates the width in pixels of a text of size [`TEXT`], as rendered in a wide font.
fn text_width(text: &str) -> i32 {
    text.chars().map(char_width).sum()
}

fn char_width(char: char) -> i32 {
    match char {
        'i' | 'j' | 'l' | '.' | ',' | ':' | '|' | '\'' | ' ' => 5,
        'f' | 'r' | 't' | '(' | ')' | '[' | ']' | '-' | '/' => 6,
        'A'..='L' | 'N'..='V' | 'X'..='Z' => 10,
        'm' | 'w' | 'M' | 'W' | '%' | '…' => 14,
        _ => 8,
    }
}

/// Styles the axes of a picture: horizontal grid lines at the labels of the y axis, and no other grid
/// lines.
pub(crate) fn style_axes<X: Ranged, Y: Ranged, B: DrawingBackend>(
    axes: &mut MeshStyle<'_, '_, X, Y, B>,
) {
    axes.disable_x_mesh().bold_line_style(GRID).light_line_style(TRANSPARENT).axis_style(FAINT);
    axes.label_style((FONT, TEXT, &INK));
}

/// The number format of an axis: one unit for all labels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticks {
    unit: f64,
    name: &'static str,
    decimals: usize,
}

impl Ticks {
    /// Returns the format for an axis from 0 up to this number.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a logarithm is small, and not negative where it is cast"
    )]
    pub(crate) fn up_to(highest: f64) -> Self {
        const UNITS: [(f64, &str); 5] =
            [(1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")];

        let large_unit = UNITS.into_iter().find(|(unit, _)| highest >= *unit);
        // `k` starts at 10,000: four digits are easy to read without it.
        let (unit, name) =
            large_unit.unwrap_or(if highest >= 1e4 { (1e3, "k") } else { (1.0, "") });
        // Ticks are at least a tenth of the axis apart, so three significant digits suffice.
        let decimals = (2.0 - (highest / unit).log10().floor()).clamp(0.0, 12.0) as usize;
        Self { unit, name, decimals }
    }

    pub(crate) fn label(self, value: f64) -> String {
        let digits = format!("{:.*}", self.decimals, value / self.unit);
        let number = if digits.contains('.') {
            digits.trim_end_matches('0').trim_end_matches('.')
        } else {
            &digits
        };
        if number == "0" { number.to_owned() } else { format!("{number}{}", self.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_labels_share_one_unit() {
        for (highest, values, labels) in [
            (0.35, [0.0, 0.1 + 0.2, 0.35], ["0", "0.3", "0.35"]),
            (4e-4, [0.0, 1e-4, 2.5e-4], ["0", "0.0001", "0.00025"]),
            (2048.0, [0.0, 500.0, 2000.0], ["0", "500", "2000"]),
            (1.6e6, [0.0, 200_000.0, 1_250_000.0], ["0", "0.2M", "1.25M"]),
            (16_384.0, [0.0, 500.0, 16_000.0], ["0", "0.5k", "16k"]),
            (4e21, [0.0, 4e18, 4e21], ["0", "4E", "4000E"]),
        ] {
            let ticks = Ticks::up_to(highest);
            assert_eq!(values.map(|value| ticks.label(value)), labels, "{highest}");
        }
        // Axes without an extent.
        assert_eq!([0.0, f64::NAN].map(|highest| Ticks::up_to(highest).label(0.0)), ["0", "0"]);
    }

    #[test]
    fn inline_removes_style_and_namespace() {
        let picture = document((100, 100), |area| area.present()).unwrap();
        assert!(picture.contains("<style>") && picture.ends_with("</svg>\n"), "{picture}");
        let inlined = inline(&picture);
        assert!(inlined.starts_with("<svg "), "{inlined}");
        assert!(!inlined.contains("style") && !inlined.contains("http"), "{inlined}");
    }
}
