//! What a command can fail with, and whose fault it is.

use std::{error::Error as _, io, path::PathBuf};

use candle_distributed::{batch, mesh, plan, sampler, types};
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
    /// A value that only this command refuses.
    #[error("{0}")]
    Usage(String),
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} does not describe a model")]
    Model { path: PathBuf, source: plan::Error },
    #[error("{path} does not hold a plan")]
    StoredPlan { path: PathBuf, source: serde_json::Error },
    #[error("{path} does not hold rules")]
    Rules { path: PathBuf, source: serde_json::Error },
    #[error("{path} does not hold the state of a sampler")]
    State { path: PathBuf, source: serde_json::Error },
    #[error("{path} does not hold the settings of a run")]
    Settings { path: PathBuf, source: serde_json::Error },
    /// Somebody asked the program to end.
    #[error("stopped after {done} of {steps} steps; to go on: candle-distributed train --out {} --resume", path.display())]
    Stopped { done: u64, steps: u64, path: PathBuf },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot write the result")]
    Output(#[from] io::Error),
    #[error("cannot draw the chart")]
    Chart(#[from] DrawingAreaErrorKind<io::Error>),
    #[error("training failed")]
    Train(#[from] candle_core::Error),
}

impl Error {
    /// 2 if other arguments or another input would help, 1 if the machine or the program is at fault, 130 as shells have it
    /// for what was interrupted.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Mesh(mesh::Error::MeshSize { .. } | mesh::Error::Device { .. }) => 2,
            Self::Stopped { .. } => 130,
            Self::Mesh(_) | Self::Write { .. } | Self::Output(_) | Self::Chart(_) | Self::Train(_) => 1,
            _ => 2,
        }
    }

    /// The message and those of its causes, in one line.
    pub(crate) fn chain(&self) -> String {
        let causes = std::iter::successors(self.source(), |&cause| cause.source());
        causes.fold(self.to_string(), |chain, cause| format!("{chain}: {cause}"))
    }
}
