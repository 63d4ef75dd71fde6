//! Errors of commands, with their exit codes.

use std::{
    borrow::Cow,
    error::Error as _,
    fmt, io, iter,
    path::{Path, PathBuf},
};

use candle_distributed::{
    batch,
    finetune::{self, FolderError, RunError, SpecError, cost::MemoryLimit},
    mesh, plan, sampler,
    train::{self, CheckpointError},
    types::{
        self,
        human::{HumanBytes, Printable},
    },
};
use plotters::drawing::DrawingAreaErrorKind;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of a command, with advice to the user.
#[derive(Debug)]
pub(crate) struct Error {
    /// Boxed to keep every `Result` of this program small.
    pub(crate) kind: Box<ErrorKind>,
    /// Advice that is more specific than the advice for the kind.
    pub(crate) advice: Option<Cow<'static, str>>,
}

/// The cause of an error, in its own words.
type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ErrorKind {
    #[error(transparent)]
    Types(#[from] types::Error),
    #[error(transparent)]
    Sampler(#[from] sampler::Error),
    #[error(transparent)]
    Batch(#[from] batch::Error),
    #[error(transparent)]
    Plan(#[from] plan::Error),
    #[error(transparent)]
    Mesh(#[from] mesh::Error),
    /// An error of training other than mesh and plan errors.
    #[error(transparent)]
    Training(train::Error),
    #[error("{}", option_message(.0))]
    Finetune(finetune::Error),
    /// An invalid argument or input that only this program checks.
    #[error("{0}")]
    Usage(String),
    /// A process started by `launch` failed.
    #[error("rank {rank} {how}")]
    Rank { rank: usize, how: String, code: u8 },
    /// A file cannot be read, or does not hold what it should.
    #[error("{message}")]
    Read { message: String, source: Cause },
    #[error("{path} does not describe a model", path = Printable(path.display()))]
    Model { path: PathBuf, source: plan::Error },
    /// The user or a scheduler asked the program to stop.
    #[error("stopped after {done} of {steps} steps")]
    Stopped { done: u64, steps: u64 },
    /// The error of another process, reported by the first process.
    #[error("rank 0 reports the cause")]
    ReportedByFirst {
        exit_code: u8,
        /// Whether every process ends with this error after the same step.
        ends_all_processes: bool,
    },
    /// The run needs more memory than this process may use.
    #[error(
        "this process would take up to {}, but {} limits it to {}",
        HumanBytes((*needed).into()),
        limit.source,
        HumanBytes(limit.share().into())
    )]
    Memory { needed: u64, limit: MemoryLimit },
    /// The system refuses to write, or to start processes.
    #[error("{message}")]
    System { message: String, source: Cause },
    #[error("the computation failed: {}", mesh::one_line(.0))]
    Tensor(#[from] candle_core::Error),
}

/// The exit code for bad arguments or input.
pub(crate) const BAD_INPUT: u8 = 2;

/// The exit code for any other failure.
pub(crate) const FAILURE: u8 = 1;

/// The exit code of a run stopped by a signal, as shells report Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

impl<E> From<E> for Error
where
    ErrorKind: From<E>,
{
    fn from(error: E) -> Self {
        Self { kind: Box::new(error.into()), advice: None }
    }
}

impl Error {
    /// Returns an error for an invalid argument or input.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        ErrorKind::Usage(message.into()).into()
    }

    /// Returns an error for an unreadable file or folder.
    pub(crate) fn read(path: impl AsRef<Path>, source: io::Error) -> Self {
        let message = format!("cannot read {}", Printable(path.as_ref().display()));
        ErrorKind::Read { message, source: source.into() }.into()
    }

    /// Returns an error for a file or folder that cannot be written.
    pub(crate) fn write(path: impl AsRef<Path>, source: io::Error) -> Self {
        let message = format!("cannot write {}", Printable(path.as_ref().display()));
        ErrorKind::System { message, source: source.into() }.into()
    }

    /// Returns an error for a JSON file that does not hold `what`.
    pub(crate) fn json(
        path: impl AsRef<Path>,
        what: &'static str,
        source: serde_json::Error,
    ) -> Self {
        let message = format!("{} does not hold {what}", Printable(path.as_ref().display()));
        ErrorKind::Read { message, source: source.into() }.into()
    }

    /// Adds the path of the model to an error of the planner. Other errors stay the same.
    pub(crate) fn in_model(self, path: &Path) -> Self {
        let kind = match *self.kind {
            ErrorKind::Plan(source) => ErrorKind::Model { path: path.into(), source },
            kind => kind,
        };
        Self { kind: Box::new(kind), advice: self.advice }
    }

    /// Adds a hint, which replaces the hint for the kind of error.
    pub(crate) fn with_hint(self, advice: impl Into<Cow<'static, str>>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    /// Returns this error in the first process. The other processes get an error with the same exit code
    /// that is not printed.
    pub(crate) fn on_first(self, is_first: bool) -> Self {
        if is_first {
            return self;
        }
        let (exit_code, ends_all_processes) = (self.exit_code(), self.ends_all_processes());
        ErrorKind::ReportedByFirst { exit_code, ends_all_processes }.into()
    }

    /// Returns true if every process of a run ends with this error after the same step.
    pub(crate) fn ends_all_processes(&self) -> bool {
        matches!(
            *self.kind,
            ErrorKind::Stopped { .. }
                | ErrorKind::Finetune(finetune::Error::Run(RunError::Diverged { .. }))
                | ErrorKind::ReportedByFirst { ends_all_processes: true, .. }
        )
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match &*self.kind {
            ErrorKind::Stopped { .. } => INTERRUPTED,
            ErrorKind::ReportedByFirst { exit_code, .. } => *exit_code,
            ErrorKind::Mesh(error) if is_bad_input(error) => BAD_INPUT,
            ErrorKind::Training(error) if is_bad_setting_or_file(error) => BAD_INPUT,
            ErrorKind::Mesh(_)
            | ErrorKind::Training(_)
            | ErrorKind::System { .. }
            | ErrorKind::Finetune(
                finetune::Error::Write { .. } | finetune::Error::Run(RunError::Diverged { .. }),
            )
            | ErrorKind::Tensor(_) => FAILURE,
            ErrorKind::Types(_)
            | ErrorKind::Sampler(_)
            | ErrorKind::Batch(_)
            | ErrorKind::Plan(_)
            | ErrorKind::Finetune(_)
            | ErrorKind::Usage(_)
            | ErrorKind::Memory { .. }
            | ErrorKind::Read { .. }
            | ErrorKind::Model { .. } => BAD_INPUT,
            ErrorKind::Rank { code, .. } => *code,
        }
    }

    /// Returns the message and the messages of all causes in one line. candle's own messages may have
    /// backtraces, so the messages of other errors include them.
    pub(crate) fn chain(&self) -> String {
        let causes = iter::successors(self.kind.source(), |&cause| cause.source())
            .take_while(|cause| !cause.is::<candle_core::Error>());
        causes.fold(self.to_string(), |chain, cause| format!("{chain}: {cause}"))
    }
}

impl ErrorKind {
    /// Returns the error of `launch` if it cannot start or watch a process.
    pub(crate) fn launcher(source: io::Error) -> Self {
        Self::System { message: "cannot run the processes".into(), source: source.into() }
    }
}

impl From<types::LaunchError> for ErrorKind {
    fn from(error: types::LaunchError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<io::Error> for ErrorKind {
    /// Returns the error of a write to standard output.
    fn from(source: io::Error) -> Self {
        Self::System { message: "cannot write to standard output".into(), source: source.into() }
    }
}

impl From<DrawingAreaErrorKind<io::Error>> for ErrorKind {
    fn from(source: DrawingAreaErrorKind<io::Error>) -> Self {
        Self::System { message: "cannot draw the chart".into(), source: source.into() }
    }
}

impl From<train::Error> for ErrorKind {
    fn from(error: train::Error) -> Self {
        match error {
            train::Error::Mesh(error) => Self::Mesh(error),
            train::Error::Plan(error) => Self::Plan(error),
            error => Self::Training(error),
        }
    }
}

impl From<finetune::Error> for ErrorKind {
    fn from(error: finetune::Error) -> Self {
        use finetune::Error::{Batch, Plan, Sampler, Tensor, Train, Types};

        match error {
            Types(error) => Self::Types(error),
            Sampler(error) => Self::Sampler(error),
            Batch(error) => Self::Batch(error),
            Plan(error) => Self::Plan(error),
            Train(error) => (*error).into(),
            Tensor(error) => Self::Tensor(error),
            error => Self::Finetune(error),
        }
    }
}

impl From<FolderError> for ErrorKind {
    fn from(error: FolderError) -> Self {
        finetune::Error::from(error).into()
    }
}

impl From<CheckpointError> for ErrorKind {
    fn from(error: CheckpointError) -> Self {
        train::Error::from(error).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

/// Returns the message of an error. It names settings by their options.
fn option_message(error: &finetune::Error) -> String {
    let finetune::Error::Spec(error) = error else { return error.to_string() };
    match error {
        SpecError::Setting { name, value, expected } => {
            format!("--{} is {value}, must be {expected}", name.replace('_', "-"))
        }
        SpecError::ResumeMismatch { name, started } => {
            let option = format!("--{}", name.replace('_', "-"));
            let started = match started.as_deref() {
                Some("") => format!("with {option}"),
                Some(value) => format!("with {option} {value}"),
                None => format!("without {option}"),
            };
            format!("the run started {started}, and can only be resumed with the same")
        }
        SpecError::NoData => "--model needs --data, the training texts".into(),
        error => error.to_string(),
    }
}

/// Returns true if the requested mesh is impossible on this or any machine.
fn is_bad_input(error: &mesh::Error) -> bool {
    use mesh::MeshError::{Axes, Device, Size};

    matches!(error, mesh::Error::Mesh(Device { .. } | Axes { .. } | Size { .. }))
}

/// Returns true if an argument or the content of a checkpoint is at fault. I/O errors are not bad
/// input.
fn is_bad_setting_or_file(error: &train::Error) -> bool {
    match error {
        train::Error::Checkpoint(fault) => {
            use CheckpointError::{Io, Lost, NotFinite};

            !matches!(fault, Io { .. } | Lost { .. } | NotFinite { .. })
        }
        // The program defines the model, so a mismatch means a checkpoint of another model.
        train::Error::Parameter(_) | train::Error::Init { .. } | train::Error::Setting { .. } => {
            true
        }
        _ => false,
    }
}

/// Results that take advice for their error.
pub(crate) trait WithHint {
    /// Adds the hint to the error, if there is one.
    fn with_hint(self, hint: &'static str) -> Self;
}

impl<T> WithHint for Result<T> {
    fn with_hint(self, hint: &'static str) -> Self {
        self.map_err(|error| error.with_hint(hint))
    }
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn messages_have_no_backtrace() {
        let cause = || candle_core::Error::WithBacktrace {
            inner: Box::new(candle_core::Error::Msg("no data".into())),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        for error in [Error::from(cause()), finetune::Error::from(cause()).into()] {
            assert_eq!(error.chain(), "the computation failed: no data");
        }
    }
}
