//! What a command can fail with, and whose fault it is.

use std::{borrow::Cow, error::Error as _, io, path::PathBuf};

use candle_distributed::{batch, mesh, plan, sampler, train, types};
use plotters::drawing::DrawingAreaErrorKind;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
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
    /// What training refuses beyond what its mesh and its plan do.
    #[error(transparent)]
    Training(train::Error),
    /// An error, and what to do about it as the place knows that met it.
    #[error("{error}")]
    Hinted { error: Box<Error>, hint: Cow<'static, str> },
    /// A value that only this command refuses.
    #[error("{0}")]
    Usage(String),
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} does not describe a model")]
    Model { path: PathBuf, source: plan::Error },
    #[error("{path} does not hold {what}")]
    Json { path: PathBuf, what: &'static str, source: serde_json::Error },
    /// Somebody asked the program to end.
    #[error("stopped after {done} of {steps} steps")]
    Stopped { done: u64, steps: u64 },
    /// The first process of several says it for all.
    #[error("stopped with the first process")]
    StoppedToo,
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot write to standard output")]
    Output(#[from] io::Error),
    #[error("cannot draw the chart")]
    Chart(#[from] DrawingAreaErrorKind<io::Error>),
    #[error("the computation failed")]
    Train(#[from] candle_core::Error),
}

/// The exit code if other arguments or another input would help.
pub(crate) const BAD_INPUT: u8 = 2;

/// The exit code if the machine or the program is at fault.
const FAILURE: u8 = 1;

/// The exit code that shells give to what was interrupted.
pub(crate) const INTERRUPTED: u8 = 130;

impl Error {
    /// The same, with what to do about it.
    pub(crate) fn hinted(self, hint: impl Into<Cow<'static, str>>) -> Self {
        Self::Hinted { error: self.into(), hint: hint.into() }
    }

    /// Whether all processes of a run end with it, after the same step.
    pub(crate) fn is_of_all(&self) -> bool {
        match self {
            Self::Hinted { error, .. } => error.is_of_all(),
            error => matches!(error, Self::Stopped { .. } | Self::StoppedToo),
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Hinted { error, .. } => error.exit_code(),
            Self::Stopped { .. } | Self::StoppedToo => INTERRUPTED,
            Self::Mesh(error) if is_bad_input(error) => BAD_INPUT,
            Self::Mesh(_)
            | Self::Training(_)
            | Self::Write { .. }
            | Self::Output(_)
            | Self::Chart(_)
            | Self::Train(_) => FAILURE,
            _ => BAD_INPUT,
        }
    }

    /// The message and those of its causes, in one line.
    pub(crate) fn chain(&self) -> String {
        if let Self::Hinted { error, .. } = self {
            return error.chain();
        }
        let causes = std::iter::successors(self.source(), |&cause| cause.source());
        causes.fold(self.to_string(), |chain, cause| format!("{chain}: {cause}"))
    }
}

impl From<train::Error> for Error {
    fn from(error: train::Error) -> Self {
        match error {
            train::Error::Mesh(error) => Self::Mesh(error),
            train::Error::Plan(error) => Self::Plan(error),
            error => Self::Training(error),
        }
    }
}

/// Whether a mesh was asked for that cannot be.
fn is_bad_input(error: &mesh::Error) -> bool {
    use mesh::MeshError::{AxisCount, Device, DuplicateAxis, Size};

    matches!(
        error,
        mesh::Error::Mesh(Device { .. } | DuplicateAxis { .. } | AxisCount { .. } | Size { .. })
    )
}

/// Adds what to do about an error.
pub(crate) trait WithHint {
    /// The same, with `hint` if it is an error.
    fn with_hint(self, hint: &'static str) -> Self;
}

impl<T> WithHint for Result<T> {
    fn with_hint(self, hint: &'static str) -> Self {
        self.map_err(|error| error.hinted(hint))
    }
}
