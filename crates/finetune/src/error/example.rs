//! Errors of examples.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use core_types::human::{HumanBytes, Printable};

use crate::error::Error;

/// An error of training examples.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExampleError {
    /// A line is not an example.
    #[error("{location} {reason}: {}", Excerpt(line))]
    Line {
        /// The line's place.
        location: SourceLocation,
        /// The fault, such as `has no completion`.
        reason: String,
        /// The line.
        line: String,
    },
    /// The example of a line is of another kind than the first example of the file.
    #[error("{location} holds {kind}, but line {first} holds {expected}")]
    KindMismatch {
        /// The line's place.
        location: SourceLocation,
        /// The kind of the line, in words.
        kind: &'static str,
        /// The number of the first example's line.
        first: u64,
        /// The kind of the first example, in words.
        expected: &'static str,
    },
    /// A file is one JSON document instead of text or lines of JSON.
    #[error(
        "{} is one JSON document: examples must be plain text, or one JSON object per line",
        Printable(path.display())
    )]
    WholeJson {
        /// The file.
        path: PathBuf,
    },
    /// A file of lines is not UTF-8.
    #[error("cannot read {}: {cause}", Printable(path.display()))]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The error, which gives the position of the first invalid byte.
        cause: io::Error,
    },
    /// A file or folder has no example.
    #[error("there is no example in {}", Printable(path.display()))]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// A file would take more memory than the process may.
    #[error(
        "the texts up to {} would take about {}, more than {}",
        Printable(path.display()),
        HumanBytes((*needed).into()),
        HumanBytes((*limit).into())
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// Bytes of the file's text and of all tokens.
        needed: u64,
        /// Maximum bytes.
        limit: u64,
    },
    /// An example is longer than the context.
    #[error("{location} has {length} tokens, more than the context of {context}")]
    Overlong {
        /// The example's place.
        location: SourceLocation,
        /// The number of tokens of the example.
        length: usize,
        /// Maximum number of tokens of an example.
        context: usize,
    },
    /// The answer of an example begins beyond the context.
    #[error("{location} has no answer within the context of {context} tokens")]
    NoAnswer {
        /// The example's place.
        location: SourceLocation,
        /// Maximum number of tokens of an example.
        context: usize,
    },
    /// An example has no target that follows another token.
    #[error("{location} has no token to predict")]
    NoTarget {
        /// The example's place.
        location: SourceLocation,
    },
    /// An example cannot be tokenized.
    #[error("{location}: {cause}")]
    Tokens {
        /// The example's place.
        location: SourceLocation,
        /// The error of the tokenizer.
        cause: Box<Error>,
    },
    /// The training examples or the validation examples of a split would be empty.
    #[error(
        "a fraction {fraction} of {n_examples} examples is {n_held_out}, must be 1 to {}",
        n_examples.saturating_sub(1)
    )]
    Split {
        /// The requested fraction.
        fraction: f64,
        /// The number of all examples.
        n_examples: usize,
        /// The number of validation examples.
        n_held_out: usize,
    },
}

/// The place of an example in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceLocation {
    /// The file.
    pub path: PathBuf,
    /// The counted unit, such as `line`.
    pub unit: &'static str,
    /// The number of the unit, from 1.
    pub number: u64,
}

impl SourceLocation {
    /// Returns the place of a unit of a file.
    pub(crate) fn new(path: &Path, unit: &'static str, number: u64) -> Self {
        Self { path: path.to_owned(), unit, number }
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {}", self.unit, self.number, Printable(self.path.display()))
    }
}

/// The beginning of a line in quotes, shortened for an error message.
struct Excerpt<'a>(&'a str);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 40;
        let beginning: String = self.0.chars().take(MAX_CHARS).collect();
        let ellipsis = if beginning.len() < self.0.len() { "…" } else { "" };
        write!(f, "{beginning:?}{ellipsis}")
    }
}
