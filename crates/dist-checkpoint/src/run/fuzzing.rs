//! Readers of untrusted bytes, for fuzz targets and tests only.

use std::path::Path;

use crate::{
    error::Result,
    run::{
        footer,
        index::{INDEX, Index},
        shard::{
            self, FileOrigin,
            read::{self, ExpectedFile},
        },
    },
    safetensors::{checksum::Checksum, stored},
};

/// Reads the text of a checkpoint's index, both unchanged and with a correct checksum.
///
/// # Errors
///
/// The fault of the text.
///
/// # Panics
///
/// If the index changes when it is written and read again.
pub fn index(text: &[u8]) -> Result<()> {
    let path = Path::new(INDEX);
    if text.ends_with(b"\n}") {
        drop(parse_twice(path, &footer::add_footer(text.to_vec())));
    }
    parse_twice(path, text)
}

/// Reads the text of an index, then reads it again as written.
fn parse_twice(path: &Path, text: &[u8]) -> Result<()> {
    let first = Index::parse(path, text)?;
    let written = first.to_text(path)?;
    let second = Index::parse(path, &written)?;
    assert_eq!(written, second.to_text(path)?, "the index changed when it was written again");
    Ok(())
}

/// Reads the header of a slot's file, with an index that matches it.
///
/// # Errors
///
/// The fault of the header.
pub fn shard(bytes: &[u8]) -> Result<()> {
    let path = Path::new("shard");
    let (_, header) = stored::parse(path, bytes)?;
    let origin = FileOrigin { run: None, step: 0, file: shard::name(0, 1) };
    let header = Checksum::compute(&header);
    let expected = ExpectedFile { bytes: bytes.len() as u64, origin, header };
    read::parse(path, bytes, &expected).map(drop)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use candle_core::{Device, Tensor};
    use serde_json::Value;

    use super::*;
    use crate::{run::shard::write, safetensors::finite::AllowedValues};

    #[test]
    fn only_intact_bytes_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let origin = FileOrigin { run: None, step: 0, file: shard::name(0, 1) };
        let tensor = Tensor::new(&[1_f32, 2.0], &Device::Cpu).unwrap();
        let tensors = BTreeMap::from([("model/a@0".to_owned(), tensor)]);
        write(&path, &origin, &tensors, AllowedValues::Finite).unwrap();
        let bytes = fs::read(&path).unwrap();
        shard(&bytes).unwrap();
        assert!(shard(&bytes[..9]).is_err());

        let parameters = [("a".to_owned(), vec![2])].into();
        let index_path = folder.path().join(INDEX);
        Index::new(None, 0, parameters, vec![], None, Value::Null).write(&index_path).unwrap();
        index(&fs::read(&index_path).unwrap()).unwrap();
        assert!(index(b"{\n}").is_err());
    }
}
