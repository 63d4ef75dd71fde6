//! What the colors of a drawing mean.

use candle_distributed::types::human::HumanCount;

use super::{
    columns::{Columns, Part},
    paint::{AFTER, Canvas, Point},
};
use crate::picture::{Drawn, FAINT, INK};

/// Where the legend begins.
const LEFT: i32 = 790;
const TOP: i32 = 80;
/// The distance between two lines.
const LINE: i32 = 26;
/// The extent of a sample of color.
const SAMPLE: i32 = 15;
/// The room for a name, in pixels.
const ROOM: i32 = 180;

/// The number of units that are named one by one at most.
const MAX_NAMES: usize = 8;
/// The height of a sample of more units.
const RAMP: i32 = 190;

/// Names the colors that occur, from the top of a column down.
pub(super) fn draw(canvas: &Canvas<'_, '_>, columns: &Columns<'_>) -> Drawn {
    let mut y = TOP;
    for part in [Part::Activations, Part::Gathered, Part::Optimizer, Part::Gradients, Part::Padding]
    {
        if columns.have(part) {
            y = entry(canvas, part, y)?;
        }
    }
    let n_units = columns.units.len();
    let heading = format!("parameters of {}", HumanCount(n_units as u128).of("unit"));
    canvas.text(&heading, (LEFT, y + 10), AFTER, FAINT)?;
    y += 10 + LINE;
    if n_units > MAX_NAMES {
        return ramp(canvas, y);
    }
    for unit in (0..n_units).rev() {
        y = entry(canvas, Part::Unit(unit), y)?;
    }
    Ok(())
}

/// One color in the line around `y`; returns where the next line is.
fn entry(canvas: &Canvas<'_, '_>, part: Part, y: i32) -> Drawn<i32> {
    canvas.block(part, [(LEFT, y - SAMPLE / 2), (LEFT + SAMPLE, y + SAMPLE / 2 + 1)], true)?;
    name(canvas, part, (LEFT + SAMPLE + 8, y))?;
    Ok(y + LINE)
}

fn name(canvas: &Canvas<'_, '_>, part: Part, at: Point) -> Drawn {
    canvas.text(&canvas.name_of(part, ROOM), at, AFTER, INK)
}

/// All units stacked, with names for the first two and the last.
fn ramp(canvas: &Canvas<'_, '_>, top: i32) -> Drawn {
    let n_units = canvas.units.len();
    let bottom = top + RAMP;
    for unit in 0..n_units {
        let corners = [
            (LEFT, bottom - height_of(unit + 1, n_units)),
            (LEFT + SAMPLE, bottom - height_of(unit, n_units)),
        ];
        canvas.block(Part::Unit(unit), corners, false)?;
    }
    let x = LEFT + SAMPLE + 8;
    name(canvas, Part::Unit(n_units - 1), (x, top + 6))?;
    canvas.text("…", (x, top.midpoint(bottom)), AFTER, INK)?;
    name(canvas, Part::Unit(1), (x, bottom - 24))?;
    name(canvas, Part::Unit(0), (x, bottom - 4))
}

/// How high `n` of `n_units` stand in the ramp.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn height_of(n: usize, n_units: usize) -> i32 {
    i32::try_from(RAMP as usize * n / n_units).expect("at most the whole ramp")
}
