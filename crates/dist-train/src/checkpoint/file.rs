//! The files of a checkpoint: what tensors are called in them, and where their bytes lie.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{BufWriter, Write},
    ops::Range,
    path::Path,
    sync::Arc,
};

use candle_core::{Device, Tensor};
use fsdp_plan::source::{SafetensorsHeader, StoredTensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::{
    checkpoint::disk::At,
    error::{Doing, Result, checkpoint::CheckpointError},
    stored::{self, StoredItems},
};

/// What a model's variables are called among the kinds of tensors; an optimizer names its own.
pub(crate) const MODEL: &str = "model";

/// Headers begin and end at multiples of this, so that tensors are aligned.
const ALIGNMENT: usize = 8;

/// What a tensor of a checkpoint is: a run of the items that belong to a parameter, or a scalar
/// that does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorKey<'a> {
    /// [`MODEL`], or what the optimizer calls it.
    pub(crate) kind: &'a str,
    pub(crate) parameter: &'a str,
    /// The first item, in row-major order.
    pub(crate) start: usize,
}

impl<'a> TensorKey<'a> {
    /// A parameter, from its item `start` on.
    pub(crate) fn model(parameter: &'a str, start: usize) -> Self {
        Self { kind: MODEL, parameter, start }
    }

    /// Reads a name, as it is displayed.
    pub(super) fn parse(key: &'a str) -> Option<Self> {
        let (kind, rest) = key.split_once('/')?;
        let (parameter, start) = rest.rsplit_once('@')?;
        Some(Self { kind, parameter, start: start.parse().ok()? })
    }
}

impl fmt::Display for TensorKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.kind, self.parameter, self.start)
    }
}

/// The name of a slot's file.
pub(super) fn shard_name(slot: usize, n_slots: usize) -> String {
    format!("shard-{:05}-of-{n_slots:05}.safetensors", slot + 1)
}

/// Whether this is the name of a slot's file, in the folder of its checkpoint: an index must not
/// lead to files elsewhere.
pub(super) fn is_shard_name(name: &str) -> bool {
    name.starts_with("shard-") && name.ends_with(".safetensors") && !name.contains(['/', '\\'])
}

/// Writes tensors, and waits until they are on disk; returns the length of the file in bytes.
///
/// The file is written from its beginning to its end, a tensor at a time: no more than one is copied
/// at once. (`safetensors::serialize_to_file` writes a file for its owner alone, and replaces what
/// is there; a checkpoint's files have the permissions that the system gives new ones.)
pub(super) fn write(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<u64> {
    let ordered = in_file_order(tensors);
    let header = header(path, &ordered)?;
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).at(path)?);
    file.write_all(&header).at(path)?;
    for (_, tensor) in ordered {
        write_items(&mut file, tensor, path)?;
    }
    file.flush().at(path)?;
    file.get_ref().sync_all().at(path)?;
    Ok(file.get_ref().metadata().at(path)?.len())
}

/// Wide types first and then by name, as the `safetensors` crate orders them: so every tensor is
/// aligned to its type.
fn in_file_order(tensors: &BTreeMap<String, Tensor>) -> Vec<(&String, &Tensor)> {
    let mut ordered: Vec<_> = tensors.iter().collect();
    ordered.sort_by_key(|(_, tensor)| Reverse(Dtype::from(tensor.dtype())));
    ordered
}

