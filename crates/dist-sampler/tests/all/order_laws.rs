//! Properties of sharded orders and mixtures.
//!
//! The laws of `laws.rs` hold for the positions of a sequential order. Here every rank, tail and
//! resumed state must read the same positions of another order.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{
    DistributedSampler, Error, MixtureEnd, MixturePart, Order, Partition, SamplerConfig,
    SamplerState, Tail,
};
use proptest::prelude::*;
use serde_json::json;

const TAILS: [Tail; 4] = [Tail::Drop, Tail::LastRank, Tail::Spread, Tail::Pad];

fn placement(rank: u64, world: u64) -> Placement {
    Placement::new(rank, world).unwrap()
}

fn placements(world: u64) -> impl Iterator<Item = Placement> {
    WorldSize::new(world).unwrap().placements()
}

fn resumed(mut sampler: DistributedSampler, state: &SamplerState) -> DistributedSampler {
    sampler.resume(state).unwrap();
    sampler
}

/// Creates samplers of one order.
type MakeSampler<'a> = &'a dyn Fn(Placement, SamplerConfig) -> DistributedSampler;

/// Creates the sampler of a sequential order with the positions of `len` samples.
fn positions(len: u64, placement: Placement, config: SamplerConfig) -> DistributedSampler {
    let config = config.with_order(Order::Sequential).with_partition(Partition::Strided);
    DistributedSampler::new(len, placement, config).unwrap()
}

/// Checks that a sampler reads the samples of `order` at the given positions, by every function.
fn check_reads(sampler: &DistributedSampler, positions: &DistributedSampler, order: &[u64]) {
    let sample_at = |position: u64| order[usize::try_from(position).unwrap()];
    let expected: Vec<u64> = positions.iter().map(sample_at).collect();
    assert_eq!(sampler.len(), positions.len());
    assert!(sampler.iter().eq(expected.iter().copied()), "{sampler:?}");
    let mut block = vec![0; expected.len()];
    assert_eq!((sampler.fill(0, &mut block), &block), (expected.len(), &expected));
    for n in 0..=sampler.len() {
        let entry = positions.entry(n).map(|(position, padding)| (sample_at(position), padding));
        assert_eq!(sampler.entry(n), entry);
    }
}

/// Checks every tail and world, and resuming at every position in every small world.
fn check_order(make: MakeSampler<'_>, order: &[u64]) {
    let len = order.len() as u64;
    for tail in TAILS {
        let config = SamplerConfig::default().with_tail(tail);
        for me in (1..=4).flat_map(placements) {
            let sampler = make(me, config);
            let own_positions = positions(len, me, config);
            check_reads(&sampler, &own_positions, order);
            if !me.is_last() {
                continue;
            }
            for (read, next) in (0..=sampler.len()).flat_map(|n| (1..=3).map(move |to| (n, to))) {
                let next = placement(next / 2, next);
                let resumed_positions =
                    resumed(positions(len, next, config), &own_positions.state(read));
                let next_sampler = resumed(make(next, config), &sampler.state(read));
                check_reads(&next_sampler, &resumed_positions, order);
                let moved = resumed(sampler.clone(), &sampler.state(read));
                assert!(moved.with_placement(next).unwrap().iter().eq(next_sampler.iter()));
            }
        }
    }
}

fn sharded(lens: &[u64], lanes: u64, me: Placement, config: SamplerConfig) -> DistributedSampler {
    DistributedSampler::sharded(lens, lanes, me, config).unwrap()
}

