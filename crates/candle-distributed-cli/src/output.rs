//! Where results and messages go: results to stdout, as text for people or JSON for programs,
//! messages to stderr.

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

/// As much as a pipe holds: fewer bytes at a time wake its reader more often.
const BUFFER_BYTES: usize = 1 << 16;

/// Writes a result as text.
pub(crate) fn text(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, io::stdout().lock());
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

/// A result that is one JSON object per line, printed while it is computed.
pub(crate) struct Lines {
    out: BufWriter<StdoutLock<'static>>,
    is_live: bool,
    /// What became of the lines so far.
    written: io::Result<()>,
}

impl Lines {
    /// No lines yet. Whoever waits for a line may be the one to write what the next is computed
    /// from: if the input `is_live`, no line waits for others.
    pub(crate) fn new(is_live: bool) -> Self {
        let out = BufWriter::with_capacity(BUFFER_BYTES, io::stdout().lock());
        Self { out, is_live, written: Ok(()) }
    }

    /// Prints a line, and says whether another one will be.
    pub(crate) fn print(&mut self, value: &impl Serialize) -> ControlFlow<()> {
        self.written = self.write(value);
        if self.written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn write(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        writeln!(self.out)?;
        if self.is_live { self.out.flush() } else { Ok(()) }
    }

    /// Prints what waits.
    pub(crate) fn finish(mut self) -> Result<()> {
        let written = self.written.and_then(|()| self.out.flush());
        if written.is_err() {
            // As in `text`.
            drop(self.out.into_parts());
        }
        printed(written)
    }
}

/// Writes a result as bytes, which no person can read and a terminal takes for commands.
pub(crate) fn bytes(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    if io::stdout().is_terminal() {
        let refused = Error::usage("this --format is binary, and standard output is a terminal");
        return Err(
            refused.hinted("send it to a file or another program: … > FILE, or … | PROGRAM")
        );
    }
    widen(&io::stdout());
    text(write)
}

/// Has a pipe hold 1 MiB instead of 64 KiB: its two ends take turns less often, and ten million
/// numbers arrive in half the time. What the system refuses stays as it is, and so does no pipe.
#[cfg(target_os = "linux")]
fn widen(out: &impl std::os::fd::AsFd) {
    /// What Linux grants every user.
    const PIPE_BYTES: usize = 1 << 20;
    let _ = rustix::pipe::fcntl_setpipe_size(out, PIPE_BYTES);
}

#[cfg(not(target_os = "linux"))]
fn widen(_: &io::Stdout) {}

/// Writes `value` as JSON to what `path` names.
pub(crate) fn json_file(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(value).map_err(io::Error::from)?;
    file(path, &text)
}

/// Writes `content` to what `path` names, whatever that is.
///
/// A file is replaced in one piece, or made: of any number of programs that write it at once, one
/// has its whole content there. It keeps its permissions and, where the system allows it, its owner
/// and group. A link stays a link, and what it leads to is replaced. Pipes, devices and this
/// program's own standard streams are written to, since they cannot be replaced.
pub(crate) fn file(path: &Path, content: &[u8]) -> Result<()> {
    write(path, content).map_err(|source| Error::write(path, source))
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let stream = match fs::metadata(path) {
        Ok(known) => standard_stream(&known)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    match stream {
        Some(mut stream) => stream.write_all(content),
        None => files::write(path, content),
    }
}

/// Standard output or standard error, if `known` describes it: where that is a file, as in
/// `--out /dev/stdout > page.html`, replacing it would take it away from everybody else who writes
/// there.
#[cfg(unix)]
fn standard_stream(known: &Metadata) -> io::Result<Option<File>> {
    use std::os::{fd::AsFd, unix::fs::MetadataExt};

    for stream in [io::stdout().as_fd(), io::stderr().as_fd()] {
        let stream = File::from(stream.try_clone_to_owned()?);
        let found = stream.metadata()?;
        if (found.dev(), found.ino()) == (known.dev(), known.ino()) {
            return Ok(Some(stream));
        }
    }
    Ok(None)
}

#[cfg(not(unix))]
fn standard_stream(_: &Metadata) -> io::Result<Option<File>> {
    Ok(None)
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
pub(crate) fn error(error: &Error) {
    labelled(Styles::styled().get_error(), "error", error.chain());
    if let Some(advice) = error.hint() {
        hint(advice);
    }
}

/// Prints what a user should know though nothing failed.
pub(crate) fn warning(text: impl fmt::Display) {
    labelled(Styles::styled().get_invalid(), "warning", text);
}

/// Prints advice, which need not be about an error.
pub(crate) fn hint(advice: impl fmt::Display) {
    labelled(Styles::styled().get_valid(), "hint", advice);
}

/// Prints a text behind the word that says what it is.
fn labelled(style: &Style, label: &str, text: impl fmt::Display) {
    let text = printable(&text.to_string());
    message(|out| writeln!(out, "{style}{label}:{style:#} {text}"));
}

/// The lines of a message. Whatever it quotes from a file, it cannot act on the terminal.
pub(crate) fn printable(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| Printable(line).to_string()).collect();
    lines.join("\n")
}

/// Writes to stderr, in colors where they are shown. A failure is ignored: there is no other place
/// to report it.
pub(crate) fn message(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    let _ = write(&mut anstream::stderr());
}
