//! The file of a slot: its name, its origin, and the form of its header.
//!
//! The metadata in the safetensors header name the run, step and slot of the file, and contain the
//! checksums of its tensors under their names. The index contains the checksum of the header.

pub(super) mod read;

use std::{collections::BTreeMap, fmt, path::Path};

use candle_core::Tensor;

use crate::{
    disk::{create_file, sync_file},
    error::Result,
    safetensors::{
        finite::AllowedValues,
        tensor_file::{TensorFile, TensorInfo, WrittenFile},
    },
};

/// The run, step and slot of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileOrigin {
    /// The name of the run, if it has one.
    pub(super) run: Option<String>,
    pub(super) step: u64,
    /// The name of the file in its folder.
    pub(super) file: String,
}

const RUN: &str = "run";
const STEP: &str = "step";
const FILE: &str = "file";

impl FileOrigin {
    /// Returns the metadata for a header.
    fn to_texts(&self) -> BTreeMap<String, String> {
        let run = self.run.iter().map(|run| (RUN, run.clone()));
        let others = [(STEP, self.step.to_string()), (FILE, self.file.clone())];
        run.chain(others).map(|(key, text)| (key.to_owned(), text)).collect()
    }

    /// Parses the metadata of a header.
    fn from_texts(texts: &BTreeMap<String, String>) -> Option<Self> {
        let run = texts.get(RUN).cloned();
        Some(Self { run, step: texts.get(STEP)?.parse().ok()?, file: texts.get(FILE)?.clone() })
    }
}

impl fmt::Display for FileOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of step {}", self.file, self.step)?;
        match &self.run {
            Some(run) => write!(f, " of run {run}"),
            None => write!(f, " of a run without a name"),
        }
    }
}

/// Returns the name of a slot's file.
pub(super) fn name(slot: usize, n_slots: usize) -> String {
    format!("shard-{:05}-of-{n_slots:05}.safetensors", slot + 1)
}

/// Returns true if this is the name of a slot's file without a folder: an index must not refer to
/// files elsewhere.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with("shard-") && name.ends_with(".safetensors") && !name.contains(['/', '\\'])
}