#[test]
fn shards_are_read_once() {
    let config = SamplerConfig::default();
    for lens in [&[5][..], &[3, 0, 4], &[1; 7], &[7, 2, 9, 4, 1], &[0, 300, 0, 140, 77, 0]] {
        for lanes in [1, 2, 3, 4, 7, 50, u64::MAX] {
            let mut sampler = sharded(lens, lanes, Placement::SINGLE, config);
            for epoch in 0..3 {
                sampler.set_epoch(Epoch::new(epoch));
                let mut order: Vec<u64> = sampler.iter().collect();
                for (position, &sample) in (0..).zip(&order) {
                    assert_eq!(sampler.position_of(sample), Some(position), "{lens:?}, {lanes}");
                }
                assert_eq!(sampler.position_of(order.len() as u64), None);
                order.sort_unstable();
                assert!(order.into_iter().eq(0..lens.iter().sum()), "{lens:?}, {lanes}");
            }
        }
    }
}

#[test]
fn shards_follow_the_tail() {
    for (lens, lanes) in [(&[3, 0, 4][..], 2), (&[1; 7], 3), (&[7, 2, 9, 4, 1], 4)] {
        let order = sharded(lens, lanes, Placement::SINGLE, SamplerConfig::default());
        check_order(
            &|me, config| sharded(lens, lanes, me, config),
            &order.iter().collect::<Vec<_>>(),
        );
    }
}

#[test]
fn other_shards_are_rejected() {
    let config = SamplerConfig::default();
    let state = sharded(&[10, 20, 30], 4, Placement::SINGLE, config).state(5);
    for (lens, lanes) in [([20, 10, 30], 4), ([10, 20, 30], 5)] {
        let error = sharded(&lens, lanes, Placement::SINGLE, config).resume(&state).unwrap_err();
        assert!(matches!(error, Error::StateMismatch { what, .. } if what.contains("shards")));
    }
}

/// The set-up of the mixing test: nodes of eight ranks that read shards sorted by label.
const N_SHARDS: usize = 1000;
const N_NODES: u64 = 4;
const RANKS_OF_NODE: u64 = 8;
const GLOBAL_BATCH: usize = 512;
const LANES: u64 = 256;

/// Returns the length of each shard, from 201 to 1,800.
fn uneven_shards(seed: Seed) -> Vec<u64> {
    (0..N_SHARDS as u64).map(|shard| 201 + seed.derive(shard).as_u64() % 1600).collect()
}

/// Returns the deviation of a batch's mean label, over that of a full shuffle.
fn label_deviation(order: &[u64]) -> f64 {
    let len = order.len() as f64;
    let batches = order.chunks_exact(GLOBAL_BATCH);
    let n_batches = batches.len() as f64;
    let deviations = batches.map(|batch| {
        let mean = batch.iter().map(|&sample| sample as f64 / len).sum::<f64>();
        (mean / GLOBAL_BATCH as f64 - 0.5).powi(2)
    });
    // Labels are uniform from 0 to 1, so their variance is 1/12.
    (deviations.sum::<f64>() / n_batches * GLOBAL_BATCH as f64 * 12.).sqrt()
}

/// Returns the number of shards that a node fetches if it keeps the last ones that it has used.
fn count_fetches(order: &[u64], lens: &[u64], node: u64) -> usize {
    let mut len = 0;
    let mut ends = Vec::new();
    for shard_len in lens {
        len += shard_len;
        ends.push(len);
    }
    let n_cached = usize::try_from(LANES / N_NODES).unwrap();
    let world = N_NODES * RANKS_OF_NODE;
    let mut cached: Vec<usize> = Vec::new();
    let mut n_fetches = 0;
    for (position, &sample) in (0..).zip(order) {
        if position % world / RANKS_OF_NODE != node {
            continue;
        }
        let shard = ends.partition_point(|&end| end <= sample);
        match cached.iter().rposition(|&other| other == shard) {
            Some(place) => drop(cached.remove(place)),
            None => n_fetches += 1,
        }
        cached.push(shard);
        if cached.len() > n_cached {
            cached.remove(0);
        }
    }
    n_fetches
}

