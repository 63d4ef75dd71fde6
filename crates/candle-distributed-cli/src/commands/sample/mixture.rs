//! `sample --mix`: several data sets, read in proportion.

use std::ops::Range;

use candle_distributed::{
    sampler::{DistributedSampler, Mixture},
    types::{Placement, Seed},
};
use serde::{Serialize, Serializer};

use super::{
    Args, FormatArg, print_rows,
    rows::{self, Rows},
};
use crate::{
    error::{Error, Result},
    output,
};

/// One data set of a mixture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    len: u64,
    weight: u64,
}

pub(super) fn parse_part(text: &str) -> Result<Part, String> {
    if let Some((len, weight)) = text.split_once(':')
        && let (Ok(len), Ok(weight)) = (len.parse(), weight.parse())
    {
        return Ok(Part { len, weight });
    }
    Err("expected a length, a colon and a weight".into())
}

/// The JSON result, which looks like that of one data set.
#[derive(Serialize)]
struct Mixed<'a> {
    format_version: u32,
    len: u64,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    #[serde(serialize_with = "indices")]
    indices: Printed<'a>,
}

/// Some samples of a mixture. They are computed as they are written and never stored.
struct Printed<'a> {
    mixture: &'a Mixture,
    /// Where each data set begins if they are one after the other.
    starts: &'a [u64],
    numbers: Range<u64>,
}

impl Printed<'_> {
    /// Returns where each sample is if the data sets are one after the other.
    fn indices(&self) -> impl Iterator<Item = u64> {
        let entries = self.numbers.clone().map(|n| entry(self.mixture, n));
        entries.map(|(source, index)| self.starts[source] + index)
    }
}

fn indices<S: Serializer>(printed: &Printed<'_>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(printed.indices())
}

pub(super) fn print(args: &Args, parts: &[Part]) -> Result<()> {
    let placement = Placement::new(args.rank, args.world_size)?;
    // Each data set has a seed of its own, so that equal lengths do not give equal orders.
    let config = |label| args.config().with_seed(Seed::new(args.seed).derive(label));
    let samplers = (0..)
        .zip(parts)
        .map(|(label, part)| DistributedSampler::new(part.len, placement, config(label)));
    let weights: Vec<u64> = parts.iter().map(|part| part.weight).collect();
    let mixture = Mixture::new(samplers.collect::<Result<_, _>>()?, &weights)?;
    let n_rows = args.count(mixture.len())?;
    let starts = starts(parts)?;
    let len = parts.iter().map(|part| part.len).sum();
    let numbers = args.start..args.start + n_rows;
    let printed = Printed { mixture: &mixture, starts: &starts, numbers };
    match args.format {
        FormatArg::Json => output::json(&Mixed {
            format_version: 1,
            len,
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: mixture.len(),
            indices: printed,
        }),
        FormatArg::Text | FormatArg::Npy => {
            let indices = printed.indices().map(|index| [index]);
            print_rows(args, len, Rows { n_rows, fill: rows::from(indices) })
        }
    }
}

/// Where each data set begins if they are one after the other.
fn starts(parts: &[Part]) -> Result<Vec<u64>> {
    let mut end = 0_u64;
    let mut starts = Vec::new();
    for part in parts {
        starts.push(end);
        end = end.checked_add(part.len).ok_or_else(|| {
            Error::usage(format!("the data sets of --mix have more than {} samples", u64::MAX))
        })?;
    }
    Ok(starts)
}

#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn entry(mixture: &Mixture, n: u64) -> (usize, u64) {
    mixture.get(n).expect("`count` ends the numbers at the length of the mixture")
}
