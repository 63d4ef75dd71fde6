//! The order in which `batch` reads sequences.

use std::path::PathBuf;

use candle_distributed::{
    batch::{Sequence, SequenceLengths},
    sampler::DistributedSampler,
    types::human::Printable,
};

use crate::{
    error::{Error, Result},
    hint,
    numbers::{Lengths, Numbers},
};

/// Which sequences come in which order.
pub(super) enum Order {
    /// All of them, once each.
    Drawn(Box<DistributedSampler>),
    /// Those at the positions in a file, which may repeat some and leave others out.
    Listed { positions: Numbers<u64>, path: PathBuf },
}

impl Order {
    /// The sequences in order. Listed positions are read as they are needed.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(super) fn sequences<'a>(
        &'a mut self,
        lengths: &'a Lengths,
    ) -> Box<dyn Iterator<Item = Result<Sequence>> + 'a> {
        match self {
            Self::Drawn(sampler) => Box::new(sampler.iter().map(|index| {
                let length = lengths.length(index).expect("as many samples as lengths");
                Ok(Sequence { index, length })
            })),
            Self::Listed { positions, path } => {
                let numbered = (1_u64..).zip(positions);
                Box::new(numbered.map(|(n, position)| {
                    let index = position?;
                    let length = lengths.length(index);
                    let length = length.ok_or_else(|| {
                        let name = Printable(path.display());
                        let count = lengths.count();
                        let refused = format!(
                            "position {n} in {name} is {index}, out of range for {count} sequences"
                        );
                        Error::usage(refused).hinted(hint::ORDER)
                    })?;
                    Ok(Sequence { index, length })
                }))
            }
        }
    }
}
