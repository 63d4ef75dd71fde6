//! Laws of streamed batches: each sequence once, every limit kept, and the batches of a naive
//! reference.
//!
//! The laws are the acceptance criteria of dynamic batching: padding to the longest (1), similar
//! lengths (2), the token limit (3), valid batches (4), no overlong sequence (5), actual sizes (6),
//! and the rule of each strategy (7).

use std::{cell::Cell, collections::BTreeMap, iter};

use dyn_batch::{
    Batch, BatchConfig, Batches, Buckets, DynamicBatchSampler, DynamicBatchStrategy, Error,
    Overlong, PaddingReport, Remainder, Sequence,
};
use proptest::prelude::*;

use crate::laws::support::all_lengths;

/// Returns the length after truncation, or `None` if the sequence is skipped (criterion 5).
fn truncated_length(length: u64, config: &BatchConfig) -> Option<u64> {
    match (config.max_sequence_length, config.overlong) {
        (Some(max), Overlong::Truncate) => Some(length.min(max)),
        (Some(max), Overlong::Skip) => (length <= max).then_some(length),
        _ => Some(length),
    }
}

fn bucket(length: u64, config: &BatchConfig) -> u64 {
    match &config.strategy {
        DynamicBatchStrategy::Bucket(Buckets::Width(width)) => length / width,
        _ => 0,
    }
}

/// Returns true if a batch is within its limits (criterion 3). `Dynamic` without a token budget
/// uses the product of the other limits.
fn is_allowed(size: u64, padded_length: u64, config: &BatchConfig) -> bool {
    let (max_batch_size, max_tokens) = match (&config.strategy, config.max_tokens) {
        (DynamicBatchStrategy::Dynamic, None) => (
            None,
            config
                .max_batch_size
                .zip(config.max_sequence_length)
                .map(|(size, length)| size * length),
        ),
        _ => (config.max_batch_size, config.max_tokens),
    };
    max_batch_size.is_none_or(|max| size <= max)
        && size
            .checked_mul(padded_length)
            .is_some_and(|tokens| max_tokens.is_none_or(|max| tokens <= max))
}

/// Returns the first sequence that must end the batches with an error.
fn first_misfit(lengths: &[u64], config: &BatchConfig) -> Option<u64> {
    let misfit = lengths.iter().position(|&length| {
        let is_overlong = config.max_sequence_length.is_some_and(|max| length > max);
        (is_overlong && config.overlong == Overlong::Error)
            || truncated_length(length, config)
                .is_some_and(|length| !is_allowed(config.batch_size_multiple, length, config))
    });
    misfit.map(|index| index as u64)
}

/// Computes the batches of each bucket by the naive rule (criterion 7): repeatedly cut off the
/// longest prefix that is a multiple and within the limits.
fn reference(lengths: &[u64], config: &BatchConfig) -> BTreeMap<u64, Vec<Vec<u64>>> {
    let mut queues = BTreeMap::<u64, Vec<(u64, u64)>>::new();
    for (index, &length) in (0..).zip(lengths) {
        if let Some(length) = truncated_length(length, config) {
            queues.entry(bucket(length, config)).or_default().push((index, length));
        }
    }
    queues.into_iter().map(|(bucket, queue)| (bucket, cut(&queue, config))).collect()
}

fn cut(queue: &[(u64, u64)], config: &BatchConfig) -> Vec<Vec<u64>> {
    let indices = |part: &[(u64, u64)]| part.iter().map(|&(index, _)| index).collect();
    let is_batch = |size: &usize| {
        let padded_length = queue[..*size].iter().map(|&(_, length)| length).max().unwrap_or(0);
        *size as u64 % config.batch_size_multiple == 0
            && is_allowed(*size as u64, padded_length, config)
    };
    match (1..=queue.len()).rev().find(is_batch) {
        Some(size) => {
            iter::once(indices(&queue[..size])).chain(cut(&queue[size..], config)).collect()
        }
        None if config.remainder == Remainder::Keep && !queue.is_empty() => vec![indices(queue)],
        None => Vec::new(),
    }
}

/// Checks all laws on one input.
fn check(lengths: &[u64], config: &BatchConfig) {
    let sampler =
        DynamicBatchSampler::new(lengths, config.clone()).expect("the configuration is valid");
    let mut run = sampler.iter();
    let outcome: Result<Vec<Batch>, Error> = run.by_ref().collect();
    let report = *run.report();
    assert_eq!(run.next(), None, "the iterator stays empty");
    assert!(
        sampler.iter_order(0..lengths.len() as u64).eq(sampler.iter()),
        "the second iteration differs"
    );
    match (outcome, first_misfit(lengths, config)) {
        (Ok(batches), None) => {
            check_batches(&batches, lengths, config);
            check_report(report, &batches, lengths, config);
        }
        (
            Err(Error::SequenceTooLong { index, .. } | Error::SequenceOverBudget { index, .. }),
            Some(misfit),
        ) => {
            assert_eq!(index, misfit);
        }
        (outcome, misfit) => {
            panic!("misfit {misfit:?}, but {outcome:?} of {lengths:?} with {config:?}")
        }
    }
}

