//! Options of generation.

use core_types::Seed;

use crate::error::generate::GenerateError;

/// Options of [`Generator::generate`](crate::Generator::generate).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Generation {
    /// Maximum number of new tokens: 64 by default.
    pub max_tokens: usize,
    /// Divisor of the logits when tokens are drawn at random. `None`, the default, always takes the
    /// likeliest token.
    pub temperature: Option<f64>,
    /// Seed of random tokens: 0 by default.
    pub seed: Seed,
    /// Whether to continue after an end token: `false` by default.
    pub ignore_end: bool,
}

impl Default for Generation {
    fn default() -> Self {
        Self { max_tokens: 64, temperature: None, seed: Seed::new(0), ignore_end: false }
    }
}

impl Generation {
    /// Sets the maximum number of new tokens.
    #[must_use]
    pub fn with_max_tokens(self, max_tokens: usize) -> Self {
        Self { max_tokens, ..self }
    }

    /// Draws tokens at random: a temperature of 1 keeps the probabilities of the model, and a lower
    /// temperature favors likely tokens.
    #[must_use]
    pub fn with_temperature(self, temperature: f64) -> Self {
        Self { temperature: Some(temperature), ..self }
    }

    /// Sets the seed of random tokens.
    #[must_use]
    pub fn with_seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Checks the options, for example before a model is loaded.
    ///
    /// # Errors
    ///
    /// [`GenerateError::Temperature`] if the temperature is not a positive number.
    pub fn check(&self) -> Result<(), GenerateError> {
        match self.temperature {
            Some(temperature) if !(temperature > 0. && temperature.is_finite()) => {
                Err(GenerateError::Temperature { temperature })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperatures_are_positive() {
        for temperature in [0., -1., f64::NAN, f64::INFINITY] {
            let fault = Generation::default().with_temperature(temperature).check().unwrap_err();
            let words =
                format!("the temperature is {temperature}, must be a finite number above 0");
            assert_eq!(fault.to_string(), words);
        }
        Generation::default().with_temperature(0.5).check().unwrap();
    }
}
