//! Damaged lines of the files of a run.

use std::path::Path;

use core_types::files;

use crate::error::{Error, Result};

/// Warns about damaged lines, which are skipped.
pub(super) fn warn_damaged(path: &Path, lines: &[u64]) {
    if !lines.is_empty() {
        tracing::warn!("{} {}", path.display(), damage(lines));
    }
}

/// Backs up a file if some of its lines are damaged, with a warning.
pub(super) fn back_up_damaged(path: &Path, lines: &[u64]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let copy = files::back_up(path, "damaged").map_err(|cause| Error::write(path, cause))?;
    tracing::warn!(
        "{} {}; the whole file is backed up as {}",
        path.display(),
        damage(lines),
        copy.display()
    );
    Ok(())
}

/// Returns the part of a message that names damaged lines.
fn damage(lines: &[u64]) -> String {
    let noun = if lines.len() == 1 { "line" } else { "lines" };
    let lines: Vec<String> = lines.iter().map(u64::to_string).collect();
    format!("has damage in {noun} {}", lines.join(", "))
}
