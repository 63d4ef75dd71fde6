//! Training options that affect the parameters.

use candle_nn::ParamsAdamW;
use dist_train::{Lora, Schedule};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Result, spec::SpecError},
    models::Precision,
    spec::variant_name,
};

/// Training options that affect the parameters, as `run.json` records them. `None` means the
/// default of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args), command(next_help_heading = "Learning"))]
pub struct Recipe {
    /// Peak of the learning rate [default: 0.003; 0.00002 for a model folder, 0.0002 for its adapters]
    #[cfg_attr(feature = "clap", arg(long, value_name = "RATE", visible_alias = "learning-rate"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Course of the learning rate after its peak [default: a cosine, after a warm-up of a
    /// twentieth of the steps]
    #[cfg_attr(feature = "clap", arg(long, value_enum))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr_schedule: Option<LrCurve>,
    /// Number of steps before the learning rate reaches its peak [default: 0 with `--lr-schedule`]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", requires = "lr_schedule"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Minimum learning rate of a schedule after its peak, as a fraction of the peak [default: 0]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FRACTION", requires = "lr_schedule"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_lr_rate: Option<f64>,
    /// Maximum norm of all gradients together, to which larger gradients are clipped; `none`, an
    /// infinite norm, lets a sharded model update each unit in the backward pass, which takes less
    /// memory [default: 1 for a model folder, none otherwise]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NORM", value_parser = parse_norm))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,
    /// Weight decay: each step subtracts this fraction of a parameter, times the learning rate; norms
    /// and biases do not decay [default: 0.01]
    #[cfg_attr(feature = "clap", arg(long, value_name = "DECAY"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Data type in which the model computes; parameters are stored, summed and updated in f32
    /// [default: f32]
    #[cfg_attr(feature = "clap", arg(long, value_enum))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Precision>,
    /// Train low-rank adapters of this rank instead of the parameters of the model
    #[cfg_attr(feature = "clap", arg(long, value_name = "RANK"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<usize>,
    /// Scale of the adapters, before it is divided by their rank [default: twice the rank]
    #[cfg_attr(feature = "clap", arg(long, value_name = "ALPHA", requires = "lora"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_alpha: Option<f64>,
    /// Linear layers that get adapters, by the last parts of their names [default: `q_proj,v_proj`]
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_on: Option<Vec<String>>,
}

/// The course of the learning rate, with the names of Hugging Face.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum LrCurve {
    /// Constant at the peak
    Constant,
    /// A straight line down to the minimum at the last step
    Linear,
    /// Half a cosine wave down to the minimum at the last step
    Cosine,
    /// The inverse square root of the number of steps
    InverseSqrt,
}

impl Recipe {
    /// Checks the options for a run of `steps` steps.
    ///
    /// # Errors
    ///
    /// [`SpecError::Setting`] with the first option that lacks the option it requires, or whose
    /// value is out of range, and the errors of [`Lora::new`].
    pub(crate) fn check(&self, steps: u64) -> Result<()> {
        for (name, value) in self.options() {
            let required = match name {
                "warmup_steps" | "min_lr_rate" if self.lr_schedule.is_none() => "lr_schedule",
                "lora_alpha" | "lora_on" if self.lora.is_none() => "lora",
                _ => continue,
            };
            if let Some(value) = value {
                let expected = format!("set together with {required}");
                return Err(SpecError::setting(name, &value, expected).into());
            }
        }
        let ends_with_run = matches!(self.lr_schedule, Some(LrCurve::Linear | LrCurve::Cosine));
        if let Some(warmup) = self.warmup_steps
            && ends_with_run
            && warmup >= steps
        {
            let expected = format!("less than the {steps} steps of the run");
            return Err(SpecError::setting("warmup_steps", &warmup, expected).into());
        }
        let is_positive: RangeCheck = |value| value > 0.0 && value.is_finite();
        let is_norm: RangeCheck = |value| value > 0.0;
        let is_share: RangeCheck = |value| (0.0..=1.0).contains(&value);
        let is_decay: RangeCheck = |value| (0.0..1.0).contains(&value);
        for (name, value, is_valid, expected) in [
            ("min_lr_rate", self.min_lr_rate, is_share, "from 0 to 1"),
            ("max_grad_norm", self.max_grad_norm, is_norm, "above 0"),
            ("lr", self.lr, is_positive, "above 0"),
            ("weight_decay", self.weight_decay, is_decay, "from 0 to below 1"),
        ] {
            if let Some(value) = value.filter(|&value| !is_valid(value)) {
                return Err(SpecError::setting(name, &value, expected.into()).into());
            }
        }
        // `adapters` checks the rank and the scale. Any name of a layer will do for this.
        self.adapters(&["any"]).map(drop)
    }

