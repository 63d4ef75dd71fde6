//! Tables of the padding that the batcher leaves on realistic lengths. A bench prints them, and a
//! test compares them with snapshots.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be made is a failed test")]
#![allow(clippy::missing_panics_doc, reason = "a figure that cannot be made is a failed test")]

use std::collections::BTreeMap;

use candle_distributed::{
    batch::{
        Batch, BatchConfig, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
        DynamicBatchSampler, DynamicBatchStrategy, Overlong, Packing, PaddingReport, StepLayout,
        support::balance,
    },
    sampler::{DistributedSampler, Order, SamplerConfig},
    types::{Epoch, Placement, WorldSize},
};

use crate::lengths::{self, Recipe};

/// Number of sequences behind most figures.
pub const N: u64 = 20_000;

/// Returns the report of batches within a budget of padded tokens.
#[must_use]
pub fn report(lengths: &[u32], strategy: DynamicBatchStrategy, max_tokens: u64) -> PaddingReport {
    let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(max_tokens);
    let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
    let mut batches = sampler.iter();
    batches.by_ref().for_each(|batch| assert!(batch.unwrap().padded_tokens() <= max_tokens));
    *batches.report()
}

/// Returns the strategy that sorts all lengths, or windows of them.
#[must_use]
pub fn sorted(window: Option<u64>, cut: Cut) -> DynamicBatchStrategy {
    DynamicBatchStrategy::Sorted { window, cut }
}

/// Returns the minimum number of batches: the longest sequence left decides how many fit into one.
#[must_use]
pub fn fewest_batches(lengths: &[u32], max_tokens: u64) -> u64 {
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable();
    let mut n_batches = 0;
    while let Some(&longest) = sorted.last() {
        let size = usize::try_from(max_tokens / u64::from(longest)).unwrap();
        sorted.truncate(sorted.len().saturating_sub(size));
        n_batches += 1;
    }
    n_batches
}

/// Returns the share of pairs of sequences that share a batch again in the next epoch, in shuffled
/// orders cut by windows.
#[must_use]
pub fn repeated_pair_share(lengths: &[u32], window: u64, max_tokens: u64) -> f64 {
    let config = BatchConfig::default()
        .with_strategy(sorted(Some(window), Cut::Greedy))
        .with_max_tokens(max_tokens);
    let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
    let batches = |epoch| {
        let order =
            SamplerConfig::default().with_order(Order::Streaming).with_epoch(Epoch::new(epoch));
        let order =
            DistributedSampler::new(lengths.len() as u64, Placement::SINGLE, order).unwrap();
        sampler.iter_order(&order).map(|batch| batch.unwrap().indices).collect::<Vec<_>>()
    };
    let mut batch_of = vec![0_usize; lengths.len()];
    for (nth, batch) in batches(0).iter().enumerate() {
        for &index in batch {
            batch_of[usize::try_from(index).unwrap()] = nth;
        }
    }
    let mut n_repeated = 0;
    let mut n_pairs = 0;
    for batch in batches(1) {
        let mut n_from_batch = BTreeMap::<usize, u64>::new();
        for &index in &batch {
            *n_from_batch.entry(batch_of[usize::try_from(index).unwrap()]).or_default() += 1;
        }
        n_repeated += n_from_batch.values().map(|n| n * (n - 1)).sum::<u64>();
        n_pairs += batch.len() as u64 * (batch.len() as u64 - 1);
    }
    n_repeated as f64 / n_pairs as f64
}

