//! Where lists of parameters come from: safetensors headers, indices of several files, manifests.
//!
//! Everything here takes bytes, text or a reader that the caller has, and opens nothing itself.
//! Tensors are never looked at. Input may be hostile: memory stays within a small multiple of the
//! input, and whatever is wrong is an [`Error`].

mod entries;
mod index;
mod manifest;
pub(crate) mod safetensors;

pub use self::{index::from_index, manifest::from_manifest, safetensors::from_safetensors};
use crate::error::{Error, Result, SourceError};

/// Parses `json`, which should be a `what`.
fn parse<'a, T: serde::Deserialize<'a>>(what: &'static str, json: &'a [u8]) -> Result<T> {
    // Looking at the encoding of all the text at once is much faster than string by string.
    let malformed = |reason: String| Error::Source(SourceError::Malformed { what, reason });
    let text = std::str::from_utf8(json).map_err(|error| malformed(error.to_string()))?;
    serde_json::from_str(text).map_err(|error| malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: &str = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},
        "a":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}"#;

    fn file(header: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header].concat()
    }

    fn read_everything(bytes: &[u8]) -> bool {
        let text = String::from_utf8_lossy(bytes);
        let no_file = |_: &str| Ok::<_, Error>(Vec::new());
        from_safetensors(bytes).is_ok()
            | from_manifest(&text).is_ok()
            | from_index(&text, no_file).is_ok()
    }

    proptest! {
        #[test]
        fn any_bytes_are_parameters_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            read_everything(&bytes);
            read_everything(&file(&bytes));
        }

        #[test]
        fn a_damaged_header_is_parameters_or_an_error(
            damage in proptest::collection::vec((0..HEADER.len(), any::<u8>()), 1..4),
            end in 0..=HEADER.len(),
        ) {
            let mut header = HEADER.as_bytes().to_vec();
            for (position, byte) in damage {
                header[position] = byte;
            }
            read_everything(&header);
            read_everything(&file(&header)[..end]);
            read_everything(&file(&header[..end]));
        }
    }
}
