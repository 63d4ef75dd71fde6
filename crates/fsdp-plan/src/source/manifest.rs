//! Manifests: a list of tensors with nothing but dtype and shape.

use serde::Deserialize;

use super::{
    entries::{Entries, elem_type, unique},
    parse,
};
use crate::{ParameterInfo, Result};

/// Reads a manifest `{name: {"dtype": …, "shape": […]}}`, in the order of its text.
///
/// Dtypes are named as in safetensors headers. Other fields of an entry, and an entry `__metadata__`, are ignored.
///
/// # Errors
///
/// [`Error::Malformed`](crate::Error::Malformed), [`Error::UnknownDtype`](crate::Error::UnknownDtype),
/// [`Error::DuplicateName`](crate::Error::DuplicateName) or
/// [`Error::ParameterTooLarge`](crate::Error::ParameterTooLarge).
///
/// # Examples
///
/// ```
/// let parameters = fsdp_plan::source::from_manifest(r#"{"wte.weight": {"dtype": "F32", "shape": [50257, 768]}}"#)?;
/// assert_eq!(parameters[0].bytes(), 154_389_504);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub fn from_manifest(json: &str) -> Result<Vec<ParameterInfo>> {
    let Entries(entries) = parse::<Entries<Entry>>("manifest", json.as_bytes())?;
    unique(entries.iter().map(|(name, _)| name.as_str()))?;
    entries.into_iter().map(|(name, entry)| entry.into_parameter(name)).collect()
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
}

impl Entry {
    fn into_parameter(self, name: String) -> Result<ParameterInfo> {
        let dtype = elem_type(&name, &self.dtype)?;
        ParameterInfo::new(name, self.shape, dtype)
    }
}