/// The beginning of a file with these tensors: the length of its header, and the header.
fn header(path: &Path, ordered: &[(&String, &Tensor)]) -> Result<Vec<u8>> {
    let mut end = 0;
    let mut infos = Vec::with_capacity(ordered.len());
    for (key, tensor) in ordered {
        let begin = end;
        end += tensor.elem_count() * tensor.dtype().size_in_bytes();
        infos.push((
            (*key).clone(),
            TensorInfo {
                dtype: tensor.dtype().into(),
                shape: tensor.dims().to_vec(),
                data_offsets: (begin, end),
            },
        ));
    }
    #[expect(clippy::expect_used, reason = "sizes and offsets are computed from the tensors")]
    let metadata = Metadata::new(None, infos).expect("tensors of a map lie side by side");
    let json = serde_json::to_vec(&metadata)
        .map_err(|cause| CheckpointError::Json { path: path.to_owned(), cause })?;
    let padded_len = json.len().next_multiple_of(ALIGNMENT);
    let mut bytes = (padded_len as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes.resize(size_of::<u64>() + padded_len, b' ');
    // What would be refused when it is read must not be written: a header that is too long.
    SafetensorsHeader::parse(&bytes)
        .map_err(|cause| CheckpointError::Header { path: path.to_owned(), cause })?;
    Ok(bytes)
}

/// Appends the items of a tensor, which may lie on any device and be a view.
fn write_items(file: &mut impl Write, tensor: &Tensor, path: &Path) -> Result<()> {
    let here = tensor.contiguous().and_then(|items| items.to_device(&Device::Cpu));
    match here.and_then(|items| items.write_bytes(file)) {
        Err(candle_core::Error::Io(cause)) => Err(cause).at(path),
        written => written.doing("copying a tensor for a checkpoint"),
    }
}

/// What a tensor belongs to: its kind, and the parameter.
pub(super) type Owner = (String, String);

/// Some items of a parameter, in a file.
#[derive(Debug)]
pub(super) struct Piece {
    /// The first item, in the parameter.
    start: usize,
    len: usize,
    stored: StoredItems,
}

impl Piece {
    /// The items of the parameter that it holds.
    pub(super) fn items(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Reads items of the parameter, all of which lie in this piece: one dimension, on the
    /// processor.
    pub(super) fn read(&self, items: Range<usize>) -> Result<Tensor> {
        self.stored.read(items.start - self.start..items.end - self.start)
    }
}

/// What a file holds, which must be as long as the index says.
pub(super) fn pieces(path: &Path, expected: u64) -> Result<Vec<(Owner, Piece)>> {
    let metadata = fs::metadata(path).at(path)?;
    let found = metadata.len();
    if !metadata.is_file() || found != expected {
        return Err(CheckpointError::Length { path: path.to_owned(), found, expected }.into());
    }
    let file: Arc<Path> = path.into();
    stored::header(path)?.tensors().iter().map(|tensor| piece(&file, tensor)).collect()
}

fn piece(file: &Arc<Path>, tensor: &StoredTensor) -> Result<(Owner, Piece)> {
    let name = tensor.info.name();
    let Some((key, len)) = run(tensor) else {
        return Err(CheckpointError::Key { path: file.to_path_buf(), key: name.to_owned() }.into());
    };
    let piece = Piece { start: key.start, len, stored: StoredItems::new(file, tensor)? };
    Ok(((key.kind.to_owned(), key.parameter.to_owned()), piece))
}

/// Where a tensor begins, and how many items it has, if it has an end.
fn run(stored: &StoredTensor) -> Option<(TensorKey<'_>, usize)> {
    let key = TensorKey::parse(stored.info.name())?;
    let len = usize::try_from(stored.info.numel()).ok()?;
    key.start.checked_add(len)?;
    Some((key, len))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let key = TensorKey { kind: "exp_avg", parameter: "a/b@c.weight", start: 12 };
        assert_eq!(key.to_string(), "exp_avg/a/b@c.weight@12");
        assert_eq!(TensorKey::parse(&key.to_string()), Some(key));
        for other in ["weight", "model/weight", "weight@3", "model/weight@", "model/weight@-1"] {
            assert_eq!(TensorKey::parse(other), None, "{other}");
        }
    }

    /// Tensors of several widths, a view among them.
    fn tensors() -> BTreeMap<String, Tensor> {
        let floats = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let named = [
            ("model/b@0", floats.t().unwrap()),
            ("model/a@3", floats.to_dtype(DType::BF16).unwrap()),
            ("step/b@0", Tensor::new(7_i64, &Device::Cpu).unwrap()),
            ("mask/a@0", Tensor::new(&[1_u8, 0, 1], &Device::Cpu).unwrap()),
        ];
        named.map(|(name, tensor)| (name.to_owned(), tensor)).into()
    }

    #[test]
    fn bytes_are_those_of_the_safetensors_crate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        for tensors in [tensors(), BTreeMap::new()] {
            let len = write(&path, &tensors).unwrap();
            let contiguous = tensors.iter().map(|(name, x)| (name, x.contiguous().unwrap()));
            let expected = safetensors::serialize(contiguous, None).unwrap();
            assert_eq!(fs::read(&path).unwrap(), expected);
            assert_eq!(len, expected.len() as u64);
        }
    }

    #[test]
    fn pieces_are_read_from_their_places() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard");
        let len = write(&path, &tensors()).unwrap();
        let pieces = pieces(&path, len).unwrap();
        let owner = ("model".to_owned(), "a".to_owned());
        let (_, piece) = pieces.iter().find(|(found, _)| *found == owner).unwrap();
        assert_eq!(piece.items(), 3..9);
        let some = piece.read(4..7).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(some.to_vec1::<f32>().unwrap(), [1., 2., 3.]);
    }

    #[cfg(unix)]
    #[test]
    fn files_have_the_permissions_of_new_files() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let mode =
            |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        File::create(folder.path().join("new")).unwrap();
        write(&folder.path().join("shard"), &tensors()).unwrap();
        assert_eq!(mode("shard"), mode("new"));
    }
}
