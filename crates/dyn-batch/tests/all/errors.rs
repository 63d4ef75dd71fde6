//! Errors: invalid input is rejected with the value and the limit.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use core_types::{Epoch, Placement};
use dyn_batch::{
    BatchConfig, Batches, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, Error, Overlong, Packing, Sequence, SequenceLengths,
    StepLayout,
};

const MAX: u64 = u64::MAX;

fn bucket(width: u64) -> BatchConfig {
    BatchConfig::default().with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(width)))
}

fn dynamic() -> BatchConfig {
    BatchConfig::default().with_strategy(DynamicBatchStrategy::Dynamic)
}

/// Checks that a configuration is rejected with this message.
fn check_config(config: BatchConfig, message: &str) {
    let error = DynamicBatchSampler::new([1_u32], config.clone()).unwrap_err();
    assert_eq!(error.to_string(), message);
    let stream = [Ok::<_, Error>(Sequence { index: 0, length: 1 })];
    assert_eq!(Batches::new(stream, config).err(), Some(error));
}

#[test]
fn zero_settings_are_rejected() {
    let limited = BatchConfig::default().with_max_batch_size(4);
    let sorted = DynamicBatchStrategy::Sorted { window: Some(0), cut: Cut::Greedy };
    for (setting, config) in [
        ("bucket width", bucket(0).with_max_batch_size(4)),
        ("max_batch_size", BatchConfig::default().with_max_batch_size(0)),
        ("max_tokens", BatchConfig::default().with_max_tokens(0)),
        ("max_sequence_length", limited.clone().with_max_sequence_length(0)),
        ("batch_size_multiple", limited.clone().with_batch_size_multiple(0)),
        ("window", limited.clone().with_strategy(sorted)),
        ("open_rows", packing(Packing::InOrder { open_rows: 0 }).with_max_tokens(9)),
        ("max_cost", limited.clone().with_max_cost(0, Cost::TOKENS)),
        ("length_multiple", limited.with_length_multiple(0)),
        ("number of buckets", boundaries(&[])),
    ] {
        check_config(config, &format!("{setting} is 0, it must be at least 1"));
    }
}

#[test]
fn missing_limits_are_rejected() {
    let message = "batches have no limit, set max_batch_size, max_tokens or max_cost";
    check_config(BatchConfig::default(), message);
    check_config(bucket(64).with_max_sequence_length(512), message);

    let message = "the dynamic strategy has no token budget, set max_tokens, or max_batch_size and max_sequence_length";
    for config in
        [dynamic(), dynamic().with_max_batch_size(8), dynamic().with_max_sequence_length(512)]
    {
        check_config(config, message);
    }
}

#[test]
fn overflowing_budgets_are_rejected() {
    check_config(
        dynamic().with_max_batch_size(MAX).with_max_sequence_length(2),
        "a token budget of 18446744073709551615 × 2 is above the limit of 18446744073709551615",
    );
}

#[test]
fn multiples_over_limits_are_rejected() {
    let multiples_of_eight = BatchConfig::default().with_batch_size_multiple(8);
    for config in [
        multiples_of_eight.clone(),
        dynamic().with_batch_size_multiple(8).with_max_sequence_length(512),
    ] {
        check_config(
            config.with_max_batch_size(7),
            "batch_size_multiple 8 is above max_batch_size 7",
        );
    }
    check_config(
        multiples_of_eight.with_max_tokens(7),
        "batch_size_multiple 8 is above max_tokens 7",
    );
}

/// Checks that a sequence ends the batches with this message.
fn check_sequence(lengths: &[u64], config: BatchConfig, message: &str) {
    let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
    let mut batches = sampler.iter();
    assert_eq!(batches.find_map(Result::err).unwrap().to_string(), message);
    assert_eq!(batches.next(), None);
}

#[test]
fn overlong_sequences_are_errors() {
    check_sequence(
        &[8, 9, 1],
        BatchConfig::default().with_max_batch_size(1).with_max_sequence_length(8),
        "sequence 1 of length 9 is above max_sequence_length 8",
    );
}

#[test]
fn sequences_over_the_budget_are_errors() {
    for config in [BatchConfig::default(), bucket(64), dynamic()] {
        check_sequence(
            &[100, 1, 101, 1],
            config.with_max_tokens(100),
            "a batch of 1 with sequence 2 of length 101 is above max_tokens 100",
        );
    }
}

#[test]
fn padding_counts_toward_the_budget() {
    check_sequence(
        &[64, 98],
        dynamic().with_max_tokens(100).with_length_multiple(64).with_max_cost(MAX, Cost::TOKENS),
        "a batch of 1 with sequence 1 of length 98 (128 with padding) is above max_tokens 100",
    );
}

