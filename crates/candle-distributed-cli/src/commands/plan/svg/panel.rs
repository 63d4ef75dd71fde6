//! A panel of columns over an axis in binary units.

use std::ops::Range;

use candle_distributed::types::human::BinaryUnit;
use plotters::{coord::types::RangedCoordf64, prelude::*};

use super::{
    columns::Part,
    paint::{Canvas, Point},
    words::fits,
};
use crate::picture::{self, Drawn, LEFT};

/// Where the panels end. The legend is to their right.
pub(super) const RIGHT: i32 = 690;

/// The room for the numbers of the axis.
const NUMBERS: u32 = 76;

/// A column is no wider, in pixels, however few there are.
const MAX_WIDTH: i32 = 180;

/// The space between two numbers.
const SPACE: i32 = 8;

/// The height from which a block is set off from the next one, in pixels.
const MIN_HEIGHT: f64 = 4.0;

/// Columns over a common axis.
pub(super) struct Panel<'b> {
    chart: ChartContext<'b, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
    unit: BinaryUnit,
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
        let unit = BinaryUnit::of(highest);
        // There is room for a number above the highest column, and none on an axis of no extent or
        // for half a byte.
        let top = if highest == 0 { 1.0 } else { 1.1 * highest as f64 / unit.bytes() as f64 };
        let n_ticks = highest.clamp(1, 6) as usize + 1;
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
            .y_desc(format!("{name} ({})", unit.name()))
            .draw()?;
        let (_, height) = chart.plotting_area().dim_in_pixel();
        let pixels_per_byte = f64::from(height) / (top * unit.bytes() as f64);
        Ok(Self { chart, unit, pixels_per_byte })
    }

    /// Draws blocks stacked on each other, named where there is room.
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

    /// Writes above the columns what they amount to in the unit of the axis, with one digit less if
    /// that fits over all of them, else not at all.
    pub(super) fn totals(&self, canvas: &Canvas<'_, '_>, totals: &[(u128, RGBColor)]) -> Drawn {
        let room = self.width(1) - SPACE;
        let forms: [fn(BinaryUnit, u128) -> String; 2] = [
            |unit, bytes| unit.count(bytes),
            |unit, bytes| {
                let mut number = unit.count(bytes);
                number.pop();
                number
            },
        ];
        for form in forms {
            let numbers: Vec<_> = totals.iter().map(|&(bytes, _)| form(self.unit, bytes)).collect();
            if numbers.iter().all(|number| fits(number, room)) {
                return self.numbers(canvas, totals, &numbers);
            }
        }
        Ok(())
    }

    fn numbers(
        &self,
        canvas: &Canvas<'_, '_>,
        totals: &[(u128, RGBColor)],
        numbers: &[String],
    ) -> Drawn {
        for (position, (&(bytes, color), number)) in totals.iter().zip(numbers).enumerate() {
            canvas.number(number, self.at(position as f64 + 0.5, bytes as f64), color)?;
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

    /// The point at the end of this many columns and this many bytes.
    pub(super) fn at(&self, columns: f64, bytes: f64) -> Point {
        self.chart.backend_coord(&(columns, bytes / self.unit.bytes() as f64))
    }

    /// The width of this many columns with the space between them.
    pub(super) fn width(&self, n_columns: usize) -> i32 {
        self.at(n_columns as f64, 0.0).0 - self.at(0.0, 0.0).0
    }
}
