//! The reading order of `batch`.

use std::path::PathBuf;

use candle_distributed::{
    batch::{Sequence, SequenceLengths},
    sampler::DistributedSampler,
    types::human::Printable,
};

use crate::{
    error::{Error, Result},
    hint,
    numbers::Numbers,
};

/// The order of sequences in an epoch.
pub(super) enum ReadingOrder {
    /// All sequences, once each.
    Sampled(Box<DistributedSampler>),
    /// Sequences at the positions in a file, which may repeat some and leave others out.
    Listed { positions: Numbers<u64>, path: PathBuf },
}

impl ReadingOrder {
    /// Returns the sequences in order. Listed positions are read lazily.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub(super) fn sequences<'a>(
        &'a mut self,
        lengths: &'a [u64],
    ) -> Box<dyn Iterator<Item = Result<Sequence>> + 'a> {
        match self {
            Self::Sampled(sampler) => Box::new(sampler.iter().map(|index| {
                let length = lengths.length(index).expect("the sampler has one sample per length");
                Ok(Sequence { index, length })
            })),
            Self::Listed { positions, path } => {
                let numbered = (1_u64..).zip(positions);
                Box::new(numbered.map(|(n, position)| {
                    let index = position?;
                    if let Some(length) = lengths.length(index) {
                        return Ok(Sequence { index, length });
                    }
                    let name = Printable(path.display());
                    let count = lengths.count();
                    let message = format!(
                        "position {n} in {name} is {index}, out of range for {count} sequences"
                    );
                    Err(Error::usage(message).with_hint(hint::ORDER))
                }))
            }
        }
    }
}