#[test]
fn lanes_mix_with_few_fetches() {
    const N_SEEDS: u64 = 10;
    let mut variance = 0.;
    for seed in (0..N_SEEDS).map(Seed::new) {
        let lens = uneven_shards(seed);
        let config = SamplerConfig::default().with_seed(seed);
        let order: Vec<u64> = sharded(&lens, LANES, Placement::SINGLE, config).iter().collect();
        variance += label_deviation(&order).powi(2);
        if seed == Seed::new(0) {
            let counts = (0..N_NODES).map(|node| count_fetches(&order, &lens, node));
            let per_shard = counts.sum::<usize>() as f64 / N_SHARDS as f64;
            assert!(per_shard <= 1.05, "{per_shard} fetches of each shard");
        }
    }
    let deviation = (variance / N_SEEDS as f64).sqrt();
    assert!(deviation < 1.34, "{deviation}");
}

fn mixture(
    parts: &[(u64, u64)],
    end: MixtureEnd,
    me: Placement,
    config: SamplerConfig,
) -> DistributedSampler {
    let parts: Vec<_> = parts.iter().map(|&(len, weight)| MixturePart::new(len, weight)).collect();
    DistributedSampler::mixture(&parts, end, me, config).unwrap()
}

/// Creates the single rank of a shuffled mixture of `len` samples.
fn repeated(parts: &[(u64, u64)], len: u64) -> DistributedSampler {
    mixture(parts, MixtureEnd::Repeat { len }, Placement::SINGLE, SamplerConfig::default())
}

#[test]
fn mixtures_follow_the_tail() {
    let parts = [(5, 2), (7, 1), (3, 3)];
    for end in [MixtureEnd::FirstExhausted, MixtureEnd::Repeat { len: 23 }] {
        let order = mixture(&parts, end, Placement::SINGLE, SamplerConfig::default());
        let indices: Vec<u64> = order.iter().collect();
        check_order(&|me, config| mixture(&parts, end, me, config), &indices);
    }
}

#[test]
fn passes_read_every_sample() {
    let mixture = repeated(&[(5, 2), (130, 1), (3, 0)], 600);
    let indices: Vec<u64> = mixture.iter().collect();
    let (first, second): (Vec<u64>, Vec<u64>) = indices.iter().partition(|&&index| index < 5);
    assert_eq!((first.len(), second.len()), (400, 200));
    let passes: Vec<&[u64]> = first.chunks(5).chain(second.chunks(130)).collect();
    for pass in &passes {
        let mut samples = pass.to_vec();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), pass.len(), "a pass reads no sample twice");
    }
    assert!(passes[0] != passes[1] || passes[1] != passes[2], "each pass has another order");
    for index in 0..135 {
        let first_position = indices.iter().position(|&other| other == index).unwrap();
        assert_eq!(mixture.position_of(index), Some(first_position as u64));
        assert_eq!(mixture.part_of(index), Some(usize::from(index >= 5)));
    }
    let (excluded, beyond) = (135, 138);
    assert_eq!((mixture.position_of(excluded), mixture.part_of(excluded)), (None, Some(2)));
    assert_eq!((mixture.position_of(beyond), mixture.part_of(beyond)), (None, None));
}

#[test]
fn mixture_ends_with_first_exhausted_part() {
    let config = SamplerConfig::default();
    for lens in [[5, 100], [100, 5], [1, 1], [33, 17]] {
        let parts = [(lens[0], 2), (lens[1], 1)];
        let mixture = mixture(&parts, MixtureEnd::FirstExhausted, Placement::SINGLE, config);
        let mut indices: Vec<u64> = mixture.iter().collect();
        let n_first = indices.iter().filter(|&&index| index < lens[0]).count() as u64;
        let n_second = mixture.len() - n_first;
        assert!(n_first == lens[0] || n_second == lens[1], "{n_first}, {n_second} of {lens:?}");
        indices.sort_unstable();
        indices.dedup();
        assert_eq!(indices.len() as u64, mixture.len(), "no sample is repeated");
    }
}

