//! How a run learns: options that decide about the parameters after each step.

use candle_distributed::train::{Lora, Schedule};
use candle_nn::ParamsAdamW;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    help::typed,
    train::precision::Precision,
};

/// How a run learns, as it is asked for and as `run.json` records it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[command(next_help_heading = "How it learns")]
pub(crate) struct Recipe {
    /// The learning rate at its peak [default: 0.003; with --model 0.00002, and 0.0002 of adapters]
    #[arg(long, value_name = "RATE", visible_alias = "learning-rate")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lr: Option<f64>,
    /// How the learning rate falls from its peak [default: along a cosine, after a warm-up of a
    /// twentieth of the steps]
    #[arg(long, value_enum)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lr_schedule: Option<Curve>,
    /// Number of steps in which the learning rate of --lr-schedule first rises to its peak
    /// [default: 0]
    #[arg(long, value_name = "N", requires = "lr_schedule")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    warmup_steps: Option<u64>,
    /// The least learning rate of --lr-schedule after that, as a fraction of its peak [default: 0]
    #[arg(long, value_name = "FRACTION", requires = "lr_schedule")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min_lr_rate: Option<f64>,
    /// The largest norm of the gradients of all parameters together, to which larger ones are
    /// clipped [default: they are not clipped; with --model 1]
    #[arg(long, value_name = "NORM")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_grad_norm: Option<f64>,
    /// By how much of itself a parameter shrinks in each step, times the learning rate; norms and
    /// biases do not [default: 0.01]
    #[arg(long, value_name = "DECAY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight_decay: Option<f64>,
    /// Type in which the model computes: parameters are kept, summed and updated in f32 all the same
    /// [default: f32]
    #[arg(long, value_enum)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dtype: Option<Precision>,
    /// Train low-rank adapters of this rank, while the parameters of --model stay as they are
    #[arg(long, value_name = "RANK")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lora: Option<usize>,
    /// The factor of adapters, times their rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lora_alpha: Option<f64>,
    /// The linear layers that have adapters, by the ends of their names [default: `q_proj,v_proj`]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lora_on: Option<Vec<String>>,
}

/// The curves of the learning rate, by the names that Hugging Face gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Curve {
    /// It stays at its peak
    Constant,
    /// A straight line down to the least rate at the last step
    Linear,
    /// Half a wave of the cosine down to the least rate at the last step
    Cosine,
    /// One over the root of the number of steps
    InverseSqrt,
}

impl Recipe {
    /// Refuses what cannot be followed in so many steps.
    pub(crate) fn check(&self, steps: u64) -> Result<()> {
        let ends = matches!(self.lr_schedule, Some(Curve::Linear | Curve::Cosine));
        if let Some(warmup) = self.warmup_steps.filter(|&warmup| ends && warmup >= steps) {
            return Err(Error::usage(format!(
                "--warmup-steps {warmup} must be less than the {steps} steps of the run"
            )));
        }
        if let Some(rate) = self.min_lr_rate.filter(|rate| !(0.0..=1.0).contains(rate)) {
            return Err(Error::usage(format!("--min-lr-rate is {rate}, must be from 0 to 1")));
        }
        if let Some(norm) = self.max_grad_norm.filter(|&norm| !(norm > 0.0 && norm.is_finite())) {
            return Err(Error::usage(format!("--max-grad-norm is {norm}, must be above 0")));
        }
        if let Some(lr) = self.lr.filter(|&lr| !(lr > 0.0 && lr.is_finite())) {
            return Err(Error::usage(format!("--lr is {lr}, must be above 0")));
        }
        if let Some(decay) = self.weight_decay.filter(|decay| !(0.0..1.0).contains(decay)) {
            return Err(Error::usage(format!(
                "--weight-decay is {decay}, must be from 0 to below 1"
            )));
        }
        self.adapters(&["any"]).map(drop)
    }

    /// Returns the recipe with its defaults where nothing else is asked for.
    pub(crate) fn with_defaults(self, steps: u64, is_own_model: bool) -> Self {
        let lr = match (is_own_model, self.lora) {
            (true, _) => PEAK_LEARNING_RATE,
            (false, Some(_)) => 2e-4,
            (false, None) => 2e-5,
        };
        let warmup_steps = match self.lr_schedule {
            None => Some(steps / 20),
            Some(_) => self.warmup_steps,
        };
        Self {
            lr: self.lr.or(Some(lr)),
            lr_schedule: self.lr_schedule.or(Some(Curve::Cosine)),
            warmup_steps,
            max_grad_norm: self.max_grad_norm.or((!is_own_model).then_some(1.0)),
            ..self
        }
    }

    /// The type in which the model computes.
    pub(crate) fn precision(&self) -> Precision {
        self.dtype.unwrap_or_default()
    }

    /// The adapters that are trained, if the model itself is not; of `layers` unless others are asked
    /// for.
    pub(crate) fn adapters(&self, layers: &[&str]) -> Result<Option<Lora>> {
        let Some(rank) = self.lora else { return Ok(None) };
        let alpha = self.lora_alpha.unwrap_or(2.0 * rank as f64);
        Ok(Some(match &self.lora_on {
            Some(asked) => Lora::new(asked.clone(), rank, alpha)?,
            None => Lora::new(layers.iter().copied(), rank, alpha)?,
        }))
    }

