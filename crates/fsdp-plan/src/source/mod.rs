//! Readers of parameter lists: safetensors headers, indices of several files, and manifests.
//!
//! Functions take bytes, text or a reader, and open no file. They never read tensor data. Input may
//! be hostile: memory stays within a small multiple of the input, and invalid input is an
//! [`Error`].

mod entries;
mod index;
mod manifest;
pub(crate) mod safetensors;

pub use self::{index::from_index, manifest::from_manifest, safetensors::from_safetensors};
use crate::error::{Error, Result, SourceError};

/// Parses `json`; `what` names the document in errors.
fn parse<'a, T: serde::Deserialize<'a>>(what: &'static str, json: &'a [u8]) -> Result<T> {
    // Checking the encoding of the whole text at once is much faster than string by string.
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

    fn run_all_readers(bytes: &[u8]) -> bool {
        let text = String::from_utf8_lossy(bytes);
        from_safetensors(bytes).is_ok()
            | from_manifest(&text).is_ok()
            | from_index(&text, |_| Ok::<_, Error>(Vec::new())).is_ok()
    }

    proptest! {
        #[test]
        fn reading_damaged_headers_never_panics(
            damage in proptest::collection::vec((0..HEADER.len(), any::<u8>()), 1..4),
            end in 0..=HEADER.len(),
        ) {
            let mut header = HEADER.as_bytes().to_vec();
            for (position, byte) in damage {
                header[position] = byte;
            }
            run_all_readers(&header);
            run_all_readers(&file(&header)[..end]);
            run_all_readers(&file(&header[..end]));
        }
    }
}