#[test]
fn later_weights_move_the_end() {
    let config = SamplerConfig::default();
    let even = mixture(&[(50, 1), (20, 1)], MixtureEnd::FirstExhausted, Placement::SINGLE, config);
    let uneven = even.clone().with_weights_from(10, &[3, 0]).unwrap();
    assert_eq!((even.len(), uneven.len()), (41, 55));
    assert!(uneven.iter().take(10).eq(even.iter().take(10)));
    let late = even.clone().with_weights_from(42, &[1, 0]).unwrap();
    assert_eq!(late.len(), 41, "the mixture ends before");
    // A state of the shorter mixture is continued by the longer one.
    let resumed = resumed(uneven.clone(), &even.state(7));
    assert!(resumed.iter().eq(uneven.iter().skip(7)));
}

/// Weights 999 to 1 and a restart every 7 entries: the rare part is read once in 1,000 entries.
#[test]
fn restarts_keep_the_proportions() {
    let parts = [(5_000, 999), (10, 1)];
    let whole = repeated(&parts, 4_000);
    let mut state = whole.state(0);
    let mut indices = Vec::new();
    while indices.len() < 4_000 {
        let part = resumed(repeated(&parts, 4_000), &state);
        indices.extend(part.iter().take(7));
        state = part.state(7);
    }
    assert!(whole.iter().eq(indices.iter().copied()));
    assert_eq!(indices.iter().filter(|&&index| index >= 5_000).count(), 4);
}