    /// Replaces `None` by the defaults of a run of `steps` steps. `is_built_in` selects the
    /// defaults of the built-in model instead of the defaults of a model folder.
    #[must_use]
    pub(crate) fn with_defaults(self, steps: u64, is_built_in: bool) -> Self {
        let lr = match (is_built_in, self.lora) {
            (true, _) => PEAK_LEARNING_RATE,
            (false, Some(_)) => 2e-4,
            (false, None) => 2e-5,
        };
        let warmup_steps = match self.lr_schedule {
            None => Some(steps / 20),
            Some(_) => self.warmup_steps,
        };
        let max_grad_norm = self.max_grad_norm.or((!is_built_in).then_some(1.0));
        Self {
            lr: self.lr.or(Some(lr)),
            lr_schedule: self.lr_schedule.or(Some(LrCurve::Cosine)),
            warmup_steps,
            max_grad_norm: max_grad_norm.filter(|norm| norm.is_finite()),
            ..self
        }
    }

    /// Returns the compute type of the model.
    pub(crate) fn precision(&self) -> Precision {
        self.dtype.unwrap_or(Precision::F32)
    }

    /// Returns the configuration of the adapters to train, or `None` if the model itself is to be
    /// trained. The adapters are on `layers` unless the recipe names other layers.
    ///
    /// # Errors
    ///
    /// The errors of [`Lora::new`].
    pub(crate) fn adapters(&self, layers: &[&str]) -> Result<Option<Lora>> {
        let Some(rank) = self.lora else { return Ok(None) };
        let alpha = self.lora_alpha.unwrap_or(2.0 * rank as f64);
        Ok(Some(match &self.lora_on {
            Some(names) => Lora::new(names.clone(), rank, alpha)?,
            None => Lora::new(layers.iter().copied(), rank, alpha)?,
        }))
    }

    /// Returns the options of AdamW: PyTorch's defaults, with the weight decay of the recipe if it
    /// is set. The learning rate is set before each step.
    pub(crate) fn adamw(&self) -> ParamsAdamW {
        let defaults = ParamsAdamW::default();
        ParamsAdamW { weight_decay: self.weight_decay.unwrap_or(defaults.weight_decay), ..defaults }
    }

    /// Returns the learning rate of step `step`, counted from 0, in a run of `steps` steps. If
    /// [`with_defaults`](Self::with_defaults) has not set the defaults of the recipe, the defaults
    /// of the built-in model apply.
    pub(crate) fn learning_rate(&self, step: u64, steps: u64) -> f64 {
        self.lr.unwrap_or(PEAK_LEARNING_RATE) * self.schedule(steps).factor(step)
    }

    /// Returns the schedule, by default a cosine after a warm-up of a twentieth of the steps.
    fn schedule(&self, steps: u64) -> Schedule {
        let Some(curve) = self.lr_schedule else {
            return Schedule::cosine(steps).warmup(steps / 20);
        };
        let schedule = match curve {
            LrCurve::Constant => Schedule::constant(),
            LrCurve::Linear => Schedule::linear(steps),
            LrCurve::Cosine => Schedule::cosine(steps),
            LrCurve::InverseSqrt => Schedule::inverse_sqrt(),
        };
        let warmup = self.warmup_steps.unwrap_or(0);
        schedule.warmup(warmup).floor(self.min_lr_rate.unwrap_or(0.0))
    }

    /// Returns the options by argument name, or `None` for options that are not set.
    pub fn options(&self) -> [(&'static str, Option<String>); 10] {
        let to_text = |number: Option<f64>| number.map(|number| number.to_string());
        [
            ("lr", to_text(self.lr)),
            ("lr_schedule", self.lr_schedule.as_ref().map(variant_name)),
            ("warmup_steps", self.warmup_steps.map(|steps| steps.to_string())),
            ("min_lr_rate", to_text(self.min_lr_rate)),
            ("max_grad_norm", self.max_grad_norm.map(norm_text)),
            ("weight_decay", to_text(self.weight_decay)),
            ("dtype", self.dtype.as_ref().map(variant_name)),
            ("lora", self.lora.map(|rank| rank.to_string())),
            ("lora_alpha", to_text(self.lora_alpha)),
            ("lora_on", self.lora_on.as_ref().map(|layers| layers.join(","))),
        ]
    }

    /// Returns true if no option is set.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the options as JSON, for comparison between runs and processes.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("all fields are JSON values")
    }
}

const PEAK_LEARNING_RATE: f64 = 3e-3;

/// The name of an infinite norm, to which no gradient is clipped.
const NO_NORM: &str = "none";

