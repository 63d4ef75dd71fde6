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

/// Returns the reasons of all skipped checkpoints.
pub(super) fn reasons(skipped: &[SkippedCheckpoint]) -> String {
    let reasons: Vec<String> = skipped.iter().map(SkippedCheckpoint::to_string).collect();
    reasons.join("; ")
}
