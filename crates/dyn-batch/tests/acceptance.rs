//! The acceptance criteria of dynamic batching, one test each.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "lengths/mod.rs"]
mod lengths;

use dyn_batch::{
    Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, Error, Overlong,
    Packing, PaddingReport, SequenceLengths,
};

const LENGTHS: [u32; 12] = [40, 3, 17, 64, 5, 63, 130, 8, 2, 70, 65, 9];
const BUCKET: DynamicBatchStrategy =
    DynamicBatchStrategy::Bucket(Buckets::Width(Buckets::DEFAULT_WIDTH));
const STRATEGIES: [DynamicBatchStrategy; 3] =
    [DynamicBatchStrategy::PadToMax, BUCKET, DynamicBatchStrategy::Dynamic];

fn config(strategy: DynamicBatchStrategy) -> BatchConfig {
    BatchConfig::default().with_strategy(strategy)
}

fn batches(lengths: &[u32], config: BatchConfig) -> Vec<Batch> {
    DynamicBatchSampler::new(lengths, config).unwrap().iter().collect::<Result<_, _>>().unwrap()
}

/// The indices, batch by batch.
fn indices(lengths: &[u32], config: BatchConfig) -> Vec<Vec<u64>> {
    batches(lengths, config).into_iter().map(|batch| batch.indices).collect()
}

fn lengths_in(batch: &Batch) -> impl Iterator<Item = u64> {
    batch.indices.iter().map(|&index| LENGTHS.length(index).unwrap())
}

#[test]
fn criterion_1_pad_to_max_pads_to_the_longest_in_the_batch() {
    let batches = batches(&LENGTHS, config(DynamicBatchStrategy::PadToMax).with_max_batch_size(5));
    assert_eq!(batches.iter().map(|batch| batch.padded_length).collect::<Vec<_>>(), [64, 130, 65]);
    for batch in &batches {
        assert_eq!(lengths_in(batch).max(), Some(batch.padded_length));
    }
}

#[test]
fn criterion_2_bucket_groups_sequences_of_similar_length() {
    let bucketed = batches(&LENGTHS, config(BUCKET).with_max_batch_size(3));
    for batch in &bucketed {
        let bucket = lengths_in(batch).next().unwrap() / 64;
        assert!(lengths_in(batch).all(|length| length / 64 == bucket), "{batch:?}");
    }
    let unsorted = batches(&LENGTHS, config(DynamicBatchStrategy::PadToMax).with_max_batch_size(3));
    let efficiency = |batches: &[Batch]| PaddingReport::from_iter(batches).efficiency();
    assert!(efficiency(&bucketed) > 1.3 * efficiency(&unsorted));
}

#[test]
fn criterion_3_dynamic_adjusts_batch_size_to_the_token_limit() {
    let batches = batches(&LENGTHS, config(DynamicBatchStrategy::Dynamic).with_max_tokens(200));
    assert_eq!(batches.iter().map(Batch::len).collect::<Vec<_>>(), [3, 3, 1, 2, 2, 1]);
    for pair in batches.windows(2) {
        assert!(pair[0].padded_tokens() <= 200);
        let next = LENGTHS.length(pair[1].indices[0]).unwrap();
        assert!(
            (pair[0].len() as u64 + 1) * pair[0].padded_length.max(next) > 200,
            "closed too early: {pair:?}"
        );
    }
}

#[test]
fn criterion_3_dynamic_takes_the_budget_of_the_spec_if_no_other_is_set() {
    let by_product =
        config(DynamicBatchStrategy::Dynamic).with_max_batch_size(2).with_max_sequence_length(130);
    let by_tokens = config(DynamicBatchStrategy::Dynamic).with_max_tokens(260);
    assert_eq!(batches(&LENGTHS, by_product), batches(&LENGTHS, by_tokens));
}

#[test]
fn criterion_4_all_strategies_produce_valid_batches() {
    for strategy in STRATEGIES {
        let batches =
            batches(&LENGTHS, config(strategy.clone()).with_max_batch_size(4).with_max_tokens(260));
        let mut indices: Vec<u64> =
            batches.iter().flat_map(|batch| batch.indices.iter().copied()).collect();
        indices.sort_unstable();
        assert!(indices.into_iter().eq(0..12), "{strategy:?}: each sequence once");
        for batch in &batches {
            assert!((1..=4).contains(&batch.len()) && batch.padded_tokens() <= 260, "{batch:?}");
        }
    }
}

#[test]
fn criterion_5_no_sequence_exceeds_the_maximum_length() {
    for strategy in STRATEGIES {
        let limited = config(strategy.clone()).with_max_batch_size(4).with_max_sequence_length(64);
        let sampler = |overlong| {
            DynamicBatchSampler::new(LENGTHS, limited.clone().with_overlong(overlong)).unwrap()
        };
        for (overlong, counts) in [(Overlong::Truncate, (12, 3, 0)), (Overlong::Skip, (9, 0, 3))] {
            let sampler = sampler(overlong);
            let mut batches = sampler.iter();
            assert!(batches.all(|batch| batch.unwrap().padded_length <= 64));
            let report = batches.report();
            assert_eq!(
                (report.sequences, report.truncated, report.skipped),
                counts,
                "{strategy:?} {overlong:?}"
            );
        }
        let error = sampler(Overlong::Error).iter().find_map(Result::err);
        assert_eq!(
            error,
            Some(Error::SequenceTooLong { index: 6, length: 130, max_sequence_length: 64 })
        );
    }
}

