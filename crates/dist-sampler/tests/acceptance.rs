//! The ten acceptance criteria of the `DistributedSampler` spec and the two modes of SPDL's
//! deterministic sampler.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, thread};

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, Order, Partition, SamplerConfig, Tail};

/// What the spec calls `shuffle: true`, `drop_last: false`, `seed: 0`.
fn shuffled() -> SamplerConfig {
    SamplerConfig::default()
}

/// What the spec calls `shuffle: false`.
fn sequential() -> SamplerConfig {
    SamplerConfig::default().with_order(Order::Sequential)
}

/// What one rank reads at `epoch`.
fn read(len: u64, placement: Placement, config: SamplerConfig, epoch: u64) -> Vec<u64> {
    let mut sampler = DistributedSampler::new(len, placement, config).unwrap();
    sampler.set_epoch(Epoch::new(epoch));
    sampler.iter().collect()
}

/// What each rank of a world reads at `epoch`.
fn read_all(len: u64, world_size: u64, config: SamplerConfig, epoch: u64) -> Vec<Vec<u64>> {
    let placements = WorldSize::new(world_size).unwrap().placements();
    placements.map(|placement| read(len, placement, config, epoch)).collect()
}

fn sizes(ranks: &[Vec<u64>]) -> Vec<usize> {
    ranks.iter().map(Vec::len).collect()
}

#[test]
fn criterion_1_drop_last_divides_the_data_set_equally() {
    assert_eq!(sizes(&read_all(10, 4, shuffled().with_tail(Tail::Drop), 0)), [2, 2, 2, 2]);
    assert_eq!(sizes(&read_all(1000, 4, shuffled().with_tail(Tail::Drop), 0)), [250; 4]);
}

#[test]
fn criterion_2_without_drop_last_the_last_replica_gets_the_extra_samples() {
    assert_eq!(sizes(&read_all(10, 4, shuffled(), 0)), [2, 2, 2, 4]);
    assert_eq!(
        sizes(&read_all(10, 4, shuffled().with_partition(Partition::Strided), 0)),
        [2, 2, 2, 4]
    );
    assert_eq!(sizes(&read_all(3, 4, shuffled(), 0)), [0, 0, 0, 3]);
}

#[test]
fn criterion_3_replicas_read_distinct_samples() {
    for epoch in 0..5 {
        let mut all = read_all(103, 4, shuffled(), epoch).concat();
        all.sort_unstable();
        assert_eq!(all, (0..103).collect::<Vec<_>>());
    }
}

#[test]
fn criterion_4_set_epoch_changes_the_shuffling() {
    let mut sampler =
        DistributedSampler::new(100, Placement::new(1, 4).unwrap(), shuffled()).unwrap();
    let epochs: BTreeSet<Vec<u64>> = (0..20)
        .map(|epoch| {
            sampler.set_epoch(Epoch::new(epoch));
            assert_eq!(sampler.epoch(), Epoch::new(epoch));
            sampler.iter().collect()
        })
        .collect();
    assert_eq!(epochs.len(), 20);
}

#[test]
fn criterion_5_ranks_see_different_samples_and_each_rank_others_every_epoch() {
    for epoch in 0..5 {
        let ranks = read_all(100, 4, shuffled(), epoch);
        assert_eq!(ranks.iter().collect::<BTreeSet<_>>().len(), 4);
    }
    // Not only the order within a fixed part of the data changes: over the epochs a rank sees
    // (nearly) everything.
    let seen: BTreeSet<u64> = (0..40)
        .flat_map(|epoch| read(100, Placement::new(2, 4).unwrap(), shuffled(), epoch))
        .collect();
    assert_eq!(seen.len(), 100);
}

#[test]
fn criterion_6_without_shuffle_a_replica_reads_sequential_indices() {
    assert_eq!(
        read_all(10, 4, sequential(), 7),
        [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7, 8, 9]]
    );
}

#[test]
fn criterion_7_a_seed_makes_shuffling_reproducible() {
    let with_seed = |seed, epoch| read_all(50, 2, shuffled().with_seed(Seed::new(seed)), epoch);
    assert_eq!(with_seed(3, 1), with_seed(3, 1));
    assert_ne!(with_seed(3, 1), with_seed(4, 1));
    assert_ne!(with_seed(0, 1), with_seed(1, 0), "seed and epoch are not added");
}

#[test]
fn criterion_8_len_is_the_number_of_indices_read() {
    for tail in [Tail::Drop, Tail::LastRank, Tail::Spread, Tail::Pad] {
        for placement in WorldSize::new(4).unwrap().placements() {
            let sampler =
                DistributedSampler::new(11, placement, shuffled().with_tail(tail)).unwrap();
            assert_eq!(sampler.len(), sampler.iter().count() as u64);
            assert_eq!(sampler.iter().len(), sampler.iter().count());
        }
    }
}

#[test]
fn criterion_9_partitions_are_correct() {
    let strided = sequential().with_partition(Partition::Strided);
    let padded = |config: SamplerConfig| config.with_tail(Tail::Pad);
    let spread = |config: SamplerConfig| config.with_tail(Tail::Spread);
    assert_eq!(read_all(5, 3, spread(sequential()), 0), [vec![0, 1], vec![2, 3], vec![4]]);
    assert_eq!(read_all(5, 3, padded(sequential()), 0), [[0, 1], [2, 3], [4, 0]]);
    assert_eq!(read_all(5, 3, padded(strided), 0), [[0, 3], [1, 4], [2, 0]]);
    assert_eq!(read_all(5, 3, strided, 0), [vec![0], vec![1], vec![2, 3, 4]]);
    assert_eq!(
        read_all(2, 5, padded(strided), 0),
        [[0], [1], [0], [1], [0]],
        "padding repeats as often as it must"
    );
}

#[test]
fn criterion_10_processes_that_never_talk_cover_every_epoch() {
    const WORLD: u64 = 8;
    let workers = WorldSize::new(WORLD).unwrap().placements().map(|placement| {
        thread::spawn(move || {
            let mut sampler =
                DistributedSampler::new(10_007, placement, shuffled().with_tail(Tail::Drop))
                    .unwrap();
            [0, 1, 2].map(|epoch| {
                sampler.set_epoch(Epoch::new(epoch));
                sampler.iter().collect::<Vec<_>>()
            })
        })
    });
    let workers: Vec<_> =
        workers.collect::<Vec<_>>().into_iter().map(|worker| worker.join().unwrap()).collect();
    for epoch in 0..3 {
        let read: BTreeSet<u64> = workers.iter().flat_map(|epochs| epochs[epoch].clone()).collect();
        assert_eq!(
            read.len() as u64,
            10_007 / WORLD * WORLD,
            "nothing twice, and only the remainder is dropped"
        );
    }
}

#[test]
fn spdl_page_dropping_the_last_distributed_round() {
    let ranks = read_all(11, 4, SamplerConfig::spdl_deterministic(), 0);
    assert_eq!(ranks, [[0, 4], [1, 5], [2, 6], [3, 7]]);
}

#[test]
fn spdl_page_keeping_the_last_distributed_round() {
    let ranks = read_all(11, 4, SamplerConfig::spdl_deterministic().with_tail(Tail::Spread), 0);
    assert_eq!(ranks, [vec![0, 4, 8], vec![1, 5, 9], vec![2, 6, 10], vec![3, 7]]);
}
