//! Sampler: making an epoch and reading it, beside the naive way.

use std::hint::black_box;

use candle_distributed::{
    sampler::{DistributedSampler, Order, Partition, SamplerConfig, Tail},
    types::{Epoch, Placement},
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const LEN: u64 = 1_000_000;
const WORLD: u64 = 8;

fn sampler(order: Order) -> Option<DistributedSampler> {
    let config = SamplerConfig::default().with_order(order).with_partition(Partition::Strided).with_tail(Tail::Drop);
    DistributedSampler::new(LEN, Placement::new(3, WORLD).ok()?, config).ok()
}

/// One rank's epoch: set it, then read every index.
fn epoch(c: &mut Criterion) {
    let mut group = c.benchmark_group("sampler/epoch");
    group.throughput(Throughput::Elements(LEN / WORLD)).sample_size(20);
    for (variant, order) in [("sequential_1M_w8", Order::Sequential), ("exact_1M_w8", Order::Exact)] {
        let Some(mut sampler) = sampler(order) else { continue };
        let mut epoch = 0;
        group.bench_function(variant, |b| {
            b.iter(|| {
                epoch += 1;
                sampler.set_epoch(Epoch::new(epoch));
                let sum: u64 = sampler.iter().sum();
                assert!(sum > 0);
                black_box(sum)
            });
        });
    }
    group.finish();
}

/// The floor: writing as many consecutive numbers to memory that is warm.
fn reference(c: &mut Criterion) {
    let mut group = c.benchmark_group("sampler/reference");
    group.throughput(Throughput::Elements(LEN / WORLD));
    let mut buffer = vec![0_u64; (LEN / WORLD) as usize];
    group.bench_function("write_u64", |b| {
        b.iter(|| {
            (0..).zip(buffer.iter_mut()).for_each(|(value, slot)| *slot = black_box(value));
            assert_eq!(buffer.last(), Some(&(LEN / WORLD - 1)));
        });
    });
    group.finish();
}

criterion_group!(benches, epoch, reference);
criterion_main!(benches);
