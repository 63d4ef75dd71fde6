//! How little padding the batcher leaves on lengths that look real, as tables: printed by a bench, checked by a test.

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

/// The lengths that most figures are about.
pub const N: u64 = 20_000;

/// Batches within a budget of padded tokens.
#[must_use]
pub fn report(lengths: &[u32], strategy: DynamicBatchStrategy, max_tokens: u64) -> PaddingReport {
    let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(max_tokens);
    let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
    let mut batches = sampler.iter();
    batches.by_ref().for_each(|batch| assert!(batch.unwrap().padded_tokens() <= max_tokens));
    *batches.report()
}

/// Batches of all lengths sorted, or of windows of them.
#[must_use]
pub fn sorted(window: Option<u64>, cut: Cut) -> DynamicBatchStrategy {
    DynamicBatchStrategy::Sorted { window, cut }
}

/// The fewest batches there can be: the longest sequence that is left decides how many fit.
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

/// Pairs of sequences that share a batch in one epoch and again in the next, as a share of all pairs, in shuffled
/// orders cut by windows.
#[must_use]
pub fn pairs_met_again(lengths: &[u32], window: u64, max_tokens: u64) -> f64 {
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
    let (mut met_again, mut n_pairs) = (0, 0);
    for batch in batches(1) {
        let mut from = BTreeMap::<usize, u64>::new();
        for &index in &batch {
            *from.entry(batch_of[usize::try_from(index).unwrap()]).or_default() += 1;
        }
        met_again += from.values().map(|n| n * (n - 1)).sum::<u64>();
        n_pairs += batch.len() as u64 * (batch.len() as u64 - 1);
    }
    met_again as f64 / n_pairs as f64
}