/// Returns the share of real tokens if each sequence is padded to the boundary above it.
#[must_use]
pub fn bucket_efficiency(buckets: &Buckets, lengths: &[u32]) -> f64 {
    let Buckets::Boundaries(boundaries) = buckets else { panic!("no boundaries: {buckets:?}") };
    let mut real_tokens = 0;
    let mut padded_tokens = 0;
    for &length in lengths {
        let length = u64::from(length);
        real_tokens += length;
        padded_tokens += boundaries[boundaries.partition_point(|&boundary| boundary < length)];
    }
    real_tokens as f64 / padded_tokens as f64
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "boundaries are small positive numbers"
)]
/// Returns `n` boundaries by common rules: quantiles, an equal number of tokens in each bucket
/// (Lhotse), and a constant ratio between boundaries (a finer form of `TensorFlow`'s powers of
/// two).
#[must_use]
pub fn common_rules(lengths: &[u32], n: u32) -> [(&'static str, Buckets); 3] {
    let mut sorted: Vec<u64> = lengths.iter().map(|&length| length.into()).collect();
    sorted.sort_unstable();
    let shortest = sorted[0];
    let longest = sorted[sorted.len() - 1];
    let total: u64 = sorted.iter().sum();
    let mut n_shorter = 0;
    let mut quantiles = Vec::new();
    for run in sorted.chunk_by(|length, next| length == next) {
        n_shorter += run.len();
        if n_shorter * n as usize / sorted.len() > quantiles.len() {
            quantiles.push(run[0]);
        }
    }
    let mut tokens = 0;
    let mut equal_tokens = Vec::new();
    for &length in &sorted {
        tokens += length;
        if tokens * u64::from(n) / total > equal_tokens.len() as u64 {
            equal_tokens.push(length);
        }
    }
    equal_tokens.push(longest);
    let ratio = (longest as f64 / shortest as f64).powf(1.0 / f64::from(n));
    let steps = (1..=n).map(|nth| (shortest as f64 * ratio.powf(nth.into())).ceil() as u64);
    let mut equal_ratio: Vec<u64> =
        steps.map(|boundary| boundary.min(longest)).chain([longest]).collect();
    for boundaries in [&mut equal_tokens, &mut equal_ratio] {
        boundaries.dedup();
    }
    [
        ("quantiles", Buckets::Boundaries(quantiles)),
        ("equal tokens", Buckets::Boundaries(equal_tokens)),
        ("equal ratio", Buckets::Boundaries(equal_ratio)),
    ]
}

/// Row lengths for packing each of [`lengths::ALL`].
pub const ROW_LENGTHS: [&[u64]; 8] = [
    &[8192, 32_769],
    &[512, 608, 1024, 4097],
    &[2560, 4096, 16_385],
    &[2449, 4096, 16_385],
    &[32_768, 131_073],
    &[2048, 8193],
    &[512, 2049],
    &[512, 2049],
];

/// Returns the number of rows after packing; longer sequences are cut to the length of a row.
#[must_use]
pub fn rows(lengths: &[u32], row_length: u64, packing: Packing) -> u64 {
    let config = BatchConfig::default()
        .with_strategy(DynamicBatchStrategy::Pack(packing))
        .with_max_tokens(row_length);
    let config = config.with_max_sequence_length(row_length).with_overlong(Overlong::Truncate);
    DynamicBatchSampler::new(lengths, config).unwrap().iter().count() as u64
}

/// Returns a lower bound on the number of rows: L2 of Martello and Toth ("Lower bounds and
/// reduction procedures for the bin packing problem", 1990).
#[must_use]
pub fn fewest_rows(lengths: &[u32], row_length: u64) -> u64 {
    let mut counts = BTreeMap::<u64, u64>::new();
    for &length in lengths {
        *counts.entry(u64::from(length).min(row_length)).or_default() += 1;
    }
    let sum = |from: u64, to: u64, weight: fn(u64) -> u64| -> u64 {
        if from > to {
            0
        } else {
            counts.range(from..=to).map(|(&length, count)| count * weight(length)).sum()
        }
    };
    let half = row_length / 2;
    let mut n_rows = sum(0, row_length, |length| length).div_ceil(row_length);
    for (&shortest, _) in counts.range(..=half) {
        let n_large = sum(row_length - shortest + 1, row_length, |_| 1);
        let n_medium = sum(half + 1, row_length - shortest, |_| 1);
        let free = n_medium * row_length - sum(half + 1, row_length - shortest, |length| length);
        let small = sum(shortest, half, |length| length);
        n_rows = n_rows.max(n_large + n_medium + small.saturating_sub(free).div_ceil(row_length));
    }
    n_rows
}

/// Time that ranks lose by waiting for the slowest one, relative to their work: the largest cost in
/// each step, summed over all steps, divided by the sum of the mean costs, minus 1.
#[derive(Clone, Copy, Debug)]
pub struct RankWaiting {
    /// Number of steps.
    pub n_steps: usize,
    /// Time lost if the cost is the number of padded tokens.
    pub tokens: f64,
    /// Time lost if the cost is the number of pairs of tokens within sequences, as in attention
    /// without padding.
    pub attention: f64,
    /// Share of real tokens.
    pub efficiency: f64,
}

/// Plans the steps of 8 ranks and returns the time lost by waiting.
#[must_use]
pub fn waiting(lengths: &[u32], layout: StepLayout, cost: Cost, max_tokens: u64) -> RankWaiting {
    let config = BatchConfig::default()
        .with_strategy(sorted(None, Cut::Optimal))
        .with_max_tokens(max_tokens);
    let batches = DynamicBatchSampler::new(lengths, config).unwrap();
    let config = DistributedConfig { layout, cost, ..DistributedConfig::default() };
    let sampler =
        DistributedBatchSampler::new(batches, Placement::new(0, 8).unwrap(), config).unwrap();
    let steps = sampler.epoch(Epoch::ZERO, 0..lengths.len() as u64).unwrap();
    let mut tokens = (0, 0);
    let mut attention = (0, 0);
    let mut seen = 0;
    for nth in 0..steps.len() {
        let batches = steps.all_ranks(nth).unwrap().concat();
        seen += batches.iter().map(Batch::len).sum::<usize>();
        assert!(
            batches.iter().all(|batch| batch.padded_tokens() <= max_tokens && !batch.is_empty())
        );
        let pairs: Vec<u64> = batches.iter().map(|batch| n_token_pairs(batch, lengths)).collect();
        add_step(&mut attention, &pairs);
        add_step(&mut tokens, &batches.iter().map(Batch::padded_tokens).collect::<Vec<_>>());
    }
    assert_eq!(seen, lengths.len());
    let [tokens, attention] =
        [tokens, attention].map(|(slowest, all)| slowest as f64 / all as f64 - 1.0);
    RankWaiting { n_steps: steps.len(), tokens, attention, efficiency: steps.report().efficiency() }
}

/// Returns the number of pairs of tokens within the sequences of a batch.
fn n_token_pairs(batch: &Batch, lengths: &[u32]) -> u64 {
    let mut n_pairs = 0;
    for &index in &batch.indices {
        n_pairs += u64::from(lengths[usize::try_from(index).unwrap()]).pow(2);
    }
    n_pairs
}

fn add_step((slowest, all): &mut (u64, u64), costs: &[u64]) {
    *slowest += costs.iter().max().unwrap() * costs.len() as u64;
    *all += costs.iter().sum::<u64>();
}

/// Returns the worst excess over the mean of the largest of 8 balanced parts of 512 sequences.
#[must_use]
pub fn imbalance(lengths: &[u32]) -> f64 {
    let world_size = WorldSize::new(8).unwrap();
    let mut worst = 0.0_f64;
    for batch in lengths.chunks_exact(512) {
        let costs: Vec<u64> = batch.iter().map(|&length| length.into()).collect();
        let sums = balance(&costs, world_size)
            .into_iter()
            .map(|part| part.into_iter().map(|i| costs[i]).sum::<u64>());
        let largest = sums.max().unwrap();
        worst = worst.max(largest as f64 * 8.0 / costs.iter().sum::<u64>() as f64 - 1.0);
    }
    worst
}

/// A name, a distribution of lengths, and its budget of padded tokens.
type LengthSet = (&'static str, &'static Recipe, u64);

/// Returns all tables by name, with `n_stream` sequences in each stream that is cut by windows.
#[must_use]
pub fn tables(n_stream: u64) -> [(&'static str, String); 5] {
    [
        (
            "sorted",
            table("lengths    fewest  batches  greedy  optimal", lengths::ALL.map(sorted_row)),
        ),
        (
            "window",
            table(
                "lengths   128: efficiency, more batches; 256",
                lengths::ALL.map(|set| window_row(set, n_stream)),
            ),
        ),
        (
            "buckets",
            table(
                "lengths   optimal  quantiles  equal tokens  equal ratio",
                lengths::ALL.map(bucket_row),
            ),
        ),
        (
            "packing",
            table("lengths      row fewest  best fit  minimum slack  in order", packing_rows()),
        ),
        (
            "ranks",
            table(
                "lengths     tokens  attention   dealt  its steps, efficiency  512 in 8",
                lengths::ALL.map(rank_row),
            ),
        ),
    ]
}

fn table(head: &str, rows: impl IntoIterator<Item = String>) -> String {
    let rows: Vec<String> = rows.into_iter().collect();
    format!("{head}\n{}", rows.join("\n"))
}

fn sorted_row((name, recipe, budget): LengthSet) -> String {
    let lengths = recipe.draw(N);
    let fewest = fewest_batches(&lengths, budget);
    let [greedy, optimal] =
        [Cut::Greedy, Cut::Optimal].map(|cut| report(&lengths, sorted(None, cut), budget));
    format!(
        "{name:9} {fewest:7} {:8} {:7.4} {:8.4}",
        optimal.batches,
        greedy.efficiency(),
        optimal.efficiency()
    )
}

fn window_row((name, recipe, budget): LengthSet, n_stream: u64) -> String {
    let stream = recipe.draw(n_stream);
    let fewest = fewest_batches(&stream, budget) as f64;
    let [small, large] = [128, 256].map(|window| {
        let report = report(&stream, sorted(Some(window), Cut::Greedy), budget);
        let excess = report.batches as f64 / fewest - 1.0;
        format!("{:7.4} {:6.2}%", report.efficiency(), 100.0 * excess)
    });
    format!("{name:9} {small}  {large}")
}

fn bucket_row((name, recipe, _): LengthSet) -> String {
    let lengths = recipe.draw(N);
    let optimal = bucket_efficiency(&Buckets::optimal(&lengths, 32).unwrap(), &lengths);
    let others = common_rules(&lengths, 32)
        .map(|(_, rule)| format!("{:.4}", bucket_efficiency(&rule, &lengths)));
    format!("{name:9} {optimal:7.4} {:>10} {:>13} {:>12}", others[0], others[1], others[2])
}

fn packing_rows() -> Vec<String> {
    let mut lines = Vec::new();
    for ((name, recipe, _), row_lengths) in lengths::ALL.into_iter().zip(ROW_LENGTHS) {
        let lengths = recipe.draw(N);
        for &row_length in row_lengths {
            let fewest = fewest_rows(&lengths, row_length);
            let [best_fit, slack, in_order] =
                [Packing::BestFit, Packing::MinimumSlack, Packing::InOrder { open_rows: 64 }]
                    .map(|packing| rows(&lengths, row_length, packing) - fewest);
            lines.push(format!(
                "{name:9} {row_length:6} {fewest:6} {best_fit:9} {slack:14} {in_order:9}"
            ));
        }
    }
    lines
}

fn rank_row((name, recipe, budget): LengthSet) -> String {
    let lengths = recipe.draw(N);
    let tokens = waiting(&lengths, StepLayout::Grouped, Cost::TOKENS, budget);
    let attention = waiting(&lengths, StepLayout::Grouped, Cost::ATTENTION, budget);
    let dealt = waiting(&lengths, StepLayout::Dealt, Cost::ATTENTION, budget);
    let percent = |share: f64| format!("{:.3}%", 100.0 * share);
    format!(
        "{name:9} {:>8} {:>10} {:>7} {:>10} {:>7.4} {:>10}",
        percent(tokens.tokens),
        percent(attention.attention),
        percent(dealt.attention),
        format!("{}/{}", dealt.n_steps, attention.n_steps),
        dealt.efficiency,
        percent(imbalance(&lengths)),
    )
}
