//! Checkpoints that could not be used.

use std::{fmt, path::PathBuf};

use core_types::human::Printable;

use crate::error::Error;

/// A checkpoint that could not be used and was skipped.
#[derive(Debug)]
#[non_exhaustive]
pub struct SkippedCheckpoint {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The error of the checkpoint.
    pub error: Error,
}

impl fmt::Display for SkippedCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = Printable(self.path.display()).to_string();
        let reason = self.error.to_string();
        // Most errors begin with the path of a file in the checkpoint.
        if !reason.starts_with(&path) {
            write!(f, "{path}: ")?;
        }
        f.write_str(&reason)
    }
}

/// Displays the errors of several checkpoints, separated by semicolons.
pub(super) struct Reasons<'a>(pub(super) &'a [SkippedCheckpoint]);

impl fmt::Display for Reasons<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, skipped) in self.0.iter().enumerate() {
            write!(f, "{}{skipped}", if n == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
