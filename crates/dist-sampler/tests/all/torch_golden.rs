//! Comparison with `DistributedSampler` of torch 2.15 and its index lists in `golden/`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, Error, Order, SamplerConfig, Tail};
use serde_json::Value;

/// Length, world, shuffle, `drop_last`, seed, epoch, indices per rank.
type TorchCase = (u64, u64, bool, bool, u64, u64, Vec<Vec<u64>>);

/// Length, world, rank, shuffle, `drop_last`, seed, epoch; length of the index list, its first and
/// last indices, and its digest.
type DigestCase = (u64, u64, u64, bool, bool, u64, u64, u64, Vec<u64>, Vec<u64>, String);

/// Length, seed; first and last indices of the permutation, and its digest.
type LargeCase = (u64, u64, Vec<u64>, Vec<u64>, String);

fn distributed_sampler() -> Value {
    serde_json::from_str(include_str!("../golden/torch_distributed_sampler.json")).unwrap()
}

fn config(shuffle: bool, drop_last: bool, seed: u64) -> SamplerConfig {
    let config = SamplerConfig::torch().with_seed(Seed::new(seed));
    let config = if shuffle { config } else { config.with_order(Order::Sequential) };
    if drop_last { config.with_tail(Tail::Drop) } else { config }
}

/// Creates a sampler in epoch 0 and moves it to `epoch`, as a training loop does.
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

/// Hashes the indices, each as 8 little-endian bytes, by FNV-1a 64.
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
fn ranks_read_the_torch_indices() {
    let cases: Vec<TorchCase> =
        serde_json::from_value(distributed_sampler()["cases"].take()).unwrap();
    assert_eq!(cases.len(), 780);
    for (len, world, shuffle, drop_last, seed, epoch, ranks) in cases {
        let config = config(shuffle, drop_last, seed);
        for (placement, expected) in WorldSize::new(world).unwrap().placements().zip(ranks) {
            if len == 0 {
                // The only difference: torch returns an empty list, this crate an error.
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
fn long_data_sets_match_torch() {
    let digests: Vec<DigestCase> =
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
fn seed_plus_epoch_wraps_like_torch() {
    let read = |seed: u64, epoch| {
        let placement = Placement::new(1, 4).unwrap();
        sampler(100, placement, config(true, false, seed), epoch).iter().collect::<Vec<_>>()
    };
    assert_eq!(read(7, 3), read(3, 7));
    let minus_two = 2_u64.wrapping_neg();
    assert_eq!(read(minus_two, 3), read(1, 0));
}

#[test]
fn torch_algorithms_agree_at_the_limit() {
    if std::env::var_os("DIST_SAMPLER_LARGE").is_none() {
        eprintln!("skipped: takes 0.9 GB, set DIST_SAMPLER_LARGE=1 (and use --release) to run it");
        return;
    }
    let mut file: Value =
        serde_json::from_str(include_str!("../golden/torch_randperm_large.json")).unwrap();
    let cases: Vec<LargeCase> = serde_json::from_value(file["cases"].take()).unwrap();
    assert_eq!(cases.len(), 2);
    for (len, seed, first, last, expected) in cases {
        let sampler = sampler(len, Placement::new(0, 1).unwrap(), config(true, false, seed), 0);
        assert_ends(&sampler, &first, &last);
        assert_eq!(digest(sampler.iter()), expected, "{len} samples");
    }
}
