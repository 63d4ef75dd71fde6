//! Readers of bytes that may come from anywhere: what fuzz targets call, built for them and for
//! tests alone.

use std::path::Path;

use crate::{
    error::Result,
    run::{
        footer,
        index::{INDEX, Index},
        shard::{
            self, Origin,
            read::{self, Expected},
        },
    },
    safetensors::{checksum::Summing, stored},
};

/// Reads the text of a checkpoint's index: as it is, and with a checksum that is right.
///
/// # Errors
///
/// What is wrong with the text.
///
/// # Panics
///
/// If what was read is not read again as it was written.
pub fn index(text: &[u8]) -> Result<()> {
    let path = Path::new(INDEX);
    if text.ends_with(b"\n}") {
        drop(parse_twice(path, &footer::add(text.to_vec())));
    }
    parse_twice(path, text)
}

/// Reads the text of an index, and what it is written as.
fn parse_twice(path: &Path, text: &[u8]) -> Result<()> {
    let first = Index::parse(path, text)?;
    let written = first.to_text(path)?;
    let second = Index::parse(path, &written)?;
    assert_eq!(written, second.to_text(path)?, "what was read was written otherwise");
    Ok(())
}

/// Reads the header of a slot's file, as an index expects it.
///
/// # Errors
///
/// What is wrong with the header.
pub fn shard(bytes: &[u8]) -> Result<()> {
    let path = Path::new("shard");
    let mut read_bytes = Summing::new(bytes);
    stored::parse(path, &mut read_bytes)?;
    let origin = Origin { run: None, step: 0, file: shard::name(0, 1) };
    let expected = Expected { bytes: bytes.len() as u64, origin, header: read_bytes.checksum() };
    read::parse(path, bytes, &expected).map(drop)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use candle_core::{Device, Tensor};
    use serde_json::Value;

    use super::*;
    use crate::{run::shard::write, safetensors::finite::Values};

    #[test]
    fn whole_bytes_are_read_and_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let origin = Origin { run: None, step: 0, file: shard::name(0, 1) };
        let tensor = Tensor::new(&[1_f32, 2.0], &Device::Cpu).unwrap();
        let tensors = BTreeMap::from([("model/a@0".to_owned(), tensor)]);
        write(&path, &origin, &tensors, Values::Finite).unwrap();
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
