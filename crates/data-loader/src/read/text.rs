//! Lines, paragraphs or whole files of text.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use core_types::{Fingerprint, Seed};
use dyn_batch::SequenceLengths;

use crate::{
    dataset::{
        Dataset,
        concat::{ends_of, locate},
    },
    error::{BoxError, Error, Result},
    read::{
        file::DataFile,
        indexed_text::IndexedText,
        line_index::{INDEX_EXTENSION, IndexPlace},
        listing::list_files,
        open_cache::OpenCache,
        split_text::{MIN_SAMPLE_BYTES, SplitRule, TextUnit},
    },
};

/// The configuration of a [`TextDataset`].
///
/// # Examples
///
/// ```
/// use data_loader::{TextConfig, TextUnit};
///
/// let config = TextConfig {
///     unit: TextUnit::Paragraph,
///     max_bytes: Some(512),
///     ..TextConfig::default()
/// };
/// assert_eq!(config.max_bytes, Some(512));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "callers take the other fields from `Default`")]
pub struct TextConfig {
    /// Part of a file that is a sample; [`TextUnit::Line`] by default.
    pub unit: TextUnit,
    /// Maximum bytes of a sample, at least 8; none by default. Longer samples are cut into pieces,
    /// between characters.
    pub max_bytes: Option<u64>,
    /// Place of the line index; [`IndexPlace::InMemory`] by default.
    pub index: IndexPlace,
}

/// Texts of a file or folder, read when they are asked for.
///
/// A folder stands for all files below it in the order of their paths, without hidden files and
/// line indexes. Line ends become `\n`, and a byte order mark is removed. A sample that is not
/// UTF-8 is an error when it is read. Clones share the files.
///
/// The lengths for a batcher are bytes in the file, so no text is read for them. Of a line they are
/// those without `\n`. Of other units, and of cut lines, separators count. A length is at least the
/// number of bytes of the text.
///
/// # Complexity
///
/// Opening reads the files once, to find the samples, unless an index is kept. The index takes 4.1
/// bytes of memory per sample.
///
/// # Examples
///
/// ```
/// use data_loader::{Dataset, TextConfig, TextDataset, TextUnit};
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// # let path = folder.path().join("poem.txt");
/// std::fs::write(&path, "to be\nor not\n\nto be")?;
/// let lines = TextDataset::open(&path)?;
/// assert_eq!((lines.len(), lines.read(1)?.as_str()), (4, "or not"));
///
/// let config = TextConfig { unit: TextUnit::Paragraph, ..TextConfig::default() };
/// let paragraphs = TextDataset::open_with(&path, &config)?;
/// assert_eq!((paragraphs.len(), paragraphs.read(0)?.as_str()), (2, "to be\nor not"));
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextDataset {
    rule: SplitRule,
    texts: Arc<[IndexedText]>,
    /// End of the samples of each file.
    ends: Arc<[u64]>,
    open_files: Arc<OpenCache<DataFile>>,
}

/// Systems allow at least 256 open files in a process.
const MAX_OPEN_FILES: usize = 64;

impl TextDataset {
    /// Opens the lines of a file or folder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::FileChanged`] and [`Error::Content`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &TextConfig::default())
    }

    /// Opens the texts of a file or folder.
    ///
    /// # Errors
    ///
    /// The errors of [`open`](Self::open), and [`Error::Setting`] for less than 8 bytes per sample
    /// or a single index file for a folder.
    pub fn open_with(path: impl AsRef<Path>, config: &TextConfig) -> Result<Self> {
        let path = path.as_ref();
        if let Some(value) = config.max_bytes.filter(|&max_bytes| max_bytes < MIN_SAMPLE_BYTES) {
            return Err(Error::setting("the maximum of bytes per sample", &value, "at least 8"));
        }
        if path.is_dir() && matches!(config.index, IndexPlace::At(_)) {
            let expected = "in memory or next to the files of a folder";
            return Err(Error::setting("the place of the index", "one file", expected));
        }
        let rule =
            SplitRule { unit: config.unit, skips_blank_lines: false, max_bytes: config.max_bytes };
        let is_index = |path: &Path| path.extension().is_some_and(|end| end == INDEX_EXTENSION);
        let files = list_files(path, is_index)?;
        let texts = files.iter().map(|file| IndexedText::open(file, rule, &config.index));
        let texts = texts.collect::<Result<Arc<[_]>>>()?;
        let ends = ends_of(texts.iter().map(|text| text.index.len())).into();
        let open_files = Arc::new(OpenCache::new(MAX_OPEN_FILES));
        Ok(Self { rule, texts, ends, open_files })
    }

    /// Reads a sample, for callers that check later that its file is unchanged.
    fn read_unchecked(&self, index: u64) -> Result<String> {
        let (number, index) = locate(&self.ends, index)?;
        let text = &self.texts[number];
        let file = self.file(number)?;
        let sample = text.read_unchecked(&file, index)?;
        match std::str::from_utf8(&sample.bytes) {
            Ok(text) => Ok(self.clean(text)),
            Err(fault) => Err(text.invalid_line(&file, &sample, fault)),
        }
    }

    /// Returns a file, which has not changed if it was closed.
    fn file(&self, number: usize) -> Result<Arc<DataFile>> {
        self.open_files.get(number as u64, || self.texts[number].reopen())
    }

    /// Removes separators and converts line ends.
    fn clean(&self, text: &str) -> String {
        match self.rule.unit {
            TextUnit::Line => {
                let line = text.strip_suffix('\n');
                line.map_or(text, |line| line.strip_suffix('\r').unwrap_or(line)).to_owned()
            }
            TextUnit::Paragraph => {
                let text = text.replace("\r\n", "\n");
                // Skipped paragraphs of white space may come before. A piece may be blank itself.
                let text = text.trim_end_matches('\n');
                let nonblank = text.split("\n\n").find(|text| !text.trim_ascii().is_empty());
                let paragraph = nonblank.or_else(|| text.rsplit("\n\n").next()).unwrap_or(text);
                paragraph.trim_matches('\n').to_owned()
            }
            TextUnit::Document => text.replace("\r\n", "\n"),
        }
    }
}

impl Dataset for TextDataset {
    type Item = String;

    fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, index: u64) -> Result<String, BoxError> {
        let sample = self.read_seeded(index, Seed::default());
        self.check(&[index]).and(sample)
    }

    fn read_seeded(&self, index: u64, _: Seed) -> Result<String, BoxError> {
        Ok(self.read_unchecked(index)?)
    }

    fn check(&self, indices: &[u64]) -> Result<(), BoxError> {
        let located = indices.iter().filter_map(|&index| locate(&self.ends, index).ok());
        let numbers: BTreeSet<usize> = located.map(|(number, _)| number).collect();
        for number in numbers {
            self.file(number)?.check_unchanged()?;
        }
        Ok(())
    }

    fn fingerprint(&self) -> Option<u64> {
        let identities = self.texts.iter().flat_map(IndexedText::identity);
        Some(identities.collect::<Fingerprint>().finish())
    }
}

impl SequenceLengths for TextDataset {
    fn count(&self) -> u64 {
        Dataset::len(self)
    }

    fn length(&self, index: u64) -> Option<u64> {
        let (number, index) = locate(&self.ends, index).ok()?;
        let text = &self.texts[number];
        let bytes = text.index.place(index).ok()?.bytes;
        let is_whole_line = self.rule.unit == TextUnit::Line && self.rule.max_bytes.is_none();
        Some(bytes.end - bytes.start - u64::from(is_whole_line && text.is_line_end(bytes.end)))
    }
}
