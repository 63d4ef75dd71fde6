//! `sample --mix`: several data sets, read in proportion.

use std::ops::Range;

use candle_distributed::{
    sampler::{DistributedSampler, Mixture},
    types::{Placement, Seed},
};
use serde::{Serialize, Serializer};

use super::Args;
use crate::{
    error::Result,
    output::{self, Format},
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

/// The JSON result of `--mix`; an entry is a data set and one of its samples.
#[derive(Serialize)]
struct Mixed<'a> {
    format_version: u32,
    world_size: u64,
    rank: u64,
    per_rank_len: u64,
    entries: Entries<'a>,
}

/// The entries to print. They are computed as they are written and never stored.
struct Entries<'a> {
    mixture: &'a Mixture,
    numbers: Range<u64>,
}

impl Entries<'_> {
    fn iter(&self) -> impl Iterator<Item = (usize, u64)> {
        self.numbers.clone().map(|n| entry(self.mixture, n))
    }
}

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
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
    let numbers = args.start..args.start + args.count(mixture.len())?;
    let entries = Entries { mixture: &mixture, numbers };
    match args.format {
        Format::Text => output::text(|out| {
            entries.iter().try_for_each(|(source, index)| writeln!(out, "{source} {index}"))
        }),
        Format::Json => output::json(&Mixed {
            format_version: 1,
            world_size: args.world_size,
            rank: args.rank,
            per_rank_len: mixture.len(),
            entries,
        }),
    }
}

#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn entry(mixture: &Mixture, n: u64) -> (usize, u64) {
    mixture.get(n).expect("`count` ends the numbers at the length of the mixture")
}
