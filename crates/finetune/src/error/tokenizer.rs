//! Errors of tokenizers and chat templates.

use std::path::PathBuf;

use core_types::human::Printable;

/// Why texts cannot be tokenized.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The folder has no `tokenizer.json`.
    #[error("{} has no tokenizer.json", Printable(path.display()))]
    Missing {
        /// The folder.
        path: PathBuf,
    },
    /// The file is damaged, or its parts do not fit together.
    #[error("{}: {}", Printable(path.display()), Printable(reason))]
    Broken {
        /// The file.
        path: PathBuf,
        /// The words of the library that reads it.
        reason: String,
    },
    /// The tokens of a text are random.
    #[error(
        "{}: its dropout {dropout} gives other tokens each time, it must be null",
        Printable(path.display())
    )]
    Dropout {
        /// The file.
        path: PathBuf,
        /// The probability with which a merge is left out.
        dropout: f32,
    },
    /// A token is not in the vocabulary of the model.
    #[error(
        "{}: its token {} has number {id}, and the model has {vocab_size} tokens",
        Printable(path.display()),
        Printable(format!("{token:?}"))
    )]
    VocabularyMismatch {
        /// The file.
        path: PathBuf,
        /// The last token.
        token: String,
        /// The number of that token.
        id: u32,
        /// The number of tokens of the model.
        vocab_size: usize,
    },
    /// No token ends a text.
    #[error("no token of {} ends a text", Printable(path.display()))]
    NoEnd {
        /// The folder.
        path: PathBuf,
    },
    /// The token that ends a text is unknown.
    #[error("{}: eos_token {token:?} is not in tokenizer.json", Printable(path.display()))]
    UnknownEnd {
        /// The folder.
        path: PathBuf,
        /// The token.
        token: String,
    },
    /// The number of the token that ends a text is unknown.
    #[error("{}: eos_token_id {id} is not in tokenizer.json", Printable(path.display()))]
    UnknownEndId {
        /// The folder.
        path: PathBuf,
        /// The number.
        id: u32,
    },
    /// The tokens are bytes, and none is left to end a text.
    #[error(
        "{}: without a tokenizer.json the tokens are bytes, and eos_token_id must be one beyond them, \
         such as 256",
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
    /// Of several chat templates none is the default.
    #[error(
        "{}: none of its chat templates is named \"default\"",
        Printable(path.display())
    )]
    NoDefaultTemplate {
        /// The file.
        path: PathBuf,
    },
    /// The chat template is not valid Jinja.
    #[error("{}: the chat template fails: {}", Printable(path.display()), Printable(reason))]
    Template {
        /// The file.
        path: PathBuf,
        /// The error of the compiler.
        reason: String,
    },
    /// The chat template rejects a conversation, does not end, or writes too much.
    #[error("{}: the chat template fails: {}", Printable(path.display()), Printable(reason))]
    Rendering {
        /// The file of the template.
        path: PathBuf,
        /// The error of the template.
        reason: String,
    },
    /// The chat template changes earlier messages when it adds one.
    #[error(
        "{}: the chat template does not append: with message {message}, or with those after it, it \
         writes the messages before otherwise",
        Printable(path.display())
    )]
    Rewrites {
        /// The file of the template.
        path: PathBuf,
        /// The message, counted from 1.
        message: usize,
    },
}
