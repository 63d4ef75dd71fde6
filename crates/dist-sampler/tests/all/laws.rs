//! Properties of every sampler, for all data sets, worlds and configurations.
//!
//! Comments name the acceptance criteria of the `DistributedSampler` spec that a test proves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{
    DistributedSampler, Error, Order, Partition, Quota, SamplerConfig, SamplerState, Tail,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The length of the longest data set.
const MAX_LEN: u64 = 1 << 63;

/// The maximum number of worlds within one epoch.
const MAX_STAGES: usize = 1024;

const ORDERS: [Order; 4] = [Order::Sequential, Order::Exact, Order::Streaming, Order::Torch];
const PARTITIONS: [Partition; 2] = [Partition::Contiguous, Partition::Strided];
const TAILS: [Tail; 4] = [Tail::Drop, Tail::LastRank, Tail::Spread, Tail::Pad];
const N_RULES: usize = PARTITIONS.len() * TAILS.len();
const N_CONFIGS: usize = ORDERS.len() * N_RULES;

/// Returns the `n`-th combination of order, partition and tail.
fn config(n: usize) -> SamplerConfig {
    SamplerConfig::default()
        .with_order(ORDERS[n / N_RULES])
        .with_partition(PARTITIONS[n / TAILS.len() % PARTITIONS.len()])
        .with_tail(TAILS[n % TAILS.len()])
        .with_seed(Seed::new(n as u64))
}

fn sampler(
    len: u64,
    rank: u64,
    world: u64,
    config: SamplerConfig,
    epoch: u64,
) -> DistributedSampler {
    let mut sampler =
        DistributedSampler::new(len, Placement::new(rank, world).unwrap(), config).unwrap();
    sampler.set_epoch(Epoch::new(epoch));
    sampler
}

fn world(len: u64, world: u64, config: SamplerConfig, epoch: u64) -> Vec<DistributedSampler> {
    (0..world).map(|rank| sampler(len, rank, world, config, epoch)).collect()
}

fn read(samplers: &[DistributedSampler]) -> Vec<Vec<u64>> {
    samplers.iter().map(|sampler| sampler.iter().collect()).collect()
}

fn sorted(indices: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let mut indices: Vec<u64> = indices.into_iter().collect();
    indices.sort_unstable();
    indices
}

fn check(len: u64, n_ranks: u64, config: SamplerConfig, epoch: u64) {
    let context = format!("{len} over {n_ranks}, epoch {epoch}, {config:?}");
    let samplers = world(len, n_ranks, config, epoch);
    let ranks = read(&samplers);
    check_counts(len, n_ranks, config.tail, &ranks, &context);
    check_sizes(len, n_ranks, config.tail, &ranks, &context);
    check_owners(len, &samplers, &context);
    for (sampler, indices) in samplers.iter().zip(&ranks) {
        check_iterator(sampler, indices, &context);
        check_fill(sampler, indices, &context);
        check_workers(sampler, indices, &context);
    }
}

