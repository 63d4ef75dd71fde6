//! The whole flow with many simulated ranks: sampler, batches, plan, mesh.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are small")]

use std::thread;

use candle_core::{Device, Tensor, Var};
use candle_distributed::{
    batch::{
        Batch, BatchConfig, Buckets, DynamicBatchSampler, DynamicBatchStrategy, SequenceLengths,
    },
    mesh::{ALL, DeviceMesh, P},
    plan::{
        ElemType, ParameterInfo,
        strategy::{Full, ShardingStrategy},
    },
    sampler::{DistributedSampler, Order, Partition, SamplerConfig, SamplerState, Tail},
    types::{Epoch, Placement, Seed, WorldSize},
};
use integration_tests::lengths::WEB;

const MAX_TOKENS: u64 = 20_000;

/// What one rank does without a word to the others: sample, then batch.
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
fn many_ranks_read_every_sequence_once_each_epoch_within_the_budget() {
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
fn killed_and_resumed_on_other_worlds_no_sample_is_lost_or_read_twice() {
    const LEN: u64 = 100_003;
    let draw = |epoch, life: u64, below| Seed::new(3).derive(epoch).derive(life).as_u64() % below;
    for order in [Order::Shuffled, Order::Exact, Order::Torch] {
        let config = SamplerConfig::default()
            .with_order(order)
            .with_partition(Partition::Strided)
            .with_tail(Tail::Spread);
        let sampler = |placement| DistributedSampler::new(LEN, placement, config).unwrap();
        for epoch in 0..3 {
            let mut first = sampler(Placement::SINGLE);
            first.set_epoch(Epoch::new(epoch));
            // The checkpoint of each life is a text, as in a file.
            let mut checkpoint = serde_json::to_string(&first.state(0)).unwrap();
            let mut read = Vec::new();
            for life in 0.. {
                let state: SamplerState = serde_json::from_str(&checkpoint).unwrap();
                let world = [64, 48, 64, 96][(life % 4) as usize];
                let steps = 1 + draw(epoch, life, 700);
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
fn ranks_that_never_talk_make_the_same_plan() {
    let make = || {
        let layer = |n: u64| {
            ParameterInfo::new(format!("layers.{n}.weight"), [3 * n + 1, 7], ElemType::F32).unwrap()
        };
        let parameters: Vec<_> = (0..50).map(layer).collect();
        Full::default().plan(&parameters, WorldSize::new(16).unwrap()).unwrap()
    };
    let plans: Vec<_> = (0..4)
        .map(|_| thread::spawn(make))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|t| t.join().unwrap())
        .collect();
    assert!(plans.windows(2).all(|pair| pair[0] == pair[1]));
    let texts: Vec<_> = plans.iter().map(|plan| serde_json::to_string(plan).unwrap()).collect();
    assert!(texts.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Learns the mean of sequences by gradient descent on `devices` devices and returns the loss of
/// every step.
fn loss_curve(devices: usize) -> Vec<f64> {
    let lengths = WEB.draw(480);
    let order = DistributedSampler::new(
        480,
        Placement::SINGLE,
        SamplerConfig::default().with_seed(Seed::new(5)),
    )
    .unwrap();
    // Batches that split over each of the meshes compared, so that all of them see the same ones.
    let config = BatchConfig::default().with_max_batch_size(24).with_batch_size_multiple(4);
    let batches = DynamicBatchSampler::new(&lengths, config).unwrap();

    let weight =
        Var::from_tensor(&Tensor::new(&[[0.5_f64], [-0.25]], &Device::Cpu).unwrap()).unwrap();
    let shared = weight.clone();
    let step = DeviceMesh::cpu(devices)
        .unwrap()
        .pmap(move |_, (x, y): (Tensor, Tensor)| {
            let loss = (x.matmul(&shared)? - y)?.sqr()?.sum_all()?;
            let gradient = loss.backward()?.get(&shared).cloned();
            Ok((gradient.ok_or_else(|| candle_core::Error::msg("no gradient"))?, loss))
        })
        .in_axes(P::shard(0, ALL))
        .out_axes(P::sum(ALL));

    let mut curve = Vec::new();
    for batch in batches.iter_order(&order) {
        let rows = batch.unwrap().indices;
        let length = |row| lengths.length(row).unwrap() as f64;
        let x: Vec<f64> = rows.iter().flat_map(|&row| [1.0, length(row).ln()]).collect();
        let y: Vec<f64> = rows.iter().map(|&row| (row as f64 / 100.0).sin()).collect();
        let x = Tensor::from_vec(x, (rows.len(), 2), &Device::Cpu).unwrap();
        let y = Tensor::from_vec(y, (rows.len(), 1), &Device::Cpu).unwrap();
        let (gradient, loss) = step.call((x, y)).unwrap();
        weight.set(&(weight.as_tensor() - (gradient * 1e-4).unwrap()).unwrap()).unwrap();
        curve.push(loss.to_scalar().unwrap());
    }
    curve
}

#[test]
fn the_loss_curve_does_not_depend_on_the_number_of_devices() {
    let single = loss_curve(1);
    assert_eq!(single.len(), 20);
    assert!(single.last() < single.first());
    for devices in [2, 4] {
        for (parallel, single) in loss_curve(devices).into_iter().zip(&single) {
            assert!(
                (parallel - single).abs() <= 1e-12 * single.abs(),
                "{devices} devices: {parallel} and {single}"
            );
        }
    }
}

#[test]
fn the_same_run_gives_the_same_loss_curve_to_the_bit() {
    let bits = |curve: Vec<f64>| curve.into_iter().map(f64::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(loss_curve(4)), bits(loss_curve(4)));
}