/// Writes tensors to a new file, and syncs it to disk.
///
/// # Errors
///
/// [`Error::NotFinite`](crate::Error::NotFinite), [`Error::Header`](crate::Error::Header) if a file
/// with this many tensors could not be read, [`Error::Io`](crate::Error::Io).
pub(super) fn write(
    path: &Path,
    origin: &FileOrigin,
    tensors: &BTreeMap<String, Tensor>,
    values: AllowedValues,
) -> Result<WrittenFile> {
    let mut infos: Vec<_> =
        tensors.iter().map(|(name, tensor)| TensorInfo::new(name, tensor)).collect();
    TensorInfo::sort(&mut infos);
    let out = create_file(path)?;
    let file = TensorFile::create(out, path, &infos, origin.to_texts())?;
    let mut file = file.with_values(values);
    for info in &infos {
        file.write(&tensors[&info.name])?;
    }
    let (out, written) = file.finish_described()?;
    sync_file(&out, path)?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use candle_core::{DType, Device, Tensor};
    use safetensors::SafeTensors;

    use super::{
        read::{ExpectedFile, open},
        *,
    };
    use crate::{error::Error, safetensors::checksum::BLOCK};

    #[test]
    fn origin_round_trips() {
        for run in [None, Some("c0ffee".to_owned())] {
            let origin = FileOrigin { run, step: u64::MAX, file: name(1, 4) };
            assert_eq!(FileOrigin::from_texts(&origin.to_texts()).as_ref(), Some(&origin));
        }
        assert_eq!(FileOrigin::from_texts(&BTreeMap::new()), None);
    }

    fn origin() -> FileOrigin {
        FileOrigin { run: Some("c0ffee".to_owned()), step: 3, file: name(0, 2) }
    }

    fn write_all(path: &Path, tensors: &BTreeMap<String, Tensor>) -> WrittenFile {
        write(path, &origin(), tensors, AllowedValues::Finite).unwrap()
    }

    /// Returns tensors of several widths, including a view and a tensor of several blocks.
    fn tensors() -> BTreeMap<String, Tensor> {
        let floats = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let named = [
            ("model/b@0", floats.t().unwrap()),
            ("model/a@3", floats.to_dtype(DType::BF16).unwrap()),
            (
                "model/large@0",
                Tensor::arange(0_f64, (2 * BLOCK / 8 + 1) as f64, &Device::Cpu).unwrap(),
            ),
            ("model/none@0", Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap()),
            ("step/b@0", Tensor::new(7_i64, &Device::Cpu).unwrap()),
            ("mask/a@0", Tensor::new(&[1_u8, 0, 1], &Device::Cpu).unwrap()),
        ];
        named.map(|(name, tensor)| (name.to_owned(), tensor)).into()
    }

    #[test]
    fn layout_matches_the_safetensors_crate() {
        let folder = tempfile::tempdir().unwrap();
        for (n, tensors) in [tensors(), BTreeMap::new()].into_iter().enumerate() {
            let path = folder.path().join(n.to_string());
            let written = write_all(&path, &tensors);
            let bytes = fs::read(&path).unwrap();
            assert_eq!(written.bytes, bytes.len() as u64);
            let ours = SafeTensors::deserialize(&bytes).unwrap();
            let contiguous = tensors.iter().map(|(name, x)| (name, x.contiguous().unwrap()));
            let expected = safetensors::serialize(contiguous, None).unwrap();
            let expected = SafeTensors::deserialize(&expected).unwrap();
            assert_eq!(ours.len(), tensors.len());
            for name in tensors.keys() {
                assert_eq!(ours.tensor(name).unwrap(), expected.tensor(name).unwrap(), "{name}");
            }
        }
    }

    #[test]
    fn every_dtype_is_written_like_candle() {
        use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
        let folder = tempfile::tempdir().unwrap();
        let numbers = Tensor::arange(0_f32, 60., &Device::Cpu).unwrap().reshape((5, 12)).unwrap();
        for dtype in [U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3] {
            let all = numbers.to_dtype(dtype).unwrap();
            let views = [
                all.clone(),
                // One that begins in the middle of its storage, and one that has gaps.
                all.narrow(0, 2, 2).unwrap(),
                all.narrow(1, 3, 4).unwrap(),
                all.t().unwrap(),
            ];
            for (n, view) in views.into_iter().enumerate() {
                let path = folder.path().join(format!("{dtype:?}-{n}"));
                let mut expected = Vec::new();
                view.contiguous().unwrap().write_bytes(&mut expected).unwrap();
                write_all(&path, &[("model/a@0".to_owned(), view)].into());
                assert!(fs::read(&path).unwrap().ends_with(&expected), "{dtype:?}, view {n}");
            }
        }
    }

    #[test]
    fn pieces_are_read_by_range() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let WrittenFile { bytes, header } = write_all(&path, &tensors());
        let pieces = open(&path, &ExpectedFile { bytes, origin: origin(), header }).unwrap();
        let piece = |kind: &str, parameter: &str| {
            let owner = (parameter.to_owned(), kind.to_owned());
            pieces.iter().find_map(|(found, piece)| (*found == owner).then_some(piece)).unwrap()
        };
        assert_eq!(piece("model", "a").items(), 3..9);
        let some = piece("model", "a").read(4..7, AllowedValues::Finite).unwrap();
        assert_eq!(some.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(), [1., 2., 3.]);
        let n_items = BLOCK / 8;
        for start in [0, 1, n_items - 1, n_items, 2 * n_items - 1, 2 * n_items] {
            for len in [0, 1, 2, n_items, n_items + 1] {
                let range = start..(start + len).min(2 * n_items + 1);
                let items =
                    piece("model", "large").read(range.clone(), AllowedValues::Finite).unwrap();
                let expected: Vec<_> = range.map(|item| item as f64).collect();
                assert_eq!(items.to_vec1::<f64>().unwrap(), expected);
            }
        }
        for (_, piece) in &pieces {
            piece.verify(AllowedValues::Finite).unwrap();
        }
    }

    #[test]
    fn first_non_finite_item_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let n_items = 2 * BLOCK / 8 + 1;
        for item in [0, 7, BLOCK / 8 - 1, BLOCK / 8, BLOCK / 8 + 20_000, n_items - 1] {
            let numbers = (0..n_items).map(|n| if n < item { 1.0 } else { f64::NAN });
            let tensor = Tensor::from_iter(numbers, &Device::Cpu).unwrap();
            let tensors = [("model/a@0".to_owned(), tensor)].into();
            let is_named = |error: Error| matches!(error, Error::NotFinite { item: named, .. } if named == item);
            let rejected =
                write(&folder.path().join("rejected"), &origin(), &tensors, AllowedValues::Finite);
            assert!(is_named(rejected.unwrap_err()), "{item}");
            let path = folder.path().join("allowed");
            let WrittenFile { bytes, header } =
                write(&path, &origin(), &tensors, AllowedValues::Any).unwrap();
            let pieces = open(&path, &ExpectedFile { bytes, origin: origin(), header });
            let (_, piece) = &pieces.unwrap()[0];
            assert!(is_named(piece.verify(AllowedValues::Finite).unwrap_err()), "{item}");
            assert!(is_named(piece.read(0..n_items, AllowedValues::Finite).unwrap_err()), "{item}");
            piece.verify(AllowedValues::Any).unwrap();
            for name in ["rejected", "allowed"] {
                fs::remove_file(folder.path().join(name)).unwrap();
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn files_have_default_permissions() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let mode =
            |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        fs::File::create(folder.path().join("new")).unwrap();
        write_all(&folder.path().join("shard"), &tensors());
        assert_eq!(mode("shard"), mode("new"));
    }
}
