//! Efficiency of batches on realistic lengths: criterion 8 of the spec of dynamic batching.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use core_types::{Epoch, Placement};
use dyn_batch::{
    BatchConfig, Buckets, Cost, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler,
    DynamicBatchStrategy, GridConfig, Overlong, Packing, StepLayout,
};

use crate::lengths;

const BUCKET: DynamicBatchStrategy =
    DynamicBatchStrategy::Bucket(Buckets::Width(Buckets::DEFAULT_WIDTH));

fn config(strategy: DynamicBatchStrategy) -> BatchConfig {
    BatchConfig::default().with_strategy(strategy)
}

/// Checks the number of batches and the efficiency of 20,000 lengths, to show any change.
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
fn padding_efficiency_is_pinned() {
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
fn minimum_slack_beats_best_fit() {
    let squad = lengths::SQUAD.draw(20_000);
    for (packing, n_rows) in [(Packing::BestFit, 6357), (Packing::MinimumSlack, 6271)] {
        let config = config(DynamicBatchStrategy::Pack(packing))
            .with_max_tokens(512)
            .with_max_sequence_length(512)
            .with_overlong(Overlong::Truncate);
        assert_eq!(DynamicBatchSampler::new(&squad, config).unwrap().iter().count(), n_rows);
    }
}

#[test]
fn packed_grids_wait_little() {
    // The most that ranks may wait, in percent of the mean time. Some 6 % of the rows is free.
    let most = [0.03, 0.01, 0.01, 0.01, 0.11, 0.01, 0.0, 0.01];
    for ((name, recipe, row_tokens), most) in lengths::ALL.into_iter().zip(most) {
        let lengths = recipe.draw(20_000);
        let tokens: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        let size = 60 * row_tokens * lengths.len() as u64 / tokens;
        let n_steps = (lengths.len() as u64 / size).min(8);
        let pack = config(DynamicBatchStrategy::Pack(Packing::BestFit)).with_max_tokens(row_tokens);
        let rows = DynamicBatchSampler::new(&lengths, pack).unwrap();
        let best_fit = (0..n_steps).map(|step| {
            rows.iter_order(step * size..(step + 1) * size).count().next_multiple_of(8)
        });
        let best_fit: usize = best_fit.sum();
        let layout =
            StepLayout::Grid(GridConfig { global_batch_size: Some(size), ..GridConfig::default() });
        let config =
            DistributedConfig { layout, cost: Cost::ATTENTION, ..DistributedConfig::default() };
        let sampler =
            DistributedBatchSampler::new(rows, Placement::new(0, 8).unwrap(), config).unwrap();
        let steps = sampler.epoch(Epoch::ZERO, 0..n_steps * size).unwrap();
        let report = steps.grid_report().unwrap();
        assert_eq!(report.cells, best_fit as u64, "{name}");
        let waiting = (report.time * u128::from(report.ranks)) as f64 / report.cost as f64 - 1.0;
        assert!(waiting * 100.0 <= most, "{name}: {report}");
    }
}
