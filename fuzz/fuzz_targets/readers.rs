//! The readers of `fsdp_plan::source` on untrusted files: none panics, memory is in proportion to
//! the input, and an accepted file obeys laws.
//!
//! Every input goes to every reader: as a safetensors file, and up to its first NUL as the text of
//! a header, as a manifest and as an index. The texts between the later NULs, which JSON cannot
//! contain, are the headers of the files that the index names.

#![no_main]

use std::{alloc::System, collections::BTreeSet};

use core_types::{Placement, WorldSize};
use fsdp_plan::{
    Cut, Error, ParameterInfo, PlannedParameter, Result, ShardingPlan,
    cost::CostModel,
    source,
    strategy::{Full, ShardingStrategy},
    support,
};
use libfuzzer_sys::fuzz_target;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

const RANKS: u64 = 3;

/// The bytes that a reader may allocate for any input, and for each byte of it. Indexes of short
/// names need the most: 30.
const FIXED_BYTES: usize = 1024;
const BYTES_PER_BYTE: usize = 128;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fuzz_target!(|bytes: &[u8]| {
    let mut texts = bytes.split(|&byte| byte == 0);
    let first = texts.next().unwrap_or_default();
    let text = String::from_utf8_lossy(first);
    let lists = [
        safetensors(bytes),
        safetensors(&file(first)),
        bounded(text.len(), || source::from_manifest(&text)),
        bounded(bytes.len() + text.len(), || index(&text, texts)),
    ];
    lists.into_iter().flatten().for_each(|parameters| check(&parameters));
});

/// Returns the beginning of a safetensors file with this header.
fn file(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header].concat()
}

/// Runs `read` on an input of `len` bytes, and checks that all it allocates, freed again or not, is
/// a multiple of them.
fn bounded<T>(len: usize, read: impl FnOnce() -> T) -> T {
    let region = Region::new(ALLOCATOR);
    let result = read();
    let allocated = region.change().bytes_allocated;
    assert!(
        allocated <= FIXED_BYTES + BYTES_PER_BYTE * len,
        "{allocated} bytes were allocated to read {len}"
    );
    result
}

/// Reads the beginning of a file. Its tensors must be adjacent; the rest of the file is ignored.
fn safetensors(bytes: &[u8]) -> Result<Vec<ParameterInfo>> {
    let parameters = bounded(bytes.len(), || source::from_safetensors(bytes))?;
    let total: u128 = parameters.iter().map(|info| u128::from(info.bytes())).sum();
    assert!(total <= u64::MAX.into(), "{total} bytes in a file with 64-bit offsets");
    let prefix = bytes[..8].try_into().expect("a file that was read has a prefix");
    let end = support::PREFIX_LEN + support::header_len(prefix)?;
    let header = &bytes[..usize::try_from(end).expect("the header was in memory")];
    assert_eq!(source::from_safetensors(header).as_ref(), Ok(&parameters));
    Ok(parameters)
}

/// Reads an index of files with these headers: each is read once, in order.
fn index<'a>(
    text: &str,
    mut headers: impl Iterator<Item = &'a [u8]>,
) -> Result<Vec<ParameterInfo>> {
    let mut were_read = Vec::new();
    let parameters = source::from_index(text, |name| {
        were_read.push(name.to_owned());
        safetensors(&file(headers.next().unwrap_or(b"{}")))
    });
    assert!(were_read.is_sorted_by(|left, right| left < right), "{were_read:?}");
    for name in &were_read {
        assert!(!name.is_empty() && !name.contains(['/', '\\', '\0']), "{were_read:?}");
    }
    parameters
}

/// Checks the laws of a list of parameters, and of its plan if it has one.
fn check(parameters: &[ParameterInfo]) {
    let names: BTreeSet<_> = parameters.iter().map(ParameterInfo::name).collect();
    assert_eq!(names.len(), parameters.len(), "a name occurs twice");
    for info in parameters {
        assert_eq!(u128::from(info.bytes()), bytes(info), "{info:?}");
    }
    let world = WorldSize::new(RANKS).expect("a small world");
    if let Ok(plan) = Full::default().plan(parameters, world) {
        check_plan(&plan, parameters);
    }
}

/// Returns the bytes of a parameter, computed only from its shape and dtype.
fn bytes(info: &ParameterInfo) -> u128 {
    let numel = info.shape().iter().map(|&dim| u128::from(dim)).product::<u128>();
    let block = u128::from(info.dtype().block_numel());
    assert_eq!(numel % block, 0, "{info:?}");
    numel / block * u128::from(info.dtype().block_bytes())
}

/// Checks that ranks hold every element as often as its cut says, and that the cost says the same.
fn check_plan(plan: &ShardingPlan, parameters: &[ParameterInfo]) {
    assert!(plan.parameters().iter().map(PlannedParameter::info).eq(parameters));
    let mut held_bytes = 0;
    for (position, planned) in plan.parameters().iter().enumerate() {
        let copies = match planned.cut() {
            Cut::Tied => 0,
            Cut::Replicated => RANKS,
            _ => 1,
        };
        let ranks =
            (0..RANKS).map(|rank| Placement::new(rank, RANKS).expect("a rank of the world").rank());
        let shards = ranks.flat_map(|rank| {
            plan.shard(position, rank).expect("a parameter and a rank of the plan")
        });
        let held = shards.map(|shard| u128::from(shard.shard_size)).sum::<u128>();
        assert_eq!(held, u128::from(planned.info().numel()) * u128::from(copies), "{planned:?}");
        held_bytes += u128::from(copies) * bytes(planned.info());
    }
    match plan.cost(&CostModel::default()) {
        Ok(cost) => {
            assert_eq!(
                cost.ranks.iter().map(|rank| u128::from(rank.param_bytes)).sum::<u128>(),
                held_bytes
            );
            assert!(cost.max_over_mean.is_finite());
        }
        Err(error) => assert!(matches!(error, Error::TotalTooLarge { .. }), "{error}"),
    }
    let json = serde_json::to_string(plan).expect("a plan can be written");
    assert_eq!(
        serde_json::from_str::<ShardingPlan>(&json).as_ref().map_err(ToString::to_string),
        Ok(plan)
    );
}
