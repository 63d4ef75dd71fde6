//! What to do about an error, where its message does not say it in the words of the command line.

use std::borrow::Cow;

use candle_distributed::{batch, mesh, plan, sampler, types};

use crate::error::Error;

/// What is meant by a file of numbers.
pub(crate) const NUMBERS: &str = "it is a text file of numbers, one for each sample, separated by white space";
pub(crate) const LENGTHS: &str =
    "--lengths is a text file of whole numbers, one for each sequence, separated by white space; - is standard input";
pub(crate) const JSON_LINES: &str = "each line of a .jsonl file is a JSON string, or an object whose `text` is one";
pub(crate) const RUN: &str = "candle-distributed train --out DIR makes a run in DIR; without --out it lies under runs";
pub(crate) const MODEL: &str = "a model is a .safetensors file, a model.safetensors.index.json, a folder with either, or a \
                                manifest such as {\"w\": {\"dtype\": \"F32\", \"shape\": [10, 4]}}";
pub(crate) const RULES: &str = "rules are such as {\"rules\": [{\"pattern\": \"*.bias\", \"choice\": \"replicate\"}], \"default\": {\"full\": \"dim0\"}}";
pub(crate) const PLAN: &str = "candle-distributed plan MODEL --world-size W --format json > FILE writes a plan";
pub(crate) const STATE: &str = "candle-distributed sample … --save-state FILE writes a state";

impl Error {
    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Hinted { hint, .. } => Some(Cow::Borrowed(hint)),
            Self::Types(error) | Self::Plan(plan::Error::World(error)) => world(error),
            Self::Sampler(error) => sampler(error).map(Cow::from),
            Self::Batch(error) => batch(error),
            Self::Plan(error) | Self::Model { source: error, .. } => plan(error).map(Cow::from),
            Self::Mesh(error) => mesh(error).map(Cow::from),
            _ => None,
        }
    }
}

fn world(error: &types::Error) -> Option<Cow<'static, str>> {
    match error {
        types::Error::WorldSizeOutOfRange { .. } => Some("--world-size is the number of ranks, 1 for one alone".into()),
        types::Error::RankOutOfRange { world_size, .. } => {
            Some(format!("ranks are counted from 0, the last one is {}", world_size.as_u64() - 1).into())
        }
        _ => None,
    }
}

fn sampler(error: &sampler::Error) -> Option<&'static str> {
    match error {
        sampler::Error::EmptyDataSet => Some("--len is the number of samples"),
        sampler::Error::TooLongToShuffle { .. } | sampler::Error::OutOfMemory { .. } => {
            Some("--order streaming shuffles a data set of any length and takes no memory")
        }
        sampler::Error::RankWeights { .. } => Some("--rank-weights takes a number for each rank, such as 2,1,1"),
        sampler::Error::StateMismatch { .. } => {
            Some("go on with the options that the state was written with; only --world-size and --rank may differ")
        }
        _ => None,
    }
}

fn batch(error: &batch::Error) -> Option<Cow<'static, str>> {
    match error {
        batch::Error::NoLimit => Some("give --max-tokens or --max-batch-size".into()),
        batch::Error::NoTokenBudget => Some("give --max-tokens".into()),
        batch::Error::SequenceTooLong { .. } => {
            Some("--overlong skip leaves such sequences out, --overlong truncate cuts them".into())
        }
        batch::Error::SequenceOverBudget { max_tokens, .. } => Some(
            format!("raise the limit, or leave such sequences out: --max-sequence-length {max_tokens} --overlong skip")
                .into(),
        ),
        batch::Error::CannotFillStep { .. } => {
            Some("a smaller --max-tokens or --max-batch-size makes more batches".into())
        }
        batch::Error::TooManySequences { .. } => Some("--window 1000 sorts a thousand batches' worth at a time".into()),
        _ => None,
    }
}

fn plan(error: &plan::Error) -> Option<&'static str> {
    match error {
        plan::Error::Malformed { .. } | plan::Error::NoParameters => Some(MODEL),
        plan::Error::UnknownDtype { .. } => Some("types are those of safetensors, such as F32 and BF16"),
        plan::Error::ScalarParameter { .. } => Some("--layout flat cuts parameters of any shape"),
        plan::Error::UnknownParameter { .. } => Some("with --format json the plan lists the names of all parameters"),
        _ => None,
    }
}

fn mesh(error: &mesh::Error) -> Option<&'static str> {
    match error {
        mesh::Error::Mesh(mesh::MeshError::Device { .. }) => Some(
            "--device cpu works everywhere; cuda and metal need a build with that feature, and as many devices as asked for",
        ),
        mesh::Error::Mesh(mesh::MeshError::Size { .. }) => Some("--world-size is the number of devices"),
        _ => None,
    }
}