    /// AdamW with PyTorch's defaults but for the decay; the learning rate is set before each step.
    pub(crate) fn adamw(&self) -> ParamsAdamW {
        let usual = ParamsAdamW::default();
        ParamsAdamW { weight_decay: self.weight_decay.unwrap_or(usual.weight_decay), ..usual }
    }

    /// The learning rate of the step that `step` others come before, of `steps` in all.
    pub(crate) fn learning_rate(&self, step: u64, steps: u64) -> f64 {
        self.lr.unwrap_or(PEAK_LEARNING_RATE) * self.schedule(steps).factor(step)
    }

    /// The library's schedule; a cosine after a warm-up of a twentieth of the steps unless another is
    /// asked for.
    fn schedule(&self, steps: u64) -> Schedule {
        let Some(curve) = self.lr_schedule else {
            return Schedule::cosine(steps).warmup(steps / 20);
        };
        let schedule = match curve {
            Curve::Constant => Schedule::constant(),
            Curve::Linear => Schedule::linear(steps),
            Curve::Cosine => Schedule::cosine(steps),
            Curve::InverseSqrt => Schedule::inverse_sqrt(),
        };
        let warmup = self.warmup_steps.unwrap_or(0);
        schedule.warmup(warmup).floor(self.min_lr_rate.unwrap_or(0.0))
    }

    /// The options by their names, as they are typed.
    pub(crate) fn options(&self) -> [(&'static str, Option<String>); 10] {
        let number = |number: Option<f64>| number.map(|number| number.to_string());
        [
            ("lr", number(self.lr)),
            ("lr-schedule", self.lr_schedule.map(typed)),
            ("warmup-steps", self.warmup_steps.map(|steps| steps.to_string())),
            ("min-lr-rate", number(self.min_lr_rate)),
            ("max-grad-norm", number(self.max_grad_norm)),
            ("weight-decay", number(self.weight_decay)),
            ("dtype", self.dtype.map(typed)),
            ("lora", self.lora.map(|rank| rank.to_string())),
            ("lora-alpha", number(self.lora_alpha)),
            ("lora-on", self.lora_on.as_ref().map(|layers| layers.join(","))),
        ]
    }

    /// Whether nothing is asked for.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// All of it in a form that other recipes do not have.
    #[expect(clippy::expect_used, reason = "its fields are names and numbers")]
    pub(crate) fn words(&self) -> String {
        serde_json::to_string(self).expect("it is made of what JSON has")
    }
}

const PEAK_LEARNING_RATE: f64 = 3e-3;

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(recipe: &Recipe, steps: u64) -> Vec<f64> {
        (0..steps).map(|step| recipe.learning_rate(step, steps) / PEAK_LEARNING_RATE).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-12;
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(is_near), "{found:?}, {expected:?}");
    }

    #[test]
    fn the_default_rises_and_falls() {
        let found = rates(&Recipe::default(), 42);
        assert_near(&found[..3], &[0.5, 1., 1.]);
        assert_near(&found[22..23], &[0.5]);
        assert!(found[3..].is_sorted_by(|left, right| left > right), "{found:?}");
    }

    #[test]
    fn the_learning_rate_follows_its_schedule() {
        let recipe = |curve, warmup_steps, min_lr_rate| Recipe {
            lr_schedule: Some(curve),
            warmup_steps,
            min_lr_rate,
            ..Recipe::default()
        };
        assert_near(&rates(&recipe(Curve::Constant, Some(2), None), 4), &[0.5, 1., 1., 1.]);
        assert_near(&rates(&recipe(Curve::Linear, None, Some(0.5)), 4), &[1., 0.875, 0.75, 0.625]);
        let half = 0.5_f64.sqrt();
        let cosine = [1., 0.5 + 0.5 * half, 0.5, 0.5 - 0.5 * half];
        assert_near(&rates(&recipe(Curve::Cosine, None, None), 4), &cosine);
        assert_near(&rates(&recipe(Curve::InverseSqrt, Some(1), None), 3), &[1., 1., half]);
    }

    #[test]
    fn recipes_are_read_as_they_were_written() {
        let recipe = Recipe {
            lr: Some(2e-5),
            lr_schedule: Some(Curve::InverseSqrt),
            warmup_steps: Some(3),
            min_lr_rate: Some(0.1),
            max_grad_norm: Some(1e-3),
            weight_decay: Some(0.1),
            dtype: Some(Precision::Bf16),
            lora: Some(4),
            lora_alpha: Some(0.7),
            lora_on: Some(vec!["q_proj".to_owned()]),
        };
        let words = recipe.words();
        assert!(words.contains(r#""lr_schedule":"inverse-sqrt""#), "{words}");
        assert_eq!(serde_json::from_str::<Recipe>(&words).unwrap(), recipe);
        assert_eq!(Recipe::default().words(), "{}");
        assert!(!recipe.is_default() && Recipe::default().is_default());
    }
}
