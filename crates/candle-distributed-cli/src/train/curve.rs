//! A drawing of how a run went: loss and speed, step by step.

use candle_distributed::train::{Metrics, TimedStep};
use plotters::{
    coord::types::{RangedCoordf64, RangedCoordu64},
    prelude::*,
};

use crate::{
    error::Result,
    picture::{self, Area, BLUE, Drawn, FAINT, ORANGE, tick},
};

const SIZE: (u32, u32) = (900, 540);
/// Where the upper panel ends.
const MIDDLE: u32 = 350;

/// The number of points drawn of each series at most.
const MAX_POINTS: usize = 1000;

/// The smooth line is the mean over this share of the steps at each side.
const SMOOTH_OVER: usize = 40;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordu64, RangedCoordf64>>;

/// An SVG document: above, the loss over the steps; below, the tokens per second; both as points
/// and as a smooth line.
pub(crate) fn draw(metrics: &Metrics) -> Result<String> {
    let steps: Vec<TimedStep> = metrics.timed().collect();
    picture::document(SIZE, |area| {
        let (above, below) = area.split_vertically(MIDDLE);
        let losses = Series::new(&steps, |TimedStep { metrics, .. }| Sum {
            of: f64::from(metrics.loss) * metrics.predictions() as f64,
            over: metrics.predictions() as f64,
        });
        let speeds = Series::new(&steps, |step| Sum {
            of: step.metrics.real_tokens as f64,
            over: step.seconds,
        });
        let loss = Panel { name: "loss (nats per byte)", color: BLUE, from_zero: false };
        let speed = Panel { name: "tokens/s", color: ORANGE, from_zero: true };
        draw_panel(&above, &steps, &losses, &loss)?;
        draw_panel(&below, &steps, &speeds, &speed)?;
        area.present()
    })
}

/// How a series is shown.
struct Panel {
    name: &'static str,
    color: RGBColor,
    from_zero: bool,
}

fn draw_panel(area: &Area<'_>, steps: &[TimedStep], series: &Series, panel: &Panel) -> Drawn {
    // An axis of no extent has no ticks.
    let last = steps.last().map_or(1, |step| step.metrics.step + 1);
    let (low, high) = series.range(panel.from_zero);
    let mut chart = axes(area, last, (low, high), panel.name)?;
    for step in steps.iter().filter(|step| step.is_resumed).map(|step| step.metrics.step) {
        chart.draw_series([PathElement::new([(step, low), (step, high)], FAINT)])?;
    }
    let points = series.points.iter().map(|&at| Circle::new(at, 2, panel.color.mix(0.45).filled()));
    chart.draw_series(points)?;
    chart.draw_series([PathElement::new(series.smooth.clone(), panel.color.stroke_width(2))])?;
    Ok(())
}

/// Axes for steps up to `last` and values of this range.
fn axes<'a, 'b>(
    area: &Area<'b>,
    last: u64,
    (low, high): (f64, f64),
    name: &str,
) -> Drawn<Chart<'a, 'b>> {
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .margin_right(30)
        .x_label_area_size(45)
        .y_label_area_size(70)
        .build_cartesian_2d(0..last, low..high)?;
    let mut axes = chart.configure_mesh();
    picture::plain(&mut axes);
    axes.x_desc("steps")
        .y_desc(name)
        .y_labels(6)
        .x_label_formatter(&|&step| tick(&(step as f64)))
        .y_label_formatter(&tick)
        .draw()?;
    Ok(chart)
}

/// The numerator and the denominator of a mean.
#[derive(Clone, Copy, Debug)]
struct Sum {
    of: f64,
    over: f64,
}

/// The values of a panel, each with the number of steps done.
#[derive(Debug)]
struct Series {
    points: Vec<(u64, f64)>,
    smooth: Vec<(u64, f64)>,
}

impl Series {
    /// Means of `sum` where they are finite: of every step, and over the steps around it.
    fn new(steps: &[TimedStep], sum: impl Fn(&TimedStep) -> Sum) -> Self {
        let sums: Vec<(u64, Sum)> =
            steps.iter().map(|step| (step.metrics.step + 1, sum(step))).collect();
        let known: Vec<_> =
            sums.into_iter().filter(|(_, sum)| (sum.of / sum.over).is_finite()).collect();
        let every = known.len().div_ceil(MAX_POINTS).max(1);
        let at = |position: usize| {
            // The same number on both sides, or the line would lag where the values fall fast.
            let n_sides = (known.len() / SMOOTH_OVER).min(position).min(known.len() - 1 - position);
            (known[position].0, mean(&known[position - n_sides..=position + n_sides]))
        };
        Self {
            points: known
                .iter()
                .step_by(every)
                .map(|&(step, sum)| (step, sum.of / sum.over))
                .collect(),
            smooth: (0..known.len()).step_by(every).map(at).collect(),
        }
    }

    /// The values of the axis, with a little room above and below.
    fn range(&self, from_zero: bool) -> (f64, f64) {
        let values = || self.points.iter().map(|&(_, value)| value);
        let low = values().fold(f64::INFINITY, f64::min);
        let high = values().fold(f64::NEG_INFINITY, f64::max);
        match high - low {
            // There is no point.
            extent if !extent.is_finite() => (0.0, 1.0),
            _ if from_zero => (0.0, (1.05 * high).max(1.0)),
            extent => (low - 0.05 * extent.max(0.1), high + 0.05 * extent.max(0.1)),
        }
    }
}

fn mean(sums: &[(u64, Sum)]) -> f64 {
    let total = |part: fn(&Sum) -> f64| sums.iter().map(|(_, sum)| part(sum)).sum::<f64>();
    total(|sum| sum.of) / total(|sum| sum.over)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::run_dir::tests::line;

    /// The series of the losses of steps; JSON has no number for what is none.
    fn series(losses: &[f32]) -> Series {
        let text = |&loss: &f32| if loss.is_finite() { loss.to_string() } else { "null".into() };
        let lines = (0..).zip(losses).map(|(step, loss)| line(step, &text(loss), 1.0));
        let metrics = Metrics::parse(lines.collect::<String>().as_bytes());
        let steps: Vec<TimedStep> = metrics.timed().collect();
        Series::new(&steps, |step| Sum { of: step.metrics.loss.into(), over: 1.0 })
    }

    #[test]
    fn the_smooth_line_keeps_to_a_straight_one() {
        let losses: Vec<f32> = (0..200_u8).map(f32::from).collect();
        let series = series(&losses);
        assert_eq!(series.points.len(), 200);
        assert!(
            series.smooth.iter().all(|&(step, value)| (value - (step - 1) as f64).abs() < 1e-9)
        );
    }

    #[test]
    fn only_finite_values_are_drawn_and_long_runs_are_thinned() {
        let unfinished = series(&[2.0, f32::NAN, f32::INFINITY, 1.0]);
        assert_eq!(unfinished.points, [(1, 2.0), (4, 1.0)]);
        assert!(series(&vec![1.0; 5500]).points.len() <= MAX_POINTS);
        assert_eq!(series(&[]).range(false), (0.0, 1.0));
    }
}