#[test]
fn other_mixtures_are_rejected() {
    let parts = [(50, 2), (20, 1)];
    let phased = |from, weights: &[u64]| repeated(&parts, 60).with_weights_from(from, weights);
    let state = phased(20, &[1, 1]).unwrap().state(30);
    let mismatch = |mut sampler: DistributedSampler| match sampler.resume(&state) {
        Err(Error::StateMismatch { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let weights = "weights before its position";
    assert_eq!(mismatch(repeated(&[(50, 3), (20, 1)], 60)), weights);
    assert_eq!(mismatch(phased(20, &[1, 2]).unwrap()), weights);
    assert_eq!(mismatch(phased(21, &[1, 1]).unwrap()), weights);
    assert!(mismatch(repeated(&[(20, 2), (50, 1)], 60)).contains("parts"));

    // Weights that only the state has are taken from it.
    let reweighted = phased(20, &[1, 1]).unwrap();
    let found = resumed(repeated(&parts, 60), &state);
    assert!(found.iter().eq(reweighted.iter().skip(30)));
    assert_eq!(found.state(5), reweighted.state(35));

    // Weights behind the position and the length may differ.
    let longer = mixture(
        &parts,
        MixtureEnd::Repeat { len: 90 },
        Placement::SINGLE,
        SamplerConfig::default(),
    );
    let longer = longer.with_weights_from(20, &[2, 2]).unwrap();
    assert!(resumed(longer.clone(), &state).iter().eq(longer.iter().skip(30)));
    let other = longer.clone().with_weights_from(30, &[1, 7]).unwrap();
    assert!(resumed(other.clone(), &state).iter().eq(other.iter().skip(30)));
    let shorter = repeated(&parts, 29).with_weights_from(20, &[1, 1]).unwrap().resume(&state);
    assert_eq!(shorter, Err(Error::StateConsumed { consumed: 30, len: 29 }));
}

#[test]
fn changed_weights_resume_without_being_given_again() {
    let new = || repeated(&[(100, 1), (100, 3)], 100);
    for n_before in [0, 10] {
        for n_after in [0_usize, 5] {
            let changed = resumed(new(), &new().state(n_before));
            let changed = changed.with_weights_from(n_before, &[1, 1]).unwrap();
            let state = changed.state(n_after as u64);
            let later = resumed(new(), &state);
            let rest: Vec<u64> = changed.iter().skip(n_after).collect();
            assert!(later.iter().eq(rest.iter().copied()), "{n_before} + {n_after}");
            assert!(resumed(new(), &later.state(3)).iter().eq(rest.iter().skip(3).copied()));
            // A sampler whose weights were changed at once resumes, too.
            let planned = new().with_weights_from(n_before, &[1, 1]).unwrap();
            assert!(resumed(planned, &state).iter().eq(rest.iter().copied()));
        }
    }
}

#[test]
fn states_without_the_first_weights_are_rejected() {
    let new = || repeated(&[(100, 1), (100, 3)], 100);
    let mut value = serde_json::to_value(new().state(10)).unwrap();
    let phases = [serde_json::json!([]), serde_json::json!([{ "from": 5, "weights": [1, 3] }])];
    for phases in phases {
        value["phases"] = phases;
        let state = serde_json::from_value(value.clone()).unwrap();
        let error = new().resume(&state).unwrap_err();
        assert!(matches!(error, Error::StateMismatch { .. }), "{error}");
    }
}

#[test]
fn impossible_weights_are_rejected() {
    let mixture = repeated(&[(50, 2), (20, 1)], 60);
    let message = |sampler: &DistributedSampler, from, weights: &[u64]| {
        sampler.clone().with_weights_from(from, weights).unwrap_err().to_string()
    };
    assert!(message(&mixture, 5, &[1]).starts_with("1 weights were given for 2 parts"));
    assert_eq!(message(&mixture, 5, &[0, 0]), "none of the 2 weights is above 0");
    let read = resumed(mixture.clone(), &mixture.state(8));
    assert!(message(&read, 7, &[1, 1]).ends_with("at position 7, 8 positions are read"));
    assert!(read.with_weights_from(8, &[1, 1]).is_ok());
    let plain = DistributedSampler::new(9, Placement::SINGLE, SamplerConfig::default()).unwrap();
    assert!(message(&plain, 5, &[1]).starts_with("the sampler is not a mixture"));

    let new = |parts: &[MixturePart], end| {
        let config = SamplerConfig::default();
        DistributedSampler::mixture(parts, end, Placement::SINGLE, config).map(|_| ())
    };
    let end = MixtureEnd::FirstExhausted;
    assert_eq!(new(&[], end), Err(Error::EmptyDataSet));
    assert_eq!(new(&[MixturePart::new(0, 1)], end), Err(Error::EmptyDataSet));
    let no_samples = MixtureEnd::Repeat { len: 0 };
    assert_eq!(new(&[MixturePart::new(1, 1)], no_samples), Err(Error::EmptyDataSet));
    let half = MixturePart::new(1 << 62, 1);
    assert_eq!(new(&[half, half], end), Ok(()));
    let (len, max) = (3 << 62, 1 << 63);
    assert_eq!(new(&[half; 3], end), Err(Error::DataSetTooLong { len, max }));
}

#[test]
fn mixture_state_is_pinned() {
    let mixture = mixture(
        &[(100, 4), (3, 2)],
        MixtureEnd::Repeat { len: 50 },
        placement(1, 2),
        SamplerConfig::default(),
    );
    let mixture = mixture.with_weights_from(30, &[1, 1]).unwrap();
    let state = serde_json::to_value(mixture.state(4)).unwrap();
    let expected = json!({
        "format_version": 1, "order": "shuffled", "len": 50,
        "fingerprint": 12_022_226_353_906_345_083_u64, "seed": 0, "epoch": 0,
        "phases": [{ "from": 0, "weights": [2, 1] }, { "from": 30, "weights": [1, 1] }],
        "stages": [{ "world_size": 2, "rule": { "strided": "last_rank" }, "consumed": 4 }],
    });
    assert_eq!(state, expected);
    // In another world, one position is the state.
    let other = resumed(mixture.clone(), &serde_json::from_value(expected).unwrap());
    let other = other.with_placement(placement(0, 3)).unwrap();
    let stages = json!([
        { "world_size": 1, "rule": { "strided": "drop" }, "consumed": 8 },
        { "world_size": 3, "rule": { "strided": "last_rank" }, "consumed": 1 },
    ]);
    assert_eq!(serde_json::to_value(other.state(1)).unwrap()["stages"], stages);
}

/// A part of a run: the world, the steps that it reads, and new weights from here on.
#[derive(Clone, Debug)]
struct RunPart {
    world: u64,
    steps: u64,
    weights: Option<Vec<u64>>,
}

fn run_part(n_parts: usize) -> impl Strategy<Value = RunPart> {
    let weights = prop::collection::vec(0_u64..7, n_parts)
        .prop_filter("a weight", |weights| weights.iter().any(|&weight| weight > 0));
    (1_u64..6, 0_u64..12, prop::option::of(weights)).prop_map(|(world, steps, weights)| RunPart {
        world,
        steps,
        weights,
    })
}

/// Draws the lengths of the parts, and the parts of a run; the first one sets the weights.
fn mixed_run() -> impl Strategy<Value = (Vec<u64>, Vec<RunPart>)> {
    prop::collection::vec(1_u64..150, 1..5).prop_flat_map(|lens| {
        let run = prop::collection::vec(run_part(lens.len()), 1..8);
        (Just(lens), run)
    })
}

/// Counts the samples of each part among `indices`.
fn count_parts(mixture: &DistributedSampler, n_parts: usize, indices: &[u64]) -> Vec<u64> {
    let mut counts = vec![0; n_parts];
    for &index in indices {
        counts[mixture.part_of(index).unwrap()] += 1;
    }
    counts
}

/// Checks that every prefix of each phase has the parts in proportion, within less than one sample.
fn check_proportions(mixture: &DistributedSampler, indices: &[u64]) {
    let state = serde_json::to_value(mixture.state(0)).unwrap();
    let phases = state["phases"].as_array().unwrap();
    let start = |n: usize| match phases.get(n) {
        Some(phase) => usize::try_from(phase["from"].as_u64().unwrap()).unwrap(),
        None => indices.len(),
    };
    for (n, phase) in phases.iter().enumerate() {
        let weights: Vec<u64> = serde_json::from_value(phase["weights"].clone()).unwrap();
        let total: u64 = weights.iter().sum();
        for end in start(n)..=start(n + 1).min(indices.len()) {
            let counts = count_parts(mixture, weights.len(), &indices[start(n)..end]);
            for (count, weight) in counts.iter().zip(&weights) {
                let excess = (count * total).abs_diff((end - start(n)) as u64 * weight);
                assert!(excess < total, "{counts:?} by {weights:?}");
            }
        }
    }
}

proptest! {
    #[test]
    fn histories_lose_and_repeat_nothing((lens, run) in mixed_run()) {
        const LEN: u64 = 1_000;
        let parts: Vec<(u64, u64)> = lens.iter().map(|&len| (len, 1)).collect();
        let new = |me| {
            let config = SamplerConfig::default().with_tail(Tail::Spread);
            mixture(&parts, MixtureEnd::Repeat { len: LEN }, me, config)
        };
        let mut state = new(Placement::SINGLE).state(0);
        let mut expected = new(Placement::SINGLE);
        let mut weights = vec![1; lens.len()];
        let mut read = Vec::new();
        for part in run {
            weights = part.weights.clone().unwrap_or(weights);
            expected = expected.with_weights_from(read.len() as u64, &weights).unwrap();
            let ranks: Vec<_> = placements(part.world).map(|me| {
                resumed(new(me), &state).with_weights_from(read.len() as u64, &weights).unwrap()
            }).collect();
            read.extend((0..part.steps).flat_map(|n| ranks.iter().map(move |rank| rank.get(n).unwrap())));
            state = ranks[0].state(part.steps);
        }
        prop_assert!(expected.iter().take(read.len()).eq(read.iter().copied()));
        check_proportions(&expected, &read);
        for (part, &len) in lens.iter().enumerate() {
            let samples: Vec<u64> =
                read.iter().copied().filter(|&index| expected.part_of(index) == Some(part)).collect();
            for pass in samples.chunks(usize::try_from(len).unwrap()) {
                let mut sorted = pass.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                prop_assert_eq!(sorted.len(), pass.len());
            }
        }
    }
}