/// The share of real tokens if each sequence is padded to the boundary above it.
#[must_use]
pub fn efficiency_of(buckets: &Buckets, lengths: &[u32]) -> f64 {
    let Buckets::Boundaries(boundaries) = buckets else { panic!("no boundaries: {buckets:?}") };
    let padded = |&length: &u32| {
        boundaries[boundaries.partition_point(|&boundary| boundary < u64::from(length))]
    };
    let real: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    real as f64 / lengths.iter().map(padded).sum::<u64>() as f64
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "boundaries are small positive numbers"
)]
/// Other people's rules for `n` boundaries: an equal number of tokens in each bucket (Lhotse's), and a constant ratio
/// between boundaries (the powers of two of `TensorFlow` and others, drawn closer).
#[must_use]
pub fn other_rules(lengths: &[u32], n: u32) -> [(&'static str, Buckets); 3] {
    let mut sorted: Vec<u64> = lengths.iter().map(|&length| length.into()).collect();
    sorted.sort_unstable();
    let (shortest, longest) = (sorted[0], sorted[sorted.len() - 1]);
    let total: u64 = sorted.iter().sum();
    let (mut tokens, mut of_tokens) = (0, Vec::new());
    for &length in &sorted {
        tokens += length;
        if tokens * u64::from(n) / total > of_tokens.len() as u64 {
            of_tokens.push(length);
        }
    }
    of_tokens.push(longest);
    let ratio = (longest as f64 / shortest as f64).powf(1.0 / f64::from(n));
    let steps = (1..=n).map(|nth| (shortest as f64 * ratio.powf(nth.into())).ceil() as u64);
    let mut of_ratio: Vec<u64> =
        steps.map(|boundary| boundary.min(longest)).chain([longest]).collect();
    for boundaries in [&mut of_tokens, &mut of_ratio] {
        boundaries.dedup();
    }
    [
        ("quantiles", Buckets::quantiles(lengths, n.into()).unwrap()),
        ("equal tokens", Buckets::Boundaries(of_tokens)),
        ("equal ratio", Buckets::Boundaries(of_ratio)),
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

/// The rows that sequences, cut to the length of a row, are packed into.
#[must_use]
pub fn rows(lengths: &[u32], row_length: u64, packing: Packing) -> u64 {
    let config = BatchConfig::default()
        .with_strategy(DynamicBatchStrategy::Pack(packing))
        .with_max_tokens(row_length);
    let config = config.with_max_sequence_length(row_length).with_overlong(Overlong::Truncate);
    DynamicBatchSampler::new(lengths, config).unwrap().iter().count() as u64
}

/// A number of rows below which no packing can come: the bound L2 of Martello and Toth ("Lower bounds and reduction
/// procedures for the bin packing problem", 1990).
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
    let bound = |shortest: u64| {
        let n_large = sum(row_length - shortest + 1, row_length, |_| 1);
        let n_medium = sum(half + 1, row_length - shortest, |_| 1);
        let room = n_medium * row_length - sum(half + 1, row_length - shortest, |length| length);
        let small = sum(shortest, half, |length| length);
        n_large + n_medium + small.saturating_sub(room).div_ceil(row_length)
    };
    let of_tokens = sum(0, row_length, |length| length).div_ceil(row_length);
    counts.range(..=half).map(|(&shortest, _)| bound(shortest)).fold(of_tokens, u64::max)
}

/// What ranks lose by waiting for the slowest one: the most a rank does in each step, over all, by what they do on
/// average, less 1; in padded tokens, and in pairs of tokens within sequences, as attention without padding has them.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The number of steps.
    pub n_steps: usize,
    /// By padded tokens.
    pub tokens: f64,
    /// By pairs of tokens.
    pub attention: f64,
    /// How many of the tokens are real.
    pub efficiency: f64,
}

/// The steps of 8 ranks.
#[must_use]
pub fn waiting(lengths: &[u32], layout: StepLayout, cost: Cost, max_tokens: u64) -> Waiting {
    let config = BatchConfig::default()
        .with_strategy(sorted(None, Cut::Optimal))
        .with_max_tokens(max_tokens);
    let batches = DynamicBatchSampler::new(lengths, config).unwrap();
    let config = DistributedConfig::default().with_layout(layout).with_cost(cost);
    let sampler =
        DistributedBatchSampler::new(batches, Placement::new(0, 8).unwrap(), config).unwrap();
    let steps = sampler.epoch(Epoch::ZERO, 0..lengths.len() as u64).unwrap();
    let length = |&index: &u64| u64::from(lengths[usize::try_from(index).unwrap()]);
    let ([mut tokens, mut attention], mut seen) = ([(0, 0); 2], 0);
    for nth in 0..steps.len() {
        let batches = steps.step(nth).unwrap();
        seen += batches.iter().map(Batch::len).sum::<usize>();
        assert!(
            batches.iter().all(|batch| batch.padded_tokens() <= max_tokens && !batch.is_empty())
        );
        let pairs = batches
            .iter()
            .map(|batch| batch.indices.iter().map(|index| length(index).pow(2)).sum::<u64>());
        add_step(&mut attention, &pairs.collect::<Vec<_>>());
        add_step(&mut tokens, &batches.iter().map(Batch::padded_tokens).collect::<Vec<_>>());
    }
    assert_eq!(seen, lengths.len());
    let [tokens, attention] =
        [tokens, attention].map(|(slowest, all)| slowest as f64 / all as f64 - 1.0);
    Waiting { n_steps: steps.len(), tokens, attention, efficiency: steps.report().efficiency() }
}

fn add_step((slowest, all): &mut (u64, u64), costs: &[u64]) {
    *slowest += costs.iter().max().unwrap() * costs.len() as u64;
    *all += costs.iter().sum::<u64>();
}

/// How much the largest of 8 equal parts of 512 sequences is over the mean, at worst.
#[must_use]
pub fn imbalance(lengths: &[u32]) -> f64 {
    let world_size = WorldSize::new(8).unwrap();
    let over = |batch: &[u32]| {
        let costs: Vec<u64> = batch.iter().map(|&length| length.into()).collect();
        let sums = balance(&costs, world_size)
            .into_iter()
            .map(|part| part.into_iter().map(|i| costs[i]).sum::<u64>());
        let largest = sums.max().unwrap();
        largest as f64 * 8.0 / costs.iter().sum::<u64>() as f64 - 1.0
    };
    lengths.chunks_exact(512).map(over).fold(0.0, f64::max)
}

/// Every table, as text.
#[must_use]
pub fn tables(n_stream: u64) -> [(&'static str, String); 5] {
    let all = || lengths::ALL.into_iter();
    let table = |head: &str, rows: Vec<String>| format!("{head}\n{}", rows.join("\n"));
    let draw = |recipe: &Recipe| recipe.draw(N);
    [
        ("sorted", {
            let row = |(name, recipe, budget): (&str, &Recipe, u64)| {
                let [greedy, optimal] = [Cut::Greedy, Cut::Optimal]
                    .map(|cut| report(&draw(recipe), sorted(None, cut), budget));
                let (greedy, fewest) = (greedy.efficiency(), fewest_batches(&draw(recipe), budget));
                format!(
                    "{name:9} {fewest:7} {:8} {greedy:7.4} {:8.4}",
                    optimal.batches,
                    optimal.efficiency()
                )
            };
            table("lengths    fewest  batches  greedy  optimal", all().map(row).collect())
        }),
        ("window", {
            let row = |(name, recipe, budget): (&str, &Recipe, u64)| {
                let stream = recipe.draw(n_stream);
                let whole = fewest_batches(&stream, budget) as f64;
                let [a, b] = [128, 256].map(|window| {
                    let report = report(&stream, sorted(Some(window), Cut::Greedy), budget);
                    format!(
                        "{:7.4} {:6.2}%",
                        report.efficiency(),
                        100.0 * (report.batches as f64 / whole - 1.0)
                    )
                });
                format!("{name:9} {a}  {b}")
            };
            table("lengths   128: efficiency, more batches; 256", all().map(row).collect())
        }),
        ("buckets", {
            let row = |(name, recipe, _): (&str, &Recipe, u64)| {
                let lengths = draw(recipe);
                let optimal = efficiency_of(&Buckets::optimal(&lengths, 32).unwrap(), &lengths);
                let others = other_rules(&lengths, 32)
                    .map(|(_, rule)| format!("{:.4}", efficiency_of(&rule, &lengths)));
                format!(
                    "{name:9} {optimal:7.4} {:>10} {:>13} {:>12}",
                    others[0], others[1], others[2]
                )
            };
            table(
                "lengths   optimal  quantiles  equal tokens  equal ratio",
                all().map(row).collect(),
            )
        }),
        ("packing", {
            let row = |((name, recipe, _), row_length): ((&str, &Recipe, u64), u64)| {
                let (lengths, fewest) = (draw(recipe), fewest_rows(&draw(recipe), row_length));
                let [best_fit, slack, in_order] =
                    [Packing::BestFit, Packing::MinimumSlack, Packing::InOrder { open_rows: 64 }]
                        .map(|packing| rows(&lengths, row_length, packing) - fewest);
                format!("{name:9} {row_length:6} {fewest:6} {best_fit:9} {slack:14} {in_order:9}")
            };
            let cases = all()
                .zip(ROW_LENGTHS)
                .flat_map(|(set, rows)| rows.iter().map(move |&row| (set, row)));
            table(
                "lengths      row fewest  best fit  minimum slack  in order",
                cases.map(row).collect(),
            )
        }),
        ("ranks", {
            let row = |(name, recipe, budget): (&str, &Recipe, u64)| {
                let lengths = draw(recipe);
                let by = |layout, cost| waiting(&lengths, layout, cost, budget);
                let tokens = by(StepLayout::Grouped, Cost::TOKENS);
                let attention = by(StepLayout::Grouped, Cost::ATTENTION);
                let dealt = by(StepLayout::Dealt, Cost::ATTENTION);
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
            };
            table(
                "lengths     tokens  attention   dealt  its steps, efficiency  512 in 8",
                all().map(row).collect(),
            )
        }),
    ]
}
