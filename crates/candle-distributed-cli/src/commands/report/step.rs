//! A drawing of a process's memory over a step: predicted, term by term, beside the measured peak.

use std::ops::Range;

use candle_distributed::{
    plan::ShardingPlan,
    types::human::{BinaryUnit, HumanBytes},
};
use plotters::{coord::types::RangedCoordf64, prelude::*};

use crate::{
    error::Result,
    picture::{
        self, ACTIVATIONS, Area, BLUE, Drawn, FAINT, FONT, GATHERED, GRADIENTS, GRID, HEADING, INK,
        LIMIT, OPTIMIZER, TEXT, Ticks,
    },
    train::measured::Comparison,
};

const SIZE: (u32, u32) = (900, 420);
/// Where the legend begins.
const RIGHT: i32 = 600;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// An SVG document: what a process is predicted to hold while a step passes through units, which
/// are given in the order of the forward pass, each with its bytes.
pub(super) fn draw(units: &[u128], plan: &ShardingPlan, comparison: &Comparison) -> Result<String> {
    let stays = plan.units().iter().all(|unit| plan.keeps_gathered(unit));
    let step = Step { units, stays };
    let mut terms: Vec<Term> = comparison.memory.terms.iter().map(Term::of).collect();
    // What moves lies on what does not.
    terms.sort_by_key(|term| term.course != Course::Always);
    let total = |moment: Moment| terms.iter().map(|term| term.bytes_at(&step, moment)).sum::<f64>();
    let highest = step.moments().map(total).fold(0.0, f64::max);
    let title = format!("memory of a process over a step: {} predicted", human(highest));
    let measured = match comparison.peak_bytes {
        Some(peak) => format!("{} measured at most in the whole run", HumanBytes(peak.into())),
        None => String::from("this system does not say what was taken"),
    };
    picture::document(SIZE, |area| {
        picture::heading(&area, &title, &measured, FAINT)?;
        let below = area.margin(HEADING, 0, 0, 0);
        draw_terms(&below, &step, &terms, comparison.peak_bytes.map(u128::from), highest)?;
        name_terms(&below, &terms)?;
        area.present()
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a sum of bytes is a number of bytes"
)]
fn human(bytes: f64) -> HumanBytes {
    HumanBytes(bytes as u128)
}

/// The units of a step.
#[derive(Clone, Copy, Debug)]
struct Step<'a> {
    units: &'a [u128],
    /// Whether they stay gathered between the passes.
    stays: bool,
}

/// Where a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Forward(usize),
    Backward(usize),
    Update,
}

impl Step<'_> {
    fn moments(&self) -> impl Iterator<Item = Moment> + use<> {
        let forward = (0..self.units.len()).map(Moment::Forward);
        let backward = (0..self.units.len()).rev().map(Moment::Backward);
        forward.chain(backward).chain([Moment::Update])
    }

    /// The part of the units up to this one, it included.
    fn up_to(&self, unit: usize) -> f64 {
        part(self.units[..=unit].iter().sum(), self.units.iter().sum())
    }

    /// The part of the units from this one on.
    fn from(&self, unit: usize) -> f64 {
        part(self.units[unit..].iter().sum(), self.units.iter().sum())
    }

    /// A unit beside the largest.
    fn beside_largest(&self, unit: usize) -> f64 {
        part(self.units[unit], self.units.iter().copied().fold(0, u128::max))
    }
}

fn part(of: u128, whole: u128) -> f64 {
    if whole == 0 { 0.0 } else { of as f64 / whole as f64 }
}

/// When how much of a term is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// All of it, all the time.
    Always,
    /// With the unit that computes; units that stay add up.
    Gathered,
    /// With the unit of the backward pass.
    OfUnit,
    /// In the backward pass.
    Backward,
    /// More with each unit of the backward pass, up to the update.
    Gradients,
    /// More with each unit of the forward pass, less with each of the backward pass.
    Activations,
}

impl Course {
    fn part(self, step: &Step<'_>, moment: Moment) -> f64 {
        match (self, moment) {
            (Self::Always, _)
            | (Self::Backward, Moment::Backward(_))
            | (Self::Gradients, Moment::Update) => 1.0,
            (Self::Gathered, Moment::Forward(unit) | Moment::Backward(unit)) if step.stays => {
                step.up_to(unit)
            }
            (Self::Gathered, Moment::Forward(unit) | Moment::Backward(unit))
            | (Self::OfUnit, Moment::Backward(unit)) => step.beside_largest(unit),
            (Self::Gradients, Moment::Backward(unit)) => step.from(unit),
            (Self::Activations, Moment::Forward(unit) | Moment::Backward(unit)) => {
                part(unit as u128 + 1, step.units.len() as u128)
            }
            _ => 0.0,
        }
    }
}

/// A term of the prediction.
#[derive(Clone, Copy, Debug)]
struct Term {
    name: &'static str,
    bytes: u64,
    course: Course,
    color: RGBColor,
}

