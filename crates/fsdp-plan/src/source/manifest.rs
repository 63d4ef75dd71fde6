//! Manifests: lists of tensors with dtype and shape.

use super::{
    entries::{JsonEntries, NamedEntry, check_unique_parameters},
    parse,
};
use crate::{
    error::Result,
    param::{ParameterInfo, UncheckedParameter},
};

/// Reads a manifest `{name: {"dtype": …, "shape": […]}}` in the order of its text.
///
/// Dtypes have the names of [`ElemType`](crate::ElemType). An entry may also have the fields
/// `layer`, `unit`, `requires_grad`, `always_gather` and `tied_to`, which work like the setters of
/// [`ParameterInfo`]. Other fields and an entry `__metadata__` are ignored.
///
/// # Errors
///
/// [`SourceError::Malformed`](crate::SourceError::Malformed),
/// [`Error::UnknownDtype`](crate::Error::UnknownDtype) or
/// [`Error::InvalidParameter`](crate::Error::InvalidParameter).
///
/// # Examples
///
/// ```
/// let parameters = fsdp_plan::source::from_manifest(
///     r#"{"wte.weight": {"dtype": "F32", "shape": [50257, 768]}}"#,
/// )?;
/// assert_eq!(parameters[0].bytes(), 154_389_504);
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
pub fn from_manifest(json: &str) -> Result<Vec<ParameterInfo>> {
    let infos =
        parse::<JsonEntries<UncheckedParameter<'_>>>("manifest", json.as_bytes())?.entries?;
    check_unique_parameters(infos.len(), |position| &infos[position])?;
    Ok(infos)
}

impl NamedEntry for UncheckedParameter<'_> {
    type Named = ParameterInfo;

    fn into_named(self, name: String) -> Result<ParameterInfo> {
        self.with_name(name).try_into()
    }
}
