//! Metrics of a run: the numbers of each step as lines of JSON.

pub(crate) mod log;
pub(crate) mod read;

use serde::{Deserialize, Deserializer, Serialize};

use crate::step::rules::Step;

/// The metrics of one step, one line of a [log](crate::MetricsLog).
///
/// A line omits the numbers that the program does not know. Readers ignore unknown fields.
///
/// # Examples
///
/// ```
/// use dist_train::StepMetrics;
///
/// let step = StepMetrics::new(41, 0.75).epoch(2).batch(8, 900, 1024);
/// assert_eq!(step.loss_weight(), 892.0);
/// assert_eq!(
///     serde_json::to_string(&step)?,
///     r#"{"step":41,"epoch":2,"loss":0.75,"sequences":8,"real_tokens":900,"padded_tokens":1024,"seconds":0.0}"#
/// );
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepMetrics {
    /// The step, from 0.
    pub step: u64,
    /// The epoch, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// The mean loss, in single precision; a non-finite loss is NaN here and `null` in JSON.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// The learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Number of sequences in the batch, over all devices; 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sequences: u64,
    /// Number of tokens in these sequences; 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub real_tokens: u64,
    /// Number of tokens including padding; 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub padded_tokens: u64,
    /// Seconds from the start of the session to the end of the step.
    pub seconds: f64,
    /// The gradient norm before clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// The weight of the mean loss, if it is not the number of predicted tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Peak memory of the process so far, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}

/// Reads a number; JSON stores NaN and infinities as `null`.
fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

/// Returns true if a count is not known, and therefore is not written.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl StepMetrics {
    /// Creates the metrics of step `step`, counted from 0; all other fields are not known.
    pub fn new(step: u64, loss: f32) -> Self {
        Self {
            step,
            epoch: None,
            loss,
            learning_rate: None,
            sequences: 0,
            real_tokens: 0,
            padded_tokens: 0,
            seconds: 0.0,
            grad_norm: None,
            weight: None,
            peak_bytes: None,
        }
    }

    /// Creates the metrics of step `step`, counted from 0, with the loss, learning rate, gradient
    /// norm and weight that the model returned.
    #[expect(clippy::cast_possible_truncation, reason = "metrics store losses in single precision")]
    pub fn from_step<A>(step: u64, done: &Step<A>) -> Self {
        let (grad_norm, weight) = (Some(done.grad_norm), Some(done.weight));
        let learning_rate = Some(done.learning_rate);
        Self { learning_rate, grad_norm, weight, ..Self::new(step, done.loss as f32) }
    }

    /// Sets the epoch, from 0.
    #[must_use]
    pub fn epoch(self, epoch: u64) -> Self {
        Self { epoch: Some(epoch), ..self }
    }

    /// Sets the number of sequences and tokens in the batch; `real_tokens` excludes padding.
    #[must_use]
    pub fn batch(self, sequences: u64, real_tokens: u64, padded_tokens: u64) -> Self {
        Self { sequences, real_tokens, padded_tokens, ..self }
    }

    /// Returns the number of steps that are done when this step is.
    pub fn n_done(&self) -> u64 {
        self.step.saturating_add(1)
    }

    /// Returns the weight of the mean loss: the recorded weight, or else the number of predicted
    /// tokens, which are all but the first token of each sequence.
    pub fn loss_weight(&self) -> f64 {
        let predicted = self.real_tokens.saturating_sub(self.sequences);
        self.weight.unwrap_or(predicted as f64)
    }

    /// Returns true if the numbers are plausible: the step has a successor, and no sequence is
    /// empty.
    fn is_possible(&self) -> bool {
        self.step < u64::MAX && self.sequences <= self.real_tokens
    }
}

/// The mean loss of several steps, weighted by [`StepMetrics::loss_weight`].
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
    /// Adds a step. A step of weight 0 has no loss, so it does not count.
    pub fn add(&mut self, step: &StepMetrics) {
        if step.loss_weight() == 0.0 {
            return;
        }
        self.sum += f64::from(step.loss) * step.loss_weight();
        self.weight += step.loss_weight();
    }

    /// Returns the mean; NaN without a step that has a weight.
    pub fn mean(self) -> f64 {
        self.sum / self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weighted by predictions, 9 and 1, the mean would be 1.2.
    #[test]
    fn known_weights_count_in_the_mean() {
        let step = |loss, weight, tokens| StepMetrics {
            weight: Some(weight),
            ..StepMetrics::new(0, loss).batch(1, tokens, tokens)
        };
        let mut mean = MeanLoss::default();
        mean.add(&step(1.0, 1.0, 10));
        mean.add(&step(3.0, 3.0, 2));
        mean.add(&step(f32::NAN, 0.0, 2));
        mean.add(&StepMetrics::new(0, 7.0));
        assert_eq!(mean.mean().to_bits(), 2.5_f64.to_bits());
    }
}