#[test]
fn multiples_shrink_the_longest_sequence() {
    let truncated = dynamic().with_overlong(Overlong::Truncate).with_max_sequence_length(26);
    check_sequence(
        &[25, 30],
        truncated.with_max_tokens(100).with_batch_size_multiple(4),
        "a batch of 4 with sequence 1 of length 26 is above max_tokens 100",
    );
    check_sequence(
        &[MAX],
        BatchConfig::default().with_max_batch_size(2).with_batch_size_multiple(2),
        "a batch of 2 with sequence 0 of length 18446744073709551615 is above max_tokens 18446744073709551615",
    );
}

#[test]
fn unknown_indices_are_errors() {
    let sampler =
        DynamicBatchSampler::new([5_u32, 6, 7], BatchConfig::default().with_max_batch_size(1))
            .unwrap();
    for index in [3, MAX] {
        let mut batches = sampler.iter_order([2, index, 1]);
        assert_eq!(batches.next().unwrap().unwrap().indices, [2]);
        assert_eq!(batches.next(), Some(Err(Error::IndexOutOfRange { index, count: 3 })));
        assert_eq!(batches.next(), None);
    }
    let message = Error::IndexOutOfRange { index: 3, count: 3 }.to_string();
    assert_eq!(message, "index 3 is out of range for 3 sequences");
}

#[test]
fn stream_errors_end_the_batches() {
    let stream = [
        Ok(Sequence { index: 0, length: 1 }),
        Err("disk full".into()),
        Ok(Sequence { index: 1, length: 1 }),
    ];
    let mut batches = Batches::new(stream, BatchConfig::default().with_max_batch_size(8)).unwrap();
    let error: Box<dyn std::error::Error> = batches.next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "disk full");
    assert!(batches.next().is_none());
}

fn packing(packing: Packing) -> BatchConfig {
    BatchConfig::default().with_strategy(DynamicBatchStrategy::Pack(packing))
}

fn boundaries(boundaries: &[u64]) -> BatchConfig {
    let buckets = Buckets::Boundaries(boundaries.to_vec());
    BatchConfig::default().with_strategy(DynamicBatchStrategy::Bucket(buckets)).with_max_tokens(100)
}

#[test]
fn unsupported_packing_settings_are_rejected() {
    let pack = packing(Packing::BestFit);
    check_config(pack.clone().with_max_batch_size(4), "packed rows have no length, set max_tokens");
    let pack = pack.with_max_tokens(64);
    let slack = packing(Packing::MinimumSlack).with_max_tokens(64);
    for (setting, config) in [
        ("max_cost", slack.with_max_cost(9, Cost::TOKENS)),
        ("batch_size_multiple", pack.clone().with_batch_size_multiple(2)),
        ("length_multiple", pack.clone().with_length_multiple(8)),
    ] {
        check_config(config, &format!("{setting} cannot be used with packed rows"));
    }
    check_config(
        pack.with_max_tokens(MAX),
        "18446744073709551615 tokens in a row for best-fit packing are above the limit of 16777216",
    );
    let endless_rows = packing(Packing::InOrder { open_rows: 1 }).with_max_tokens(MAX);
    assert!(DynamicBatchSampler::new([1_u32], endless_rows).is_ok());
}

#[test]
fn invalid_buckets_are_rejected() {
    check_config(
        boundaries(&[4, 9, 9]),
        "bucket boundary 9 is followed by 9, boundaries must ascend",
    );
    let fixed = BatchConfig::default().with_max_tokens(9).with_fixed_shapes(true);
    check_config(fixed, "fixed_shapes cannot be used with a strategy without buckets");
    assert_eq!(Buckets::optimal([1_u32], 0), Err(Error::Zero { setting: "number of buckets" }));
    assert_eq!(
        Buckets::optimal([0_u32; 0], 3).unwrap_err().to_string(),
        "number of sequences is 0, it must be at least 1"
    );
    check_sequence(
        &[9, 10],
        boundaries(&[4, 9]),
        "sequence 1 of length 10 is above the last bucket boundary 9",
    );
}

#[test]
fn sequences_over_the_cost_are_errors() {
    check_sequence(
        &[9, 10, 11],
        BatchConfig::default().with_max_cost(100, Cost::ATTENTION),
        "a batch of 1 with sequence 2 of length 11 is above max_cost 100",
    );
}

