//! Output of the program: results to stdout, as text for people or JSON for programs, and messages
//! to stderr.

use std::{
    fmt,
    fs::{self, File, Metadata},
    io::{self, BufWriter, IsTerminal, StdoutLock, Write},
    ops::ControlFlow,
    path::Path,
};

use candle_distributed::types::{files, human::Printable};
use clap::builder::{Styles, styling::Style};
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

/// The default capacity of a pipe. Smaller writes would wake the reader more often.
const BUFFER_BYTES: usize = 1 << 16;

/// Writes a result to stdout.
pub(crate) fn to_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, io::stdout().lock());
    let outcome = write(&mut out).and_then(|()| out.flush());
    if outcome.is_err() {
        // Dropping the buffer would try to write the rest again.
        drop(out.into_parts());
    }
    check_printed(outcome)
}

/// Writes the text of a model. In a terminal its control characters are escaped: they could move
/// the cursor, change colors or send keys.
pub(crate) fn model_text(text: &str) -> Result<()> {
    let is_terminal = io::stdout().is_terminal();
    let escaped = is_terminal.then(|| printable(text));
    to_stdout(|out| writeln!(out, "{}", escaped.as_deref().unwrap_or(text)))
}

/// Writes a result as one JSON object.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    to_stdout(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}

/// Writes a result with one JSON object per line while it is computed.
pub(crate) struct JsonLines {
    out: BufWriter<StdoutLock<'static>>,
    flushes_each_line: bool,
    /// The outcome of the last write. After an error, the caller prints no further line.
    outcome: io::Result<()>,
}

impl JsonLines {
    /// Makes a writer. Set `flushes_each_line` for a live input: the program that reads a line may
    /// be the program that writes the input of the next line, so buffering could be a deadlock.
    pub(crate) fn new(flushes_each_line: bool) -> Self {
        let out = BufWriter::with_capacity(BUFFER_BYTES, io::stdout().lock());
        Self { out, flushes_each_line, outcome: Ok(()) }
    }

    /// Prints a line, and returns `Break` if it cannot be written. Do not print after `Break`.
    pub(crate) fn print(&mut self, value: &impl Serialize) -> ControlFlow<()> {
        self.outcome = self.write(value);
        if self.outcome.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn write(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        writeln!(self.out)?;
        if self.flushes_each_line { self.out.flush() } else { Ok(()) }
    }

    /// Flushes the buffered lines.
    pub(crate) fn finish(mut self) -> Result<()> {
        let outcome = self.outcome.and_then(|()| self.out.flush());
        if outcome.is_err() {
            // Dropping the buffer would try to write the rest again.
            drop(self.out.into_parts());
        }
        check_printed(outcome)
    }
}

/// Writes a binary result. A terminal is rejected, since it would interpret the bytes as commands.
pub(crate) fn bytes(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    if io::stdout().is_terminal() {
        let error = Error::usage("this --format is binary, and standard output is a terminal");
        return Err(
            error.with_hint("send it to a file or another program: … > FILE, or … | PROGRAM")
        );
    }
    enlarge_pipe(&io::stdout());
    to_stdout(write)
}

/// Enlarges a pipe from 64 KiB to 1 MiB. Writer and reader then wait for each other less often, and ten
/// million numbers arrive in half the time. Does nothing if `out` is not a pipe or the system refuses.
#[cfg(target_os = "linux")]
fn enlarge_pipe(out: &impl std::os::fd::AsFd) {
    /// The default limit of Linux for unprivileged users.
    const PIPE_BYTES: usize = 1 << 20;
    let _ = rustix::pipe::fcntl_setpipe_size(out, PIPE_BYTES);
}

#[cfg(not(target_os = "linux"))]
fn enlarge_pipe(_: &io::Stdout) {}

/// Writes `value` as JSON to the file, pipe or device at `path`.
pub(crate) fn json_file(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(value).map_err(io::Error::from)?;
    file(path, &text)
}

/// Writes `content` to the file, pipe or device at `path`.
///
/// A file is created or replaced atomically: if several programs write it at once, it holds the
/// whole content of one of them. It keeps its permissions and, where the system allows it, its
/// owner and group. A link stays a link, and its target is replaced. Pipes, devices and this
/// program's own standard streams are written in place, since they cannot be replaced.
pub(crate) fn file(path: &Path, content: &[u8]) -> Result<()> {
    write(path, content).map_err(|source| Error::write(path, source))
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let stream = match fs::metadata(path) {
        Ok(metadata) => standard_stream(&metadata)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    match stream {
        Some(mut stream) => stream.write_all(content),
        None => files::write(path, content),
    }
}

/// Returns standard output or standard error if `metadata` describes it.
///
/// Such a stream may be a file, as in `--out /dev/stdout > page.html`. Replacing the file would
/// disconnect all other writers of the stream.
#[cfg(unix)]
fn standard_stream(metadata: &Metadata) -> io::Result<Option<File>> {
    use std::os::{fd::AsFd, unix::fs::MetadataExt};

    for stream in [io::stdout().as_fd(), io::stderr().as_fd()] {
        let stream = File::from(stream.try_clone_to_owned()?);
        let own = stream.metadata()?;
        if (own.dev(), own.ino()) == (metadata.dev(), metadata.ino()) {
            return Ok(Some(stream));
        }
    }
    Ok(None)
}

#[cfg(not(unix))]
fn standard_stream(_: &Metadata) -> io::Result<Option<File>> {
    Ok(None)
}

/// Returns a progress bar of `n_steps`, drawn if stderr is a terminal.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
pub(crate) fn progress(n_steps: u64, template: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("templates are literals");
    ProgressBar::new(n_steps).with_style(style)
}

/// Converts the outcome of a write to stdout. A closed pipe, as with `head`, is not an error.
pub(crate) fn check_printed(outcome: io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Prints an error and its hint.
pub(crate) fn error(error: &Error) {
    print_labelled(Styles::styled().get_error(), "error", error.chain());
    if let Some(advice) = error.hint() {
        hint(advice);
    }
}

/// Prints a warning about a problem that did not fail the command.
pub(crate) fn warning(text: impl fmt::Display) {
    print_labelled(Styles::styled().get_invalid(), "warning", text);
}

/// Prints advice, for example after an error.
pub(crate) fn hint(advice: impl fmt::Display) {
    print_labelled(Styles::styled().get_valid(), "hint", advice);
}

/// Prints a text after its label.
fn print_labelled(style: &Style, label: &str, text: impl fmt::Display) {
    let text = printable(&text.to_string());
    message(|out| writeln!(out, "{style}{label}:{style:#} {text}"));
}

/// Escapes terminal control characters in a message, line by line.
pub(crate) fn printable(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| Printable(line).to_string()).collect();
    lines.join("\n")
}

/// Writes to stderr, in colors on terminals. Errors are ignored, since there is no other place to
/// report them.
pub(crate) fn message(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    let _ = write(&mut anstream::stderr());
}
