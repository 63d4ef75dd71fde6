//! Errors of tokenizers and chat templates.

use std::path::PathBuf;

use core_types::human::Printable;

/// An error of a tokenizer or a chat template.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The folder has no `tokenizer.json`.
    #[error("{} has no tokenizer.json", Printable(path.display()))]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// The file is damaged, or its parts contradict each other.
    #[error("{}: {}", Printable(path.display()), Printable(reason))]
    Broken {
        /// The file.
        path: PathBuf,
        /// The message of the library.
        reason: String,
    },
    /// A setting of the tokenizer is not supported.
    #[error("{}: {reason}", Printable(path.display()))]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The setting, its value, and the supported value.
        reason: String,
    },
    /// A token of the tokenizer is not in the vocabulary of the model.
    #[error(
        "{}: its token {} has number {id}, but the model has {vocab_size} tokens",
        Printable(path.display()),
        Printable(format!("{token:?}"))
    )]
    VocabularyMismatch {
        /// The file.
        path: PathBuf,
        /// The token with the highest number.
        token: String,
        /// The number of this token.
        id: u32,
        /// The number of tokens of the model.
        vocab_size: usize,
    },
    /// No token ends a text, or the token that does is unknown.
    #[error("{}: {}", Printable(path.display()), Printable(reason))]
    NoEnd {
        /// The folder.
        path: PathBuf,
        /// The token or its number, if the folder names one.
        reason: String,
    },
    /// The tokens are bytes, without a token that ends a text.
    #[error(
        "{}: without a tokenizer.json the tokens are bytes, and eos_token_id must be at least 256",
        Printable(path.display())
    )]
    NoByteEnd {
        /// The `config.json`.
        path: PathBuf,
    },
    /// There is no chat template.
    #[error("{} has no chat template for messages", Printable(path.display()))]
    NoChatTemplate {
        /// The folder.
        path: PathBuf,
    },
    /// The chat template rejects a conversation, does not end, or writes too much.
    #[error("{}: the chat template fails: {}", Printable(path.display()), Printable(reason))]
    Rendering {
        /// The file of the template.
        path: PathBuf,
        /// The error of the template.
        reason: String,
    },
    /// The chat template changes the text of earlier messages when a message is added.
    #[error(
        "{}: the chat template does not append: message {message} or a later one changes the text \
         of earlier messages",
        Printable(path.display())
    )]
    Rewrites {
        /// The file of the template.
        path: PathBuf,
        /// The message, counted from 1.
        message: usize,
    },
}
