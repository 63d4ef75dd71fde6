//! [`Error`]: crate::Error
//! [`Examples`]: crate::Examples
//! [`Folder`]: crate::Folder
//! [`Generation`]: crate::Generation
//! [`Generator`]: crate::Generator
//! [`Message`]: crate::Message
//! [`Overlong`]: crate::Overlong
//! [`Prompt`]: crate::Prompt
//! [`Event`]: crate::Event
//! [`PreparedRun`]: crate::PreparedRun
//! [`Rows`]: crate::Rows
//! [`RunOptions`]: crate::RunOptions
//! [`Start`]: crate::Start
//! [`TextSource`]: crate::TextSource
//! [`Trainer`]: crate::Trainer
//! [`Tokenizer`]: crate::Tokenizer
//! [`cost`]: crate::cost
//! [`models`]: crate::models
//! [`run`]: crate::run
//! [`spec`]: crate::spec
// The README's links go to the registry. Markdown uses the first of two link definitions, so on
// this page the definitions above redirect them to the crate itself.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod cost;
mod data;
mod error;
mod files;
mod folder;
mod generate;
#[cfg(test)]
mod golden;
pub mod models;
pub mod run;
pub mod spec;
#[doc(hidden)]
pub mod support;
mod text;
mod train;

pub use crate::{
    data::dataset::Rows,
    error::{
        Error, Result,
        example::{ExampleError, SourceLocation},
        folder::FolderError,
        generate::GenerateError,
        run::RunError,
        spec::SpecError,
        tokenizer::TokenizerError,
    },
    folder::Folder,
    generate::{
        generator::{Generated, Generator, Stop},
        options::Generation,
        prompt::Prompt,
    },
    text::{
        chat::Message,
        examples::{Examples, FileCounts, Overlong},
        source::TextSource,
        tokenizer::Tokenizer,
    },
    train::{
        options::RunOptions,
        prepare::{PreparedRun, Start},
        trainer::{Event, Trainer},
    },
};
