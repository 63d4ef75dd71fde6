//! `sample --mix`: reads several data sets in proportion to their weights.

use std::ops::Range;

use candle_distributed::{
    sampler::{DistributedSampler, Mixture},
    types::{Placement, Seed},
};
use serde::{Serialize, Serializer};

use super::{
    FormatArg, SampleArgs, print_rows,
    rows::{self, RowWriter},
};
use crate::{
    error::{Error, Result},
    output,
};

/// The length and the weight of a data set in a mixture.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataSet {
    len: u64,
    weight: u64,
}

pub(super) fn parse_data_set(text: &str) -> Result<DataSet, String> {
    if let Some((len, weight)) = text.split_once(':')
        && let (Ok(len), Ok(weight)) = (len.parse(), weight.parse())
    {
        return Ok(DataSet { len, weight });
    }
    Err("expected a length, a colon and a weight".into())
}

/// The JSON result, with the same fields as for a single data set.
#[derive(Serialize)]
struct MixtureOutput<'a> {
    format_version: u32,
    len: u64,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    #[serde(serialize_with = "serialize_indices")]
    indices: MixtureIndices<'a>,
}

/// The samples to print, computed while they are written.
struct MixtureIndices<'a> {
    mixture: &'a Mixture,
    /// First index of each data set in the concatenation.
    starts: &'a [u64],
    numbers: Range<u64>,
}

impl MixtureIndices<'_> {
    /// Returns the index of each sample in the concatenation of the data sets.
    fn indices(&self) -> impl Iterator<Item = u64> {
        let entries = self.numbers.clone().map(|n| entry(self.mixture, n));
        entries.map(|(source, index)| self.starts[source] + index)
    }
}

fn serialize_indices<S: Serializer>(
    printed: &MixtureIndices<'_>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(printed.indices())
}

pub(super) fn print(args: &SampleArgs, data_sets: &[DataSet]) -> Result<()> {
    let placement = Placement::new(args.rank, args.world_size)?;
    let mut samplers = Vec::new();
    for (label, data_set) in (0..).zip(data_sets) {
        // Data sets of equal length need different seeds, or they would have equal orders.
        let config = args.config().with_seed(Seed::new(args.seed).derive(label));
        samplers.push(DistributedSampler::new(data_set.len, placement, config)?);
    }
    let weights: Vec<u64> = data_sets.iter().map(|data_set| data_set.weight).collect();
    let mixture = Mixture::new(samplers, &weights)?;
    let n_rows = args.count(mixture.len())?;
    let starts = first_indices(data_sets)?;
    let len = data_sets.iter().map(|data_set| data_set.len).sum();
    let numbers = args.start..args.start + n_rows;
    let printed = MixtureIndices { mixture: &mixture, starts: &starts, numbers };
    match args.format {
        FormatArg::Json => output::json(&MixtureOutput {
            format_version: 1,
            len,
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: mixture.len(),
            indices: printed,
        }),
        FormatArg::Text | FormatArg::Npy => {
            let indices = printed.indices().map(|index| [index]);
            print_rows(args, len, RowWriter { n_rows, fill: rows::fill_from(indices) })
        }
    }
}

/// Returns the first index of each data set in the concatenation.
fn first_indices(data_sets: &[DataSet]) -> Result<Vec<u64>> {
    let mut end = 0_u64;
    let mut starts = Vec::new();
    for data_set in data_sets {
        starts.push(end);
        end = end.checked_add(data_set.len).ok_or_else(|| {
            Error::usage(format!("the data sets of --mix have more than {} samples", u64::MAX))
        })?;
    }
    Ok(starts)
}

#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn entry(mixture: &Mixture, n: u64) -> (usize, u64) {
    mixture.get(n).expect("`SampleArgs::count` limits the numbers to the length of the mixture")
}
