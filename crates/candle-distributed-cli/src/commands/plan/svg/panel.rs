//! A panel of columns over an axis in binary units.

use std::ops::Range;

use plotters::{coord::types::RangedCoordf64, prelude::*};

use super::{
    LEFT, RIGHT,
    columns::Part,
    paint::{Canvas, Point, fits},
};
use crate::{
    bytes::{Scale, binary},
    picture::{self, Drawn},
};

/// The room for the numbers of the axis.
const NUMBERS: u32 = 76;

/// A column is no wider, in pixels, however few there are.
const MAX_WIDTH: i32 = 180;

/// The space between two numbers.
const SPACE: i32 = 8;

/// A block must be so high to be set off from the next one, in pixels.
const MIN_HEIGHT: f64 = 4.0;

/// Columns over a common axis.
pub(super) struct Panel<'b> {
    chart: ChartContext<'b, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
    scale: Scale,
    pixels_per_byte: f64,
}

impl<'b> Panel<'b> {
    /// Draws the axis of a panel between two heights of the picture, for columns of up to `highest`
    /// bytes.
    pub(super) fn new(
        canvas: &Canvas<'_, 'b>,
        rows: Range<i32>,
        name: &str,
        highest: u128,
        n_columns: usize,
    ) -> Drawn<Self> {
        let scale = Scale::of(highest);
        // There is room for a number above the highest column, and none on an axis of no extent or
        // for half a byte.
        let top = if highest == 0 { 1.0 } else { 1.1 * highest as f64 / scale.bytes() };
        let n_ticks = usize::try_from(highest).unwrap_or(usize::MAX).clamp(1, 6) + 1;
        let area =
            canvas.area.clone().shrink((LEFT, rows.start), (RIGHT - LEFT, rows.end - rows.start));
        let mut chart = ChartBuilder::on(&area)
            .margin_top(8)
            .y_label_area_size(NUMBERS)
            .build_cartesian_2d(0.0..n_columns as f64, 0.0..top)?;
        let mut axes = chart.configure_mesh();
        picture::plain(&mut axes);
        axes.y_labels(n_ticks)
            .y_label_formatter(&|number| ((number * 1000.0).round() / 1000.0).to_string())
            .y_desc(format!("{name} ({})", scale.unit))
            .draw()?;
        let (_, height) = chart.plotting_area().dim_in_pixel();
        Ok(Self { chart, scale, pixels_per_byte: f64::from(height) / (top * scale.bytes()) })
    }

    /// Draws blocks upon each other, named where there is room.
    pub(super) fn column(
        &self,
        canvas: &Canvas<'_, '_>,
        position: usize,
        blocks: impl Iterator<Item = (Part, f64)>,
    ) -> Drawn {
        let mut height = 0.0;
        for (part, bytes) in blocks {
            let corners = self.corners(position, height, height + bytes);
            height += bytes;
            let set_off = bytes * self.pixels_per_byte >= MIN_HEIGHT;
            canvas.block(part, corners, set_off)?;
            canvas.name(part, corners)?;
        }
        Ok(())
    }

    /// Writes above the columns what they amount to: with units, or as the axis has it, or not if
    /// there is no room.
    pub(super) fn totals(&self, canvas: &Canvas<'_, '_>, totals: &[(u128, RGBColor)]) -> Drawn {
        let number = |bytes, n_digits| self.scale.number(bytes, n_digits);
        let forms: [&dyn Fn(u128) -> String; 3] =
            [&binary, &|bytes| number(bytes, 2), &|bytes| number(bytes, 1)];
        let room = self.width(1) - SPACE;
        let has_room = |form: &&dyn Fn(u128) -> String| {
            totals.iter().all(|&(bytes, _)| fits(&form(bytes), room))
        };
        let Some(form) = forms.into_iter().find(has_room) else { return Ok(()) };
        for (position, &(bytes, color)) in totals.iter().enumerate() {
            canvas.number(&form(bytes), self.at(position as f64 + 0.5, bytes as f64), color)?;
        }
        Ok(())
    }

    /// The upper left and the lower right corner of what lies between two heights of a column.
    pub(super) fn corners(&self, position: usize, from: f64, to: f64) -> [Point; 2] {
        let (left, top) = self.at(position as f64, to);
        let (right, bottom) = self.at(position as f64 + 1.0, from);
        let space = ((right - left) / 10).max((right - left - MAX_WIDTH) / 2).max(1);
        [(left + space, top), (right - space, bottom)]
    }

    /// Where so many columns and so many bytes end.
    pub(super) fn at(&self, columns: f64, bytes: f64) -> Point {
        self.chart.backend_coord(&(columns, bytes / self.scale.bytes()))
    }

    /// The width of so many columns with the space between them.
    pub(super) fn width(&self, n_columns: usize) -> i32 {
        self.at(n_columns as f64, 0.0).0 - self.at(0.0, 0.0).0
    }
}
