//! Colors, letters, and the shapes that are more than a rectangle.

use std::{io, ops::Range};

use plotters::{
    coord::Shift,
    drawing::DrawingAreaErrorKind,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{columns::Part, words::unit_name};

pub(super) type Drawn<T = ()> = Result<T, DrawingAreaErrorKind<io::Error>>;
pub(super) type Point = (i32, i32);

pub(super) const FONT: &str = "sans-serif";
/// The size of the letters of names and numbers; plotters makes 13.7 pixels of it.
pub(super) const TEXT: f64 = 17.0;
/// The width of most such letters and the space behind them, in pixels.
const LETTER: i32 = 8;

/// Where a text lies beside its point.
pub(super) const ABOVE: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Bottom };
pub(super) const BELOW: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Top };
pub(super) const AFTER: Pos = Pos { h_pos: HPos::Left, v_pos: VPos::Center };
pub(super) const AROUND: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Center };

pub(super) const INK: RGBColor = RGBColor(45, 49, 58);
pub(super) const FAINT: RGBColor = RGBColor(105, 111, 123);
pub(super) const GRID: RGBColor = RGBColor(226, 229, 234);
pub(super) const FITS: RGBColor = RGBColor(23, 120, 75);
pub(super) const LIMIT: RGBColor = RGBColor(192, 38, 45);

// Parameters are dark and cool; what comes on top of them is light, and mostly warm.
const ROOT: RGBColor = RGBColor(74, 78, 105);
const UNITS: [RGBColor; 4] =
    [RGBColor(33, 72, 138), RGBColor(38, 126, 178), RGBColor(54, 168, 150), RGBColor(132, 196, 104)];
const PADDING: RGBColor = RGBColor(240, 240, 240);
const HATCH: RGBColor = RGBColor(165, 165, 165);
const GRADIENTS: RGBColor = RGBColor(252, 221, 143);
const OPTIMIZER: RGBColor = RGBColor(247, 190, 150);
const GATHERED: RGBColor = RGBColor(240, 234, 248);
const GATHERED_EDGE: RGBColor = RGBColor(160, 140, 196);

/// What everything is drawn on, and the units that have colors.
pub(super) struct Canvas<'a, 'b> {
    pub(super) area: DrawingArea<SVGBackend<'b>, Shift>,
    pub(super) units: &'a [&'a str],
}

impl Canvas<'_, '_> {
    /// Draws what stands for `part` between an upper left and a lower right corner, below a line of paper if it is
    /// `set_off`; nothing if that is less than a pixel high.
    pub(super) fn block(&self, part: Part, [(left, top), (right, bottom)]: [Point; 2], set_off: bool) -> Drawn {
        let top = top + i32::from(set_off);
        if bottom <= top {
            return Ok(());
        }
        self.area.draw(&Rectangle::new([(left, top), (right, bottom)], self.color(part).filled()))?;
        match part {
            Part::Padding => self.hatch([(left, top), (right, bottom)]),
            // An outline would lie half outside of its area.
            Part::Gathered if set_off => {
                let inner = [(left + 1, top + 1), (right - 1, bottom - 1)];
                self.area.draw(&Rectangle::new(inner, GATHERED.filled()))
            }
            _ => Ok(()),
        }
    }

    /// Fills a rectangle with lines that rise to the right.
    fn hatch(&self, [(left, top), (right, bottom)]: [Point; 2]) -> Drawn {
        let (width, height) = (right - left, bottom - top);
        for along in (3..width + height).step_by(6) {
            let start = (left + (along - height).max(0), top + along.min(height));
            let end = (left + along.min(width), top + (along - width).max(0));
            self.area.draw(&PathElement::new([start, end], HATCH))?;
        }
        Ok(())
    }

    /// Draws the name of `part` into a block of it, if there is room.
    pub(super) fn name(&self, part: Part, [(left, top), (right, bottom)]: [Point; 2]) -> Drawn {
        if bottom - top <= 2 * LETTER {
            return Ok(());
        }
        let room = right - left - LETTER;
        let name = self.name_of(part, n_letters(room));
        if !fits(&name, room) {
            return Ok(());
        }
        let RGBColor(red, green, blue) = self.color(part);
        let brightness = 299 * u32::from(red) + 587 * u32::from(green) + 114 * u32::from(blue);
        let color = if brightness < 120_000 { WHITE } else { INK };
        self.text(&name, (left.midpoint(right), top.midpoint(bottom)), AROUND, color)
    }

    /// What `part` is called, if it is a unit in not much more than `n_letters`.
    pub(super) fn name_of(&self, part: Part, n_letters: usize) -> String {
        match part {
            Part::Unit(unit) => unit_name(self.units[unit], n_letters),
            Part::Padding => String::from("padding"),
            Part::Gradients => String::from("gradients"),
            Part::Optimizer => String::from("optimizer state"),
            Part::Gathered => String::from("gathered at the peak"),
        }
    }

    fn color(&self, part: Part) -> RGBColor {
        match part {
            Part::Unit(unit) => self.color_of_unit(unit),
            Part::Padding => PADDING,
            Part::Gradients => GRADIENTS,
            Part::Optimizer => OPTIMIZER,
            Part::Gathered => GATHERED_EDGE,
        }
    }

    /// A step of a ramp, every other one lighter: however many units there are, neighbors can be told apart.
    fn color_of_unit(&self, unit: usize) -> RGBColor {
        if self.units[unit].is_empty() {
            return ROOT;
        }
        let (at, steps) = (unit * (UNITS.len() - 1), (self.units.len() - 1).max(1));
        let next = UNITS[(at / steps + 1).min(UNITS.len() - 1)];
        let color = blend(UNITS[at / steps], next, at % steps, steps);
        if unit.is_multiple_of(2) { color } else { blend(color, WHITE, 1, 5) }
    }

    /// A dashed line.
    pub(super) fn dashes(&self, columns: Range<i32>, y: i32) -> Drawn {
        for x in columns.clone().step_by(12) {
            let dash = [(x, y), ((x + 7).min(columns.end), y)];
            self.area.draw(&PathElement::new(dash, LIMIT.stroke_width(2)))?;
        }
        Ok(())
    }

    /// Writes a number above a point, on paper, so that no line runs through it.
    pub(super) fn number(&self, text: &str, (x, y): Point, color: RGBColor) -> Drawn {
        let width = i32::try_from(text.len()).unwrap_or(0) * LETTER;
        let paper = [(x - width / 2, y - 2 * LETTER), (x + width / 2, y)];
        self.area.draw(&Rectangle::new(paper, WHITE.filled()))?;
        self.text(text, (x, y - 2), ABOVE, color)
    }

    pub(super) fn text(&self, text: &str, at: Point, place: Pos, color: RGBColor) -> Drawn {
        self.area.draw(&Text::new(text, at, TextStyle::from((FONT, TEXT)).color(&color).pos(place)))
    }
}

/// `part` of `whole` on the way from one color to another.
fn blend(from: RGBColor, to: RGBColor, part: usize, whole: usize) -> RGBColor {
    let mix = |from: u8, to: u8| {
        let sum = usize::from(from) * (whole - part) + usize::from(to) * part;
        u8::try_from(sum / whole).unwrap_or(u8::MAX)
    };
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

/// Whether `text` has room in so many pixels, about.
pub(super) fn fits(text: &str, width: i32) -> bool {
    text.chars().count() <= n_letters(width)
}

fn n_letters(width: i32) -> usize {
    usize::try_from(width / LETTER).unwrap_or(0)
}
