//! Comparison with the samplers of spdl 0.8 and their index lists in `golden/`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, Error, SamplerConfig, Tail};
use serde_json::Value;

/// Length, world, `ddp_drop_last_distributed_round`, indices per rank.
type DeterministicCase = (u64, u64, bool, Option<Vec<Vec<u64>>>);

fn config(drop_last_round: bool) -> SamplerConfig {
    SamplerConfig::spdl().with_tail(if drop_last_round { Tail::Drop } else { Tail::Spread })
}

#[test]
fn ranks_read_the_spdl_indices() {
    let mut file: Value =
        serde_json::from_str(include_str!("../golden/spdl_deterministic_sampler.json")).unwrap();
    let cases: Vec<DeterministicCase> = serde_json::from_value(file["cases"].take()).unwrap();
    assert_eq!(cases.len(), 140);
    for (len, world, drop_last_round, ranks) in cases {
        let world_size = WorldSize::new(world).unwrap();
        for placement in world_size.placements() {
            let config = config(drop_last_round);
            let sampler = DistributedSampler::spdl_deterministic(len, placement, config);
            let indices = sampler.map(|sampler| sampler.iter().collect::<Vec<_>>());
            let expected = match &ranks {
                Some(ranks) => Ok(ranks[placement.rank().as_usize()].clone()),
                None => Err(Error::FewerSamplesThanRanks { samples: len, world_size }),
            };
            assert_eq!(indices, expected, "{len} samples, {placement}, {config:?}");
        }
    }
}

/// Length, world, `num_draws`, place in the list of weights, seed, the seed that `shuffle` set,
/// `ddp_drop_last_distributed_round`.
type RandomArgs = (u64, u64, Option<u64>, Option<usize>, u64, Option<u64>, bool);

fn random_sampler(
    args: RandomArgs,
    rank: u64,
    weights: &[Vec<f64>],
) -> Result<DistributedSampler, Error> {
    let (len, world, draws, weights_at, seed, shuffle_seed, drop_last_round) = args;
    // `shuffle` replaces the seed.
    let seed = if shuffle_seed.is_some() { 0 } else { seed };
    let config = config(drop_last_round)
        .with_seed(Seed::new(seed))
        .with_epoch(Epoch::new(shuffle_seed.unwrap_or(0)));
    let weights = weights_at.map(|n| &weights[n][..]);
    let placement = Placement::new(rank, world).unwrap();
    DistributedSampler::spdl_random(len, draws, weights, placement, config)
}

/// Returns the lists of weights, which are written as bits because JSON rounds them.
fn weight_lists(file: &mut Value) -> Vec<Vec<f64>> {
    let bits: Vec<Vec<u64>> = serde_json::from_value(file["weight_bits"].take()).unwrap();
    bits.into_iter().map(|list| list.into_iter().map(f64::from_bits).collect()).collect()
}

fn random_file() -> Value {
    serde_json::from_str(include_str!("../golden/spdl_random_sampler.json")).unwrap()
}

#[test]
fn ranks_draw_the_spdl_indices() {
    let mut file = random_file();
    let weights = weight_lists(&mut file);
    let cases: Vec<(RandomArgs, Option<Vec<Vec<u64>>>)> =
        serde_json::from_value(file["cases"].take()).unwrap();
    assert_eq!(cases.len(), 288);
    for (args, ranks) in cases {
        let Some(ranks) = ranks else {
            let samples = args.2.unwrap_or(args.0);
            let world_size = WorldSize::new(args.1).unwrap();
            let expected = Error::FewerSamplesThanRanks { samples, world_size };
            assert_eq!(random_sampler(args, 0, &weights).unwrap_err(), expected, "{args:?}");
            continue;
        };
        for (rank, expected) in (0..).zip(ranks) {
            let sampler = random_sampler(args, rank, &weights).unwrap();
            assert_eq!(sampler.iter().collect::<Vec<_>>(), expected, "rank {rank}, {args:?}");
        }
    }
}

#[test]
fn long_data_sets_match_spdl() {
    let mut file = random_file();
    let weights = weight_lists(&mut file);
    let digests: Vec<(RandomArgs, u64, usize, String)> =
        serde_json::from_value(file["digests"].take()).unwrap();
    assert_eq!(digests.len(), 15);
    for (args, rank, len, expected) in digests {
        let indices: Vec<u64> = random_sampler(args, rank, &weights).unwrap().iter().collect();
        let bytes = indices.iter().flat_map(|index| index.to_le_bytes());
        let digest = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!((indices.len(), format!("{digest:016x}")), (len, expected), "{args:?}");
    }
}

#[test]
fn impossible_draws_are_rejected() {
    let error = |len, draws, weights: Option<&[f64]>| {
        let me = Placement::new(0, 2).unwrap();
        DistributedSampler::spdl_random(len, draws, weights, me, config(true)).unwrap_err()
    };
    assert_eq!(error(0, None, None), Error::EmptyDataSet);
    assert_eq!(error(4, Some(0), None), Error::EmptyDataSet);
    assert_eq!(error(10, Some(11), None), Error::DrawsExceedDataSet { draws: 11, len: 10 });
    let max = 1 << 32;
    assert_eq!(error(max + 1, Some(2), None), Error::TooLongToShuffle { len: max + 1, max });
    let reason = |samples, weights: &[f64]| error(samples, None, Some(weights)).to_string();
    assert_eq!(reason(4, &[1.0; 3]), "3 weights were given for 4 samples");
    assert_eq!(reason(4, &[0.0; 4]), "none of the 4 weights is above 0");
    assert!(reason(2, &[1.0, -1.0]).contains("at index 1 is negative"));
    assert!(reason(2, &[1e308, 1e308]).contains("overflows at index 1"));
}

/// Returns the sampler of a rank. Its order depends on the world that it was created for.
fn draws_of_eleven(placement: Placement) -> DistributedSampler {
    DistributedSampler::spdl_random(11, None, None, placement, config(true)).unwrap()
}

#[test]
fn other_worlds_continue_the_draws() {
    let four = draws_of_eleven(Placement::new(0, 4).unwrap());
    let all_ranks = four.clone().with_placement(Placement::SINGLE).unwrap();
    let order: Vec<u64> = all_ranks.iter().collect();
    assert_eq!(order.len(), 8, "the incomplete round of 4 ranks is dropped");
    assert!(all_ranks.iter().ne(draws_of_eleven(Placement::SINGLE).iter().take(8)));
    for (read, world) in [(0, 1), (0, 3), (1, 1), (1, 2), (1, 3), (2, 5)] {
        for placement in WorldSize::new(world).unwrap().placements() {
            let mut resumed = draws_of_eleven(placement);
            let first_of_next_epoch = {
                let mut next = resumed.clone();
                next.set_epoch(Epoch::new(1));
                next.iter().collect::<Vec<_>>()
            };
            resumed.resume(&four.state(read)).unwrap();
            let rest = &order[usize::try_from(read * 4).unwrap()..];
            let n_rounds = rest.len() / placement.world_size().as_usize();
            let own = rest.iter().skip(placement.rank().as_usize());
            let own = own.step_by(placement.world_size().as_usize()).take(n_rounds);
            assert!(resumed.iter().eq(own.copied()), "{read} read, {placement}");
            resumed.set_epoch(Epoch::new(1));
            assert!(resumed.iter().eq(first_of_next_epoch), "{placement}");
        }
    }
}
