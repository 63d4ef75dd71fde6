//! The choice of the next token.

use candle_core::{Result, Tensor};
use core_types::Seed;

use crate::generate::options::Generation;

/// Chooses the next token of a text.
#[derive(Clone, Debug)]
pub(super) struct Chooser {
    temperature: Option<f64>,
    seed: Seed,
    n_chosen: u64,
}

impl Chooser {
    /// Starts a sequence of choices.
    pub(super) fn new(options: &Generation) -> Self {
        Self { temperature: options.temperature, seed: options.seed, n_chosen: 0 }
    }

    /// Chooses the next token by `logits` [vocabulary]. A logit of −∞ excludes its token.
    ///
    /// # Errors
    ///
    /// If a logit is NaN or +∞, or if all are −∞.
    pub(super) fn choose(&mut self, logits: &Tensor) -> Result<u32> {
        let logits: Vec<f32> = logits.to_vec1()?;
        for (token, &logit) in logits.iter().enumerate() {
            if logit.is_nan() || logit == f32::INFINITY {
                candle_core::bail!("the logit of token {token} is {logit}");
            }
        }
        let position = match self.temperature {
            None => find_likeliest(&logits),
            Some(temperature) => draw(&logits, temperature, self.next_fraction()),
        };
        let Some(position) = position else { candle_core::bail!("no logit is a finite number") };
        u32::try_from(position).map_err(candle_core::Error::wrap)
    }

    /// Returns a number in [0, 1) that depends only on the seed and the number of earlier choices.
    fn next_fraction(&mut self) -> f64 {
        let random = self.seed.derive(self.n_chosen).as_u64();
        self.n_chosen += 1;
        // The upper 53 bits are exact in an f64.
        (random >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Returns the first position of the greatest logit, or `None` if no logit is finite.
fn find_likeliest(logits: &[f32]) -> Option<usize> {
    let finite = logits.iter().enumerate().filter(|(_, logit)| logit.is_finite());
    let first_greatest = finite.reduce(|best, other| if other.1 > best.1 { other } else { best });
    first_greatest.map(|(position, _)| position)
}

/// Returns the first position where the cumulative probability exceeds `fraction`, or `None` if no logit
/// is finite.
fn draw(logits: &[f32], temperature: f64, fraction: f64) -> Option<usize> {
    let greatest = f64::from(logits[find_likeliest(logits)?]);
    let weight = |&logit: &f32| ((f64::from(logit) - greatest) / temperature).exp();
    let weights: Vec<f64> = logits.iter().map(weight).collect();
    let mut remaining = fraction * weights.iter().sum::<f64>();
    let position = weights.iter().position(|weight| {
        remaining -= weight;
        remaining < 0.
    });
    // Because of rounding, there may be no such position. The last possible token is chosen then.
    position.or_else(|| weights.iter().rposition(|&weight| weight > 0.))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn choices(logits: &[f32], temperature: Option<f64>, seed: u64, n: usize) -> Vec<u32> {
        let logits = Tensor::new(logits, &Device::Cpu).unwrap();
        let mut chooser = Chooser { temperature, seed: Seed::new(seed), n_chosen: 0 };
        (0..n).map(|_| chooser.choose(&logits).unwrap()).collect()
    }

    #[test]
    fn ties_pick_the_first_token() {
        assert_eq!(choices(&[0., 2., f32::NEG_INFINITY, 2., -1.], None, 0, 2), [1, 1]);
        assert_eq!(choices(&[f32::NEG_INFINITY, -5.], None, 0, 1), [1]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.5_f32.ln(), 0.25_f32.ln(), f32::NEG_INFINITY, 0.25_f32.ln()];
        let drawn = choices(&logits, Some(1.), 7, 4000);
        let n_of = |id: u32| drawn.iter().filter(|&&found| found == id).count();
        assert_eq!(n_of(2), 0);
        for (id, expected) in [(0, 2000), (1, 1000), (3, 1000)] {
            assert!(n_of(id).abs_diff(expected) < 100, "{id}: {}", n_of(id));
        }
        // At half the temperature the probabilities are squared: 4 : 1 : 1.
        let cold = choices(&logits, Some(0.5), 7, 4000);
        let n_first = cold.iter().filter(|&&found| found == 0).count();
        assert!(n_first.abs_diff(2667) < 100, "{n_first}");
    }

    #[test]
    fn draws_depend_on_the_seed() {
        let logits = [0.; 16];
        assert_eq!(choices(&logits, Some(1.), 1, 20), choices(&logits, Some(1.), 1, 20));
        assert_ne!(choices(&logits, Some(1.), 1, 20), choices(&logits, Some(1.), 2, 20));
        assert_eq!(choices(&logits, Some(1.), 1, 6), [13, 12, 6, 3, 0, 7], "pinned");
    }

    #[test]
    fn extreme_fractions_draw_valid_tokens() {
        assert_eq!(draw(&[0., 0.], 1., 0.), Some(0));
        assert_eq!(draw(&[0., 0.], 1., 1.), Some(1));
        assert_eq!(draw(&[0., f32::NEG_INFINITY], 1., 1.), Some(0));
        assert_eq!(draw(&[f32::NEG_INFINITY], 1., 0.5), None);
    }

    #[test]
    fn invalid_logits_are_rejected() {
        for temperature in [None, Some(1.)] {
            let mut chooser = Chooser { temperature, seed: Seed::new(0), n_chosen: 0 };
            for (logits, words) in [
                ([1., f32::NAN, 0.], "the logit of token 1 is NaN"),
                ([1., 0., f32::INFINITY], "the logit of token 2 is inf"),
                ([f32::NEG_INFINITY; 3], "no logit is a finite number"),
            ] {
                let logits = Tensor::new(&logits, &Device::Cpu).unwrap();
                let fault = chooser.choose(&logits).unwrap_err().to_string();
                assert!(fault.contains(words), "{fault}");
            }
        }
    }
}
