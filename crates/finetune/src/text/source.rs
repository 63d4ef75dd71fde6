//! Files and folders of texts, and their weights.

use std::{fmt, path::PathBuf};

use core_types::human::Printable;

use crate::error::spec::SpecError;

/// Limit on a weight. The weights of a mixture have the same limit on their sum.
const MAX_WEIGHT: u64 = 1 << 20;

/// A file or folder of texts, and its weight in a mixture of several.
///
/// # Examples
///
/// ```
/// use finetune::TextSource;
///
/// let books = TextSource { path: "books.jsonl".into(), weight: Some(7) };
/// assert_eq!(books.to_string(), "books.jsonl:7");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a text has a place and a weight")]
pub struct TextSource {
    /// File or folder.
    pub path: PathBuf,
    /// Number of examples that are read for each example of a source of weight 1, from 1 to 2^20.
    /// `None` stands for 1, or for the weight in a resumed run. A single source needs no weight.
    pub weight: Option<u64>,
}

impl TextSource {
    /// Creates a source without a weight.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), weight: None }
    }

    /// Parses `PATH` or `PATH:WEIGHT`. If a file or folder has all of this name, it is a path.
    ///
    /// # Errors
    ///
    /// [`SpecError::Setting`] for a weight that is not from 1 to 2^20.
    #[cfg(any(feature = "clap", test))]
    pub(crate) fn parse(text: std::ffi::OsString) -> Result<Self, SpecError> {
        let path = PathBuf::from(text);
        let split = path.to_str().and_then(|text| text.rsplit_once(':'));
        let is_number =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match split.filter(|(start, end)| !start.is_empty() && is_number(end)) {
            Some((start, weight)) if !path.exists() => {
                // Only a number of too many digits cannot be parsed.
                let valid = weight.parse().ok().filter(|&weight| is_valid(weight));
                let valid = valid.ok_or_else(|| weight_error(weight))?;
                Ok(Self { path: start.into(), weight: Some(valid) })
            }
            _ => Ok(Self::new(path)),
        }
    }

    /// Rejects a weight out of range.
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        match self.weight.filter(|&weight| !is_valid(weight)) {
            Some(weight) => Err(weight_error(&weight.to_string())),
            None => Ok(()),
        }
    }
}

/// Returns true if a weight is in range.
pub(crate) fn is_valid(weight: u64) -> bool {
    (1..=MAX_WEIGHT).contains(&weight)
}

fn weight_error(weight: &str) -> SpecError {
    SpecError::setting("weight", &weight, format!("1 to {MAX_WEIGHT}"))
}

impl fmt::Display for TextSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Printable(self.path.display()))?;
        self.weight.map_or(Ok(()), |weight| write!(f, ":{weight}"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn parse(text: &str) -> Result<(String, Option<u64>), String> {
        let source = TextSource::parse(text.into()).map_err(|error| error.to_string())?;
        Ok((source.path.display().to_string(), source.weight))
    }

    #[test]
    fn number_after_colon_is_weight() {
        for (text, path, weight) in [
            ("a.jsonl", "a.jsonl", None),
            ("a.jsonl:7", "a.jsonl", Some(7)),
            ("a:b:1048576", "a:b", Some(1 << 20)),
            ("a:", "a:", None),
            (":7", ":7", None),
            ("a:-7", "a:-7", None),
            ("a:+7", "a:+7", None),
            ("C:\\a", "C:\\a", None),
        ] {
            assert_eq!(parse(text), Ok((path.to_owned(), weight)));
        }
        for weight in ["0", "1048577", "99999999999999999999"] {
            let expected = format!("weight is {weight}, must be 1 to 1048576");
            assert_eq!(parse(&format!("a:{weight}")), Err(expected));
        }
        assert!(TextSource { path: "a".into(), weight: Some(0) }.check().is_err());
    }

    #[cfg(unix)]
    #[test]
    fn existing_path_keeps_its_colon() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a:0");
        fs::write(&path, "a text").unwrap();
        assert_eq!(TextSource::parse(path.clone().into()).unwrap(), TextSource::new(&path));
        let weighted = TextSource::parse(format!("{}:3", path.display()).into()).unwrap();
        assert_eq!(weighted, TextSource { path, weight: Some(3) });
    }
}