#[cfg(feature = "clap")]
fn parse_norm(text: &str) -> Result<f64, std::num::ParseFloatError> {
    if text == NO_NORM { Ok(f64::INFINITY) } else { text.parse() }
}

fn norm_text(norm: f64) -> String {
    if norm == f64::INFINITY { NO_NORM.to_owned() } else { norm.to_string() }
}

/// A function that returns true if a value is in range.
type RangeCheck = fn(f64) -> bool;

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(recipe: &Recipe, steps: u64) -> Vec<f64> {
        (0..steps).map(|step| recipe.learning_rate(step, steps) / PEAK_LEARNING_RATE).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (rate, expected_rate) in found.iter().zip(expected) {
            assert!((rate - expected_rate).abs() < 1e-12, "{found:?}, {expected:?}");
        }
    }

    #[test]
    fn default_schedule_rises_and_falls() {
        let found = rates(&Recipe::default(), 42);
        assert_near(&found[..3], &[0.5, 1., 1.]);
        assert_near(&found[22..23], &[0.5]);
        assert!(found[3..].is_sorted_by(|left, right| left > right), "{found:?}");
    }

    #[test]
    fn learning_rate_follows_its_schedule() {
        let recipe = |curve, warmup_steps, min_lr_rate| Recipe {
            lr_schedule: Some(curve),
            warmup_steps,
            min_lr_rate,
            ..Recipe::default()
        };
        assert_near(&rates(&recipe(LrCurve::Constant, Some(2), None), 4), &[0.5, 1., 1., 1.]);
        assert_near(
            &rates(&recipe(LrCurve::Linear, None, Some(0.5)), 4),
            &[1., 0.875, 0.75, 0.625],
        );
        let half = 0.5_f64.sqrt();
        let cosine = [1., 0.5 + 0.5 * half, 0.5, 0.5 - 0.5 * half];
        assert_near(&rates(&recipe(LrCurve::Cosine, None, None), 4), &cosine);
        assert_near(&rates(&recipe(LrCurve::InverseSqrt, Some(1), None), 3), &[1., 1., half]);
    }

    #[test]
    fn options_without_their_requirement_are_refused() {
        let complete = Recipe {
            lr_schedule: Some(LrCurve::Cosine),
            warmup_steps: Some(3),
            min_lr_rate: Some(0.1),
            lora: Some(4),
            lora_alpha: Some(8.0),
            lora_on: Some(vec!["q_proj".to_owned()]),
            ..Recipe::default()
        };
        complete.check(20).unwrap();
        Recipe::default().with_defaults(20, false).check(20).unwrap();
        let no_schedule = Recipe { lr_schedule: None, ..complete.clone() };
        let no_warmup = Recipe { warmup_steps: None, ..no_schedule.clone() };
        let no_lora = Recipe { lora: None, ..complete };
        let no_alpha = Recipe { lora_alpha: None, ..no_lora.clone() };
        for (recipe, expected) in [
            (no_schedule, "warmup_steps is 3, must be set together with lr_schedule"),
            (no_warmup, "min_lr_rate is 0.1, must be set together with lr_schedule"),
            (no_lora, "lora_alpha is 8, must be set together with lora"),
            (no_alpha, "lora_on is q_proj, must be set together with lora"),
        ] {
            let fault = recipe.check(20).unwrap_err().to_string();
            assert!(fault.contains(expected), "{fault}");
        }
    }

    #[test]
    fn infinite_norm_turns_clipping_off() {
        let recipe = Recipe { max_grad_norm: Some(f64::INFINITY), ..Recipe::default() };
        recipe.check(20).unwrap();
        assert_eq!(recipe.options()[4].1.as_deref(), Some("none"));
        assert_eq!(recipe.with_defaults(20, false).max_grad_norm, None);
        assert_eq!(Recipe::default().with_defaults(20, false).max_grad_norm, Some(1.0));
    }

    #[test]
    fn recipes_round_trip() {
        let recipe = Recipe {
            lr: Some(2e-5),
            lr_schedule: Some(LrCurve::InverseSqrt),
            warmup_steps: Some(3),
            min_lr_rate: Some(0.1),
            max_grad_norm: Some(1e-3),
            weight_decay: Some(0.1),
            dtype: Some(Precision::Bf16),
            lora: Some(4),
            lora_alpha: Some(0.7),
            lora_on: Some(vec!["q_proj".to_owned()]),
        };
        let words = recipe.to_json();
        assert!(words.contains(r#""lr_schedule":"inverse-sqrt""#), "{words}");
        assert_eq!(serde_json::from_str::<Recipe>(&words).unwrap(), recipe);
        assert_eq!(Recipe::default().to_json(), "{}");
        assert!(!recipe.is_default() && Recipe::default().is_default());
    }
}