impl Term {
    /// What has another name is there all the time.
    fn of(&(name, bytes): &(&'static str, u64)) -> Self {
        let (course, color) = match name {
            "parameters" => (Course::Always, BLUE),
            "optimizer state" => (Course::Always, OPTIMIZER),
            "gradients" | "gradients of each device, and their sum" => {
                (Course::Gradients, GRADIENTS)
            }
            "gathered parameters" => (Course::Gathered, GATHERED),
            "gradients of a unit" => (Course::OfUnit, RGBColor(240, 180, 90)),
            "gradients under way" => (Course::Backward, RGBColor(222, 160, 120)),
            "activations" => (Course::Activations, ACTIVATIONS),
            "kernels and allocator" => (Course::Always, RGBColor(205, 209, 216)),
            _ => (Course::Always, RGBColor(180, 185, 194)),
        };
        Self { name, bytes, course, color }
    }

    fn bytes_at(&self, step: &Step<'_>, moment: Moment) -> f64 {
        self.bytes as f64 * self.course.part(step, moment)
    }
}

fn draw_terms(
    area: &Area<'_>,
    step: &Step<'_>,
    terms: &[Term],
    measured: Option<u128>,
    highest: f64,
) -> Drawn {
    let highest = highest.max(measured.unwrap_or(0) as f64);
    let unit = BinaryUnit::of(human(highest).0);
    let scale = unit.bytes() as f64;
    let ticks = Ticks::up_to(highest / scale);
    let n_moments = step.moments().count() as f64;
    let (left, _) = area.split_horizontally(RIGHT - 10);
    let mut chart: Chart<'_, '_> = ChartBuilder::on(&left)
        .margin(10)
        .x_label_area_size(45)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..n_moments, 0.0..(1.12 * highest / scale).max(1.0))?;
    let mut axes = chart.configure_mesh();
    picture::plain(&mut axes);
    axes.x_labels(0)
        .y_labels(6)
        .y_desc(format!("held ({})", unit.name()))
        .y_label_formatter(&|value| ticks.label(*value))
        .draw()?;
    for (place, moment) in step.moments().enumerate() {
        let mut height = 0.0;
        for term in terms {
            let top = height + term.bytes_at(step, moment) / scale;
            let corners = [(place as f64, height), (place as f64 + 1.0, top)];
            chart.draw_series([Rectangle::new(corners, term.color.filled())])?;
            height = top;
        }
    }
    name_passes(&left, &chart, step.units.len())?;
    let Some(measured) = measured else { return Ok(()) };
    let (start, y) = chart.backend_coord(&(0.0, measured as f64 / scale));
    let (end, _) = chart.backend_coord(&(n_moments, 0.0));
    // Coordinates are those of the picture, of which this area is a part.
    let y = y - HEADING.cast_signed();
    picture::dashes(&left, start..end, y, LIMIT)?;
    let style = TextStyle::from((FONT, TEXT)).color(&LIMIT);
    left.draw(&Text::new("measured peak", (start + 6, y - 18), style))
}

/// Names the passes below the axis, with a line between them.
fn name_passes(area: &Area<'_>, chart: &Chart<'_, '_>, n_units: usize) -> Drawn {
    let n = n_units as f64;
    let passes: [(Range<f64>, &str); 3] = [
        (0.0..n, "forward pass"),
        (n..2.0 * n, "backward pass"),
        (2.0 * n..2.0 * n + 1.0, "update"),
    ];
    for (columns, name) in passes {
        let (left, bottom) = chart.backend_coord(&(columns.start, 0.0));
        let (right, _) = chart.backend_coord(&(columns.end, 0.0));
        let y = bottom - HEADING.cast_signed();
        area.draw(&PathElement::new([(left, y), (left, y + 10)], GRID))?;
        let middle = left.midpoint(right) - picture::text_width(name) / 2;
        let style = TextStyle::from((FONT, TEXT)).color(&INK);
        area.draw(&Text::new(name, (middle, y + 12), style))?;
    }
    Ok(())
}

/// Names the colors, from the top of the stack down.
fn name_terms(area: &Area<'_>, terms: &[Term]) -> Drawn {
    for (y, term) in (20..).step_by(26).zip(terms.iter().rev()) {
        let corners = [(RIGHT, y), (RIGHT + 15, y + 15)];
        area.draw(&Rectangle::new(corners, term.color.filled()))?;
        let style = TextStyle::from((FONT, TEXT)).color(&INK);
        area.draw(&Text::new(term.name, (RIGHT + 23, y + 1), style))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step<'_> = Step { units: &[1, 4, 3], stays: false };

    fn parts(course: Course, step: &Step<'_>) -> Vec<f64> {
        step.moments().map(|moment| course.part(step, moment)).collect()
    }

    #[test]
    fn terms_come_and_go_with_units() {
        assert_eq!(parts(Course::Always, &STEP), [1.0; 7]);
        assert_eq!(parts(Course::Gathered, &STEP), [0.25, 1.0, 0.75, 0.75, 1.0, 0.25, 0.0]);
        assert_eq!(parts(Course::OfUnit, &STEP), [0.0, 0.0, 0.0, 0.75, 1.0, 0.25, 0.0]);
        assert_eq!(parts(Course::Backward, &STEP), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]);
        assert_eq!(parts(Course::Gradients, &STEP), [0.0, 0.0, 0.0, 0.375, 0.875, 1.0, 1.0]);
        let third = 1.0 / 3.0;
        let activations = [third, 2.0 * third, 1.0, 1.0, 2.0 * third, third, 0.0];
        assert_eq!(parts(Course::Activations, &STEP), activations);
    }

    #[test]
    fn units_that_stay_add_up() {
        let step = Step { stays: true, ..STEP };
        let gathered = [0.125, 0.625, 1.0, 1.0, 0.625, 0.125, 0.0];
        assert_eq!(parts(Course::Gathered, &step), gathered);
    }

    #[test]
    fn every_term_is_whole_at_some_moment() {
        let courses = [
            Course::Always,
            Course::Gathered,
            Course::OfUnit,
            Course::Backward,
            Course::Gradients,
            Course::Activations,
        ];
        for course in courses {
            let highest = parts(course, &STEP).into_iter().fold(0.0, f64::max);
            assert!((highest - 1.0).abs() < 1e-12, "{course:?}");
        }
    }
}
