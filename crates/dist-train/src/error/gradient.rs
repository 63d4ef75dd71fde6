//! What a check of gradients refuses.

use std::fmt;

use dist_checkpoint::support::listed::Listed;

use crate::gradient_report::PrefixCheck;

/// Why gradients are not those of the loss, or cannot be compared with it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// Gradients of some parameters are not those of the loss.
    #[error(
        "the gradients of {} of {prefixes} parts of the model are wrong: {}. An operation between \
         them and the loss has a wrong backward or, beside a residual, none. candle-nn's LayerNorm, \
         RmsNorm, softmax_last_dim and rope have none: use those of fused_ops::layers and fused_ops, \
         which candle_distributed has as `ops`",
        wrong.len(), Listed(&wrong.iter().map(Off).collect::<Vec<_>>())
    )]
    Wrong {
        /// The prefixes of their names, with what was found.
        wrong: Vec<PrefixCheck>,
        /// How many prefixes there are.
        prefixes: usize,
    },
    /// The same batch and the same variables have another loss each time.
    #[error(
        "the loss of one batch is {first} and then {second}: it is not repeatable. candle's Dropout \
         draws other numbers each time: draw them from the replica's rng"
    )]
    NotRepeatable {
        /// The loss.
        first: f64,
        /// The loss of the same batch and variables once more.
        second: f64,
    },
}

/// What was found of a prefix beside what it should be.
struct Off<'a>(&'a PrefixCheck);

impl fmt::Display for Off<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrefixCheck { prefix, found, expected, .. } = self.0;
        write!(f, "{prefix} ({found:.3e} instead of {expected:.3e})")
    }
}
