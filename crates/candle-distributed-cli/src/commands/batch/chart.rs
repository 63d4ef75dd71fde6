//! A drawing of what batches are made of: how long the sequences are, and where the padding is.

use std::collections::BTreeMap;

use candle_distributed::{
    batch::{Batch, BatchConfig, DynamicBatchStrategy, PaddingReport},
    types::human::HumanCount,
};
use plotters::{coord::types::RangedCoordf64, prelude::*};

use crate::{
    error::Result,
    picture::{
        self, Area, BLUE as REAL, Drawn, FAINT, HEADING, LEGEND, Mark, ORANGE as PADDING,
        SKY as LENGTHS, Ticks,
    },
};

const WIDTH: u32 = 900;
/// The height of a panel with its axes.
const PANEL: u32 = 300;

/// About as many bars of lengths as can be told apart.
const N_BINS: u64 = 40;
/// The number of bars of batches at most, and the number from which they touch each other.
const MAX_BARS: usize = 120;
const MAX_APART: usize = 60;

/// Where the vertical axis is.
const LEFT_OF_AXIS: i32 = 80;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// An SVG document: above, a histogram of the lengths; below, the tokens of every batch, real ones
/// and padding, from the batch with the shortest rows to that with the longest.
pub(crate) fn svg(
    lengths: impl Iterator<Item = u64> + Clone,
    batches: &[&Batch],
    report: &PaddingReport,
    title: &str,
) -> Result<String> {
    picture::document((WIDTH, HEADING + 2 * PANEL + LEGEND), |area| {
        picture::heading(&area, title, &figures(report, batches), FAINT)?;
        let (above, below) = area.margin(HEADING, 0, 0, 0).split_vertically(PANEL);
        draw_lengths(&above, lengths)?;
        draw_tokens(&below, batches)?;
        area.present()
    })
}

/// The strategy and its limits.
pub(crate) fn title(config: &BatchConfig) -> String {
    let strategy = match &config.strategy {
        DynamicBatchStrategy::PadToMax => "pad-to-max",
        DynamicBatchStrategy::Bucket(_) => "bucket",
        DynamicBatchStrategy::Dynamic => "dynamic",
        DynamicBatchStrategy::Sorted { .. } => "sorted",
        DynamicBatchStrategy::Pack(_) => "pack",
        // One that has no name on the command line yet.
        _ => "batches",
    };
    let limit = |words: &str, limit: Option<u64>, more: &str| {
        limit.map(|limit| format!(", {words} {}{more}", HumanCount(limit.into())))
    };
    let limits = [
        limit("at most", config.max_batch_size, " sequences per batch"),
        limit("at most", config.max_tokens, " tokens per batch"),
        limit("a cost of at most", config.max_cost, " per batch"),
    ];
    strategy.to_owned() + &limits.into_iter().flatten().collect::<String>()
}

/// What the batches have, and how many of packed rows are full.
fn figures(report: &PaddingReport, batches: &[&Batch]) -> String {
    if !are_packed(batches) {
        return report.to_string();
    }
    let full = batches.iter().filter(|batch| batch.real_tokens == batch.padded_tokens()).count();
    format!("{report}; {} full", HumanCount(full as u128).of("row"))
}

/// Whether sequences share rows.
fn are_packed(batches: &[&Batch]) -> bool {
    batches.iter().any(|batch| batch.rows == 1 && batch.len() > 1)
}

fn draw_lengths(area: &Area<'_>, lengths: impl Iterator<Item = u64> + Clone) -> Drawn {
    let bins = Bins::up_to(lengths.clone());
    let mut counts = BTreeMap::<u64, u64>::new();
    for length in lengths {
        *counts.entry(bins.of(length)).or_default() += 1;
    }
    let highest = counts.values().copied().fold(0, u64::max);
    let (_, right) = bins.edges(counts.keys().copied().fold(0, u64::max));
    let names = ["length of a sequence (tokens)", "sequences"];
    let mut chart = axes(area, (right, highest as f64), names)?;
    chart.draw_series(counts.iter().map(|(&bin, &count)| {
        let (left, right) = bins.edges(bin);
        bar((left, right), (0.0, count as f64), true, LENGTHS)
    }))?;
    Ok(())
}

