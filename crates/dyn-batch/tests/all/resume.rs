//! Resuming: a state continues the steps of an equal sampler, and other samplers reject it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use core_types::{Epoch, Placement, Seed};
use dyn_batch::{
    BatchConfig, BatchState, Cost, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, Error, StepLayout,
};

/// Creates a sampler of consecutive sequences, at most 4 in a batch, for the first of 2 ranks.
fn sampler(lengths: Vec<u64>, config: DistributedConfig) -> DistributedBatchSampler<Vec<u64>> {
    let batches = BatchConfig::default().with_max_batch_size(4);
    let batches = DynamicBatchSampler::new(lengths, batches).unwrap();
    DistributedBatchSampler::new(batches, Placement::new(0, 2).unwrap(), config).unwrap()
}

fn lengths() -> Vec<u64> {
    (1..=50).collect()
}

fn shuffled() -> DistributedConfig {
    DistributedConfig { shuffle: Some(Seed::new(7)), ..DistributedConfig::default() }
}

/// Returns the state after two steps of epoch 3.
fn state() -> BatchState {
    let sampler = sampler(lengths(), shuffled());
    let mut steps = sampler.epoch(Epoch::new(3), 0..50).unwrap();
    steps.nth(1);
    steps.state()
}

fn check_rejected(config: DistributedConfig, lengths: Vec<u64>, order: impl Iterator<Item = u64>) {
    let sampler = sampler(lengths, config);
    let resumed = sampler.resume(&state(), order);
    assert!(matches!(resumed, Err(Error::BatchMismatch { .. })), "{resumed:?}");
}

#[test]
fn resume_continues_the_steps() {
    let sampler = sampler(lengths(), shuffled());
    let resumed = sampler.resume(&state(), 0..50).unwrap();
    assert_eq!((resumed.len(), resumed.state()), (5, state()));
    assert!(resumed.eq(sampler.epoch(Epoch::new(3), 0..50).unwrap().skip(2)));
}

#[test]
fn another_shuffle_is_rejected() {
    let shuffle = Some(Seed::new(8));
    check_rejected(DistributedConfig { shuffle, ..shuffled() }, lengths(), 0..50);
    check_rejected(DistributedConfig::default(), lengths(), 0..50);
}

#[test]
fn another_shuffle_of_one_step_is_rejected() {
    // With one step of one rank, every seed gives the same order.
    let sampler = |seed| {
        let config = BatchConfig::default().with_max_batch_size(4);
        let batches = DynamicBatchSampler::new([5_u32, 6], config).unwrap();
        let config = DistributedConfig { shuffle: Some(Seed::new(seed)), ..shuffled() };
        DistributedBatchSampler::new(batches, Placement::SINGLE, config).unwrap()
    };
    let state = sampler(1).epoch(Epoch::ZERO, 0..2).unwrap().state();
    assert!(sampler(1).resume(&state, 0..2).is_ok());
    assert!(matches!(sampler(2).resume(&state, 0..2), Err(Error::BatchMismatch { .. })));
}

#[test]
fn another_cost_or_layout_is_rejected() {
    check_rejected(DistributedConfig { cost: Cost::ATTENTION, ..shuffled() }, lengths(), 0..50);
    check_rejected(DistributedConfig { layout: StepLayout::Dealt, ..shuffled() }, lengths(), 0..50);
}

#[test]
fn equivalent_layout_is_rejected() {
    let sampler = |layout| {
        let config = BatchConfig::default().with_max_batch_size(1);
        let batches = DynamicBatchSampler::new([5_u32], config).unwrap();
        let config = DistributedConfig { layout, ..DistributedConfig::default() };
        DistributedBatchSampler::new(batches, Placement::SINGLE, config).unwrap()
    };
    let state = sampler(StepLayout::Grouped).epoch(Epoch::ZERO, 0..1).unwrap().state();
    let dealt = sampler(StepLayout::Dealt);
    assert!(matches!(dealt.resume(&state, 0..1), Err(Error::BatchMismatch { .. })));
}

