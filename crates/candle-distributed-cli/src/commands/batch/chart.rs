//! A drawing of what batches are made of: how long the sequences are, and where the padding is.

use std::collections::BTreeMap;

use candle_distributed::batch::{Batch, PaddingReport};
use plotters::{coord::types::RangedCoordf64, prelude::*};

use crate::{
    error::Result,
    picture::{
        self, Area, BLUE as REAL, Drawn, FONT, INK, ORANGE as PADDING, SKY as LENGTHS, TEXT, tick,
    },
};

const SIZE: (u32, u32) = (900, 680);

/// About as many bars as can be told apart.
const N_BINS: u64 = 40;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// An SVG document: above, a histogram of the lengths; below, the tokens of the batches by padded
/// length.
pub(crate) fn svg(
    lengths: impl Iterator<Item = u64> + Clone,
    batches: &[&Batch],
    report: &PaddingReport,
) -> Result<String> {
    picture::document(SIZE, |area| draw(&area, lengths, batches, report))
}

fn draw(
    area: &Area<'_>,
    lengths: impl Iterator<Item = u64> + Clone,
    batches: &[&Batch],
    report: &PaddingReport,
) -> Drawn {
    let title = format!("efficiency {:.4}, {} batches", report.efficiency(), report.batches);
    let (above, below) = area
        .titled(&title, TextStyle::from((FONT, 28)).color(&INK))?
        .split_vertically(SIZE.1 / 2 - 20);
    draw_lengths(&above, lengths)?;
    draw_tokens(&below, batches)?;
    area.present()
}

fn draw_lengths(area: &Area<'_>, lengths: impl Iterator<Item = u64> + Clone) -> Drawn {
    let bins = Bins::up_to(lengths.clone());
    let mut counts = BTreeMap::<u64, u64>::new();
    for length in lengths {
        *counts.entry(bins.of(length)).or_default() += 1;
    }
    let highest = counts.values().copied().fold(0, u64::max).into();
    let mut chart =
        axes(area, &counts, bins, highest, 1.05, ["length of a sequence (tokens)", "sequences"])?;
    chart.draw_series(
        counts.iter().map(|(&bin, &count)| bins.bar(bin, 0.0, count as f64, LENGTHS)),
    )?;
    Ok(())
}

/// The tokens of some batches.
#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    real: u128,
    padded: u128,
}

fn draw_tokens(area: &Area<'_>, batches: &[&Batch]) -> Drawn {
    let bins = Bins::up_to(batches.iter().map(|batch| batch.padded_length));
    let mut tokens = BTreeMap::<u64, Tokens>::new();
    for batch in batches {
        let sum = tokens.entry(bins.of(batch.padded_length)).or_default();
        sum.real += u128::from(batch.real_tokens);
        sum.padded += u128::from(batch.padded_tokens());
    }
    let highest = tokens.values().map(|sum| sum.padded).fold(0, u128::max);
    // The legend has its place above the bars.
    let mut chart =
        axes(area, &tokens, bins, highest, 1.3, ["padded length of a batch (tokens)", "tokens"])?;
    let real = |(&bin, sum): (&u64, &Tokens)| bins.bar(bin, 0.0, sum.real as f64, REAL);
    chart.draw_series(tokens.iter().map(real))?.label("real").legend(|at| key(at, REAL));
    let is_padded = |(_, sum): &(&u64, &Tokens)| sum.real < sum.padded;
    let padding =
        |(&bin, sum): (&u64, &Tokens)| bins.bar(bin, sum.real as f64, sum.padded as f64, PADDING);
    chart
        .draw_series(tokens.iter().filter(is_padded).map(padding))?
        .label("padding")
        .legend(|at| key(at, PADDING));
    let legend = SeriesLabelPosition::UpperLeft;
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE)
        .label_font((FONT, TEXT, &INK))
        .draw()
}

/// The square that names a color.
fn key((x, y): (i32, i32), color: RGBColor) -> Rectangle<(i32, i32)> {
    Rectangle::new([(x + 4, y - 5), (x + 14, y + 5)], color.filled())
}

/// Axes for bars over these bins, the highest one of this height, with room above it.
fn axes<'a, 'b, T>(
    area: &Area<'b>,
    bars: &BTreeMap<u64, T>,
    bins: Bins,
    highest: u128,
    room: f64,
    [x_name, y_name]: [&str; 2],
) -> Drawn<Chart<'a, 'b>> {
    let (_, right) = bins.edges(bars.keys().copied().fold(0, u64::max));
    // No fractions of a sequence.
    let n_ticks = highest.clamp(1, 10) as usize + 1;
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .margin_right(30)
        .x_label_area_size(45)
        .y_label_area_size(70)
        // An axis of no extent has no ticks.
        .build_cartesian_2d(0.0..right, 0.0..(room * highest as f64).max(1.0))?;
    let mut axes = chart.configure_mesh();
    picture::plain(&mut axes);
    axes.x_desc(x_name)
        .y_desc(y_name)
        .y_labels(n_ticks)
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .draw()?;
    Ok(chart)
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

    /// A bar with a little space at both sides.
    fn bar(self, bin: u64, from: f64, to: f64, color: RGBColor) -> Rectangle<(f64, f64)> {
        let (left, right) = self.edges(bin);
        let space = 0.05 * (right - left);
        Rectangle::new([(left + space, from), (right - space, to)], color.filled())
    }
}

#[cfg(test)]
mod tests {
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
}
