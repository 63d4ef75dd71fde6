//! The drawing of a plan: a column for the peak memory of each rank, and a line for the budget.

use std::cmp::Reverse;

use candle_distributed::{
    plan::{
        ShardingPlan,
        cost::{PlanCost, RankCost},
    },
    types::human::{HumanBytes, HumanCount},
};
use plotters::{coord::types::RangedCoordf64, prelude::*};

use crate::{
    error::Result,
    picture::{
        self, ACTIVATIONS, Area, BLUE, DrawResult, FAINT, FITS, GATHERED, GRADIENTS, HEADING, LEFT,
        LEGEND, LIMIT, Mark, OPTIMIZER,
    },
};

const SIZE: (u32, u32) = (1000, 560);

/// The maximum number of readable columns.
const MAX_COLUMNS: usize = 64;

/// The maximum ratio of a drawn limit to the highest peak. A higher limit is only named, since it
/// would leave too little height for the columns.
const MAX_LIMIT_RATIO: u128 = 3;

const PADDING: RGBColor = RGBColor(165, 165, 165);

/// The parts of a column from the bottom up.
const PARTS: [(&str, RGBColor); 6] = [
    ("parameters", BLUE),
    ("padding", PADDING),
    ("gradients", GRADIENTS),
    ("optimizer state", OPTIMIZER),
    ("gathered at the peak", GATHERED),
    ("activations", ACTIVATIONS),
];

/// Draws the peak memory of each rank of `plan`, and the limit `budget` if there is one.
pub(crate) fn draw(plan: &ShardingPlan, cost: &PlanCost, budget: Option<u64>) -> Result<String> {
    let ranks = select_ranks(&cost.ranks);
    let color = match budget {
        None => FAINT,
        Some(budget) if cost.peak_bytes() <= budget.into() => FITS,
        Some(_) => LIMIT,
    };
    picture::document(SIZE, |area| {
        picture::draw_heading(&area, &plan.summary(), &verdict(cost, budget), color)?;
        draw_legend(&area, &ranks, budget)?;
        let chart_area = area.margin(HEADING + LEGEND, 8, LEFT, LEFT);
        draw_chart(&chart_area, &ranks, cost.ranks.len(), budget.map(u128::from))?;
        area.present()
    })
}

/// Selects one rank per column. Neighbors share a column in a large world, and the rank with the
/// highest peak stands for all of them.
fn select_ranks(ranks: &[RankCost]) -> Vec<RankCost> {
    let n_columns = ranks.len().min(MAX_COLUMNS);
    let mut selected = Vec::new();
    for column in 0..n_columns {
        let start = column * ranks.len() / n_columns;
        let end = (column + 1) * ranks.len() / n_columns;
        selected.extend(highest(&ranks[start..end]));
    }
    selected
}

/// Returns the first rank with the highest peak.
fn highest(ranks: &[RankCost]) -> Option<RankCost> {
    ranks.iter().min_by_key(|rank| Reverse(rank.peak_bytes())).copied()
}

/// Returns the bytes of each part, in the order of [`PARTS`].
fn parts(rank: &RankCost) -> [u128; PARTS.len()] {
    let padding = rank.storage_bytes.saturating_sub(rank.param_bytes);
    let within_step = rank.peak_bytes() - rank.total_bytes();
    [
        rank.param_bytes.into(),
        padding.into(),
        rank.grad_bytes.into(),
        rank.optimizer_bytes.into(),
        within_step - u128::from(rank.activation_bytes),
        rank.activation_bytes.into(),
    ]
}

/// Describes the highest peak, and the number of ranks that do not fit in `budget`.
fn verdict(cost: &PlanCost, budget: Option<u64>) -> String {
    let has_activations = cost.ranks.iter().any(|rank| rank.activation_bytes > 0);
    let note = if has_activations { "" } else { ", activations not counted" };
    let peak = format!("at most {} per rank at the peak{note}", HumanBytes(cost.peak_bytes()));
    let Some(budget) = budget.map(u128::from) else { return peak };
    let n_over = cost.ranks.iter().filter(|rank| rank.peak_bytes() > budget).count();
    if n_over == 0 {
        return format!("{peak}: every rank fits in {}", HumanBytes(budget));
    }
    let [n_over, n_ranks] = [n_over, cost.ranks.len()].map(|number| HumanCount(number as u128));
    let [limit, missing] = [budget, cost.peak_bytes() - budget].map(HumanBytes);
    format!("{peak}: {n_over} of {n_ranks} ranks above the limit of {limit}, by up to {missing}")
}

