//! Colors, letters, and the shapes that are more than a rectangle.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{
    columns::Part,
    words::{fits, unit_name},
};
use crate::picture::{
    self, ACTIVATIONS, Area, Drawn, FONT, GATHERED as GATHERED_EDGE, GRADIENTS, ON_LIGHT,
    OPTIMIZER, TEXT, text_width,
};

pub(super) type Point = (i32, i32);

/// The height of letters and the space around them, in pixels.
const LINE: i32 = 16;
/// The space at both sides of a name in its block.
const SPACE: i32 = 1;

/// Where a text lies beside its point.
pub(super) const ABOVE: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Bottom };
pub(super) const BELOW: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Top };
pub(super) const AFTER: Pos = Pos { h_pos: HPos::Left, v_pos: VPos::Center };
pub(super) const AROUND: Pos = Pos { h_pos: HPos::Center, v_pos: VPos::Center };

const ROOT: RGBColor = RGBColor(74, 78, 105);
const PADDING: RGBColor = RGBColor(240, 240, 240);
const HATCH: RGBColor = RGBColor(165, 165, 165);
const GATHERED: RGBColor = RGBColor(240, 234, 248);

/// What everything is drawn on, and the units that have colors.
pub(super) struct Canvas<'a, 'b> {
    pub(super) area: Area<'b>,
    pub(super) units: &'a [&'a str],
}

impl Canvas<'_, '_> {
    /// Draws the block of `part` between an upper left and a lower right corner, below a line of
    /// paper if it is `set_off`; nothing if that is less than a pixel high.
    pub(super) fn block(
        &self,
        part: Part,
        [(left, top), (right, bottom)]: [Point; 2],
        set_off: bool,
    ) -> Drawn {
        let top = top + i32::from(set_off);
        if bottom <= top {
            return Ok(());
        }
        self.area
            .draw(&Rectangle::new([(left, top), (right, bottom)], self.color(part).filled()))?;
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
        let width = right - left;
        let height = bottom - top;
        for along in (3..width + height).step_by(6) {
            let start = (left + (along - height).max(0), top + along.min(height));
            let end = (left + along.min(width), top + (along - width).max(0));
            self.area.draw(&PathElement::new([start, end], HATCH))?;
        }
        Ok(())
    }

    /// Draws the name of `part` into a block of it, if there is room.
    pub(super) fn name(&self, part: Part, [(left, top), (right, bottom)]: [Point; 2]) -> Drawn {
        if bottom - top <= LINE {
            return Ok(());
        }
        let room = right - left - 2 * SPACE;
        let name = self.name_of(part, room);
        if name == "…" || !fits(&name, room) {
            return Ok(());
        }
        let RGBColor(red, green, blue) = self.color(part);
        let brightness = 299 * u32::from(red) + 587 * u32::from(green) + 114 * u32::from(blue);
        let color = if brightness < 120_000 { WHITE } else { ON_LIGHT };
        self.text(&name, (left.midpoint(right), top.midpoint(bottom)), AROUND, color)
    }

    /// What `part` is called, if it is a unit in not much more than `room` pixels.
    pub(super) fn name_of(&self, part: Part, room: i32) -> String {
        match part {
            Part::Unit(unit) => unit_name(self.units[unit], room),
            Part::Padding => String::from("padding"),
            Part::Gradients => String::from("gradients"),
            Part::Optimizer => String::from("optimizer state"),
            Part::Gathered => String::from("gathered at the peak"),
            Part::Activations => String::from("activations"),
        }
    }

    fn color(&self, part: Part) -> RGBColor {
        match part {
            Part::Unit(unit) => self.color_of_unit(unit),
            Part::Padding => PADDING,
            Part::Gradients => GRADIENTS,
            Part::Optimizer => OPTIMIZER,
            Part::Gathered => GATHERED_EDGE,
            Part::Activations => ACTIVATIONS,
        }
    }

    fn color_of_unit(&self, unit: usize) -> RGBColor {
        if self.units[unit].is_empty() { ROOT } else { picture::ramp(unit, self.units.len()) }
    }

    /// Writes a number above a point, on paper, so that no line runs through it.
    pub(super) fn number(&self, text: &str, (x, y): Point, color: RGBColor) -> Drawn {
        let width = text_width(text);
        let paper = [(x - width / 2, y - LINE), (x + width / 2, y)];
        self.area.draw(&Rectangle::new(paper, WHITE.filled()))?;
        self.text(text, (x, y - 2), ABOVE, color)
    }

    pub(super) fn text(&self, text: &str, at: Point, place: Pos, color: RGBColor) -> Drawn {
        self.area.draw(&Text::new(text, at, TextStyle::from((FONT, TEXT)).color(&color).pos(place)))
    }
}
