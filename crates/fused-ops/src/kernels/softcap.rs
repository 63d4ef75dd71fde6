//! The soft cap c·tanh(x / c), which bounds the scores of attention and the logits of a head.

use super::float::Float;

/// Returns `cap`·tanh(`x` / `cap`).
#[inline(always)]
pub(super) fn capped<T: Float>(x: T, cap: T) -> T {
    cap * (x / cap).tanh()
}

/// Returns the slope of the cap where its value is `capped`.
#[inline(always)]
pub(super) fn slope_of_cap<T: Float>(capped: T, cap: T) -> T {
    let share = capped / cap;
    (T::ONE - share) * (T::ONE + share)
}