fn draw_tokens(area: &Area<'_>, batches: &[&Batch]) -> Drawn {
    let (above, below) = area.split_vertically(LEGEND);
    let entries = [(Mark::Block, REAL, "real tokens"), (Mark::Block, PADDING, "padding")];
    picture::legend(&above, (LEFT_OF_AXIS, 14), &entries)?;
    let bars = bars(batches);
    let highest = bars.iter().map(|bar| bar.padded).fold(0.0, f64::max);
    let per_bar = batches.len() as f64 / bars.len().max(1) as f64;
    let [x_name, y_name] = if are_packed(batches) {
        ["rows, the fullest last", "tokens of a row"]
    } else {
        ["batches, those of the longest sequences last", "tokens of a batch"]
    };
    let means = if bars.len() < batches.len() { "; a bar is the mean of neighbors" } else { "" };
    let x_name = format!("{x_name}{means}");
    let mut chart = axes(&below, (batches.len().max(1) as f64, highest), [&x_name, y_name])?;
    let is_apart = bars.len() <= MAX_APART;
    let place = |n: usize| (n as f64 * per_bar, (n + 1) as f64 * per_bar);
    let real = |(n, of): (usize, &Bar)| bar(place(n), (0.0, of.real), is_apart, REAL);
    chart.draw_series(bars.iter().enumerate().map(real))?;
    let has_padding = |(_, of): &(usize, &Bar)| of.real < of.padded;
    let padding = |(n, of): (usize, &Bar)| bar(place(n), (of.real, of.padded), is_apart, PADDING);
    chart.draw_series(bars.iter().enumerate().filter(has_padding).map(padding))?;
    Ok(())
}

/// The tokens of a batch, or the mean of neighbors.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bar {
    real: f64,
    padded: f64,
}

/// The batches from the shortest rows to the longest, those of equal rows by their tokens: one by
/// one, or equal numbers of neighbors together where they are too many.
fn bars(batches: &[&Batch]) -> Vec<Bar> {
    let mut sorted = batches.to_vec();
    sorted.sort_by_key(|batch| (batch.padded_length, batch.real_tokens));
    let n_bars = sorted.len().min(MAX_BARS);
    let start = |n| n * sorted.len() / n_bars;
    (0..n_bars).map(|n| mean(&sorted[start(n)..start(n + 1)])).collect()
}

fn mean(batches: &[&Batch]) -> Bar {
    let sum = |tokens: fn(&Batch) -> u64| {
        batches.iter().map(|batch| u128::from(tokens(batch))).sum::<u128>() as f64
    };
    let len = batches.len() as f64;
    Bar { real: sum(|batch| batch.real_tokens) / len, padded: sum(Batch::padded_tokens) / len }
}

/// A bar between two edges and two heights, with a little space at both sides if it is apart.
fn bar(
    (left, right): (f64, f64),
    (from, to): (f64, f64),
    is_apart: bool,
    color: RGBColor,
) -> Rectangle<(f64, f64)> {
    let space = if is_apart { 0.05 * (right - left) } else { 0.0 };
    Rectangle::new([(left + space, from), (right - space, to)], color.filled())
}

/// Axes up to these numbers, with room above.
fn axes<'a, 'b>(
    area: &Area<'b>,
    (right, highest): (f64, f64),
    [x_name, y_name]: [&str; 2],
) -> Drawn<Chart<'a, 'b>> {
    // An axis of no extent has no ticks.
    let top = (1.05 * highest).max(1.0);
    let [n_columns, n_lines] = [n_ticks(right, 10), n_ticks(highest, 7)];
    let [x_ticks, y_ticks] = [right, top].map(Ticks::up_to);
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .margin_right(30)
        .x_label_area_size(45)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    let mut axes = chart.configure_mesh();
    picture::plain(&mut axes);
    axes.x_desc(x_name)
        .y_desc(y_name)
        .x_labels(n_columns)
        .y_labels(n_lines)
        .x_label_formatter(&|value| x_ticks.label(*value))
        .y_label_formatter(&|value| y_ticks.label(*value))
        .draw()?;
    Ok(chart)
}

