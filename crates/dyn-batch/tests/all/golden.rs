//! Pinned values: the first values of every order, and a digest of many more.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use core_types::{Epoch, Fingerprint, Placement, Seed};
use dyn_batch::{
    Batch, BatchConfig, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, GridConfig, Packing, StepLayout, StepRemainder,
    Synchronization,
};

/// Draws lengths between 1 and 60.
fn lengths(n: u64) -> Vec<u64> {
    (0..n).map(|i| 1 + Seed::new(5).derive(i).as_u64() % 60).collect()
}

fn sorted(window: Option<u64>, cut: Cut) -> DynamicBatchStrategy {
    DynamicBatchStrategy::Sorted { window, cut }
}

fn sampler(
    strategy: DynamicBatchStrategy,
    n: u64,
    max_tokens: u64,
) -> DynamicBatchSampler<Vec<u64>> {
    let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(max_tokens);
    DynamicBatchSampler::new(lengths(n), config).unwrap()
}

/// Returns the steps of 3 ranks, rank by rank.
fn steps(
    batches: &DynamicBatchSampler<Vec<u64>>,
    config: DistributedConfig,
    epoch: u64,
) -> Vec<Vec<Batch>> {
    let placement = Placement::new(0, 3).unwrap();
    let sampler = DistributedBatchSampler::new(batches.clone(), placement, config).unwrap();
    let steps = sampler.epoch(Epoch::new(epoch), 0..batches.lengths().len() as u64).unwrap();
    (0..steps.len()).map(|nth| steps.all_ranks(nth).unwrap().concat()).collect()
}

fn indices(steps: &[Vec<Batch>]) -> Vec<Vec<Vec<u64>>> {
    steps.iter().map(|step| step.iter().map(|batch| batch.indices.clone()).collect()).collect()
}

#[test]
fn steps_in_order_are_pinned() {
    let batches = sampler(sorted(None, Cut::Optimal), 30, 120);
    let steps = steps(&batches, DistributedConfig::default(), 0);
    let expected: [[&[u64]; 3]; 4] = [
        [&[11, 12, 19, 29], &[22], &[9, 13, 7]],
        [&[2, 8, 25], &[6, 18], &[24, 28]],
        [&[10, 16, 14], &[17, 5], &[21, 15]],
        [&[3, 0], &[1, 27], &[23, 4, 20, 26]],
    ];
    assert_eq!(indices(&steps), expected);
}

#[test]
fn shuffled_steps_are_pinned() {
    let batches = sampler(sorted(None, Cut::Optimal), 30, 120);
    let config = DistributedConfig { shuffle: Some(Seed::new(7)), ..DistributedConfig::default() };
    let first: [[&[u64]; 3]; 4] = [
        [&[2, 8, 25], &[6, 18], &[24, 28]],
        [&[11, 12, 19, 29], &[9, 13, 7], &[22]],
        [&[10, 16, 14], &[17, 5], &[21, 15]],
        [&[1, 27], &[3, 0], &[23, 4, 20, 26]],
    ];
    let second: [[&[u64]; 3]; 4] = [
        [&[6, 18], &[2, 8, 25], &[24, 28]],
        [&[3, 0], &[1, 27], &[23, 4, 20, 26]],
        [&[10, 16, 14], &[17, 5], &[21, 15]],
        [&[22], &[9, 13, 7], &[11, 12, 19, 29]],
    ];
    assert_eq!(indices(&steps(&batches, config, 0)), first);
    assert_eq!(indices(&steps(&batches, config, 1)), second);
}

#[test]
fn dealt_steps_are_pinned() {
    let batches = sampler(sorted(None, Cut::Optimal), 30, 120);
    let config = DistributedConfig {
        layout: StepLayout::Dealt,
        shuffle: Some(Seed::new(7)),
        ..DistributedConfig::default()
    };
    let expected: [[&[u64]; 3]; 4] = [
        [&[0], &[3], &[28]],
        [&[27, 15], &[1, 5], &[17, 21]],
        [&[29, 13, 7, 26], &[11, 9, 22, 20], &[12, 19, 23, 4]],
        [&[8, 6, 14], &[25, 18, 16], &[2, 10, 24]],
    ];
    assert_eq!(indices(&steps(&batches, config, 0)), expected);
}

#[test]
fn small_steps_repeat_sequences() {
    let config = BatchConfig::default().with_max_batch_size(2);
    let batches = DynamicBatchSampler::new(lengths(8), config).unwrap();
    let dealt = DistributedConfig { layout: StepLayout::Dealt, ..DistributedConfig::default() };
    let steps = steps(&batches, DistributedConfig { remainder: StepRemainder::Repeat, ..dealt }, 0);
    let mut last = indices(&steps)[1].concat();
    last.sort_unstable();
    assert_eq!((steps.len(), last), (2, vec![6, 6, 7]));
}

