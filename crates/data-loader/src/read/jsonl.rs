//! Lines of JSON.

use std::{marker::PhantomData, path::Path};

use core_types::{Fingerprint, Seed};
use serde::de::DeserializeOwned;

use crate::{
    dataset::Dataset,
    error::{BoxError, Result},
    read::{
        file::DataFile,
        indexed_text::IndexedText,
        line_index::IndexPlace,
        split_text::{SplitRule, TextUnit},
    },
};

/// The lines of a `.jsonl` file, each a `T`, read and parsed when they are asked for.
///
/// Blank lines are skipped, and so is a byte order mark. A line that is no `T` is an error with
/// file and line when it is read.
///
/// # Complexity
///
/// Like [`TextDataset`](crate::TextDataset).
///
/// # Examples
///
/// ```
/// use data_loader::{Dataset, IndexPlace, JsonlDataset};
///
/// #[derive(serde::Deserialize)]
/// struct Record {
///     text: String,
/// }
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// # let path = folder.path().join("records.jsonl");
/// std::fs::write(&path, "{\"text\": \"to be\"}\n{\"text\": 7}\n")?;
/// let records = JsonlDataset::<Record>::open_with(&path, &IndexPlace::Beside)?;
/// assert_eq!((records.len(), records.read(0)?.text.as_str()), (2, "to be"));
/// assert!(records.read(1).is_err_and(|error| error.to_string().starts_with("line 2 of")));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[derive(Debug)]
pub struct JsonlDataset<T> {
    text: IndexedText,
    file: DataFile,
    item: PhantomData<fn() -> T>,
}

const NONBLANK_LINES: SplitRule =
    SplitRule { unit: TextUnit::Line, skips_blank_lines: true, max_bytes: None };

impl<T> JsonlDataset<T> {
    /// Opens a file, with its line index in memory.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io), [`Error::FileChanged`](crate::Error::FileChanged) and
    /// [`Error::Content`](crate::Error::Content).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &IndexPlace::InMemory)
    }

    /// Opens a file, with its line index in this place.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open), also if the index cannot be written.
    pub fn open_with(path: impl AsRef<Path>, index: &IndexPlace) -> Result<Self> {
        let text = IndexedText::open(path.as_ref(), NONBLANK_LINES, index)?;
        let file = text.reopen()?;
        Ok(Self { text, file, item: PhantomData })
    }
}

impl<T: DeserializeOwned + Send + 'static> Dataset for JsonlDataset<T> {
    type Item = T;

    fn len(&self) -> u64 {
        self.text.index.len()
    }

    fn read(&self, index: u64) -> Result<T, BoxError> {
        let item = self.read_seeded(index, Seed::default());
        self.check(&[index]).and(item)
    }

    fn read_seeded(&self, index: u64, _: Seed) -> Result<T, BoxError> {
        let sample = self.text.read_unchecked(&self.file, index)?;
        let item = serde_json::from_slice(&sample.bytes);
        Ok(item.map_err(|fault| self.text.invalid_line(&self.file, &sample, fault))?)
    }

    fn check(&self, _: &[u64]) -> Result<(), BoxError> {
        Ok(self.file.check_unchanged()?)
    }

    fn fingerprint(&self) -> Option<u64> {
        Some(self.text.identity().into_iter().collect::<Fingerprint>().finish())
    }
}
