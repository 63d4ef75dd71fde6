//! Sampler, batches, plan and mesh together, on many simulated ranks.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use std::thread;

use candle_core::{Device, Tensor, Var};
use candle_distributed::{
    batch::{
        Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, SequenceLengths,
    },
    mesh::{ALL, DeviceMesh, P},
    plan::{
        ElemType, ParameterInfo, ShardingPlan,
        strategy::{Full, ShardingStrategy},
    },
    sampler::{DistributedSampler, Order, Partition, SamplerConfig, SamplerState, Tail},
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

#[test]
fn resuming_on_other_worlds_loses_nothing() {
    const LEN: u64 = 100_003;
    for order in [Order::Shuffled, Order::Exact, Order::Torch] {
        let config = SamplerConfig::default()
            .with_order(order)
            .with_partition(Partition::Strided)
            .with_tail(Tail::Spread);
        let sampler = |placement| DistributedSampler::new(LEN, placement, config).unwrap();
        for epoch in 0..3 {
            let mut first = sampler(Placement::SINGLE);
            first.set_epoch(Epoch::new(epoch));
            // As text, like a checkpoint on disk.
            let mut checkpoint = serde_json::to_string(&first.state(0)).unwrap();
            let mut read = Vec::new();
            for restart in 0.. {
                let state: SamplerState = serde_json::from_str(&checkpoint).unwrap();
                let world = [64, 48, 64, 96][(restart % 4) as usize];
                let steps = 1 + Seed::new(3).derive(epoch).derive(restart).as_u64() % 700;
                for placement in WorldSize::new(world).unwrap().placements() {
                    let mut rank = sampler(placement);
                    rank.resume(&state).unwrap();
                    read.extend(rank.iter().take(steps as usize));
                    checkpoint = serde_json::to_string(&rank.state(steps)).unwrap();
                }
                if read.len() as u64 >= LEN {
                    break;
                }
            }
            read.sort_unstable();
            assert!(read.into_iter().eq(0..LEN), "{order:?}, epoch {epoch}");
        }
    }
}

#[test]
fn ranks_plan_identically_without_communication() {
    let threads: Vec<_> = (0..4).map(|_| thread::spawn(plan_layers)).collect();
    let plans: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(plans.windows(2).all(|pair| pair[0] == pair[1]));
    let texts: Vec<_> = plans.iter().map(|plan| serde_json::to_string(plan).unwrap()).collect();
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Plans 50 layers of different sizes over 16 ranks.
fn plan_layers() -> ShardingPlan {
    let mut parameters = Vec::new();
    for n in 0..50_u64 {
        let name = format!("layers.{n}.weight");
        parameters.push(ParameterInfo::new(name, [3 * n + 1, 7], ElemType::F32).unwrap());
    }
    Full::default().plan(&parameters, WorldSize::new(16).unwrap()).unwrap()
}

/// Fits a linear model by gradient descent on `devices` devices, and returns the loss of every
/// step.
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

#[test]
fn repeated_run_has_identical_losses() {
    let bits = |curve: Vec<f64>| curve.into_iter().map(f64::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(loss_curve(4)), bits(loss_curve(4)));
}
