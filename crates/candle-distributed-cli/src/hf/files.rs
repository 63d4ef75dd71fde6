//! The files of a folder.

use std::{fmt::Display, path::Path};

use crate::error::Error;

/// The sizes and properties of a model.
pub(crate) const CONFIG: &str = "config.json";

/// What is wrong with a file of a folder.
pub(crate) fn refused(file: &Path, fault: impl Display) -> Error {
    Error::usage(format!("{}: {fault}", file.display()))
}
