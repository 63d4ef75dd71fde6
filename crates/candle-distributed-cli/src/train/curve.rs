//! Draws runs step by step: losses, learning rates, gradient norms and speeds.

use candle_distributed::{
    finetune::run::ValidationPoint,
    train::{MeanLoss, Metrics, TimedStep},
    types::human::HumanCount,
};
use plotters::{
    coord::types::{RangedCoordf64, RangedCoordu64},
    prelude::*,
};

use crate::{
    error::Result,
    picture::{
        self, Area, BLUE, DrawResult, FAINT, GREEN, HEADING, LEGEND, Mark, ORANGE, PURPLE, Ticks,
    },
};

const WIDTH: u32 = 900;
/// The height of the first panel, with the losses.
const LOSS_HEIGHT: u32 = 290;
/// The height of each panel below the first.
const PANEL_HEIGHT: u32 = 125;
/// The height of the step numbers below the last panel.
const STEPS_HEIGHT: u32 = 45;
/// The distance of the vertical axes from the left edge.
const LEFT_OF_AXIS: i32 = 80;

/// The colors of compared runs.
const COLORS: [RGBColor; MAX_RUNS] = [BLUE, ORANGE, GREEN, PURPLE];
/// The color of losses on held-out examples.
const HELD_OUT: RGBColor = ORANGE;
/// Maximum number of runs in a drawing: more colors look alike.
pub(crate) const MAX_RUNS: usize = 4;

/// Maximum number of points of a series.
const MAX_POINTS: usize = 1000;

/// Each point of the smooth line is a mean over the steps around it: on each side, the number of all
/// steps divided by this number.
const SMOOTH_DIVISOR: usize = 40;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordu64, RangedCoordf64>>;

/// Draws one run as an SVG document: each quantity as points and as a smooth line. Quantities without
/// values have no panel, except for the loss.
pub(crate) fn draw(metrics: &Metrics, held_out: &[ValidationPoint]) -> Result<String> {
    let held_out: Vec<(u64, f64)> = held_out
        .iter()
        .filter(|point| point.loss.is_finite())
        .map(|point| (point.step, point.loss))
        .collect();
    let run = DrawnRun { steps: metrics.timed().collect(), held_out, color: BLUE, is_alone: true };
    let mut legend =
        vec![(Mark::Dot, BLUE, "a step"), (Mark::Line, BLUE, "mean of the steps around it")];
    if run.steps.iter().any(|step| step.is_resumed) {
        legend.push((Mark::Line, FAINT, "resumed"));
    }
    if !run.held_out.is_empty() {
        legend.push((Mark::Line, HELD_OUT, "held-out examples"));
    }
    let tokens = metrics.sum(|step| step.real_tokens);
    let seconds: f64 = run.steps.iter().map(|step| step.seconds).sum();
    let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    let figures = format!("{} tokens in {seconds:.1} s: {speed:.0} tokens/s", HumanCount(tokens));
    document([&title(metrics), &figures], &legend, &[run])
}

/// Draws several named runs as an SVG document of smooth lines.
pub(crate) fn compare(runs: &[(&str, &Metrics)]) -> Result<String> {
    let colored = || runs.iter().zip(COLORS);
    let legend: Vec<_> = colored().map(|(&(name, _), color)| (Mark::Line, color, name)).collect();
    let drawn: Vec<DrawnRun> = colored()
        .map(|((_, metrics), color)| DrawnRun {
            steps: metrics.timed().collect(),
            held_out: Vec::new(),
            color,
            is_alone: false,
        })
        .collect();
    let losses: Vec<String> =
        runs.iter().map(|(_, metrics)| format!("{:.3}", last_loss(metrics))).collect();
    let title = format!("loss {} nats per token over the last steps", losses.join(", "));
    document([&title, "each line is the mean of the steps around it"], &legend, &drawn)
}

fn title(metrics: &Metrics) -> String {
    let Some(first) = metrics.steps().first() else { return String::from("no step is done yet") };
    let steps = HumanCount(metrics.done().into()).with_noun("step");
    format!("loss {:.3} → {:.3} nats per token, {steps}", first.loss, last_loss(metrics))
}

