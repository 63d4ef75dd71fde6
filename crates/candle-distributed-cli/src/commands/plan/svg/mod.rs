//! A drawing of a plan: ranks as columns, units as blocks of them, and the memory of a device as a
//! line.

mod columns;
mod legend;
mod paint;
mod panel;
mod words;

use candle_distributed::{
    plan::{ShardingPlan, cost::PlanCost},
    types::human::{HumanBytes, HumanCount},
};
use plotters::prelude::*;

use self::{
    columns::Columns,
    paint::{AFTER, BELOW, Canvas},
    panel::{Panel, RIGHT},
    words::fits,
};
use crate::{
    error::Result,
    picture::{self, Drawn, FAINT, FITS, INK, LIMIT},
};

const SIZE: (u32, u32) = (1000, 700);

/// A limit of more than so many times the highest peak is not on the axis, where all else would
/// be too low to read.
const FAR: u128 = 3;

/// Draws what each rank of `plan` holds: above all of it at its peak, with the memory limit
/// `budget` if there is one, and below the parameters that it stores, unit by unit.
pub(crate) fn draw(plan: &ShardingPlan, cost: &PlanCost, budget: Option<u64>) -> Result<String> {
    let columns = Columns::new(plan, cost)?;
    picture::document(SIZE, |area| {
        draw_on(&Canvas { area, units: &columns.units }, &columns, plan, cost, budget)
    })
}

fn draw_on(
    canvas: &Canvas<'_, '_>,
    columns: &Columns<'_>,
    plan: &ShardingPlan,
    cost: &PlanCost,
    budget: Option<u64>,
) -> Drawn {
    heading(canvas, plan, cost, budget)?;
    memory(canvas, columns, budget.map(u128::from))?;
    let panel = parameters(canvas, columns)?;
    let has_brackets = plan.replicas() > 1 && columns.are_all_ranks();
    if has_brackets {
        replicas(canvas, columns, &panel, plan.shard_group().as_usize())?;
    }
    ranks(canvas, columns, &panel, if has_brackets { 50 } else { 30 })?;
    legend::draw(canvas, columns)?;
    canvas.area.present()
}

/// Writes what is planned, and whether it fits.
fn heading(
    canvas: &Canvas<'_, '_>,
    plan: &ShardingPlan,
    cost: &PlanCost,
    budget: Option<u64>,
) -> Drawn {
    let color = match budget {
        None => FAINT,
        Some(budget) if cost.peak_bytes() <= budget.into() => FITS,
        Some(_) => LIMIT,
    };
    let verdict = words::verdict(cost, budget);
    picture::heading(&canvas.area, &plan.summary(), &verdict, color)
}

/// Draws all that the ranks hold at their peaks. The axis ends with them if the limit is far above.
fn memory(canvas: &Canvas<'_, '_>, columns: &Columns<'_>, limit: Option<u128>) -> Drawn {
    let peaks = columns.drawn.iter().map(|column| column.cost.peak_bytes());
    let peak = peaks.fold(0, u128::max);
    let limit_on_axis = limit.filter(|limit| limit / FAR <= peak);
    let highest = peak.max(limit_on_axis.unwrap_or(0));
    let panel = Panel::new(canvas, 66..400, "held at the peak", highest, columns.drawn.len())?;
    for (position, column) in columns.drawn.iter().enumerate() {
        panel.column(canvas, position, column.blocks())?;
        let peak = column.cost.peak_bytes();
        if let Some(limit) = limit.filter(|&limit| limit < peak) {
            let beyond = panel.corners(position, limit as f64, peak as f64);
            canvas.area.draw(&Rectangle::new(beyond, LIMIT.mix(0.35).filled()))?;
        }
    }
    if let Some(limit) = limit {
        name_limit(canvas, limit, limit_on_axis.map(|limit| panel.at(0.0, limit as f64)))?;
    }
    let peaks = columns.drawn.iter().map(|column| column.cost.peak_bytes());
    let is_over = |peak| limit.is_some_and(|limit| limit < peak);
    let totals: Vec<_> =
        peaks.map(|peak| (peak, if is_over(peak) { LIMIT } else { INK })).collect();
    panel.totals(canvas, &totals)
}

