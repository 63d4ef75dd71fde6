//! Every rank reads what PyTorch's `DistributedSampler` gives it: `golden/` holds the answers of
//! torch 2.15.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, Error, Order, SamplerConfig, Tail};
use serde_json::Value;

/// n, world, shuffle, `drop_last`, seed, epoch, what each rank reads.
type Case = (u64, u64, bool, bool, u64, u64, Vec<Vec<u64>>);

/// n, world, rank, shuffle, `drop_last`, seed, epoch, then the length of the list and its ends and
/// digest.
type Digest = (u64, u64, u64, bool, bool, u64, u64, u64, Vec<u64>, Vec<u64>, String);

/// n, seed, then the ends of the permutation and its digest.
type Large = (u64, u64, Vec<u64>, Vec<u64>, String);

fn distributed_sampler() -> Value {
    serde_json::from_str(include_str!("../golden/torch_distributed_sampler.json")).unwrap()
}

fn config(shuffle: bool, drop_last: bool, seed: u64) -> SamplerConfig {
    let config = SamplerConfig::torch().with_seed(Seed::new(seed));
    let config = if shuffle { config } else { config.with_order(Order::Sequential) };
    if drop_last { config.with_tail(Tail::Drop) } else { config }
}

/// The sampler at `epoch`, reached from epoch 0 as a training loop does.
fn sampler(
    len: u64,
    placement: Placement,
    config: SamplerConfig,
    epoch: u64,
) -> DistributedSampler {
    let mut sampler = DistributedSampler::new(len, placement, config).unwrap();
    sampler.set_epoch(Epoch::new(epoch));
    sampler
}

/// FNV-1a 64 over the indices, each as 8 bytes, little-endian.
fn digest(indices: impl Iterator<Item = u64>) -> String {
    let bytes = indices.flat_map(u64::to_le_bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn assert_ends(sampler: &DistributedSampler, first: &[u64], last: &[u64]) {
    assert_eq!(sampler.iter().take(first.len()).collect::<Vec<_>>(), first);
    assert_eq!(
        sampler.iter().rev().take(last.len()).collect::<Vec<_>>(),
        last.iter().rev().copied().collect::<Vec<_>>()
    );
}

#[test]
fn every_rank_reads_what_torch_gives_it() {
    let cases: Vec<Case> = serde_json::from_value(distributed_sampler()["cases"].take()).unwrap();
    assert_eq!(cases.len(), 780);
    for (len, world, shuffle, drop_last, seed, epoch, ranks) in cases {
        let config = config(shuffle, drop_last, seed);
        for (placement, expected) in WorldSize::new(world).unwrap().placements().zip(ranks) {
            if len == 0 {
                // The one difference: torch hands out an empty list, we say that there is no data.
                assert_eq!(
                    DistributedSampler::new(0, placement, config).unwrap_err(),
                    Error::EmptyDataSet
                );
                assert!(expected.is_empty());
                continue;
            }
            let sampler = sampler(len, placement, config, epoch);
            let read: Vec<u64> = sampler.iter().collect();
            assert_eq!(read, expected, "{len} samples, {placement:?}, {config:?}, epoch {epoch}");
            assert_eq!(sampler.len(), expected.len() as u64);
        }
    }
}

#[test]
fn long_data_sets_are_dealt_as_by_torch() {
    let digests: Vec<Digest> =
        serde_json::from_value(distributed_sampler()["digests"].take()).unwrap();
    assert_eq!(digests.len(), 5);
    for (len, world, rank, shuffle, drop_last, seed, epoch, n_read, first, last, expected) in
        digests
    {
        let placement = Placement::new(rank, world).unwrap();
        let sampler = sampler(len, placement, config(shuffle, drop_last, seed), epoch);
        assert_eq!(sampler.len(), n_read);
        assert_ends(&sampler, &first, &last);
        assert_eq!(digest(sampler.iter()), expected, "{len} samples, {placement:?}");
    }
}

#[test]
fn seed_and_epoch_are_added_and_wrap_as_in_torch() {
    let read = |seed: u64, epoch| {
        let placement = Placement::new(1, 4).unwrap();
        sampler(100, placement, config(true, false, seed), epoch).iter().collect::<Vec<_>>()
    };
    assert_eq!(read(7, 3), read(3, 7));
    let minus_two = 2_u64.wrapping_neg();
    assert_eq!(read(minus_two, 3), read(1, 0));
}

#[test]
fn both_of_torchs_algorithms_agree_at_their_border() {
    if std::env::var_os("DIST_SAMPLER_LARGE").is_none() {
        eprintln!("skipped: takes 0.9 GB, set DIST_SAMPLER_LARGE=1 (and use --release) to run it");
        return;
    }
    let mut file: Value =
        serde_json::from_str(include_str!("../golden/torch_randperm_large.json")).unwrap();
    let cases: Vec<Large> = serde_json::from_value(file["cases"].take()).unwrap();
    assert_eq!(cases.len(), 2);
    for (len, seed, first, last, expected) in cases {
        let sampler = sampler(len, Placement::new(0, 1).unwrap(), config(true, false, seed), 0);
        assert_ends(&sampler, &first, &last);
        assert_eq!(digest(sampler.iter()), expected, "{len} samples");
    }
}