#[test]
fn criterion_6_batch_size_is_the_actual_one() {
    for strategy in STRATEGIES {
        for batch in
            batches(&LENGTHS, config(strategy.clone()).with_max_batch_size(5).with_max_tokens(300))
        {
            assert_eq!(batch.len(), batch.indices.len());
            assert_eq!(batch.is_empty(), batch.indices.is_empty());
            assert_eq!(batch.padded_tokens(), batch.indices.len() as u64 * batch.padded_length);
            assert_eq!(batch.real_tokens, lengths_in(&batch).sum::<u64>());
            assert_eq!(batch.real_tokens + batch.padding_tokens(), batch.padded_tokens());
        }
    }
}

#[test]
fn criterion_7_each_strategy_batches_as_told() {
    let pad_to_max =
        indices(&LENGTHS, config(DynamicBatchStrategy::PadToMax).with_max_batch_size(5));
    assert_eq!(pad_to_max, [vec![0, 1, 2, 3, 4], vec![5, 6, 7, 8, 9], vec![10, 11]]);

    // The bucket of lengths 0–63 is full at sequence 4 and again at 11; the leftovers come in
    // ascending order of length.
    let bucket = indices(&LENGTHS, config(BUCKET).with_max_batch_size(4));
    assert_eq!(bucket, [vec![0, 1, 2, 4], vec![5, 7, 8, 11], vec![3, 9, 10], vec![6]]);

    let dynamic = indices(&LENGTHS, config(DynamicBatchStrategy::Dynamic).with_max_tokens(320));
    assert_eq!(dynamic, [vec![0, 1, 2, 3, 4], vec![5, 6], vec![7, 8, 9, 10], vec![11]]);
}

#[test]
fn criterion_7_a_batch_closes_at_the_multiple_and_its_surplus_opens_the_next() {
    let lengths = [4, 4, 4, 4, 4, 6, 2, 2];
    let config = config(DynamicBatchStrategy::Dynamic).with_max_tokens(20);
    assert_eq!(indices(&lengths, config.clone()), [vec![0, 1, 2, 3, 4], vec![5, 6, 7]]);
    assert_eq!(
        indices(&lengths, config.with_batch_size_multiple(2)),
        [vec![0, 1, 2, 3], vec![4, 5], vec![6, 7]]
    );
}

/// Checks batches and efficiency of 20,000 lengths, so that a change of either shows.
fn check_efficiency(lengths: &[u32], config: BatchConfig, n_batches: u64, efficiency: f64) {
    let sampler = DynamicBatchSampler::new(lengths, config).unwrap();
    let mut batches = sampler.iter();
    assert!(batches.all(|batch| batch.is_ok()));
    let report = batches.report();
    assert_eq!(report.sequences, 20_000);
    assert_eq!(report.batches, n_batches, "{report}");
    assert!(
        (report.efficiency() - efficiency).abs() < 5e-5,
        "{:.4}: {report}",
        report.efficiency()
    );
}

#[test]
fn criterion_8_padding_efficiency_is_measured_on_real_looking_lengths() {
    let pad_to_max = config(DynamicBatchStrategy::PadToMax).with_max_batch_size(32);
    let bucket = config(BUCKET).with_max_batch_size(32);
    let bucket_tokens = config(BUCKET).with_max_tokens(16_384);
    let dynamic = config(DynamicBatchStrategy::Dynamic).with_max_tokens(16_384);

    let web = lengths::WEB.draw(20_000);
    check_efficiency(&web, pad_to_max.clone(), 625, 0.1804);
    check_efficiency(&web, bucket.clone(), 706, 0.9608);
    check_efficiency(&web, bucket_tokens.clone(), 1_014, 0.9617);
    check_efficiency(&web, dynamic.clone(), 2_695, 0.3982);

    let squad = lengths::SQUAD.draw(20_000);
    check_efficiency(&squad, pad_to_max, 625, 0.5063);
    check_efficiency(&squad, bucket, 631, 0.8447);
    check_efficiency(&squad, bucket_tokens, 239, 0.8396);
    check_efficiency(&squad, dynamic, 410, 0.4878);
}

#[test]
fn a_search_needs_fewer_rows_than_best_fit() {
    let squad = lengths::SQUAD.draw(20_000);
    let rows = |packing| {
        let config = config(DynamicBatchStrategy::Pack(packing))
            .with_max_tokens(512)
            .with_max_sequence_length(512)
            .with_overlong(Overlong::Truncate);
        batches(&squad, config).len()
    };
    assert_eq!((rows(Packing::BestFit), rows(Packing::MinimumSlack)), (6357, 6271));
}

#[test]
fn the_recipe_of_the_lengths_is_followed() {
    let check = |lengths: Vec<u32>| {
        (1..).zip(lengths).map(|(weight, length)| weight * u64::from(length)).sum::<u64>()
    };
    let found = lengths::ALL.map(|(name, recipe, _)| (name, check(recipe.draw(20_000))));
    let expected = [
        ("web", 144_239_848_069),
        ("squad", 32_062_771_814),
        ("imdb", 56_377_953_385),
        ("speech", 263_653_663_155),
        ("sft32k", 337_764_842_642),
        ("uniform2k", 206_702_530_380),
        ("const512", 102_405_120_000),
        ("spike512", 60_720_577_465),
    ];
    assert_eq!(found, expected);
}
