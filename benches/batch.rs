//! Sequences per second of each strategy. Compare a run with one before it, on the same machine: the numbers by
//! themselves say little.

use std::hint::black_box;

use candle_distributed::batch::{BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, PaddingReport};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use integration_tests::lengths;

const N: u64 = 1_000_000;

/// Drains a sampler and returns what its batches cost.
fn drain(sampler: &DynamicBatchSampler<&[u32]>) -> PaddingReport {
    let mut batches = sampler.iter();
    batches.by_ref().for_each(|batch| {
        black_box(&batch);
    });
    *batches.report()
}

fn strategies(criterion: &mut Criterion) {
    let bucket = DynamicBatchStrategy::Bucket(Buckets::Width(Buckets::DEFAULT_WIDTH));
    let config = |strategy| BatchConfig::default().with_strategy(strategy);
    let of_tokens = |strategy| config(strategy).with_max_tokens(16_384);
    let cases = [
        ("pad_to_max", config(DynamicBatchStrategy::PadToMax).with_max_batch_size(32)),
        ("bucket", of_tokens(bucket)),
        ("dynamic", of_tokens(DynamicBatchStrategy::Dynamic)),
        ("dynamic_multiple_2", of_tokens(DynamicBatchStrategy::Dynamic).with_batch_size_multiple(2)),
    ];
    for (data, lengths) in [("web_1M", lengths::WEB.draw(N)), ("squad_1M", lengths::SQUAD.draw(N))] {
        for (operation, config) in &cases {
            let Ok(sampler) = DynamicBatchSampler::new(lengths.as_slice(), config.clone()) else {
                panic!("{config:?} contradicts itself");
            };
            let mut group = criterion.benchmark_group(format!("batch/{operation}"));
            group.throughput(Throughput::Elements(N)).sample_size(20);
            group.bench_function(data, |bencher| {
                bencher.iter(|| {
                    let report = drain(&sampler);
                    assert_eq!(report.sequences + report.dropped, N);
                    report
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, strategies);
criterion_main!(benches);
