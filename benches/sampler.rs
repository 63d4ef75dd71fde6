//! Sampler: one rank's epoch in every order, single reads and seeks. The floor is writing
//! consecutive numbers to memory.
//!
//! `CANDLE_DISTRIBUTED_BENCH_LEN` sets the length of the data set; comparisons with other packages
//! use 100 million.

#![allow(clippy::unwrap_used, reason = "a bench that cannot be set up must not run")]
#![allow(clippy::cast_possible_truncation, reason = "a rank's share fits the memory")]

use std::hint::black_box;

use benches::n_items;
use candle_distributed::{
    sampler::{DistributedSampler, MixtureEnd, MixturePart, Order, Partition, SamplerConfig, Tail},
    types::{Epoch, Placement},
};
use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};

const WORLD: u64 = 8;

fn len() -> u64 {
    std::env::var("CANDLE_DISTRIBUTED_BENCH_LEN")
        .map_or(n_items(1_000_000), |len| len.parse().unwrap())
}

/// Returns the strided sampler of rank 3 of 8.
fn sampler(len: u64, order: Order) -> DistributedSampler {
    let config = SamplerConfig::default()
        .with_order(order)
        .with_partition(Partition::Strided)
        .with_tail(Tail::Drop);
    DistributedSampler::new(len, Placement::new(3, WORLD).unwrap(), config).unwrap()
}

/// Times the move to the next epoch, and writing all of the rank's indices to a warm buffer.
fn epoch(c: &mut Criterion) {
    let share = len() / WORLD;
    let mut buffer = vec![0; share as usize];
    let mut group = c.benchmark_group("sampler/epoch");
    group.throughput(Throughput::Elements(share)).sample_size(10);
    let orders =
        [("streaming", Order::Streaming), ("exact", Order::Exact), ("torch", Order::Torch)];
    for (variant, order) in [("sequential", Order::Sequential)].into_iter().chain(orders) {
        let mut sampler = sampler(len(), order);
        let mut epoch = 0;
        group.bench_function(variant, |b| {
            b.iter(|| {
                epoch += 1;
                sampler.set_epoch(Epoch::new(epoch));
                assert_eq!(sampler.fill(0, &mut buffer), buffer.len());
                black_box(&mut buffer);
            });
        });
    }
    // The floor: consecutive numbers, written to the same buffer.
    group.bench_function("write_consecutive_u64", |b| {
        b.iter(|| {
            (0..).zip(buffer.iter_mut()).for_each(|(value, slot)| *slot = value);
            black_box(&mut buffer);
        });
    });
    group.finish();
}

/// Times the start of a resumed run: build a sampler, set its epoch, read all of the rank's
/// indices.
fn first_epoch(c: &mut Criterion) {
    let share = len() / WORLD;
    let mut buffer = vec![0; share as usize];
    let mut group = c.benchmark_group("sampler/first_epoch");
    group.throughput(Throughput::Elements(share)).sample_size(10);
    for (variant, order) in [("exact", Order::Exact), ("torch", Order::Torch)] {
        group.bench_function(variant, |b| {
            b.iter(|| {
                let mut sampler = sampler(len(), order);
                sampler.set_epoch(Epoch::new(1));
                assert_eq!(sampler.fill(0, &mut buffer), buffer.len());
                black_box(&mut buffer);
            });
        });
    }
    group.finish();
}

/// Times the iterator over the streaming order, as a data loader reads it.
fn iterate(c: &mut Criterion) {
    let sampler = sampler(len(), Order::Streaming);
    let mut group = c.benchmark_group("sampler/iterate");
    group.throughput(Throughput::Elements(sampler.len())).sample_size(10);
    group.bench_function("streaming", |b| {
        b.iter(|| sampler.iter().fold(0, |all, index| all ^ index));
    });
    group.finish();
}

