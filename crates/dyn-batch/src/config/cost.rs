//! The cost of a padded sequence.

/// The cost of a sequence as a polynomial of its padded length.
///
/// A transformer layer of width d does about 12 d² multiplications per token, and 2 d more per pair
/// of tokens of a sequence (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, table
/// 1). So a sequence of length l costs 12 d² · l + 2 d · l² multiplications, or 6 d · l + l² in
/// units of 2 d: `per_token: 6 * d, per_token_squared: 1`. Costs saturate at `u64::MAX`.
///
/// # Examples
///
/// ```
/// use dyn_batch::Cost;
///
/// let layer = Cost { per_token: 6 * 768, per_token_squared: 1, ..Cost::default() };
/// assert_eq!(layer.per_sequence, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[expect(clippy::exhaustive_structs, reason = "a polynomial of degree two has three coefficients")]
pub struct Cost {
    /// Cost per sequence.
    pub per_sequence: u64,
    /// Cost per token.
    pub per_token: u64,
    /// Cost per pair of tokens, for example in attention.
    pub per_token_squared: u64,
}

impl Cost {
    /// The number of tokens.
    pub const TOKENS: Self = Self { per_sequence: 0, per_token: 1, per_token_squared: 0 };

    /// The number of pairs of tokens.
    pub const ATTENTION: Self = Self { per_sequence: 0, per_token: 0, per_token_squared: 1 };

    /// Returns the cost of a sequence of this length, saturating at `u64::MAX`.
    pub(crate) fn for_length(&self, length: u64) -> u64 {
        let slope = self.per_token_squared.saturating_mul(length).saturating_add(self.per_token);
        slope.saturating_mul(length).saturating_add(self.per_sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_saturate() {
        let layer = Cost { per_token: 6 * 768, per_token_squared: 1, ..Cost::default() };
        assert_eq!(layer.for_length(512), 6 * 768 * 512 + 512 * 512);
        assert_eq!(Cost::ATTENTION.for_length(u64::MAX), u64::MAX);
    }
}