/// Returns the mean loss over the last tenth of the steps.
pub(crate) fn last_loss(metrics: &Metrics) -> f64 {
    let mut mean = MeanLoss::default();
    metrics.steps().iter().rev().take(n_last(metrics)).for_each(|step| mean.add(step));
    mean.mean()
}

/// Returns the number of steps whose mean is the last loss: a tenth of all.
pub(crate) fn n_last(metrics: &Metrics) -> usize {
    (metrics.steps().len() / 10).max(1)
}

/// A run in the drawing.
struct DrawnRun {
    steps: Vec<TimedStep>,
    /// Losses on held-out examples, with their steps.
    held_out: Vec<(u64, f64)>,
    color: RGBColor,
    /// Whether it is the only run in the drawing. Then each step is a point.
    is_alone: bool,
}

/// A number of each step, drawn in a panel.
struct Quantity {
    name: &'static str,
    /// Whether the axis begins at 0.
    from_zero: bool,
    /// Whether the panel also shows the losses on held-out examples.
    has_held_out: bool,
    /// Returns the number of a step, if the step has it.
    ratio: fn(&TimedStep) -> Option<Ratio>,
}

const QUANTITIES: [Quantity; 4] = [
    Quantity {
        name: "loss (nats per token)",
        from_zero: false,
        has_held_out: true,
        ratio: |step| {
            let weight = step.metrics.loss_weight();
            let numerator = f64::from(step.metrics.loss) * weight;
            Some(Ratio { numerator, denominator: weight })
        },
    },
    Quantity {
        name: "learning rate",
        from_zero: true,
        has_held_out: false,
        ratio: |step| step.metrics.learning_rate.filter(|rate| *rate > 0.0).map(Ratio::single),
    },
    Quantity {
        name: "gradient norm",
        from_zero: true,
        has_held_out: false,
        ratio: |step| step.metrics.grad_norm.map(Ratio::single),
    },
    Quantity {
        name: "tokens/s",
        from_zero: true,
        has_held_out: false,
        ratio: |step| {
            let numerator = step.metrics.real_tokens as f64;
            Some(Ratio { numerator, denominator: step.seconds })
        },
    },
];

/// Draws a document with a panel per quantity, one below the other.
fn document(
    [title, figures]: [&str; 2],
    legend: &[(Mark, RGBColor, &str)],
    runs: &[DrawnRun],
) -> Result<String> {
    let mut panels = Vec::new();
    for (n, quantity) in QUANTITIES.iter().enumerate() {
        let mut all_series = Vec::new();
        for run in runs {
            let mut series = Series::new(&run.steps, quantity.ratio);
            if quantity.has_held_out {
                series.held_out.clone_from(&run.held_out);
            }
            all_series.push(series);
        }
        // The first panel, with the losses, is drawn even without values.
        if n == 0 || all_series.iter().any(|series| !series.points.is_empty()) {
            panels.push((quantity, all_series));
        }
    }
    let mut heights: Vec<u32> = Vec::new();
    for n in 0..panels.len() {
        let panel_height = if n == 0 { LOSS_HEIGHT } else { PANEL_HEIGHT };
        let steps_height = if n + 1 == panels.len() { STEPS_HEIGHT } else { 0 };
        heights.push(panel_height + steps_height);
    }
    let size = (WIDTH, HEADING + LEGEND + heights.iter().sum::<u32>());
    picture::document(size, |area| {
        picture::draw_heading(&area, title, figures, FAINT)?;
        picture::draw_legend(&area, (LEFT_OF_AXIS, HEADING.cast_signed() + 8), legend)?;
        let mut top = HEADING + LEGEND;
        for (n, ((quantity, series), height)) in panels.iter().zip(heights).enumerate() {
            let part = area.clone().shrink((0, top), (WIDTH, height));
            draw_panel(&part, quantity, runs, series, n + 1 == panels.len())?;
            top += height;
        }
        area.present()
    })
}