#[test]
fn another_order_is_rejected() {
    check_rejected(shuffled(), lengths(), (0..50).rev());
    // The second and the third sequence of the first batch swap positions.
    check_rejected(shuffled(), lengths(), [0, 2, 1].into_iter().chain(3..50));
}

#[test]
fn other_lengths_are_rejected() {
    let mut lengths = lengths();
    lengths[49] += 1;
    check_rejected(shuffled(), lengths.clone(), 0..50);
    lengths[49] -= 1;
    // The first sequence is shorter, but its batch has the same padded length.
    lengths[0] -= 1;
    check_rejected(shuffled(), lengths, 0..50);
}

#[test]
fn unknown_steps_and_versions_are_rejected() {
    let sampler = sampler(lengths(), shuffled());
    let mut done = state();
    done.step = done.n_steps;
    assert_eq!(sampler.resume(&done, 0..50).unwrap().count(), 0);
    let mut ahead = state();
    ahead.step = 99;
    let error = sampler.resume(&ahead, 0..50).unwrap_err();
    assert!(error.to_string().contains("step 99 of 7"), "{error}");
    let mut newer = state();
    newer.format_version = 2;
    assert!(matches!(sampler.resume(&newer, 0..50), Err(Error::BatchMismatch { .. })));
}

#[test]
fn states_of_too_many_worlds_are_rejected() {
    let sampler = |world_size| {
        let config = BatchConfig::default().with_max_batch_size(1);
        let batches = DynamicBatchSampler::new([5_u32, 6], config).unwrap();
        let placement = Placement::new(0, world_size).unwrap();
        DistributedBatchSampler::new(batches, placement, DistributedConfig::default()).unwrap()
    };
    let mut state = sampler(2).epoch(Epoch::ZERO, 0..2).unwrap().state();
    for nth in 0..255 {
        state = sampler(1 + nth % 2).resume(&state, 0..2).unwrap().state();
    }
    let error = sampler(2).resume(&state, 0..2).unwrap_err();
    assert!(matches!(error, Error::TooMany { count: 256, limit: 255, .. }));
    assert!(sampler(1).resume(&state, 0..2).is_ok());
}

#[test]
fn other_orders_of_earlier_worlds_are_rejected() {
    let two = sampler(lengths(), shuffled());
    let batches = BatchConfig::default().with_max_batch_size(4);
    let batches = DynamicBatchSampler::new(lengths(), batches).unwrap();
    let one = DistributedBatchSampler::new(batches, Placement::SINGLE, shuffled()).unwrap();
    // All sequences are read, so the world of one rank has no batches that could differ.
    let all_read = two.epoch(Epoch::ZERO, 0..50).map(|mut steps| (steps.nth(6), steps.state()));
    let state = one.resume(&all_read.unwrap().1, 0..50).unwrap().state();
    assert_eq!(one.resume(&state, 0..50).unwrap().len(), 0);
    let resumed = one.resume(&state, (0..50).rev());
    assert!(matches!(resumed, Err(Error::BatchMismatch { .. })), "{resumed:?}");
}

#[test]
fn forged_cuts_are_rejected() {
    let strategy = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
    let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(120);
    let batches = DynamicBatchSampler::new(lengths(), config).unwrap();
    let placement = Placement::new(0, 2).unwrap();
    let sampler = DistributedBatchSampler::new(batches, placement, shuffled()).unwrap();
    let state = sampler.epoch(Epoch::ZERO, 0..50).unwrap().state();
    assert!(sampler.resume(&state, 0..50).is_ok());
    for cut in
        [vec![], vec![(50, 1)], vec![(1, 50)], vec![(0, 50)], vec![(7, 1)], vec![(1, u32::MAX)]]
    {
        let mut other = state.clone();
        other.cut = cut;
        let resumed = sampler.resume(&other, 0..50);
        assert!(matches!(resumed, Err(Error::BatchMismatch { .. })), "{:?}", other.cut);
    }
}
