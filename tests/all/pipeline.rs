//! Sampler, batches and mesh together, on many simulated ranks.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use std::thread;

use candle_core::{Device, Tensor, Var};
use candle_distributed::{
    batch::{
        Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, SequenceLengths,
    },
    mesh::{ALL, DeviceMesh, P},
    sampler::{DistributedSampler, Partition, SamplerConfig, Tail},
    types::{Epoch, Placement, Seed, WorldSize},
};
use integration_tests::lengths::WEB;

const MAX_TOKENS: u64 = 20_000;

/// Samples and batches as one rank, without communication.
fn batches_of_rank(lengths: &[u32], placement: Placement, epoch: u64) -> Vec<Batch> {
    let config =
        SamplerConfig::default().with_partition(Partition::Strided).with_tail(Tail::Spread);
    let mut sampler = DistributedSampler::new(lengths.len() as u64, placement, config).unwrap();
    sampler.set_epoch(Epoch::new(epoch));
    let config = BatchConfig::default()
        .with_strategy(DynamicBatchStrategy::Bucket(Buckets::Width(128)))
        .with_max_tokens(MAX_TOKENS);
    DynamicBatchSampler::new(lengths, config)
        .unwrap()
        .iter_order(&sampler)
        .collect::<Result<_, _>>()
        .unwrap()
}

#[test]
fn ranks_cover_every_epoch_within_budget() {
    let lengths = WEB.draw(5_000);
    for epoch in 0..3 {
        let world = WorldSize::new(64).unwrap();
        let batches: Vec<Batch> = thread::scope(|scope| {
            let lengths = &lengths;
            let ranks = world
                .placements()
                .map(|place| scope.spawn(move || batches_of_rank(lengths, place, epoch)));
            ranks.collect::<Vec<_>>().into_iter().flat_map(|rank| rank.join().unwrap()).collect()
        });
        assert!(batches.iter().all(|batch| batch.padded_tokens() <= MAX_TOKENS));
        let mut read: Vec<u64> = batches.into_iter().flat_map(|batch| batch.indices).collect();
        read.sort_unstable();
        assert!(read.into_iter().eq(0..5_000), "epoch {epoch}");
    }
}

/// Returns the losses of 20 batches' steps on this many devices.
fn loss_curve(devices: usize) -> Vec<f64> {
    let lengths = WEB.draw(480);
    let order = DistributedSampler::new(
        480,
        Placement::SINGLE,
        SamplerConfig::default().with_seed(Seed::new(5)),
    )
    .unwrap();
    // A multiple of 4 splits evenly over every compared mesh, so that all get the same batches.
    let config = BatchConfig::default().with_max_batch_size(24).with_batch_size_multiple(4);
    let batches = DynamicBatchSampler::new(&lengths, config).unwrap();

    let weight =
        Var::from_tensor(&Tensor::new(&[[0.5_f64], [-0.25]], &Device::Cpu).unwrap()).unwrap();
    let shared = weight.clone();
    let step = DeviceMesh::cpu(devices)
        .unwrap()
        .pmap(move |ctx, (x, y): (Tensor, Tensor)| {
            let loss = (x.matmul(&shared)? - y)?.sqr()?.sum_all()?;
            let gradient = loss.backward()?.get(&shared).cloned();
            let gradient = gradient.ok_or_else(|| candle_core::Error::msg("no gradient"))?;
            ctx.psum(&(gradient, loss.detach()), ALL)
        })
        .in_axes(P::shard(0, ALL))
        .out_axes(P::replicate());

    let mut curve = Vec::new();
    for batch in batches.iter_order(&order) {
        let rows = batch.unwrap().indices;
        let mut x = Vec::new();
        let mut y = Vec::new();
        for &row in &rows {
            x.extend([1.0, (lengths.length(row).unwrap() as f64).ln()]);
            y.push((row as f64 / 100.0).sin());
        }
        let x = Tensor::from_vec(x, (rows.len(), 2), &Device::Cpu).unwrap();
        let y = Tensor::from_vec(y, (rows.len(), 1), &Device::Cpu).unwrap();
        let (gradient, loss) = step.call((x, y)).unwrap();
        weight.set(&(weight.as_tensor() - (gradient * 1e-4).unwrap()).unwrap()).unwrap();
        curve.push(loss.to_scalar().unwrap());
    }
    curve
}

#[test]
fn losses_are_independent_of_device_count() {
    let single = loss_curve(1);
    assert_eq!(single.len(), 20);
    assert!(single.last() < single.first());
    for devices in [2, 4] {
        for (parallel, single) in loss_curve(devices).into_iter().zip(&single) {
            assert!(
                (parallel - single).abs() <= 1e-12 * single.abs(),
                "{devices} devices: {parallel}, one: {single}"
            );
        }
    }
}