/// Checks criteria 1, 2, 4 and 6.
fn check_batches(batches: &[Batch], lengths: &[u64], config: &BatchConfig) {
    let mut by_bucket = BTreeMap::<u64, Vec<Vec<u64>>>::new();
    for batch in batches {
        let counted = batch
            .indices
            .iter()
            .map(|&index| truncated_length(lengths[usize::try_from(index).unwrap()], config));
        let counted: Vec<u64> =
            counted.map(|length| length.expect("a skipped sequence is in no batch")).collect();
        assert_eq!(batch.padded_length, counted.iter().copied().max().expect("no batch is empty"));
        assert_eq!(batch.real_tokens, counted.iter().sum::<u64>());
        assert!(
            is_allowed(batch.len() as u64, batch.padded_length, config),
            "{batch:?} is above a limit"
        );
        let key = bucket(counted[0], config);
        assert!(
            counted.iter().all(|&length| bucket(length, config) == key),
            "{batch:?} mixes buckets"
        );
        by_bucket.entry(key).or_default().push(batch.indices.clone());
    }
    for bucket in by_bucket.values() {
        check_sizes(bucket, config);
    }

    let mut expected = reference(lengths, config);
    expected.retain(|_, batches| !batches.is_empty());
    assert_eq!(by_bucket, expected, "{lengths:?} with {config:?}");
}

fn check_sizes(bucket: &[Vec<u64>], config: &BatchConfig) {
    assert!(bucket.concat().is_sorted_by(|a, b| a < b), "each sequence occurs once, in order");
    let multiple = config.batch_size_multiple;
    let n_whole = bucket.iter().take_while(|batch| batch.len() as u64 % multiple == 0).count();
    assert!(
        n_whole == bucket.len()
            || (config.remainder == Remainder::Keep && n_whole + 1 == bucket.len())
    );
}

fn check_report(report: PaddingReport, batches: &[Batch], lengths: &[u64], config: &BatchConfig) {
    let PaddingReport { sequences, skipped, dropped, truncated, .. } = report;
    assert_eq!(sequences + skipped + dropped, lengths.len() as u64);
    let n_overlong = lengths
        .iter()
        .filter(|&&length| config.max_sequence_length.is_some_and(|max| length > max))
        .count();
    let expected = match config.overlong {
        Overlong::Skip => (n_overlong as u64, 0),
        Overlong::Truncate => (0, n_overlong as u64),
        _ => (0, 0),
    };
    assert_eq!((skipped, truncated), expected);
    assert!(config.remainder == Remainder::Drop || dropped == 0);

    let collected = PaddingReport::from_iter(batches);
    assert_eq!(
        collected.padded_tokens,
        batches.iter().map(|batch| u128::from(batch.padded_tokens())).sum()
    );
    assert_eq!(
        collected.max_padded_tokens,
        batches.iter().map(Batch::padded_tokens).max().unwrap_or(0)
    );
    assert!((0.0..=1.0).contains(&collected.efficiency()));
    let mut rest = report;
    rest.skipped = 0;
    rest.truncated = 0;
    rest.dropped = 0;
    assert_eq!(rest, collected, "the report sums its batches");
}

type ConfigSetter = fn(BatchConfig) -> BatchConfig;

/// Returns every valid combination of a few values of each setting.
fn all_configs() -> Vec<BatchConfig> {
    let choices: [&[ConfigSetter]; 5] = [
        &[
            |c| c.with_strategy(DynamicBatchStrategy::PadToMax),
            |c| c.with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(2))),
            |c| c.with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(4))),
            |c| c.with_strategy(DynamicBatchStrategy::Dynamic),
        ],
        &[|c| c, |c| c.with_max_batch_size(2), |c| c.with_max_batch_size(5)],
        &[|c| c, |c| c.with_max_tokens(5), |c| c.with_max_tokens(12)],
        &[
            |c| c,
            |c| c.with_max_sequence_length(2),
            |c| c.with_max_sequence_length(2).with_overlong(Overlong::Truncate),
            |c| c.with_max_sequence_length(2).with_overlong(Overlong::Skip),
        ],
        &[
            |c| c,
            |c| c.with_batch_size_multiple(2),
            |c| c.with_batch_size_multiple(2).with_remainder(Remainder::Keep),
            |c| c.with_batch_size_multiple(3).with_remainder(Remainder::Keep),
        ],
    ];
    let mut configs = vec![BatchConfig::default()];
    for choice in choices {
        let varied = configs.iter().flat_map(|config| choice.iter().map(|set| set(config.clone())));
        configs = varied.collect();
    }
    configs.retain(is_valid);
    configs
}

