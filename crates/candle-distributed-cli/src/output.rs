//! Where results and messages go: results to stdout, as text for people or JSON for programs,
//! messages to stderr.

use std::{
    fmt,
    fs::{self, File, Metadata},
    io::{self, BufWriter, IsTerminal, StdoutLock, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use candle_distributed::types::human::Printable;
use clap::builder::{Styles, styling::Style};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tempfile::NamedTempFile;

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
    let known = match fs::metadata(path) {
        Ok(known) => known,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return replace(path, content, None);
        }
        Err(error) => return Err(error),
    };
    if let Some(mut stream) = standard_stream(&known)? {
        stream.write_all(content)
    } else if known.is_file() {
        replace(path, content, Some(&known))
    } else {
        File::options().write(true).open(path)?.write_all(content)
    }
}

/// Makes a file of this content where there must be none yet: of any number of programs that make
/// it at once, one succeeds.
pub(crate) fn new_file(path: &Path, content: &[u8]) -> Result<()> {
    let made = written_beside(path, content)
        .and_then(|partial| partial.persist_noclobber(path).map_err(io::Error::from));
    made.map(drop).map_err(|source| Error::write(path, source))
}

/// Replaces the file at the end of the links that `path` may be.
fn replace(path: &Path, content: &[u8], known: Option<&Metadata>) -> io::Result<()> {
    let mut partial = Partial::of(path, known)?;
    partial.file.write_all(content)?;
    partial.persisted()
}

/// A file that is written a part at a time, under another name: an interrupted program never leaves
/// half of the one that it is to become.
#[derive(Debug)]
pub(crate) struct Partial {
    file: NamedTempFile,
    target: PathBuf,
}

impl Partial {
    /// One that is to become the file at `path`, which need not be there yet.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let known = match fs::metadata(path) {
            Ok(known) => Ok(Some(known)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let opened = known.and_then(|known| Self::of(path, known.as_ref()));
        opened.map_err(|source| Error::write(path, source))
    }

    fn of(path: &Path, known: Option<&Metadata>) -> io::Result<Self> {
        let target = followed(path)?;
        let file = beside(&target)?;
        if let Some(known) = known {
            // First, as another owner takes some permissions away.
            keep_owner(file.as_file(), known)?;
            file.as_file().set_permissions(known.permissions())?;
        }
        Ok(Self { file, target })
    }

    /// Where it is until it is whole.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// The file to write to.
    pub(crate) fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Gives the file its name, once all of it is on disk.
    pub(crate) fn persist(self) -> Result<()> {
        let target = self.target.clone();
        self.persisted().map_err(|source| Error::write(target, source))
    }

    fn persisted(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file.persist(&self.target)?;
        Ok(())
    }
}

/// Gives a file the owner and the group of another one, as far as the system allows: mostly root
/// alone may give files away.
#[cfg(unix)]
fn keep_owner(file: &File, known: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};

    let made = file.metadata()?;
    for (owner, group) in [
        ((made.uid() != known.uid()).then_some(known.uid()), None),
        (None, (made.gid() != known.gid()).then_some(known.gid())),
    ] {
        match fchown(file, owner, group) {
            // It is not ours to give, or this file system knows no owners.
            Err(error) if is_refused(&error) => {}
            changed => changed?,
        }
    }
    Ok(())
}

#[cfg(unix)]
fn is_refused(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};

    matches!(error.kind(), PermissionDenied | InvalidInput | Unsupported)
}

#[cfg(not(unix))]
fn keep_owner(_: &File, _: &Metadata) -> io::Result<()> {
    Ok(())
}

/// A file of this content beside the target, on disk.
fn written_beside(target: &Path, content: &[u8]) -> io::Result<NamedTempFile> {
    let mut partial = beside(target)?;
    partial.write_all(content)?;
    partial.as_file().sync_all()?;
    Ok(partial)
}

/// An empty file beside the target.
///
/// Its own name is random and was nobody's before: a name that others know is one that they write
/// to as well, or have made a link of.
fn beside(target: &Path) -> io::Result<NamedTempFile> {
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".partial");
    // The permissions that the system gives new files; without this they would be their owner's.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// The path without the links that it is, if any; there need not be a file at their end.
fn followed(path: &Path) -> io::Result<PathBuf> {
    /// As many as Linux follows.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        // What cannot be read as a link is none.
        let Ok(next) = fs::read_link(&target) else { return Ok(target) };
        target.pop();
        target.push(next);
    }
    Err(io::Error::other("too many links"))
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

/// What is damaged in a file, after its name.
pub(crate) fn damage(lines: &[u64]) -> String {
    let lines: Vec<String> = lines.iter().map(u64::to_string).collect();
    let word = if lines.len() == 1 { "line" } else { "lines" };
    format!("has damage in {word} {}", lines.join(", "))
}

/// Keeps the content of a file beside it, and says so, if some of its lines are damaged.
pub(crate) fn keep_damaged(path: &Path, lines: &[u64], content: &[u8]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let beside = keep_beside(path, "damaged", content)?;
    warning(format_args!(
        "{} {}; the whole file is kept as {}",
        path.display(),
        damage(lines),
        beside.display()
    ));
    Ok(())
}

/// Keeps the content of the file at `path` in another one, whose name says in a word what it is, and
/// returns where.
pub(crate) fn keep_beside(path: &Path, what: &str, content: &[u8]) -> Result<PathBuf> {
    let mut number = 1_u32;
    loop {
        let beside = path.with_extension(format!("{what}-{number:04}.jsonl"));
        match File::create_new(&beside).and_then(|mut file| file.write_all(content)) {
            Ok(()) => return Ok(beside),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(source) => return Err(Error::write(beside, source)),
        }
    }
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