#[test]
fn impossible_steps_are_rejected() {
    let sampler = |lengths: Vec<u32>, config, steps| {
        let batches = DynamicBatchSampler::new(lengths, config).unwrap();
        DistributedBatchSampler::new(batches, Placement::new(0, 4).unwrap(), steps)
    };
    let grouped = DistributedConfig::default();
    let dealt = DistributedConfig { layout: StepLayout::Dealt, ..grouped };
    let batches_of_two = BatchConfig::default().with_max_batch_size(2);
    let error = sampler(vec![1, 1, 1], batches_of_two.clone(), grouped)
        .unwrap()
        .epoch(Epoch::ZERO, 0..3)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 batches cannot be split into equally many for each of 4 ranks"
    );
    let error = sampler(vec![1, 1, 1], batches_of_two, dealt)
        .unwrap()
        .epoch(Epoch::ZERO, 0..3)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "1 batches cannot be split into equally many for each of 4 ranks"
    );
    // Batches of 4 and 3 sequences: too many for one batch, too few for two.
    let batches_of_one = BatchConfig::default().with_max_batch_size(1);
    let seven_sequences = sampler(vec![1; 7], batches_of_one, dealt).unwrap();
    let error = seven_sequences.epoch(Epoch::ZERO, 0..7).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 batches cannot be split into equally many for each of 4 ranks"
    );
    let error = sampler(vec![1], boundaries(&[9]), dealt).unwrap_err();
    assert_eq!(
        error.to_string(),
        "buckets or packed rows cannot be used with dealt steps: use grouped steps"
    );
}

#[test]
fn joining_huge_batches_does_not_overflow() {
    // Four sequences fill a global batch of two ranks, and one remains. Both batches together have
    // more tokens than 64 bits can count.
    let lengths = [MAX / 4; 5];
    let batches = BatchConfig::default().with_max_tokens(MAX).with_max_batch_size(2);
    let batches = DynamicBatchSampler::new(lengths, batches).unwrap();
    let dealt = DistributedConfig { layout: StepLayout::Dealt, ..DistributedConfig::default() };
    let placement = Placement::new(0, 2).unwrap();
    let sampler = DistributedBatchSampler::new(batches, placement, dealt).unwrap();
    let sizes = sampler.epoch(Epoch::ZERO, 0..5).unwrap().map(|step| step.micro_batches[0].len());
    assert_eq!(sizes.collect::<Vec<_>>(), [1, 2]);
}

/// A data set of any number of sequences of length 1. The last sequences may lack a length.
#[derive(Debug)]
struct UnitLengths {
    count: u64,
    known: u64,
}

impl SequenceLengths for UnitLengths {
    fn count(&self) -> u64 {
        self.count
    }

    fn length(&self, index: u64) -> Option<u64> {
        (index < self.known).then_some(1)
    }
}

/// Creates a sampler for a single rank. It plans all batches at once.
fn single_rank<L: SequenceLengths>(batches: DynamicBatchSampler<L>) -> DistributedBatchSampler<L> {
    let config = DistributedConfig::default();
    DistributedBatchSampler::new(batches, Placement::SINGLE, config).unwrap()
}

#[test]
fn oversized_plans_are_rejected() {
    let count = 1 << 32;
    let config = BatchConfig::default().with_max_batch_size(1);
    let plan = |count, order: &[u64]| {
        let lengths = UnitLengths { count, known: count };
        let sampler = single_rank(DynamicBatchSampler::new(lengths, config.clone()).unwrap());
        sampler.epoch(Epoch::ZERO, order.iter().copied()).map(|steps| steps.len())
    };
    assert_eq!(plan(count, &[count - 1, count - 2]), Ok(2));
    assert_eq!(plan(count, &[count]), Err(Error::IndexOutOfRange { index: count, count }));
    let error = Error::TooManySequences { count: count + 1, limit: count - 1 };
    assert_eq!(plan(count + 1, &[count]).as_ref(), Err(&error));
    let message =
        "4294967297 sequences are above the limit of 4294967295 for a whole set, use a window";
    assert_eq!(error.to_string(), message);
}

#[test]
fn missing_lengths_are_errors() {
    let lengths = UnitLengths { count: 3, known: 2 };
    let error = Error::IndexOutOfRange { index: 2, count: 3 };
    assert_eq!(Buckets::optimal(&lengths, 2), Err(error.clone()));
    for strategy in [
        DynamicBatchStrategy::PadToMax,
        DynamicBatchStrategy::Sorted { window: None, cut: Cut::Greedy },
    ] {
        let config = BatchConfig::default().with_strategy(strategy).with_max_batch_size(2);
        let sampler = DynamicBatchSampler::new(&lengths, config).unwrap();
        assert_eq!(single_rank(sampler.clone()).epoch(Epoch::ZERO, 0..3).unwrap_err(), error);
        assert_eq!(sampler.iter().find_map(Result::err), Some(error.clone()));
    }
}