fn is_valid(config: &BatchConfig) -> bool {
    DynamicBatchSampler::new([0_u64; 0], config.clone()).is_ok()
}

#[test]
fn laws_hold_on_small_inputs() {
    let configs = all_configs();
    assert_eq!(configs.len(), 457, "valid configurations");
    for lengths in all_lengths(&[0, 1, 2, 5], 6) {
        for config in &configs {
            check(&lengths, config);
        }
    }
}

#[test]
fn batches_are_returned_early() {
    let lengths = [1, 2, 1, 5, 5, 2, 2, 1, 1, 1];
    let mut configs = all_configs();
    configs.retain(|config| !matches!(config.strategy, DynamicBatchStrategy::Bucket(_)));
    configs.retain(|config| first_misfit(&lengths, config).is_none());
    for config in configs {
        let n_taken = Cell::new(0);
        let endless = (0..).zip(lengths.into_iter().cycle());
        let endless = endless.map(|(index, length)| Ok::<_, Error>(Sequence { index, length }));
        let mut batches =
            Batches::new(endless.inspect(|_| n_taken.set(n_taken.get() + 1)), config.clone())
                .unwrap();
        // A batch is complete if even empty sequences do not join it.
        let batch_before_empty = |n_taken: usize, nth: usize| {
            let known = lengths.into_iter().cycle().take(n_taken);
            let lengths: Vec<_> = known.chain(iter::repeat_n(0, 20)).collect();
            reference(&lengths, &config)[&0][nth].clone()
        };
        for nth in 0..20 {
            let indices = batches.next().unwrap().unwrap().indices;
            assert_eq!(
                batch_before_empty(n_taken.get(), nth),
                indices,
                "too early with {config:?}"
            );
            let previous = n_taken.get() - 1;
            let needs_last = indices.contains(&(previous as u64))
                || batch_before_empty(previous, nth) != indices;
            assert!(needs_last, "too late with {config:?}");
        }
    }
}

#[test]
fn batches_do_not_depend_on_indices() {
    let config = BatchConfig::default()
        .with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(3)))
        .with_max_tokens(14);
    let lengths = [4_u64, 1, 3, 6, 5, 2, 2, 1];
    let order = [6_u64, 0, 3, 3, 7, 1, 5];
    let reordered = order.map(|index| lengths[usize::try_from(index).unwrap()]);
    let by_order = DynamicBatchSampler::new(lengths, config.clone())
        .unwrap()
        .iter_order(order)
        .collect::<Result<Vec<_>, _>>();
    let mut by_position =
        DynamicBatchSampler::new(reordered, config).unwrap().iter().collect::<Result<Vec<_>, _>>();
    for position in by_position.iter_mut().flatten().flat_map(|batch| &mut batch.indices) {
        *position = order[usize::try_from(*position).unwrap()];
    }
    assert_eq!(by_order, by_position);
}

prop_compose! {
    fn any_config()(
        strategy in prop_oneof![
            Just(DynamicBatchStrategy::PadToMax),
            Just(DynamicBatchStrategy::Dynamic),
            (1_u64..300).prop_map(|width| DynamicBatchStrategy::Bucket(Buckets::Width(width))),
        ],
        max_batch_size in prop::option::of(1_u64..20),
        max_tokens in prop::option::of(300_u64..5000),
        max_sequence_length in prop::option::of(1_u64..400),
        overlong in prop::sample::select(&[Overlong::Error, Overlong::Truncate, Overlong::Skip]),
        multiple in 1_u64..6,
        remainder in prop::sample::select(&[Remainder::Drop, Remainder::Keep]),
    ) -> BatchConfig {
        let mut config = BatchConfig::default().with_strategy(strategy).with_overlong(overlong);
        config.max_batch_size = max_batch_size;
        config.max_tokens = max_tokens;
        config.max_sequence_length = max_sequence_length;
        config.with_batch_size_multiple(multiple).with_remainder(remainder)
    }
}

proptest! {
    #[test]
    fn laws_hold_on_random_inputs(
        lengths in prop::collection::vec(0_u64..300, 0..80),
        config in any_config(),
    ) {
        prop_assume!(is_valid(&config));
        check(&lengths, &config);
    }
}