fn draw_panel(
    area: &Area<'_>,
    quantity: &Quantity,
    runs: &[DrawnRun],
    series: &[Series],
    has_steps: bool,
) -> DrawResult {
    let ends = runs.iter().filter_map(|run| run.steps.last());
    // At least 1: an axis without an extent has no ticks.
    let last = ends.map(|step| step.metrics.n_done()).fold(1, u64::max);
    let (low, high) = value_range(series, quantity.from_zero);
    let mut chart = draw_axes(area, last, (low, high), quantity.name, has_steps)?;
    for (run, series) in runs.iter().zip(series) {
        if run.is_alone {
            let resumed = run.steps.iter().filter(|step| step.is_resumed);
            for step in resumed.map(|step| step.metrics.step) {
                chart.draw_series([PathElement::new([(step, low), (step, high)], FAINT)])?;
            }
            let color = run.color.mix(0.45).filled();
            chart.draw_series(series.points.iter().map(|&at| Circle::new(at, 2, color)))?;
        }
        let line = PathElement::new(series.smooth.clone(), run.color.stroke_width(2));
        chart.draw_series([line])?;
        let held_out = PathElement::new(series.held_out.clone(), HELD_OUT.stroke_width(2));
        chart.draw_series([held_out])?;
        let dots = series.held_out.iter().map(|&at| Circle::new(at, 3, HELD_OUT.filled()));
        chart.draw_series(dots)?;
    }
    Ok(())
}

/// Draws axes for steps up to `last` and values of this range.
fn draw_axes<'a, 'b>(
    area: &Area<'b>,
    last: u64,
    (low, high): (f64, f64),
    name: &str,
    has_steps: bool,
) -> DrawResult<Chart<'a, 'b>> {
    let [steps, values] = [last as f64, high].map(Ticks::up_to);
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .margin_right(30)
        .x_label_area_size(if has_steps { STEPS_HEIGHT } else { 0 })
        .y_label_area_size(70)
        .build_cartesian_2d(0..last, low..high)?;
    let mut axes = chart.configure_mesh();
    picture::style_axes(&mut axes);
    if has_steps {
        axes.x_desc("steps");
    }
    let (_, height) = area.dim_in_pixel();
    axes.y_desc(name)
        .y_labels(if height < LOSS_HEIGHT { 3 } else { 6 })
        .x_label_formatter(&|&step| steps.label(step as f64))
        .y_label_formatter(&|&value| values.label(value))
        .draw()?;
    Ok(chart)
}

/// A fraction. The mean of several fractions is the sum of the numerators over the sum of the
/// denominators.
#[derive(Clone, Copy, Debug)]
struct Ratio {
    numerator: f64,
    denominator: f64,
}

impl Ratio {
    fn single(number: f64) -> Self {
        Self { numerator: number, denominator: 1.0 }
    }

    fn value(self) -> f64 {
        self.numerator / self.denominator
    }
}

/// The points of a run in a panel: steps and values.
#[derive(Debug)]
struct Series {
    points: Vec<(u64, f64)>,
    smooth: Vec<(u64, f64)>,
    held_out: Vec<(u64, f64)>,
}

impl Series {
    /// Computes the finite values of `ratio`, step by step and as means over the steps around each.
    fn new(steps: &[TimedStep], ratio: impl Fn(&TimedStep) -> Option<Ratio>) -> Self {
        let ratios = steps.iter().filter_map(|step| Some((step.metrics.n_done(), ratio(step)?)));
        let finite: Vec<_> = ratios.filter(|(_, ratio)| ratio.value().is_finite()).collect();
        let every = finite.len().div_ceil(MAX_POINTS).max(1);
        let smooth_point = |position: usize| {
            // The same number on both sides, or the line would lag where the values fall fast.
            let n_after = finite.len() - 1 - position;
            let n_sides = (finite.len() / SMOOTH_DIVISOR).min(position).min(n_after);
            let (step, _) = finite[position];
            (step, mean(&finite[position - n_sides..=position + n_sides]))
        };
        Self {
            points: finite
                .iter()
                .step_by(every)
                .map(|&(step, ratio)| (step, ratio.value()))
                .collect(),
            smooth: (0..finite.len()).step_by(every).map(smooth_point).collect(),
            held_out: Vec::new(),
        }
    }
}

