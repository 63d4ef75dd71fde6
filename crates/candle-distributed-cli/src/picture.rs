//! What all pictures have in common: fonts, colors in light and dark mode, numbers on axes.

use std::{fmt::Write, io, sync::LazyLock};

use plotters::{
    chart::MeshStyle,
    coord::{Shift, ranged1d::Ranged},
    drawing::DrawingAreaErrorKind,
    prelude::*,
};

use crate::error::Result;

pub(crate) type Drawn<T = ()> = Result<T, DrawingAreaErrorKind<io::Error>>;
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub(crate) const FONT: &str = "sans-serif";
/// The font size of names and numbers; plotters turns it into 13.7 pixels.
pub(crate) const TEXT: f64 = 17.0;

pub(crate) const INK: RGBColor = RGBColor(45, 49, 58);
pub(crate) const FAINT: RGBColor = RGBColor(105, 111, 123);
pub(crate) const GRID: RGBColor = RGBColor(226, 229, 234);
pub(crate) const FITS: RGBColor = RGBColor(23, 120, 75);
pub(crate) const LIMIT: RGBColor = RGBColor(192, 38, 45);
/// Letters on a light background, also in dark mode.
pub(crate) const ON_LIGHT: RGBColor = RGBColor(44, 48, 57);

// Okabe and Ito's colors: readers who confuse red and green can tell them apart, and so can a gray
// print.
pub(crate) const SKY: RGBColor = RGBColor(86, 180, 233);
pub(crate) const BLUE: RGBColor = RGBColor(0, 114, 178);
pub(crate) const ORANGE: RGBColor = RGBColor(230, 159, 0);

/// Colors that change in dark mode. The others are those of blocks, and stay.
const IN_THE_DARK: [(RGBColor, RGBColor); 6] = [
    (INK, RGBColor(225, 228, 234)),
    (FAINT, RGBColor(158, 165, 178)),
    (GRID, RGBColor(49, 54, 64)),
    (FITS, RGBColor(88, 196, 142)),
    (LIMIT, RGBColor(240, 106, 106)),
    (BLUE, RGBColor(44, 140, 204)),
];

/// The background in dark mode.
const DARK_PAPER: RGBColor = RGBColor(24, 27, 33);

/// A ramp from dark to light, for things in a row.
const RAMP: [RGBColor; 4] = [
    RGBColor(33, 72, 138),
    RGBColor(38, 126, 178),
    RGBColor(54, 168, 150),
    RGBColor(132, 196, 104),
];

/// The rules that make a picture dark where the reader's system is.
///
/// They pick elements by their colors and are the same for all pictures, so several pictures on one
/// page do not interfere.
pub(crate) static STYLE: LazyLock<String> = LazyLock::new(|| {
    let mut style = format!(
        "@media screen and (prefers-color-scheme: dark) {{\nsvg rect[fill=\"{}\"] {{ fill: {} }}\n",
        hex(WHITE),
        hex(DARK_PAPER)
    );
    for (light, dark) in IN_THE_DARK.map(|(light, dark)| (hex(light), hex(dark))) {
        for attribute in ["fill", "stroke"] {
            // Writing to a string cannot fail.
            let _ = writeln!(style, "svg [{attribute}=\"{light}\"] {{ {attribute}: {dark} }}");
        }
    }
    style + "}\n"
});

/// An SVG document of this size in pixels.
pub(crate) fn document(size: (u32, u32), draw: impl FnOnce(Area<'_>) -> Drawn) -> Result<String> {
    let mut document = String::new();
    let area = SVGBackend::with_string(&mut document, size).into_drawing_area();
    area.fill(&WHITE)?;
    draw(area)?;
    // The style is the first child of the document.
    Ok(document.replacen(">\n", &format!(">\n{}", style_element()), 1).trim_end().to_owned() + "\n")
}

/// The document as part of a page that includes the [`STYLE`] itself.
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

/// How the axes of all pictures look: lines across for the numbers on the left, nothing else.
pub(crate) fn plain<X: Ranged, Y: Ranged, B: DrawingBackend>(
    axes: &mut MeshStyle<'_, '_, X, Y, B>,
) {
    axes.disable_x_mesh().bold_line_style(GRID).light_line_style(TRANSPARENT).axis_style(FAINT);
    axes.label_style((FONT, TEXT, &INK));
}

/// The color of a step of a ramp. Every other step is lighter, so that neighbors differ however
/// many steps there are.
pub(crate) fn ramp(step: usize, n_steps: usize) -> RGBColor {
    let at = step * (RAMP.len() - 1);
    let steps = n_steps.saturating_sub(1).max(1);
    let next = RAMP[(at / steps + 1).min(RAMP.len() - 1)];
    let color = blend(RAMP[(at / steps).min(RAMP.len() - 1)], next, at % steps, steps);
    if step.is_multiple_of(2) { color } else { blend(color, WHITE, 1, 5) }
}

/// `part` of `whole` on the way from one color to another.
fn blend(from: RGBColor, to: RGBColor, part: usize, whole: usize) -> RGBColor {
    RGBColor(
        mix(from.0, to.0, part, whole),
        mix(from.1, to.1, part, whole),
        mix(from.2, to.2, part, whole),
    )
}

#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn mix(from: u8, to: u8, part: usize, whole: usize) -> u8 {
    let sum = usize::from(from) * (whole - part) + usize::from(to) * part;
    u8::try_from(sum / whole).expect("a mean of two bytes is a byte")
}

/// A number on an axis, in a short form.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "plotters asks for this signature")]
pub(crate) fn tick(value: &f64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];

    let (mut value, mut unit) = (*value, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{}{}", (value * 1000.0).round() / 1000.0, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_short() {
        let ticks =
            [0.0, 0.1 + 0.2, 999.0, 1000.0, 1_250_000.0, 4e18, 4e21].map(|value| tick(&value));
        assert_eq!(ticks, ["0", "0.3", "999", "1k", "1.25M", "4E", "4000E"]);
    }

    #[test]
    fn a_picture_on_a_page_has_no_style_and_no_address_of_its_own() {
        let picture = document((100, 100), |area| area.present()).unwrap();
        assert!(picture.contains("<style>") && picture.ends_with("</svg>\n"), "{picture}");
        let part = inline(&picture);
        assert!(
            part.starts_with("<svg ") && !part.contains("style") && !part.contains("http"),
            "{part}"
        );
    }

    #[test]
    fn neighbors_on_a_ramp_differ() {
        for n_steps in 1..200 {
            let colors: Vec<_> = (0..n_steps).map(|step| ramp(step, n_steps)).collect();
            assert!(colors.windows(2).all(|pair| pair[0] != pair[1]), "{n_steps}");
        }
    }
}
