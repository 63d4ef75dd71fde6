//! How a run goes: the numbers of each step, written as lines of JSON and read again.

pub(crate) mod log;
pub(crate) mod read;

use serde::{Deserialize, Deserializer, Serialize};

use crate::step::rules::Step;

/// The numbers of one step, as one line of a [log](crate::MetricsLog).
///
/// The fields that are no options stand in every line. Readers pass over fields that they do not
/// know.
///
/// # Examples
///
/// ```
/// use dist_train::StepMetrics;
///
/// let step = StepMetrics::new(41, 0.75).epoch(2).learning_rate(1e-3).batch(8, 900, 1024);
/// assert_eq!(step.padding(), 0.12109375);
/// assert_eq!(
///     serde_json::to_string(&step)?,
///     r#"{"step":41,"epoch":2,"loss":0.75,"learning_rate":0.001,"sequences":8,"real_tokens":900,"padded_tokens":1024,"seconds":0.0}"#
/// );
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepMetrics {
    /// The step, from 0.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The mean loss, in single precision; NaN, and `null` in JSON, if it is not finite.
    #[serde(deserialize_with = "number")]
    pub loss: f32,
    /// The learning rate.
    pub learning_rate: f64,
    /// The sequences of the batch, on all devices.
    pub sequences: u64,
    /// Their tokens.
    pub real_tokens: u64,
    /// The same with padding.
    pub padded_tokens: u64,
    /// The seconds from the start of the session to the end of the step.
    pub seconds: f64,
    /// The norm of the gradients before they were clipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// What the loss is the mean over, if it is not the tokens but the first of each sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The largest memory of the process so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}

/// A number; JSON writes `null` for NaN and the infinities.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

impl StepMetrics {
    /// A step with this number, from 0, and loss; all else is 0 or not known.
    pub fn new(step: u64, loss: f32) -> Self {
        Self {
            step,
            epoch: 0,
            loss,
            learning_rate: 0.0,
            sequences: 0,
            real_tokens: 0,
            padded_tokens: 0,
            seconds: 0.0,
            grad_norm: None,
            weight: None,
            peak_bytes: None,
        }
    }

    /// What a model says of its step with this number, from 0: loss, norm of the gradients, and
    /// weight.
    #[expect(clippy::cast_possible_truncation, reason = "losses are shown in single precision")]
    pub fn of<A>(step: u64, done: &Step<A>) -> Self {
        let (grad_norm, weight) = (Some(done.grad_norm), Some(done.weight));
        Self { grad_norm, weight, ..Self::new(step, done.loss as f32) }
    }

    /// Sets the epoch, from 0.
    #[must_use]
    pub fn epoch(self, epoch: u64) -> Self {
        Self { epoch, ..self }
    }

    /// Sets the learning rate.
    #[must_use]
    pub fn learning_rate(self, learning_rate: f64) -> Self {
        Self { learning_rate, ..self }
    }

    /// Sets how many sequences and tokens the batch has: `real_tokens` of them are no padding.
    #[must_use]
    pub fn batch(self, sequences: u64, real_tokens: u64, padded_tokens: u64) -> Self {
        Self { sequences, real_tokens, padded_tokens, ..self }
    }

    /// How many steps are done after it.
    pub fn end(&self) -> u64 {
        self.step.saturating_add(1)
    }

    /// The tokens that are predicted: all but the first of each sequence.
    pub fn predictions(&self) -> u64 {
        self.real_tokens.saturating_sub(self.sequences)
    }

    /// What the loss is the mean over: the weight if it is known, else the
    /// [predictions](Self::predictions).
    pub fn loss_weight(&self) -> f64 {
        self.weight.unwrap_or(self.predictions() as f64)
    }

    /// The part of the padded tokens that is padding; NaN without tokens.
    pub fn padding(&self) -> f64 {
        1.0 - self.real_tokens as f64 / self.padded_tokens as f64
    }

    /// Whether a step can have such numbers: there is one after it, and no sequence is empty.
    fn is_possible(&self) -> bool {
        self.step < u64::MAX && self.sequences <= self.real_tokens
    }
}

/// The mean loss of several steps, each with its [weight](StepMetrics::loss_weight).
///
/// # Examples
///
/// ```
/// use dist_train::{MeanLoss, StepMetrics};
///
/// let mut mean = MeanLoss::default();
/// mean.add(&StepMetrics::new(0, 3.0).batch(1, 4, 4)); // 3 predictions
/// mean.add(&StepMetrics::new(1, 1.0).batch(1, 2, 4)); // 1 prediction
/// assert_eq!(mean.mean(), 2.5);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanLoss {
    sum: f64,
    weight: f64,
}

impl MeanLoss {
    /// Adds a step.
    pub fn add(&mut self, step: &StepMetrics) {
        self.sum += f64::from(step.loss) * step.loss_weight();
        self.weight += step.loss_weight();
    }

    /// The mean; NaN of no steps.
    pub fn mean(self) -> f64 {
        self.sum / self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the predictions, 9 and 1, the mean would be 1.2.
    #[test]
    fn known_weights_count_in_the_mean() {
        let step = |loss, weight, tokens| StepMetrics {
            weight: Some(weight),
            ..StepMetrics::new(0, loss).batch(1, tokens, tokens)
        };
        let mut mean = MeanLoss::default();
        mean.add(&step(1.0, 1.0, 10));
        mean.add(&step(3.0, 3.0, 2));
        assert_eq!(mean.mean().to_bits(), 2.5_f64.to_bits());
    }
}
