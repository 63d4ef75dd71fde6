//! Where results go: stdout, as text for people or JSON for programs.

use std::io::{self, BufWriter, Write};

use serde::Serialize;

use crate::error::Result;

/// The form of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object with a `format_version`.
    Json,
}

/// Writes a result as text.
///
/// A reader who has seen enough and closed the pipe, as `head` does, is no failure.
pub(crate) fn text(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            // What is still in the buffer has no reader: writing it again when the buffer is dropped would fail again.
            drop(out.into_parts());
            Ok(())
        }
        written => Ok(written?),
    }
}

/// Writes a result as one JSON object.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    text(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}
