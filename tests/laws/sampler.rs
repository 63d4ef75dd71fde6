//! What every sampler promises, whatever the data set, world and choices.

use candle_distributed::{
    sampler::{DistributedSampler, Error, Order, Partition, SamplerConfig, Tail},
    types::{Epoch, Placement, Seed, WorldSize},
};
use proptest::prelude::*;

const ORDERS: [Order; 2] = [Order::Sequential, Order::Exact];
const PARTITIONS: [Partition; 2] = [Partition::Contiguous, Partition::Strided];
const TAILS: [Tail; 4] = [Tail::Drop, Tail::LastRank, Tail::Spread, Tail::Pad];

/// Every combination of order, partition, tail and two seeds.
fn configs() -> impl Iterator<Item = SamplerConfig> {
    let choices = ORDERS.into_iter().flat_map(|order| PARTITIONS.into_iter().map(move |partition| (order, partition)));
    choices.flat_map(|(order, partition)| {
        let config = SamplerConfig::default().with_order(order).with_partition(partition);
        TAILS.into_iter().flat_map(move |tail| [0, 7].map(|seed| config.with_tail(tail).with_seed(Seed::new(seed))))
    })
}

fn samplers(len: u64, world_size: u64, config: SamplerConfig, epoch: u64) -> Vec<DistributedSampler> {
    let placements = WorldSize::new(world_size).unwrap().placements();
    let make = |placement| {
        let mut sampler = DistributedSampler::new(len, placement, config).unwrap();
        sampler.set_epoch(Epoch::new(epoch));
        sampler
    };
    placements.map(make).collect()
}

fn check(len: u64, world: u64, config: SamplerConfig, epoch: u64) {
    let context = format!("{len} over {world}, epoch {epoch}, {config:?}");
    let samplers = samplers(len, world, config, epoch);
    let ranks: Vec<Vec<u64>> = samplers.iter().map(|sampler| sampler.iter().collect()).collect();
    check_counts(len, world, config.tail, &ranks, &context);
    check_sizes(len, world, config.tail, &ranks, &context);
    samplers.iter().zip(&ranks).for_each(|(sampler, indices)| check_iterator(sampler, indices, &context));
}

/// How often each sample is read, over all ranks.
fn check_counts(len: u64, world: u64, tail: Tail, ranks: &[Vec<u64>], context: &str) {
    let mut reads = vec![0_u64; usize::try_from(len).unwrap()];
    ranks.iter().flatten().for_each(|&index| reads[usize::try_from(index).unwrap()] += 1);
    let (least, most) = (reads.iter().min().unwrap(), reads.iter().max().unwrap());
    match tail {
        Tail::Drop => {
            assert!(*most <= 1, "{context}");
            assert_eq!(reads.iter().sum::<u64>(), len / world * world, "{context}");
        }
        Tail::Pad => {
            assert!(*least >= 1 && most - least <= 1, "{context}");
            assert_eq!(reads.iter().sum::<u64>(), len.div_ceil(world) * world, "{context}");
        }
        _ => assert_eq!((*least, *most), (1, 1), "{context}"),
    }
}

/// How many indices each rank reads.
fn check_sizes(len: u64, world: u64, tail: Tail, ranks: &[Vec<u64>], context: &str) {
    for (rank, indices) in (0..).zip(ranks) {
        let expected = match tail {
            Tail::Pad => len.div_ceil(world),
            Tail::Spread => len / world + u64::from(rank < len % world),
            Tail::LastRank if rank + 1 == world => len / world + len % world,
            _ => len / world,
        };
        assert_eq!(indices.len() as u64, expected, "{context}");
    }
}

/// Every way to read a sampler gives the same indices.
fn check_iterator(sampler: &DistributedSampler, indices: &[u64], context: &str) {
    assert_eq!(sampler.len(), indices.len() as u64, "{context}");
    assert_eq!(sampler.is_empty(), indices.is_empty(), "{context}");
    assert!(sampler.iter().rev().eq(indices.iter().rev().copied()), "{context}");
    for n in 0..=indices.len() {
        let expected = indices.get(n).copied();
        assert_eq!(sampler.get(n as u64), expected, "{context}");
        assert_eq!(sampler.iter().nth(n), expected, "{context}");
        assert_eq!(sampler.iter().skip(n).len(), indices.len() - n, "{context}");
    }
    assert_eq!(sampler.get(u64::MAX), None, "{context}");
}

#[test]
fn every_small_data_set_is_covered_as_the_tail_says() {
    for config in configs() {
        for len in 1..=40 {
            (1..=9).for_each(|world| check(len, world, config, len % 3));
        }
    }
}

#[test]
fn the_order_does_not_depend_on_the_world() {
    for order in ORDERS {
        let config = SamplerConfig::default().with_order(order).with_tail(Tail::Spread);
        let single: Vec<u64> = samplers(37, 1, config, 2)[0].iter().collect();
        for world in 2..=9 {
            let joined: Vec<u64> = samplers(37, world, config, 2).iter().flatten().collect();
            assert_eq!(joined, single);
            let dealt = samplers(37, world, config.with_partition(Partition::Strided), 2);
            let by_round = (0..37_u64.div_ceil(world)).flat_map(|n| dealt.iter().filter_map(move |rank| rank.get(n)));
            assert!(by_round.eq(single.iter().copied()));
        }
    }
}

#[test]
fn epochs_can_be_visited_in_any_order() {
    let config = SamplerConfig::default();
    let mut sampler = samplers(100, 3, config, 5).remove(1);
    let fifth: Vec<u64> = sampler.iter().collect();
    sampler.set_epoch(Epoch::new(9));
    assert!(!sampler.iter().eq(fifth.iter().copied()));
    sampler.set_epoch(Epoch::new(5));
    assert!(sampler.iter().eq(fifth));
}

#[test]
fn impossible_data_sets_are_refused() {
    let sampler = |len, config| DistributedSampler::new(len, Placement::SINGLE, config);
    let max = DistributedSampler::MAX_LEN;
    let sequential = SamplerConfig::default().with_order(Order::Sequential);
    assert_eq!(sampler(0, sequential).unwrap_err(), Error::EmptyDataSet);
    assert_eq!(sampler(max + 1, sequential).unwrap_err(), Error::DataSetTooLong { len: max + 1, max });
    let too_long = sampler(max, SamplerConfig::default()).unwrap_err();
    assert_eq!(too_long, Error::TooLongToShuffle { len: max, max: 1 << 32 });
}

proptest! {
    #[test]
    fn any_data_set_is_covered_as_the_tail_says(len in 1_u64..5_000, world in 1_u64..70, epoch in any::<u64>(), config in 0_usize..32) {
        check(len, world, configs().nth(config).unwrap(), epoch);
    }

    #[test]
    fn the_largest_sequential_data_sets_do_not_overflow(
        short_of_max in 0_u64..1_000, world in 1..=WorldSize::MAX.as_u64(), rank in any::<u64>(), config in 0_usize..16,
    ) {
        let config = configs().nth(config).unwrap().with_order(Order::Sequential);
        let len = DistributedSampler::MAX_LEN - short_of_max;
        let sampler = DistributedSampler::new(len, Placement::new(rank % world, world).unwrap(), config).unwrap();
        prop_assert!(sampler.get(sampler.len() - 1).unwrap() < len);
        prop_assert_eq!(sampler.get(sampler.len()), None);
    }
}
