//! Untrusted states of samplers and batches: none panics or takes long, and an accepted state reads
//! no sample twice.
//!
//! The input up to its first NUL is the state of a sampler, and the rest is the state of batches.

#![no_main]

use core_types::{Epoch, Placement, Seed, WorldSize};
use dist_sampler::{DistributedSampler, Order, SamplerConfig, SamplerState, Tail};
use dyn_batch::{
    BatchConfig, BatchState, Cut, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler,
    DynamicBatchStrategy,
};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// The longest data set that is read completely.
const SMALL: u64 = 200;
/// The longest that is held in memory here.
const HELD: u64 = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let mut texts = bytes.splitn(2, |&byte| byte == 0);
    check_sampler(texts.next().unwrap_or_default());
    check_batches(texts.next().unwrap_or_default());
});

fn check_sampler(json: &[u8]) {
    let Ok(state) = serde_json::from_slice::<SamplerState>(json) else { return };
    let written = serde_json::to_value(&state).expect("a state can be written");
    assert_eq!(serde_json::from_value::<SamplerState>(written.clone()).expect("and read"), state);
    for n_ranks in [1, 3] {
        let world = WorldSize::new(n_ranks).expect("a small world");
        let samplers: Option<Vec<_>> =
            world.placements().map(|place| resumed(&written, &state, place)).collect();
        if let Some(samplers) = samplers {
            check_samplers(&samplers);
        }
    }
}

/// Returns the sampler of a state at this placement, if it accepts the state.
fn resumed(written: &Value, state: &SamplerState, place: Placement) -> Option<DistributedSampler> {
    let order: Order = serde_json::from_value(written["order"].clone()).ok()?;
    let seed: Seed = serde_json::from_value(written["seed"].clone()).ok()?;
    let len = written["len"].as_u64()?;
    if len > HELD && matches!(order, Order::Exact | Order::Torch) {
        return None;
    }
    let config = SamplerConfig::default().with_order(order).with_seed(seed).with_tail(Tail::Spread);
    let mut sampler = DistributedSampler::new(len, place, config).ok()?;
    sampler.resume(state).ok()?;
    Some(sampler)
}

/// Checks that no sample is read twice, and that every reader is known.
fn check_samplers(samplers: &[DistributedSampler]) {
    let mut seen = Vec::new();
    for sampler in samplers {
        let ends = [0, sampler.len() / 2, sampler.len().saturating_sub(1)];
        for index in ends.into_iter().filter_map(|n| sampler.get(n)) {
            assert!(index < sampler.data_set_len());
            if sampler.data_set_len() <= HELD || !is_held(sampler) {
                assert_eq!(sampler.rank_of(index), Some(sampler.placement().rank()));
            }
        }
        assert_eq!(sampler.get(sampler.len()), None);
        if sampler.data_set_len() <= SMALL {
            seen.extend(sampler.iter());
        }
    }
    let n_seen = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), n_seen, "a sample is read twice");
}

/// Returns true if finding a sample takes a search.
fn is_held(sampler: &DistributedSampler) -> bool {
    matches!(sampler.config().order, Order::Exact | Order::Torch)
}

fn check_batches(json: &[u8]) {
    let Ok(state) = serde_json::from_slice::<BatchState>(json) else { return };
    for strategy in [
        DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal },
        DynamicBatchStrategy::Dynamic,
    ] {
        let lengths: Vec<u32> = (1..=40).collect();
        let config = BatchConfig::default().with_strategy(strategy).with_max_tokens(100);
        let batches = DynamicBatchSampler::new(lengths, config).expect("batches of known lengths");
        let place = Placement::new(1, 2).expect("a small world");
        let sampler = DistributedBatchSampler::new(batches, place, DistributedConfig::default())
            .expect("steps of two ranks");
        if let Ok(resumed) = sampler.resume(&state, 0..40) {
            let first = usize::try_from(resumed.state().step).expect("a step of the epoch");
            let batches = (first..).map_while(|nth| resumed.all_ranks(nth)).flatten().flatten();
            let mut seen: Vec<u64> = batches.flat_map(|batch| batch.indices).collect();
            let n_seen = seen.len();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), n_seen, "a sequence is read twice");
            let whole = sampler.epoch(state.epoch, 0..40).expect("an epoch of known lengths");
            if resumed.state().fingerprint == whole.state().fingerprint {
                assert!(resumed.eq(whole.skip(first)), "other steps than without a stop");
            }
        }
        // A state that is right at the beginning of every run.
        let first = sampler.epoch(Epoch::ZERO, 0..40).expect("an epoch of known lengths").state();
        assert!(sampler.resume(&first, 0..40).is_ok());
    }
}