fn add(digest: &mut Fingerprint, batch: &Batch) {
    digest.extend([batch.len() as u64, batch.rows, batch.padded_length, batch.real_tokens]);
    digest.extend(batch.indices.iter().copied());
}

/// Shuffles all batches like the crate, for every strategy.
fn shuffle(batches: &mut [Batch], seed: Seed) {
    batches.reverse();
    core_types::shuffle(batches, |n| {
        let draw = (u128::from(seed.derive(n - 1).as_u64()) * u128::from(n)) >> 64;
        n - 1 - u64::try_from(draw).unwrap()
    });
    batches.reverse();
}

/// Hashes the results of a strategy on 300 sequences: the batches in order and shuffled, and the
/// steps of every possible layout.
fn digest(strategy: &DynamicBatchStrategy) -> u64 {
    let batches = sampler(strategy.clone(), 300, 130);
    let mut digest = Fingerprint::new();
    batches.iter().for_each(|batch| add(&mut digest, &batch.unwrap()));
    batches.iter().shuffled(Seed::new(3)).for_each(|batch| add(&mut digest, &batch.unwrap()));
    let mut all: Vec<Batch> = batches.iter().map(Result::unwrap).collect();
    shuffle(&mut all, Seed::new(4));
    for batch in &all {
        add(&mut digest, batch);
    }
    let can_deal =
        !matches!(strategy, DynamicBatchStrategy::Bucket(_) | DynamicBatchStrategy::Pack(_));
    let layouts = [StepLayout::Grouped, StepLayout::Dealt];
    for layout in layouts.into_iter().filter(|layout| can_deal || *layout == StepLayout::Grouped) {
        for remainder in [StepRemainder::Split, StepRemainder::Drop, StepRemainder::Repeat] {
            let config = DistributedConfig { layout, remainder, ..DistributedConfig::default() };
            let shuffled =
                DistributedConfig { shuffle: Some(Seed::new(9)), cost: Cost::ATTENTION, ..config };
            for (config, epoch) in [(config, 0), (shuffled, 0), (shuffled, 1)] {
                let steps = steps(&batches, config, epoch);
                steps.iter().flatten().for_each(|batch| add(&mut digest, batch));
            }
        }
    }
    digest.finish()
}

#[test]
fn every_strategy_is_pinned() {
    let pinned = [
        (DynamicBatchStrategy::PadToMax, 15_161_315_736_119_724_797),
        (DynamicBatchStrategy::Dynamic, 15_161_315_736_119_724_797),
        (DynamicBatchStrategy::Bucket(Buckets::Width(8)), 11_067_805_976_372_731_769),
        (
            DynamicBatchStrategy::Bucket(Buckets::Boundaries(vec![10, 30, 60])),
            800_062_446_274_968_053,
        ),
        (sorted(None, Cut::Greedy), 3_155_838_637_467_805_216),
        (sorted(None, Cut::Optimal), 1_703_274_709_483_723_515),
        (sorted(Some(2), Cut::Greedy), 17_001_867_703_743_173_859),
        (sorted(Some(2), Cut::Optimal), 11_709_467_326_067_537_680),
        (DynamicBatchStrategy::Pack(Packing::BestFit), 9_566_274_738_879_306_811),
        (DynamicBatchStrategy::Pack(Packing::MinimumSlack), 9_566_274_738_879_306_811),
        (DynamicBatchStrategy::Pack(Packing::InOrder { open_rows: 3 }), 6_094_489_253_065_764_438),
    ];
    for (strategy, expected) in pinned {
        assert_eq!(digest(&strategy), expected, "{strategy:?}");
    }
}

#[test]
fn grids_are_pinned() {
    let pack = DynamicBatchStrategy::Pack(Packing::BestFit);
    for (strategy, global_batch_size, accumulation, expected) in [
        (DynamicBatchStrategy::PadToMax, Some(24), Some(2), 4_976_535_698_538_379_442),
        (DynamicBatchStrategy::PadToMax, Some(48), None, 9_480_721_284_650_316_258),
        (DynamicBatchStrategy::PadToMax, None, Some(2), 1_878_431_705_328_824_518),
        (pack.clone(), Some(24), Some(4), 14_668_979_276_226_651_576),
        (pack, None, Some(2), 7_697_421_124_620_324_360),
    ] {
        let mut digest = Fingerprint::new();
        for synchronization in [Synchronization::MicroStep, Synchronization::Step] {
            let grid = GridConfig { global_batch_size, synchronization };
            let config = DistributedConfig {
                layout: StepLayout::Grid(grid),
                shuffle: Some(Seed::new(9)),
                cost: Cost::ATTENTION,
                accumulation,
                ..DistributedConfig::default()
            };
            let steps = steps(&sampler(strategy.clone(), 300, 240), config, 1);
            steps.iter().flatten().for_each(|batch| add(&mut digest, batch));
        }
        assert_eq!(digest.finish(), expected, "{strategy:?}, {global_batch_size:?}");
    }
}
