//! Reading the file of a slot: its header at first, later the items that are asked for.

use std::{collections::BTreeMap, fs::File, io::Read, ops::Range, path::Path, sync::Arc};

use candle_core::Tensor;
use fsdp_plan::support::{SafetensorsHeader, StoredTensor};

use crate::{
    disk::{At, check_file},
    error::{Error, Result, file_part::FilePart},
    run::{
        key::{Owner, TensorKey},
        shard::Origin,
    },
    safetensors::{
        checksum::{BLOCK, Checksum, Summing, of_digits},
        finite::Values,
        scan::{PIECE, Scan, Scanned},
        stored::{self, StoredItems},
    },
};

/// What the index says of a file.
#[derive(Clone, Debug)]
pub(in crate::run) struct Expected {
    /// Its length.
    pub(in crate::run) bytes: u64,
    /// The run, step and slot that it belongs to.
    pub(in crate::run) origin: Origin,
    /// The checksum of its header.
    pub(in crate::run) header: Checksum,
}

/// What a file holds, if it is the one that is expected.
///
/// # Errors
///
/// [`Error::Length`], [`Error::Extent`], [`Error::Io`] and those of
/// [`parse`].
pub(in crate::run) fn open(path: &Path, expected: &Expected) -> Result<Vec<(Owner, Piece)>> {
    let found = check_file(path).at(path)?.len();
    if found != expected.bytes {
        let expected = expected.bytes;
        return Err(Error::Length { path: path.to_owned(), found, expected });
    }
    let (header, pieces) = parse(path, File::open(path).at(path)?, expected)?;
    stored::check_extent(path, &header, found)?;
    Ok(pieces)
}

/// What the header of the file at `path`, which is read from `file`, says that it holds.
///
/// # Errors
///
/// [`Error::Header`], [`Error::FileMismatch`], [`Error::Checksum`],
/// [`Error::NoChecksum`], [`Error::Key`] and
/// [`ParameterError::UnknownDtype`](crate::ParameterError::UnknownDtype).
pub(in crate::run) fn parse(
    path: &Path,
    file: impl Read,
    expected: &Expected,
) -> Result<(SafetensorsHeader, Vec<(Owner, Piece)>)> {
    let mut file = Summing::new(file);
    let header = stored::parse(path, &mut file)?;
    let texts = header.metadata().map_err(|cause| Error::header(path, cause))?;
    check_origin(path, texts, &expected.origin)?;
    check(path, expected.header, file.checksum(), || FilePart::Header)?;
    let file: Arc<Path> = path.into();
    let pieces: Result<_> =
        header.tensors().iter().map(|tensor| Piece::new(&file, tensor, texts)).collect();
    let pieces = pieces?;
    Ok((header, pieces))
}

/// Refuses a whole file of another step, run or slot.
fn check_origin(path: &Path, texts: &BTreeMap<String, String>, expected: &Origin) -> Result<()> {
    match Origin::of_texts(texts) {
        Some(found) if found != *expected => Err(Error::FileMismatch {
            path: path.to_owned(),
            found: found.to_string(),
            expected: expected.to_string(),
        }),
        // A header that does not say it has another checksum, too.
        _ => Ok(()),
    }
}

fn check(
    path: &Path,
    expected: Checksum,
    found: Checksum,
    part: impl FnOnce() -> FilePart,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Checksum {
        path: path.to_owned(),
        part: part(),
        expected: expected.get(),
        found: found.get(),
    })
}

/// Some items of a parameter, in a file.
#[derive(Debug)]
pub(in crate::run) struct Piece {
    /// What the tensor is called in the file.
    name: String,
    /// The first item, in the parameter.
    start: usize,
    len: usize,
    stored: StoredItems,
    /// The checksums of its blocks.
    checksums: Vec<Checksum>,
}

impl Piece {
    /// A tensor in `file`, of which `texts` have the checksums, and what it is a part of.
    fn new(
        file: &Arc<Path>,
        tensor: &StoredTensor,
        texts: &BTreeMap<String, String>,
    ) -> Result<(Owner, Self)> {
        let name = tensor.info.name().to_owned();
        let Some((key, len)) = run(tensor) else {
            return Err(Error::Key { path: file.to_path_buf(), key: name });
        };
        let stored = StoredItems::new(file, tensor)?;
        let n_bytes = len * stored.item_bytes();
        let checksums = texts.get(&name).and_then(|digits| of_digits(digits, n_bytes));
        let checksums = checksums.ok_or_else(|| no_checksum(file, &name))?;
        Ok((key.owner(), Self { name, start: key.start, len, stored, checksums }))
    }

    /// The items of the parameter that it holds.
    pub(in crate::run) fn items(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Reads items of the parameter, all of which lie in this piece: one dimension, on the
    /// processor. The blocks in which they lie are checked.
    ///
    /// # Errors
    ///
    /// [`Error::Checksum`], [`Error::NotFinite`], [`Error::Io`].
    pub(in crate::run) fn read(&self, items: Range<usize>, values: Values) -> Result<Tensor> {
        let size = self.stored.item_bytes();
        let wanted = (items.start - self.start) * size..(items.end - self.start) * size;
        let blocks = wanted.start / BLOCK..wanted.end.div_ceil(BLOCK);
        let begin = blocks.start * BLOCK;
        let mut bytes = vec![0; (self.len * size).min(blocks.end * BLOCK) - begin];
        let mut file = self.stored.bytes_from(begin)?;
        for (block, bytes) in blocks.zip(bytes.chunks_mut(BLOCK)) {
            self.read_block(&mut file, block, bytes, values)?;
        }
        self.stored.tensor(&bytes[wanted.start - begin..wanted.end - begin])
    }

    /// Reads all of it, and keeps nothing.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub(in crate::run) fn verify(&self, values: Values) -> Result<()> {
        let n_bytes = self.len * self.stored.item_bytes();
        let mut bytes = vec![0; n_bytes.min(BLOCK)];
        let mut file = self.stored.bytes_from(0)?;
        for block in 0..n_bytes.div_ceil(BLOCK) {
            let len = (n_bytes - block * BLOCK).min(BLOCK);
            self.read_block(&mut file, block, &mut bytes[..len], values)?;
        }
        Ok(())
    }

    /// Reads a block, and checks it.
    fn read_block(
        &self,
        file: &mut File,
        block: usize,
        bytes: &mut [u8],
        values: Values,
    ) -> Result<()> {
        let path = self.stored.path();
        let mut scan = Scan::new(self.stored.dtype(), values);
        for piece in bytes.chunks_mut(PIECE) {
            file.read_exact(piece).at(path)?;
            scan.add(piece);
        }
        let Scanned { checksum, refused } = scan.finish();
        check(path, self.checksums[block], checksum, || FilePart::Tensor(self.name.clone()))?;
        match refused {
            None => Ok(()),
            Some(item) => Err(Error::NotFinite {
                path: path.to_owned(),
                tensor: self.name.clone(),
                item: block * BLOCK / self.stored.item_bytes() + item,
            }),
        }
    }
}

/// Where a tensor begins, and how many items it has, if it has an end.
fn run(stored: &StoredTensor) -> Option<(TensorKey<'_>, usize)> {
    let key = TensorKey::parse(stored.info.name())?;
    let len = usize::try_from(stored.info.numel()).ok()?;
    usize::try_from(stored.info.bytes()).ok()?;
    key.start.checked_add(len)?;
    Some((key, len))
}

fn no_checksum(path: &Path, tensor: &str) -> Error {
    Error::NoChecksum { path: path.to_owned(), part: FilePart::Tensor(tensor.to_owned()) }
}
