//! Errors of gradient checks.

use dist_checkpoint::support::Listed;

use crate::gradient_report::PrefixCheck;

/// A failed gradient check.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// The gradients of some parameters do not match the loss.
    #[error(
        "the gradients of {} of {prefixes} parts of the model are wrong: {}. An operation between \
         them and the loss has a wrong backward pass, or none and a residual around it. \
         candle-nn's LayerNorm, RmsNorm, softmax_last_dim and rope have no backward pass: use \
         fused_ops::layers and fused_ops, which candle_distributed exports as `ops`",
        wrong.len(), Listed(&wrong.iter().map(slopes).collect::<Vec<_>>())
    )]
    Wrong {
        /// Results for the prefixes with wrong gradients.
        wrong: Vec<PrefixCheck>,
        /// Number of prefixes that were checked.
        prefixes: usize,
    },
    /// The loss of the same batch and variables varies.
    #[error(
        "the loss of one batch is {first} and then {second}: it is not repeatable. candle's Dropout \
         draws new numbers each time: draw them from the replica's rng"
    )]
    NotRepeatable {
        /// The loss of the first evaluation.
        first: f64,
        /// The loss of the second evaluation.
        second: f64,
    },
}

/// Returns the slope of a prefix and the expected slope.
fn slopes(check: &PrefixCheck) -> String {
    let PrefixCheck { prefix, found, expected, .. } = check;
    format!("{prefix} ({found:.3e} instead of {expected:.3e})")
}
