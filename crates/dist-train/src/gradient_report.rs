//! What a check of gradients has found.

use std::fmt;

/// What a check has found of the parameters that begin with the same components: made by
/// [`DistributedModel::check_gradients`](crate::DistributedModel::check_gradients).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrefixCheck {
    /// The first components of their names: those of a block, or of a layer outside of all blocks.
    pub prefix: String,
    /// How many parameters there are.
    pub parameters: usize,
    /// How fast the loss changes along the direction that is the worst for the gradient, as
    /// differences of the loss say.
    pub expected: f64,
    /// How fast it changes there as the gradient says.
    pub found: f64,
    /// How far `expected` may be off: two standard errors, as the differences at several places
    /// scatter, and the rounding of the loss.
    pub uncertainty: f64,
    /// What follows.
    pub verdict: Verdict,
}

/// Whether gradients are those of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// They are, within the tolerance.
    Right,
    /// They are not.
    Wrong,
    /// Rounding hides it, or the loss is too far from smooth: with halves, or where the loss hardly
    /// depends on the parameters.
    Unclear,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Right => "right",
            Self::Wrong => "wrong",
            Self::Unclear => "unclear",
        })
    }
}

/// What a check of gradients has found; displayed as a table with a line for each part.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GradientReport {
    /// The loss of the batch.
    pub loss: f64,
    /// The parts of the model, in the order of their names.
    pub prefixes: Vec<PrefixCheck>,
}

impl fmt::Display for GradientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.prefixes.iter().map(|check| check.prefix.len()).max().unwrap_or(0);
        for check in &self.prefixes {
            let PrefixCheck { prefix, expected, found, uncertainty, verdict, .. } = check;
            writeln!(
                f,
                "{prefix:width$}  found {found:>11.4e}  expected {expected:>11.4e} \
                 ± {uncertainty:<5.0e}  {verdict}"
            )?;
        }
        Ok(())
    }
}