/// Returns the range of an axis, with some space above and below.
fn value_range(series: &[Series], from_zero: bool) -> (f64, f64) {
    let mut low = f64::INFINITY;
    let mut high = f64::NEG_INFINITY;
    for &(_, value) in series.iter().flat_map(|series| series.points.iter().chain(&series.held_out))
    {
        low = low.min(value);
        high = high.max(value);
    }
    match high - low {
        // Without points, the difference is infinite.
        extent if !extent.is_finite() => (0.0, 1.0),
        _ if from_zero && high > 0.0 => (0.0, 1.05 * high),
        _ if from_zero => (0.0, 1.0),
        extent => (low - 0.05 * extent.max(0.1), high + 0.05 * extent.max(0.1)),
    }
}

fn mean(ratios: &[(u64, Ratio)]) -> f64 {
    let sum = |field: fn(&Ratio) -> f64| ratios.iter().map(|(_, ratio)| field(ratio)).sum::<f64>();
    sum(|ratio| ratio.numerator) / sum(|ratio| ratio.denominator)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the line of a step.
    pub(crate) fn line(step: u64, loss: &str, seconds: f64) -> String {
        format!(
            "{{\"step\": {step}, \"epoch\": 0, \"loss\": {loss}, \"learning_rate\": 0.1, \
             \"sequences\": 1, \
             \"real_tokens\": 5, \"padded_tokens\": 8, \"seconds\": {seconds}}}\n"
        )
    }

    /// Returns the metrics of steps with these losses; `null` is the JSON of a NaN.
    fn metrics(losses: &[f32]) -> Metrics {
        let mut lines = String::new();
        for (step, loss) in (0..).zip(losses) {
            let loss = if loss.is_finite() { loss.to_string() } else { "null".into() };
            lines += &line(step, &loss, 1.0);
        }
        Metrics::read_lines(lines.as_bytes()).unwrap()
    }

    fn series(losses: &[f32]) -> Series {
        let steps: Vec<TimedStep> = metrics(losses).timed().collect();
        Series::new(&steps, |step| Some(Ratio::single(step.metrics.loss.into())))
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
        assert_eq!(value_range(&[series(&[])], false), (0.0, 1.0));
    }

    #[test]
    fn axes_hold_all_runs() {
        let both = [series(&[2.0, 1.0]), series(&[5.0])];
        assert_eq!(value_range(&both, true), (0.0, 5.25));
        let (low, high) = value_range(&both, false);
        assert!((0.8, 5.2) == (low, high), "{low} {high}");
    }

    #[test]
    fn panels_are_those_of_which_something_is_known() {
        // The lines have no norm of the gradients.
        let svg = draw(&metrics(&[3.0, 2.0]), &[]).unwrap();
        for name in ["\nloss (nats per token)\n", "\nlearning rate\n", "\ntokens/s\n"] {
            assert!(svg.contains(name), "no {name} in {svg}");
        }
        assert!(!svg.contains("gradient norm"), "{svg}");
        assert!(svg.contains("\nloss 3.000 → 2.000 nats per token, 2 steps\n"), "{svg}");
        let none = draw(&metrics(&[]), &[]).unwrap();
        assert!(none.contains("no step is done yet") && !none.contains("NaN"), "{none}");
    }

    #[test]
    fn runs_are_compared_in_their_colors() {
        let (first, second) = (metrics(&[3.0, 2.0]), metrics(&[3.0, 1.0]));
        let svg = compare(&[("a", &first), ("b", &second)]).unwrap();
        assert!(svg.contains("\nloss 2.000, 1.000 nats per token over the last steps\n"), "{svg}");
        assert!(!svg.contains("<circle") && svg.contains("#E69F00"), "{svg}");
        assert!(svg.contains("\na\n") && svg.contains("\nb\n"), "{svg}");
    }

    #[test]
    fn losses_of_what_was_held_out_are_drawn_among_the_others() {
        let held_out = [ValidationPoint::new(2, 7.5, 4.0)];
        let svg = draw(&metrics(&[3.0, 2.0]), &held_out).unwrap();
        assert!(svg.contains("\nheld-out examples\n"), "{svg}");
        let series = Series { held_out: vec![(2, 20.0)], ..series(&[2.0, 1.0]) };
        assert_eq!(value_range(&[series], true), (0.0, 21.0));
        assert!(!draw(&metrics(&[3.0, 2.0]), &[]).unwrap().contains("held out"));
    }
}
