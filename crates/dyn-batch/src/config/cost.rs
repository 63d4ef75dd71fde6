//! What a padded sequence costs, where the number of its tokens is not the whole truth.

/// The cost of a sequence as a polynomial of its padded length.
///
/// A transformer layer of width d does about 12 d² multiplications for a token, and 2 d more for
/// each pair of tokens of one sequence (Kaplan et al., "Scaling Laws for Neural Language Models",
/// 2020, table 1). So sequences of length l cost as 6 d · l + l²: `per_token: 6 * d,
/// per_token_squared: 1`.
///
/// # Examples
///
/// ```
/// use dyn_batch::Cost;
///
/// assert_eq!(Cost::TOKENS.of(512), 512);
/// assert_eq!(Cost::ATTENTION.of(512), 512 * 512);
/// let layer = Cost { per_token: 6 * 768, per_token_squared: 1, ..Cost::default() };
/// assert_eq!(layer.of(512), 6 * 768 * 512 + 512 * 512);
/// assert_eq!(Cost::ATTENTION.of(u64::MAX), u64::MAX, "too much is the most there is");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
#[expect(clippy::exhaustive_structs, reason = "a polynomial of degree two has three coefficients")]
pub struct Cost {
    /// What each sequence costs, whatever its length.
    pub per_sequence: u64,
    /// What each of its tokens costs.
    pub per_token: u64,
    /// What each pair of its tokens costs, in attention for example.
    pub per_token_squared: u64,
}

impl Cost {
    /// The number of tokens.
    pub const TOKENS: Self = Self { per_sequence: 0, per_token: 1, per_token_squared: 0 };

    /// The number of pairs of tokens.
    pub const ATTENTION: Self = Self { per_sequence: 0, per_token: 0, per_token_squared: 1 };

    /// The cost of a sequence of this length, `u64::MAX` if it is more than that.
    #[must_use]
    pub fn of(&self, length: u64) -> u64 {
        let by_token = self.per_token_squared.saturating_mul(length).saturating_add(self.per_token);
        by_token.saturating_mul(length).saturating_add(self.per_sequence)
    }
}