/// Times building a sampler of 10^12 samples, seeking in it, and locating a sample.
fn random_access(c: &mut Criterion) {
    const TRILLION: u64 = 1_000_000_000_000;
    let mut group = c.benchmark_group("sampler/random_access");
    group.throughput(Throughput::Elements(1));
    group.bench_function("new_and_first_1T", |b| {
        b.iter(|| sampler(black_box(TRILLION), Order::Streaming).iter().next());
    });
    for (variant, len) in [("100M", 100_000_000), ("1T", TRILLION)] {
        let sampler = sampler(len, Order::Streaming);
        let mut n = 0;
        group.bench_function(format!("seek_{variant}"), |b| {
            b.iter(|| {
                n = (n + 7_919) % sampler.len();
                sampler.iter().nth(n as usize)
            });
        });
        time_lookups(&mut group, variant, &sampler, len);
    }
    group.finish();
}

/// Times `get`, and `position_of` for each of `n_samples` samples.
fn time_lookups(
    group: &mut BenchmarkGroup<'_, WallTime>,
    variant: &str,
    sampler: &DistributedSampler,
    n_samples: u64,
) {
    let mut n = 0;
    group.bench_function(format!("get_{variant}"), |b| {
        b.iter(|| {
            n = (n + 7_919) % sampler.len();
            sampler.get(black_box(n))
        });
    });
    group.bench_function(format!("position_of_{variant}"), |b| {
        b.iter(|| {
            n = (n + 7_919) % n_samples;
            sampler.position_of(black_box(n))
        });
    });
}

/// Times an epoch's deal, single reads and searches in 100,000 shards and in a mixture.
fn shards_and_parts(c: &mut Criterion) {
    let (me, config) = (Placement::new(3, WORLD).unwrap(), SamplerConfig::default());
    let shard_lens: Vec<u64> = (0..100_000).map(|shard| 500 + shard * 7_919 % 1_000).collect();
    let shards = DistributedSampler::sharded(&shard_lens, 240, me, config).unwrap();
    let parts = [7, 2, 1].map(|weight| MixturePart::new(10_000_000, weight));
    let end = MixtureEnd::Repeat { len: 100_000_000 };
    let mixture = DistributedSampler::mixture(&parts, end, me, config).unwrap();
    let mut group = c.benchmark_group("sampler/shards_and_parts");
    let mut dealt = shards.clone();
    let mut epoch = 0;
    group.bench_function("deal_100k_shards", |b| {
        b.iter(|| {
            epoch += 1;
            dealt.set_epoch(Epoch::new(epoch));
        });
    });
    group.throughput(Throughput::Elements(1));
    for (variant, sampler) in [("100k_shards", shards), ("mixture_of_3", mixture)] {
        time_lookups(&mut group, variant, &sampler, 30_000_000);
    }
    group.finish();
}

/// Times one rank's share of ten million weighted draws over a million weights.
fn weighted(c: &mut Criterion) {
    let draws = n_items(10_000_000);
    let weights: Vec<f64> = (0..draws / 10).map(|i| (i % 1000) as f64 + 0.5).collect();
    let make = || {
        DistributedSampler::weighted(
            &weights,
            draws,
            Placement::new(3, WORLD).unwrap(),
            SamplerConfig::default(),
        )
    };
    let mut buffer = vec![0; (draws / WORLD) as usize];
    let mut group = c.benchmark_group("sampler/weighted_10M_of_1M");
    group.throughput(Throughput::Elements(draws / WORLD)).sample_size(10);
    group.bench_function("new", |b| b.iter(|| make().unwrap()));
    let mut sampler = make().unwrap();
    let mut epoch = 0;
    group.bench_function("epoch", |b| {
        b.iter(|| {
            epoch += 1;
            sampler.set_epoch(Epoch::new(epoch));
            assert_eq!(sampler.fill(0, &mut buffer), buffer.len());
            black_box(&mut buffer);
        });
    });
    group.finish();
}

criterion_group!(benches, epoch, first_epoch, iterate, random_access, shards_and_parts, weighted);
criterion_main!(benches);