/// Draws the limit as a line from a point of the axis; one far above as a note where it would be.
fn name_limit(canvas: &Canvas<'_, '_>, limit: u128, start: Option<paint::Point>) -> Drawn {
    let mut y = 92;
    if let Some((left, at)) = start {
        picture::dashes(&canvas.area, left..RIGHT + 4, at, LIMIT)?;
        y = at;
    } else {
        canvas.text("far above", (RIGHT + 10, y + 24), AFTER, LIMIT)?;
    }
    canvas.text("limit", (RIGHT + 10, y - 8), AFTER, LIMIT)?;
    canvas.text(&HumanBytes(limit).to_string(), (RIGHT + 10, y + 8), AFTER, LIMIT)
}

/// Draws the parameters that the ranks store.
fn parameters<'b>(canvas: &Canvas<'_, 'b>, columns: &Columns<'_>) -> Drawn<Panel<'b>> {
    let stored = columns.drawn.iter().map(|column| u128::from(column.cost.storage_bytes));
    let highest = stored.fold(0, u128::max);
    let panel = Panel::new(canvas, 410..628, "stored parameters", highest, columns.drawn.len())?;
    for (position, column) in columns.drawn.iter().enumerate() {
        panel.column(canvas, position, column.stored())?;
    }
    let totals: Vec<_> =
        columns.drawn.iter().map(|column| (column.cost.storage_bytes.into(), INK)).collect();
    panel.totals(canvas, &totals)?;
    Ok(panel)
}

/// Writes the ranks under their columns, and the name of the axis `below` pixels further down.
fn ranks(canvas: &Canvas<'_, '_>, columns: &Columns<'_>, panel: &Panel<'_>, below: i32) -> Drawn {
    let names: Vec<_> = columns.drawn.iter().map(|column| column.cost.rank.to_string()).collect();
    let have_room = |step: usize| names.iter().all(|name| fits(name, panel.width(step)));
    let step = [1, 2, 4, 8, 16].into_iter().find(|&step| have_room(step)).unwrap_or(32);
    for (position, name) in names.iter().enumerate().step_by(step) {
        let (x, bottom) = panel.at(position as f64 + 0.5, 0.0);
        canvas.text(name, (x, bottom + 7), BELOW, INK)?;
    }
    let neighbors = match (columns.n_ranks / names.len(), columns.n_ranks % names.len()) {
        (1, 0) => String::new(),
        (n, 0) => {
            format!(": of every {} neighbors, the one with the highest peak", HumanCount(n as u128))
        }
        (n, _) => format!(": of every {n} or {} neighbors, the one with the highest peak", n + 1),
    };
    let (middle, bottom) = panel.at(names.len() as f64 / 2.0, 0.0);
    canvas.text(&format!("rank{neighbors}"), (middle, bottom + below), BELOW, INK)
}

/// Draws a bracket below the ranks of each replica.
fn replicas(
    canvas: &Canvas<'_, '_>,
    columns: &Columns<'_>,
    panel: &Panel<'_>,
    group: usize,
) -> Drawn {
    for (replica, first) in (0..columns.drawn.len()).step_by(group).enumerate() {
        let (left, bottom) = panel.at(first as f64 + 0.1, 0.0);
        let (right, _) = panel.at((first + group) as f64 - 0.1, 0.0);
        let y = bottom + 28;
        canvas.area.draw(&PathElement::new(
            [(left, y - 4), (left, y), (right, y), (right, y - 4)],
            FAINT,
        ))?;
        let names = [format!("replica {replica}"), replica.to_string()];
        if let Some(name) = names.iter().find(|name| fits(name, panel.width(group))) {
            canvas.text(name, (left.midpoint(right), y + 4), BELOW, FAINT)?;
        }
    }
    Ok(())
}