/// Criteria 3 and 10: checks the number of reads of each sample. The ranks never communicate.
fn check_counts(len: u64, world: u64, tail: Tail, ranks: &[Vec<u64>], context: &str) {
    let mut reads = vec![0_u64; usize::try_from(len).unwrap()];
    for &index in ranks.iter().flatten() {
        reads[usize::try_from(index).unwrap()] += 1;
    }
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

/// Criteria 1, 2 and 9: checks the number of indices per rank.
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

/// Checks the owner of each sample, which reads it other than as padding, and its position in the
/// order.
fn check_owners(len: u64, samplers: &[DistributedSampler], context: &str) {
    let whole = SamplerConfig::default()
        .with_order(samplers[0].config().order)
        .with_seed(samplers[0].config().seed);
    let order = sampler(len, 0, 1, whole, samplers[0].epoch().as_u64());
    let mut owners = vec![None; usize::try_from(len).unwrap()];
    for sampler in samplers {
        for (index, is_padding) in (0..sampler.len()).map(|n| sampler.entry(n).unwrap()) {
            if !is_padding {
                owners[usize::try_from(index).unwrap()] = Some(sampler.placement().rank());
            }
        }
    }
    for (index, owner) in (0..).zip(owners) {
        assert_eq!(samplers[0].rank_of(index), owner, "{context}");
        assert_eq!(order.get(samplers[0].position_of(index).unwrap()), Some(index), "{context}");
    }
    assert_eq!((samplers[0].position_of(len), samplers[0].rank_of(len)), (None, None), "{context}");
}

/// Criterion 8: checks that all ways to iterate agree with `len` and with each other.
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

fn check_fill(sampler: &DistributedSampler, indices: &[u64], context: &str) {
    for start in 0..=indices.len() {
        let mut block = [u64::MAX; 7];
        let count = sampler.fill(start as u64, &mut block);
        assert_eq!(block[..count], indices[start..(start + 7).min(indices.len())], "{context}");
    }
}

/// Checks that the workers of a rank read its indices in turns.
fn check_workers(sampler: &DistributedSampler, indices: &[u64], context: &str) {
    for n_workers in 1..=3 {
        let placements = WorldSize::new(n_workers).unwrap().placements();
        let workers: Vec<Vec<u64>> =
            placements.map(|worker| sampler.iter_worker(worker).collect()).collect();
        let turns = (0..).flat_map(|n| workers.iter().map(move |worker| worker.get(n).copied()));
        assert!(
            turns.take(indices.len()).map(Option::unwrap).eq(indices.iter().copied()),
            "{context}"
        );
    }
}

#[test]
fn small_data_sets_follow_the_tail() {
    for config in (0..N_CONFIGS).map(config) {
        for len in (1..=24).chain([31, 47, 63, 64]) {
            for world in 1..=9 {
                check(len, world, config, len % 3);
            }
        }
    }
}

/// Criterion 9.
#[test]
fn padding_repeats_the_first_samples() {
    let padded = SamplerConfig::default().with_order(Order::Sequential).with_tail(Tail::Pad);
    let strided = padded.with_partition(Partition::Strided);
    assert_eq!(read(&world(5, 3, padded, 0)), [[0, 1], [2, 3], [4, 0]]);
    assert_eq!(read(&world(5, 3, strided, 0)), [[0, 3], [1, 4], [2, 0]]);
    assert_eq!(
        read(&world(2, 5, strided, 0)),
        [[0], [1], [0], [1], [0]],
        "padding repeats the samples in turns"
    );
}

#[test]
fn order_is_independent_of_world() {
    for order in ORDERS {
        let config = SamplerConfig::default().with_order(order).with_tail(Tail::Spread);
        let single: Vec<u64> = sampler(37, 0, 1, config, 2).iter().collect();
        for n_ranks in 2..=9 {
            let joined = read(&world(37, n_ranks, config, 2)).concat();
            assert_eq!(joined, single);
            let dealt = read(&world(37, n_ranks, config.with_partition(Partition::Strided), 2));
            let by_round =
                (0..37).flat_map(|n| dealt.iter().filter_map(move |rank| rank.get(n).copied()));
            assert!(by_round.eq(single.iter().copied()));
        }
    }
}

/// Criterion 5: each epoch has other samples, instead of the same samples in another order.
#[test]
fn ranks_read_everything_over_epochs() {
    let seen = (0..40).flat_map(|epoch| {
        sampler(100, 2, 4, SamplerConfig::default(), epoch).iter().collect::<Vec<_>>()
    });
    let mut seen = sorted(seen);
    seen.dedup();
    assert_eq!(seen.len(), 100);
}

/// Criterion 7.
#[test]
fn seed_and_epoch_are_not_added() {
    for order in [Order::Exact, Order::Streaming] {
        let config = SamplerConfig::default().with_order(order);
        let first = sampler(200, 0, 1, config.with_seed(Seed::new(0)), 1);
        let second = sampler(200, 0, 1, config.with_seed(Seed::new(1)), 0);
        assert!(first.iter().ne(second.iter()), "{order:?}");
    }
}

/// Criterion 4.
#[test]
fn epochs_are_random_access() {
    for order in ORDERS {
        let mut sampler = sampler(100, 1, 3, SamplerConfig::default().with_order(order), 5);
        let fifth: Vec<u64> = sampler.iter().collect();
        sampler.set_epoch(Epoch::new(9));
        assert_eq!(sampler.iter().eq(fifth.iter().copied()), order == Order::Sequential);
        sampler.set_epoch(Epoch::new(5));
        assert!(sampler.iter().eq(fifth));
    }
}

#[test]
fn length_selects_the_shuffle() {
    let order = |len, order| {
        let config = SamplerConfig::default().with_order(order);
        sampler(len, 0, 1, config, 0).iter().collect::<Vec<_>>()
    };
    assert_eq!(order(16_383, Order::Shuffled), order(16_383, Order::Exact));
    assert_eq!(order(16_384, Order::Shuffled), order(16_384, Order::Streaming));
    assert_ne!(order(16_384, Order::Streaming), order(16_384, Order::Exact));
    assert_eq!(order(127, Order::Streaming), order(127, Order::Exact));
    assert_ne!(order(128, Order::Streaming), order(128, Order::Exact));
}

/// Creates a weighted, a stratified and a sharded sampler for rank 1 of 2.
fn drawn(config: SamplerConfig) -> [DistributedSampler; 3] {
    let me = Placement::new(1, 2).unwrap();
    let labels: Vec<u32> = (0..60).map(|n| n % 3).collect();
    [
        DistributedSampler::weighted(&[1.0, 2.0, 0.0, 4.0], 60, me, config).unwrap(),
        DistributedSampler::stratified(&labels, Quota::All, me, config).unwrap(),
        DistributedSampler::sharded(&[10, 20, 30], 4, me, config).unwrap(),
    ]
}

#[test]
fn draws_follow_seed_and_epoch() {
    let config = SamplerConfig::default().with_seed(Seed::new(1));
    let first = drawn(config);
    let later = drawn(config.with_epoch(Epoch::new(4)));
    let other_seed = drawn(config.with_seed(Seed::new(2)));
    for ((mut sampler, later), other_seed) in first.into_iter().zip(later).zip(other_seed) {
        assert!(sampler.iter().ne(later.iter()));
        assert!(sampler.iter().ne(other_seed.iter()));
        sampler.set_epoch(Epoch::new(4));
        assert!(sampler.iter().eq(later.iter()));
    }
}

#[test]
fn resuming_requires_equal_weights_and_labels() {
    let config = SamplerConfig::default();
    let [weighted, stratified, _] = drawn(config);
    for sampler in [&weighted, &stratified] {
        let mut resumed = sampler.clone();
        resumed.resume(&sampler.state(7)).unwrap();
        assert!(resumed.iter().eq(sampler.iter().skip(7)));
    }
    let is_mismatch = |error| matches!(error, Err(Error::StateMismatch { what, .. }) if what.contains("fingerprint"));
    let me = weighted.placement();
    let mut other = DistributedSampler::weighted(&[1.0, 2.0, 4.0, 0.0], 60, me, config).unwrap();
    assert!(is_mismatch(other.resume(&weighted.state(7))));
    let mut other = DistributedSampler::stratified(&[5; 60], Quota::All, me, config).unwrap();
    assert!(is_mismatch(other.resume(&stratified.state(7))));
}

/// Creates a sampler and resumes it from `state`.
fn resumed(
    len: u64,
    rank: u64,
    world: u64,
    config: SamplerConfig,
    state: &SamplerState,
) -> DistributedSampler {
    let mut sampler = sampler(len, rank, world, config, 0);
    sampler.resume(state).unwrap();
    sampler
}

#[test]
fn resuming_continues_at_every_position() {
    for config in (0..N_CONFIGS).map(config) {
        for (len, n_ranks) in [(1, 2), (12, 3), (23, 4), (100, 7)] {
            for rank in 0..n_ranks {
                let whole = sampler(len, rank, n_ranks, config, 1);
                for read in 0..=whole.len() {
                    let resumed = resumed(len, rank, n_ranks, config, &whole.state(read));
                    assert!(
                        resumed.iter().eq(whole.iter().skip(usize::try_from(read).unwrap())),
                        "{len} {config:?}"
                    );
                    assert_eq!(resumed.state(whole.len() - read), whole.state(whole.len()));
                }
            }
        }
    }
}

/// Returns the unread samples, including dropped ones, after each rank has read its first `read`
/// indices.
fn unread(len: u64, ranks: &[Vec<u64>], read: u64) -> Vec<u64> {
    let read = usize::try_from(read).unwrap();
    let taken = sorted(ranks.iter().flat_map(|rank| rank.iter().take(read).copied()));
    (0..len).filter(|index| taken.binary_search(index).is_err()).collect()
}

#[test]
fn other_placements_continue_the_order() {
    for config in (0..N_CONFIGS).map(config) {
        for (from, to, read) in [(3, 3, 0), (3, 3, 2), (3, 5, 0), (4, 1, 0), (4, 1, 3), (2, 6, 4)] {
            let mut first = sampler(23, 1, from, config, 2);
            first.resume(&first.state(read)).unwrap();
            for placement in WorldSize::new(to).unwrap().placements() {
                let moved = first.clone().with_placement(placement).unwrap();
                let state = first.state(0);
                let expected = resumed(23, placement.rank().as_u64(), to, config, &state);
                assert!(moved.iter().eq(expected.iter()), "{from} to {to}, {config:?}");
                assert_eq!((moved.placement(), moved.state(1)), (placement, expected.state(1)));
            }
        }
    }
    let weighted = weighted_world(10, &[1, 2]).remove(0);
    assert_eq!(weighted.clone().with_placement(Placement::new(1, 2).unwrap()).unwrap().len(), 7);
    assert_eq!(
        weighted.with_placement(Placement::SINGLE).unwrap_err(),
        Error::RankWeights { weights: 2, world_size: WorldSize::new(1).unwrap() }
    );
}

#[test]
fn set_epoch_ends_a_resumed_epoch() {
    let config = SamplerConfig::default();
    let state = sampler(50, 0, 4, config, 3).state(5);
    let mut sampler = resumed(50, 1, 3, config, &state);
    sampler.set_epoch(Epoch::new(3));
    assert_eq!(
        sampler.len(),
        10,
        "of 50 samples 20 are read; setting the current epoch changes nothing"
    );
    sampler.set_epoch(Epoch::new(4));
    assert!(sampler.iter().eq(self::sampler(50, 1, 3, config, 4).iter()));
}

#[test]
fn rank_weights_set_the_shares() {
    for weights in [&[1, 1, 1][..], &[3, 1], &[0, 5, 2], &[5, 0, 2], &[0, 0, 1, 0, 3, 0], &[1]] {
        let ranks: Vec<_> = (0..weights.len() as u64)
            .map(|rank| {
                sampler(103, rank, weights.len() as u64, SamplerConfig::default(), 2)
                    .with_rank_weights(weights)
                    .unwrap()
            })
            .collect();
        assert_eq!(sorted(read(&ranks).concat()), (0..103).collect::<Vec<_>>());
        let total: u64 = weights.iter().sum();
        for (rank, weight) in ranks.iter().zip(weights) {
            assert!((rank.len() * total).abs_diff(103 * weight) < total);
            assert!(rank.iter().all(|index| rank.rank_of(index) == Some(rank.placement().rank())));
        }
        let mut single = sampler(103, 0, 1, SamplerConfig::default(), 0);
        single.resume(&ranks[0].state(4)).unwrap();
        let expected = unread(103, &read(&ranks), 4);
        assert_eq!(sorted(single.iter()), expected);
    }
    let equal = sampler(10, 0, 2, SamplerConfig::default(), 0);
    let world_size = WorldSize::new(2).unwrap();
    assert_eq!(
        equal.clone().with_rank_weights(&[1]).unwrap_err(),
        Error::RankWeights { weights: 1, world_size }
    );
    let error = equal.with_rank_weights(&[0, 0]).unwrap_err();
    assert_eq!(error.to_string(), "none of the 2 weights is above 0");
}

/// Returns all lists of `n` weights below 4, except the list of zeros.
fn small_weights(n: u32) -> impl Iterator<Item = Vec<u64>> {
    (1..4_u64.pow(n)).map(move |code| (0..n).map(|digit| code >> (2 * digit) & 3).collect())
}

fn weighted_world(len: u64, weights: &[u64]) -> Vec<DistributedSampler> {
    let n_ranks = weights.len() as u64;
    let config = SamplerConfig::default().with_order(Order::Sequential);
    world(len, n_ranks, config, 1)
        .into_iter()
        .map(|sampler| sampler.with_rank_weights(weights).unwrap())
        .collect()
}

#[test]
fn owners_are_right_with_empty_ranks() {
    let weights = (1..=4).flat_map(small_weights).chain([vec![10, 1, 1, 10], vec![0, 0, 9, 0, 1]]);
    for weights in weights {
        for len in [1, 2, 3, 6, 10, 13] {
            let ranks = weighted_world(len, &weights);
            check_owners(len, &ranks, &format!("{len}, {weights:?}"));
        }
    }
}

/// Creates the samplers of a world with rule `rule`, resumed from `state` if there is one.
fn any_world(rule: usize, n_ranks: u64, state: Option<&SamplerState>) -> Vec<DistributedSampler> {
    const LEN: u64 = 29;
    let mut ranks = if rule < N_RULES {
        world(LEN, n_ranks, config(rule).with_seed(Seed::default()), 1)
    } else {
        let weights: Vec<u64> = (0..n_ranks).map(|rank| (rank * 2 + 1) % 4 * (rank % 2)).collect();
        if n_ranks == 1 { weighted_world(LEN, &[2]) } else { weighted_world(LEN, &weights) }
    };
    if let Some(state) = state {
        for sampler in &mut ranks {
            sampler.resume(state).unwrap();
        }
    }
    ranks
}

/// Returns the unread samples of `candidates` after each rank has read `consumed` indices.
///
/// A sample that a rank reads as padding does not count as read.
fn unread_after(candidates: &[u64], ranks: &[DistributedSampler], consumed: u64) -> Vec<u64> {
    let entries = ranks.iter().flat_map(|rank| (0..consumed).filter_map(|n| rank.entry(n)));
    let taken = sorted(entries.filter(|(_, is_padding)| !is_padding).map(|(index, _)| index));
    candidates.iter().copied().filter(|index| taken.binary_search(index).is_err()).collect()
}

#[test]
fn two_worlds_leave_the_unread_samples() {
    for (first_rule, second_rule) in
        (0..=N_RULES).flat_map(|first| (0..=N_RULES).map(move |second| (first, second)))
    {
        for (first_size, second_size) in [(1, 2), (2, 3), (4, 3), (5, 7), (6, 6), (40, 3), (3, 40)]
        {
            if (first_rule, first_size) == (second_rule, second_size) {
                continue;
            }
            for consumed in 0..3 {
                let first = any_world(first_rule, first_size, None);
                let after_first = unread_after(&(0..29).collect::<Vec<_>>(), &first, consumed);
                let state = first[0].state(consumed);
                let second = any_world(second_rule, second_size, Some(&state));
                for rank in &second {
                    let owner = Some(rank.placement().rank());
                    assert!(
                        (0..rank.len())
                            .filter_map(|n| rank.entry(n))
                            .all(|(index, is_padding)| is_padding || rank.rank_of(index) == owner)
                    );
                }
                let more = 2.min(after_first.len() as u64);
                let after_second = unread_after(&after_first, &second, more);
                let state = second[0].state(more);
                let mut single =
                    sampler(29, 0, 1, SamplerConfig::default().with_order(Order::Sequential), 1);
                single.resume(&state).unwrap();
                assert_eq!(
                    single.iter().collect::<Vec<_>>(),
                    after_second,
                    "{consumed} of rule {first_rule} over {first_size}, rule {second_rule} over {second_size}"
                );
                check_fill(&single, &after_second, "");
            }
        }
    }
}

/// A state of a few bytes can name the largest worlds. A list of the ranges of their ranks would
/// have a million entries per world, so `resume` must not build it.
#[test]
fn resuming_from_largest_worlds_is_fast() {
    let max = WorldSize::MAX.as_u64();
    let len = MAX_LEN;
    let sequential = SamplerConfig::default().with_order(Order::Sequential);
    let mut state = sampler(len, 0, max, sequential, 0).state(3);
    for (stage, tail) in (1..MAX_STAGES as u64).zip(TAILS.into_iter().cycle()) {
        let config = sequential.with_tail(tail);
        state = resumed(len, 0, max - stage % 2, config, &state).state(3);
    }
    let last = resumed(len, 1, 2, sequential, &state);
    let index = last.get(last.len() - 1).unwrap();
    assert_eq!(last.rank_of(index), Some(last.placement().rank()));
    assert_eq!(last.rank_of(0), None, "the sample has been read");

    let mut fresh = sampler(len, 0, 1, sequential, 0);
    assert_eq!(
        fresh.resume(&last.state(1)).unwrap_err(),
        Error::TooMany { count: 1025, what: "worlds in one epoch", max: 1024 }
    );
}

#[test]
fn foreign_states_are_rejected() {
    let config = SamplerConfig::default();
    let state = sampler(50, 0, 4, config, 3).state(5);
    let resume_error = |mut sampler: DistributedSampler, state: &SamplerState| {
        let expected: Vec<u64> = sampler.iter().collect();
        let error = sampler.resume(state).unwrap_err();
        assert!(sampler.iter().eq(expected), "a rejected state changes nothing");
        error
    };
    let mismatch = |error, name| matches!(error, Error::StateMismatch { what, .. } if what == name);
    assert!(mismatch(resume_error(sampler(51, 0, 4, config, 0), &state), "data set length"));
    assert!(mismatch(
        resume_error(sampler(50, 0, 4, config.with_seed(Seed::new(1)), 0), &state),
        "seed"
    ));
    assert!(mismatch(
        resume_error(sampler(50, 0, 4, config.with_order(Order::Torch), 0), &state),
        "order"
    ));

    let edited = |from: &str, to: &str| -> SamplerState {
        let text = serde_json::to_string(&state).unwrap();
        assert!(text.contains(from), "{text}");
        serde_json::from_str(&text.replace(from, to)).unwrap()
    };
    let version = resume_error(
        sampler(50, 0, 4, config, 0),
        &edited("\"format_version\":1", "\"format_version\":2"),
    );
    assert!(matches!(version, Error::StateMismatch { what: "format version", .. }));
    let consumed =
        resume_error(sampler(50, 0, 4, config, 0), &edited("\"consumed\":5", "\"consumed\":51"));
    assert_eq!(consumed, Error::StateConsumed { consumed: 51, len: 50 });
    let uneven = edited("{\"contiguous\":\"last_rank\"}", "{\"proportional\":[1,2,3]}");
    let weights = resume_error(sampler(50, 0, 4, config, 0), &uneven);
    let world_size = WorldSize::new(4).unwrap();
    assert_eq!(weights, Error::RankWeights { weights: 3, world_size });
}

#[test]
fn impossible_data_sets_are_rejected() {
    let sampler = |len, order| {
        DistributedSampler::new(len, Placement::SINGLE, SamplerConfig::default().with_order(order))
    };
    let max = MAX_LEN;
    for order in ORDERS {
        assert_eq!(sampler(0, order).unwrap_err(), Error::EmptyDataSet);
        assert_eq!(
            sampler(max + 1, order).unwrap_err(),
            Error::DataSetTooLong { len: max + 1, max }
        );
    }
    for order in [Order::Exact, Order::Torch] {
        assert_eq!(
            sampler(max, order).unwrap_err(),
            Error::TooLongToShuffle { len: max, max: 1 << 32 }
        );
    }
}

#[test]
fn fill_past_the_end_writes_nothing() {
    for config in (0..N_CONFIGS).map(config) {
        let mut sampler = sampler(50, 1, 4, config, 3);
        sampler.resume(&sampler.state(5)).unwrap();
        for start in [sampler.len(), sampler.len() + 1, u64::MAX] {
            let mut block = [7; 3];
            assert_eq!((sampler.fill(start, &mut block), block), (0, [7; 3]), "{config:?}");
        }
    }
}

/// Later versions of this crate must be able to read the states that this version writes.
#[test]
fn state_format_is_pinned() {
    let config = SamplerConfig::default().with_seed(Seed::new(7)).with_tail(Tail::Spread);
    let me = Placement::new(1, 2).unwrap();
    let mut weighted = DistributedSampler::weighted(&[1.0, 2.0, 3.0, 4.0], 10, me, config).unwrap();
    weighted.set_epoch(Epoch::new(3));
    check_format(
        &weighted.state(2),
        &json!({
            "format_version": 1, "order": "shuffled", "len": 10,
            "fingerprint": 6_901_188_282_358_919_322_u64, "seed": 7, "epoch": 3,
            "stages": [{ "world_size": 2, "rule": { "contiguous": "spread" }, "consumed": 2 }],
        }),
    );
    let stratified = DistributedSampler::stratified(&[0, 1, 0, 2], Quota::All, me, config).unwrap();
    check_format(
        &stratified.with_rank_weights(&[1, 3]).unwrap().state(1),
        &json!({
            "format_version": 1, "order": "shuffled", "len": 4,
            "fingerprint": 14_058_578_823_181_980_254_u64, "seed": 7, "epoch": 0,
            "stages": [{ "world_size": 2, "rule": { "proportional": [1, 3] }, "consumed": 1 }],
        }),
    );
}

fn check_format(state: &SamplerState, json: &Value) {
    assert_eq!(serde_json::to_value(state).unwrap(), *json);
    assert_eq!(serde_json::from_value::<SamplerState>(json.clone()).unwrap(), *state);
}

#[test]
fn state_without_world_is_rejected() {
    let text = serde_json::to_string(&sampler(5, 0, 1, config(0), 0).state(0)).unwrap();
    let (head, _) = text.split_once("\"stages\":").unwrap();
    let error = serde_json::from_str::<SamplerState>(&format!("{head}\"stages\":[]}}"));
    let message = error.unwrap_err().to_string();
    assert!(message.starts_with("a sampler state must have at least one world"), "{message}");
}

/// Creates a stage with the rule of index `rule`; a large world has almost the maximum size.
fn hostile_stage((rule, n_ranks, consumed, is_large): (usize, u64, u64, bool)) -> Value {
    let tail = ["drop", "last_rank", "spread", "pad"][rule % TAILS.len()];
    let n_ranks =
        if is_large && rule < N_RULES { WorldSize::MAX.as_u64() - n_ranks } else { n_ranks };
    let rule = match rule / TAILS.len() {
        0 => json!({ "contiguous": tail }),
        1 => json!({ "strided": tail }),
        _ => json!({ "proportional": (0..n_ranks).map(|rank| rank * 5 % 7).collect::<Vec<_>>() }),
    };
    json!({ "world_size": n_ranks, "rule": rule, "consumed": consumed })
}

proptest! {
    #[test]
    fn accepted_states_read_nothing_twice(
        len in prop_oneof![1_u64..120, Just(MAX_LEN)],
        stages in prop::collection::vec((0..=N_RULES, 1_u64..9, 0_u64..9, any::<bool>()), 1..6),
    ) {
        let stages: Vec<Value> = stages.into_iter().map(hostile_stage).collect();
        let state: SamplerState = serde_json::from_value(json!({
            "format_version": 1, "order": "sequential", "len": len, "fingerprint": 0, "seed": 0,
            "epoch": 0, "stages": stages,
        })).unwrap();
        let config = SamplerConfig::default().with_order(Order::Sequential).with_tail(Tail::Spread);
        let mut ranks = world(len, 3, config, 0);
        if ranks.iter_mut().all(|rank| rank.resume(&state).is_ok()) {
            let mut indices: Vec<u64> = Vec::new();
            for rank in &ranks {
                indices.extend(rank.iter().take(120));
                for index in rank.iter().take(120).chain(rank.iter().next_back()) {
                    prop_assert_eq!(rank.rank_of(index), Some(rank.placement().rank()));
                }
            }
            let n_read = indices.len();
            indices.sort_unstable();
            indices.dedup();
            prop_assert_eq!(indices.len(), n_read);
            prop_assert!(indices.last().is_none_or(|&last| last < len));
        }
    }

    #[test]
    fn largest_data_sets_do_not_overflow(
        short_of_max in 0_u64..1_000,
        world in 1..=WorldSize::MAX.as_u64(),
        rank in any::<u64>(),
        n in 0..N_RULES,
        start in any::<u64>(),
        streams in any::<bool>(),
    ) {
        let len = MAX_LEN - short_of_max;
        let order = if streams { Order::Streaming } else { Order::Sequential };
        let config = config(n).with_order(order);
        let sampler = sampler(len, rank % world, world, config, 1);
        let start = start % sampler.len();
        let mut block = [0; 70];
        let count = sampler.fill(start, &mut block);
        for (n, &index) in (start..).zip(&block[..count]) {
            prop_assert!(index < len);
            prop_assert_eq!(sampler.get(n), Some(index));
            let (_, is_padding) = sampler.entry(n).unwrap();
            prop_assert!(is_padding || sampler.rank_of(index) == Some(sampler.placement().rank()));
        }
        prop_assert_eq!(sampler.get(sampler.len()), None);
        let resumed = resumed(len, rank % world, world, config, &sampler.state(start));
        prop_assert_eq!(resumed.get(0), sampler.get(start));
    }
}
