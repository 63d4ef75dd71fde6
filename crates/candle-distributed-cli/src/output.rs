//! Where results and messages go: results to stdout, as text for people or JSON for programs,
//! messages to stderr.

use std::{
    fmt,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

use candle_distributed::types::human::Printable;
use clap::builder::Styles;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::error::{Error, Result};

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
pub(crate) fn text(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let written = write(&mut out).and_then(|()| out.flush());
    if written.is_err() {
        // Dropping the buffer would write the rest again, and fail again.
        drop(out.into_parts());
    }
    printed(written)
}

/// Writes a result as one JSON object.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    text(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}

/// Writes a file under another name, syncs it to disk and renames it, so that an interrupted
/// program never leaves half a file.
pub(crate) fn file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        if path.exists() && !path.is_file() {
            // A pipe or a device cannot be replaced by a file.
            return fs::write(path, content);
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let mut file = File::create(&partial)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    write().map_err(|source| Error::write(path, source))
}

/// A progress bar of `n_steps`, drawn if stderr is a terminal.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn progress(n_steps: u64, template: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the templates of this program");
    ProgressBar::new(n_steps).with_style(style)
}

/// The result of a command that wrote to stdout like this.
///
/// A reader that closes the pipe early, as `head` does, is not a failure.
pub(crate) fn printed(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Prints what went wrong, and what to do about it.
///
/// Whatever a message quotes from a file, it cannot act on the terminal.
pub(crate) fn error(error: &Error) {
    let style = Styles::styled();
    let label = style.get_error();
    let chain = error.chain();
    let lines: Vec<_> = chain.lines().map(|line| Printable(line).to_string()).collect();
    message(|out| writeln!(out, "{label}error:{label:#} {}", lines.join("\n")));
    if let Some(advice) = error.hint() {
        hint(advice);
    }
}

/// Prints advice, which need not be about an error.
pub(crate) fn hint(advice: impl fmt::Display) {
    let style = Styles::styled();
    let label = style.get_valid();
    message(|out| writeln!(out, "{label}hint:{label:#} {advice}"));
}

/// Writes to stderr, in colors where they are shown. A failure is ignored: there is no other place
/// to report it.
pub(crate) fn message(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    let _ = write(&mut anstream::stderr());
}
