//! Files of tokens.

use std::path::Path;

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, Result},
    read::{file::DataFile, rows::FileRows},
};

/// The type of the tokens in a file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TokenType {
    /// 8 bits, such as bytes.
    U8,
    /// 16 bits, for vocabularies below 65,536.
    U16,
    /// 32 bits.
    U32,
}

impl TokenType {
    fn n_bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// Blocks of tokens of a `.bin` file, as nanoGPT and litGPT write them.
///
/// nanoGPT's files are bare tokens, such as `train.bin`. litGPT's packed files have a header of 24
/// bytes, which is recognized and must match the type. Tokens behind the last complete block are
/// not read.
///
/// # Complexity
///
/// Opening takes the same time for files of any length.
///
/// # Examples
///
/// Blocks of 4 tokens, each with the next token as the last target:
///
/// ```
/// use data_loader::{Dataset, TokenDataset, TokenType};
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// # let path = folder.path().join("train.bin");
/// let bytes: Vec<u8> = (0..10_u16).flat_map(u16::to_le_bytes).collect();
/// std::fs::write(&path, bytes)?;
/// let blocks = TokenDataset::open(&path, TokenType::U16, 5)?.stride(4)?;
/// assert_eq!((blocks.len(), blocks.read(1)?), (2, vec![4, 5, 6, 7, 8]));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[derive(Debug)]
pub struct TokenDataset {
    rows: FileRows,
    token_type: TokenType,
}

const LITGPT_MAGIC: &[u8] = b"LITPKDS";
/// The magic bytes, a version, a code of the type, and a number of tokens.
const LITGPT_HEADER_BYTES: u64 = 24;
const LITGPT_VERSION: [u8; 8] = 1_u64.to_le_bytes();

impl TokenDataset {
    /// Opens a file; each sample is a block of `block` tokens. Blocks do not overlap.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; [`Error::Setting`] for a block of 0 tokens; [`Error::Content`] if the file has
    /// an incomplete token, or a header of another type or version.
    pub fn open(path: impl AsRef<Path>, token_type: TokenType, block: u64) -> Result<Self> {
        let file = DataFile::open(path.as_ref())?;
        if block == 0 {
            return Err(Error::setting("the block length", &block, "at least 1"));
        }
        let fault = |fault| Error::Content { path: file.path.clone(), fault };
        let first_bytes = file.read(0..LITGPT_HEADER_BYTES)?;
        let data_start = header_bytes(&first_bytes, token_type).map_err(fault)?;
        let n_bytes = file.len().checked_sub(data_start);
        let n_bytes = n_bytes.ok_or_else(|| fault("the header is cut short".into()))?;
        let token_bytes = token_type.n_bytes() as u64;
        if n_bytes % token_bytes != 0 {
            return Err(fault(format!("{n_bytes} bytes are no whole number of {token_type:?}")));
        }
        let rows = FileRows::new(file, data_start, n_bytes / token_bytes, token_bytes);
        Ok(Self { rows: rows.windows(block, block)?, token_type })
    }

    /// Sets the distance between the starts of blocks, in tokens; the block length by default.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a stride of 0.
    pub fn stride(self, stride: u64) -> Result<Self> {
        let length = self.rows.length;
        Ok(Self { rows: self.rows.windows(length, stride)?, ..self })
    }
}

fn decode_token(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

/// Returns the bytes of litGPT's header, 0 without one, or describes its fault.
fn header_bytes(first_bytes: &[u8], token_type: TokenType) -> Result<u64, String> {
    let Some(rest) = first_bytes.strip_prefix(LITGPT_MAGIC) else { return Ok(0) };
    let Some((&code, _)) = rest.strip_prefix(&LITGPT_VERSION).and_then(<[u8]>::split_first) else {
        return Err("the header is not of version 1".into());
    };
    // Codes of signed types are read as unsigned: no token is negative.
    let expected: &[u8] = match token_type {
        TokenType::U8 => &[1, 2],
        TokenType::U16 => &[3, 8],
        TokenType::U32 => &[4],
    };
    if !expected.contains(&code) {
        return Err(format!("the header has type {code}, which is not {token_type:?}"));
    }
    Ok(LITGPT_HEADER_BYTES)
}

impl Dataset for TokenDataset {
    type Item = Vec<u32>;

    fn len(&self) -> u64 {
        self.rows.len()
    }

    fn read(&self, index: u64) -> Result<Vec<u32>, BoxError> {
        let bytes = self.rows.read(index)?;
        Ok(bytes.chunks_exact(self.token_type.n_bytes()).map(decode_token).collect())
    }

    fn fingerprint(&self) -> Option<u64> {
        self.rows.fingerprint()
    }
}
