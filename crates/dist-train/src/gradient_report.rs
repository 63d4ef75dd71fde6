//! Results of a gradient check.

use std::fmt;

/// The result for the parameters that share a name prefix; made by
/// [`DistributedModel::check_gradients`](crate::DistributedModel::check_gradients).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrefixCheck {
    /// The first components of the names: a block, or a layer outside all blocks.
    pub prefix: String,
    /// Number of parameters with this prefix.
    pub parameters: usize,
    /// Slope of the loss along the direction that contradicts the gradient most, measured by
    /// differences of the loss.
    pub expected: f64,
    /// Slope of the loss along the same direction according to the gradient.
    pub found: f64,
    /// Uncertainty of `expected`: two standard errors, from the scatter of the differences at
    /// several points, plus the rounding of the loss.
    pub uncertainty: f64,
    /// Outcome of the comparison.
    pub verdict: Verdict,
}

/// Outcome of comparing a gradient with differences of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The gradient matches within the tolerance.
    Right,
    /// The gradient does not match.
    Wrong,
    /// Undecided: rounding hides the result or the loss is not smooth enough, as with half
    /// precision or if the loss hardly depends on the parameters.
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

/// The results of a gradient check; displayed as a table with one line per prefix.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GradientReport {
    /// The loss of the batch.
    pub loss: f64,
    /// The results per prefix, in the order of names.
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
