//! Comparison with `DistributedDeterministicSampler` of spdl 0.8, whose index lists are in
//! `golden/`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use core_types::WorldSize;
use dist_sampler::{DistributedSampler, SamplerConfig, Tail};
use serde_json::Value;

/// Length, world, `ddp_drop_last_distributed_round`, indices per rank.
type SpdlCase = (u64, u64, bool, Option<Vec<Vec<u64>>>);

#[test]
fn ranks_read_the_spdl_indices() {
    let mut file: Value =
        serde_json::from_str(include_str!("../golden/spdl_deterministic_sampler.json")).unwrap();
    let cases: Vec<SpdlCase> = serde_json::from_value(file["cases"].take()).unwrap();
    assert_eq!(cases.len(), 140);
    for (len, world, drop_last_round, ranks) in cases {
        let tail = if drop_last_round { Tail::Drop } else { Tail::Spread };
        let config = SamplerConfig::spdl_deterministic().with_tail(tail);
        // The only difference: SPDL rejects a data set that leaves every rank without a sample.
        let ranks = ranks.unwrap_or_else(|| vec![Vec::new(); usize::try_from(world).unwrap()]);
        for (placement, expected) in WorldSize::new(world).unwrap().placements().zip(ranks) {
            let sampler = DistributedSampler::new(len, placement, config).unwrap();
            assert_eq!(
                sampler.iter().collect::<Vec<_>>(),
                expected,
                "{len} samples, {placement}, {config:?}"
            );
        }
    }
}