/// About the number of ticks of an axis up to `highest`: not for fractions of a sequence or a batch.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is a small number by then"
)]
fn n_ticks(highest: f64, most: u8) -> usize {
    highest.clamp(1.0, f64::from(most) - 1.0) as usize + 1
}

/// Lengths in bins of equal width, the first of which begins at 0.
#[derive(Clone, Copy, Debug)]
struct Bins {
    width: u64,
}

impl Bins {
    /// Bins for these lengths, which may be none: `batch` may leave all sequences out.
    fn up_to(lengths: impl Iterator<Item = u64>) -> Self {
        Self { width: lengths.fold(0, u64::max).div_ceil(N_BINS).max(1) }
    }

    fn of(self, length: u64) -> u64 {
        length / self.width
    }

    fn edges(self, bin: u64) -> (f64, f64) {
        let width = self.width as f64;
        (bin as f64 * width, (bin + 1) as f64 * width)
    }
}

#[cfg(test)]
mod tests {
    use candle_distributed::batch::{Cost, DynamicBatchSampler, Packing};

    use super::*;

    #[test]
    fn bins_hold_every_length_and_are_about_forty() {
        for longest in (0..500).chain([u64::MAX - 1, u64::MAX]) {
            let bins = Bins::up_to([longest].into_iter());
            assert!(bins.of(longest) <= N_BINS, "{longest}");
            assert!(longest < N_BINS || bins.of(longest) >= N_BINS / 2, "{longest}");
        }
        assert_eq!(Bins { width: 5 }.edges(3), (15.0, 20.0));
    }

    /// The batches of sequences of these lengths, which come in the order of the data set.
    fn batches(lengths: &[u64], config: BatchConfig) -> Vec<Batch> {
        let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
        sampler.iter().map(Result::unwrap).collect()
    }

    fn packed(max_tokens: u64) -> BatchConfig {
        let in_order = Packing::InOrder { open_rows: 1 };
        let strategy = DynamicBatchStrategy::Pack(in_order);
        BatchConfig::default().with_strategy(strategy).with_max_tokens(max_tokens)
    }

    #[test]
    fn each_batch_has_a_bar_from_short_to_long() {
        let batches = batches(&[8, 4, 3, 2, 1, 8], BatchConfig::default().with_max_batch_size(2));
        let bar = |real, padded| Bar { real, padded };
        let expected = [bar(5.0, 6.0), bar(9.0, 16.0), bar(12.0, 16.0)];
        assert_eq!(bars(&batches.iter().collect::<Vec<_>>()), expected);
        assert_eq!(bars(&[]), []);
    }

    #[test]
    fn bars_of_many_batches_are_means_of_all() {
        let lengths: Vec<u64> = (1..=1000).collect();
        let batches = batches(&lengths, BatchConfig::default().with_max_batch_size(1));
        let bars = bars(&batches.iter().collect::<Vec<_>>());
        assert_eq!(bars.len(), MAX_BARS);
        // The first has 8 batches, of 1 to 8 tokens.
        assert_eq!(bars[0], Bar { real: 4.5, padded: 4.5 });
        assert!(bars.is_sorted_by(|left, right| left.real < right.real));
    }

    #[test]
    fn titles_name_the_strategy_and_its_limits() {
        let config = BatchConfig::default().with_max_batch_size(32);
        assert_eq!(title(&config), "pad-to-max, at most 32 sequences per batch");
        assert_eq!(title(&packed(2048)), "pack, at most 2,048 tokens per batch");
        let dynamic = packed(2048).with_strategy(DynamicBatchStrategy::Dynamic);
        let config = dynamic.with_max_cost(9, Cost::ATTENTION);
        let tokens = "at most 2,048 tokens per batch";
        assert_eq!(title(&config), format!("dynamic, {tokens}, a cost of at most 9 per batch"));
    }

    #[test]
    fn full_rows_are_counted() {
        let rows = batches(&[5, 3, 7, 8], packed(8));
        let report: PaddingReport = rows.iter().collect();
        let all: Vec<&Batch> = rows.iter().collect();
        let figures = figures(&report, &all);
        assert!(figures.ends_with("; 2 rows full"), "{figures}");
        assert!(!self::figures(&report, &all[1..]).contains("full"), "nothing is packed");
    }
}
