//! Sequences per second of each strategy. Compare two runs on one machine; the times of a single
//! run depend on the machine.

#![allow(clippy::cast_possible_truncation, reason = "the data sets are small")]

use std::hint::black_box;

use benches::n_items;
use candle_distributed::{
    batch::{
        BatchConfig, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
        DynamicBatchSampler, DynamicBatchStrategy, Packing, PaddingReport,
    },
    types::{Epoch, Placement, Seed},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use integration_tests::lengths;

const N: u64 = 1_000_000;

/// Drains a sampler and returns its padding report.
fn drain(sampler: &DynamicBatchSampler<&[u32]>) -> PaddingReport {
    let mut batches = sampler.iter();
    batches.by_ref().for_each(|batch| {
        black_box(&batch);
    });
    *batches.report()
}

fn strategies(criterion: &mut Criterion) {
    let n = n_items(N);
    let bucket = DynamicBatchStrategy::Bucket(Buckets::Width(Buckets::DEFAULT_WIDTH));
    let config = |strategy| BatchConfig::default().with_strategy(strategy);
    let with_budget = |strategy| config(strategy).with_max_tokens(16_384);
    let cases = [
        ("pad_to_max", config(DynamicBatchStrategy::PadToMax).with_max_batch_size(32)),
        ("bucket", with_budget(bucket)),
        ("dynamic", with_budget(DynamicBatchStrategy::Dynamic)),
        (
            "dynamic_multiple_2",
            with_budget(DynamicBatchStrategy::Dynamic).with_batch_size_multiple(2),
        ),
        (
            "window_128",
            with_budget(DynamicBatchStrategy::Sorted { window: Some(128), cut: Cut::Greedy }),
        ),
        (
            "window_128_optimal",
            with_budget(DynamicBatchStrategy::Sorted { window: Some(128), cut: Cut::Optimal }),
        ),
    ];
    for (data, lengths) in [("web_1M", lengths::WEB.draw(n)), ("squad_1M", lengths::SQUAD.draw(n))]
    {
        for (operation, config) in &cases {
            let Ok(sampler) = DynamicBatchSampler::new(lengths.as_slice(), config.clone()) else {
                panic!("invalid configuration: {config:?}");
            };
            let mut group = criterion.benchmark_group(format!("batch/{operation}"));
            group.throughput(Throughput::Elements(n)).sample_size(20);
            group.bench_function(data, |bencher| {
                bencher.iter(|| {
                    let report = drain(&sampler);
                    assert_eq!(report.sequences + report.dropped, n);
                    report
                });
            });
            group.finish();
        }
    }
}

/// Times plans of a whole data set: sorted and cut, or packed.
///
/// `plain_sort_and_cut` is the floor: the sort of the standard library, then fairseq's rule without
/// its multiple of the batch size.
fn plans(criterion: &mut Criterion) {
    let sorted = |cut| DynamicBatchStrategy::Sorted { window: None, cut };
    // SQuAD has only a few hundred different lengths, and the chats have a long tail.
    let data_sets = [
        ("web_1M", &lengths::WEB, N, 16_384, 8192),
        ("web_10M", &lengths::WEB, 10 * N, 16_384, 8192),
        ("squad_1M", &lengths::SQUAD, N, 16_384, 1024),
        ("sft32k_1M", &lengths::SFT32K, N, 65_536, 32_768),
    ];
    for (data, recipe, n, max_tokens, row_length) in data_sets {
        let cases = [
            ("sorted_greedy", sorted(Cut::Greedy), max_tokens),
            ("sorted_optimal", sorted(Cut::Optimal), max_tokens),
            ("pack_best_fit", DynamicBatchStrategy::Pack(Packing::BestFit), row_length),
            ("pack_minimum_slack", DynamicBatchStrategy::Pack(Packing::MinimumSlack), row_length),
        ];
        let n = n_items(n);
        let lengths = recipe.draw(n);
        let mut group = criterion.benchmark_group("batch/plan");
        group.throughput(Throughput::Elements(n)).sample_size(10);
        for (operation, strategy, max_tokens) in &cases {
            let config =
                BatchConfig::default().with_strategy(strategy.clone()).with_max_tokens(*max_tokens);
            let Ok(sampler) = DynamicBatchSampler::new(lengths.as_slice(), config) else {
                panic!("invalid configuration for {operation}")
            };
            group.bench_function(format!("{operation}/{data}"), |bencher| {
                bencher.iter(|| sampler.iter().count());
            });
        }
        group.bench_function(format!("plain_sort_and_cut/{data}"), |bencher| {
            bencher.iter(|| {
                let mut order: Vec<u32> = (0..n as u32).collect();
                order.sort_by_key(|&index| lengths[index as usize]);
                let mut batches: Vec<Vec<u32>> = vec![Vec::new()];
                for index in order {
                    let length = u64::from(lengths[index as usize]);
                    let last = batches.len() - 1;
                    if (batches[last].len() as u64 + 1) * length > max_tokens {
                        batches.push(Vec::new());
                    }
                    let last = batches.len() - 1;
                    batches[last].push(index);
                }
                batches.len()
            });
        });
        group.finish();
    }
}

/// Times the plan of one rank of 8, for a new epoch and for a saved state.
fn steps(criterion: &mut Criterion) {
    let n = n_items(N);
    let lengths = lengths::WEB.draw(n);
    let strategy = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
    let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(16_384);
    let placement = Placement::new(3, 8);
    let (Ok(batches), Ok(placement)) =
        (DynamicBatchSampler::new(lengths.as_slice(), config), placement)
    else {
        panic!("invalid configuration")
    };
    let config = DistributedConfig {
        shuffle: Some(Seed::new(1)),
        cost: Cost::ATTENTION,
        ..DistributedConfig::default()
    };
    let Ok(sampler) = DistributedBatchSampler::new(batches, placement, config) else {
        panic!("cannot build the sampler")
    };
    let Ok(mut steps) = sampler.epoch(Epoch::ZERO, 0..n) else { panic!("cannot plan the epoch") };
    let half = steps.len() / 2;
    assert!(steps.nth(half - 1).is_some());
    let state = steps.state();

    let mut group = criterion.benchmark_group("batch/steps");
    group.throughput(Throughput::Elements(n)).sample_size(10);
    group.bench_function("first_plan/web_1M", |bencher| {
        bencher.iter(|| sampler.epoch(Epoch::ZERO, 0..n).map_or(0, |steps| steps.len()));
    });
    group.bench_function("cold_resume/web_1M", |bencher| {
        bencher.iter(|| {
            assert_eq!(sampler.resume(&state, 0..n).map_or(0, |steps| steps.len()), steps.len());
        });
    });
    group.finish();
}

criterion_group!(benches, strategies, plans, steps);
criterion_main!(benches);