/// Draws the legend: the parts that occur, and the limit.
fn draw_legend(area: &Area<'_>, ranks: &[RankCost], budget: Option<u64>) -> DrawResult {
    let mut entries = Vec::new();
    for (part, (name, color)) in PARTS.into_iter().enumerate() {
        if ranks.iter().any(|rank| parts(rank)[part] > 0) {
            entries.push((Mark::Block, color, name));
        }
    }
    let limit = budget.map(|budget| format!("limit {}", HumanBytes(budget.into())));
    if let Some(limit) = &limit {
        entries.push((Mark::Line, LIMIT, limit));
    }
    picture::draw_legend(area, (LEFT, HEADING.cast_signed() + 8), &entries)
}

/// Draws the columns over an axis in binary units.
fn draw_chart(
    area: &Area<'_>,
    ranks: &[RankCost],
    n_ranks: usize,
    limit: Option<u128>,
) -> DrawResult {
    let peak = ranks.iter().map(RankCost::peak_bytes).fold(0, u128::max);
    let limit = limit.filter(|limit| limit / MAX_LIMIT_RATIO <= peak);
    let highest = peak.max(limit.unwrap_or(0));
    let (unit_name, unit) = HumanBytes(highest).unit();
    // plotters cannot draw an axis without an extent.
    let top = if highest == 0 { 1.0 } else { 1.1 * in_unit(highest, unit) };
    let mut chart = ChartBuilder::on(area)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(0.0..ranks.len() as f64, 0.0..top)?;
    let mut axes = chart.configure_mesh();
    picture::style_axes(&mut axes);
    axes.x_labels(ranks.len().min(16) + 1)
        .x_label_formatter(&|position| rank_at(ranks, *position))
        .x_desc(rank_axis(n_ranks, ranks.len()))
        .y_labels(highest.clamp(1, 6) as usize + 1)
        .y_label_formatter(&|number| ((number * 1000.0).round() / 1000.0).to_string())
        .y_desc(format!("at the peak ({unit_name})"))
        .draw()?;
    for (position, rank) in ranks.iter().enumerate() {
        draw_column(&mut chart, position as f64, rank, unit)?;
    }
    if let Some(limit) = limit {
        draw_limit(&chart, ranks.len() as f64, in_unit(limit, unit))?;
    }
    Ok(())
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Draws the parts of a rank, stacked.
fn draw_column(chart: &mut Chart<'_, '_>, position: f64, rank: &RankCost, unit: u64) -> DrawResult {
    let mut bottom = 0;
    for ((_, color), bytes) in PARTS.into_iter().zip(parts(rank)) {
        if bytes == 0 {
            continue;
        }
        let corners = [
            (position + 0.1, in_unit(bottom, unit)),
            (position + 0.9, in_unit(bottom + bytes, unit)),
        ];
        chart.plotting_area().draw(&Rectangle::new(corners, color.filled()))?;
        bottom += bytes;
    }
    Ok(())
}

/// Draws the limit as a dashed line over all columns.
fn draw_limit(chart: &Chart<'_, '_>, n_columns: f64, height: f64) -> DrawResult {
    const DASHES: u32 = 50;

    let distance = n_columns / f64::from(DASHES);
    for start in (0..DASHES).map(|dash| f64::from(dash) * distance) {
        let ends = [(start, height), (start + 0.6 * distance, height)];
        chart.plotting_area().draw(&PathElement::new(ends, LIMIT.stroke_width(2)))?;
    }
    Ok(())
}

fn in_unit(bytes: u128, unit: u64) -> f64 {
    bytes as f64 / unit as f64
}

/// Returns the rank number at an axis position.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positions are small and not negative"
)]
fn rank_at(ranks: &[RankCost], position: f64) -> String {
    ranks.get(position as usize).map_or_else(String::new, |rank| rank.rank.to_string())
}

/// Returns the name of the rank axis, with the selection of drawn ranks.
fn rank_axis(n_ranks: usize, n_columns: usize) -> String {
    match (n_ranks / n_columns, n_ranks % n_columns) {
        (1, 0) => String::from("rank"),
        (n, 0) => {
            format!("rank with the highest peak of every {} neighbors", HumanCount(n as u128))
        }
        (n, _) => {
            format!("rank with the highest peak of every {n} or {} neighbors", n + 1)
        }
    }
}
