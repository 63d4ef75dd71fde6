//! Untrusted rules: no text panics or overflows the stack, the cost is in proportion to the input,
//! and accepted rules obey laws.
//!
//! The input up to its first NUL is the JSON of rules. The words of the whole input, split at other
//! characters, are parameter names to match.

#![no_main]

use core_types::WorldSize;
use fsdp_plan::{
    ElemType, ParameterInfo,
    strategy::{Hybrid, ShardingStrategy},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let json = text.split('\0').next().unwrap_or(&text);
    let Ok(hybrid) = serde_json::from_str::<Hybrid>(json) else { return };
    let parameters: Vec<_> = fuzz::names(&text)
        .filter_map(|name| ParameterInfo::new(name, [4, 2], ElemType::F32).ok())
        .collect();
    check(&hybrid, &parameters);
});

fn check(hybrid: &Hybrid, parameters: &[ParameterInfo]) {
    let matches = hybrid.matches(parameters);
    let n_decided: usize = matches.decided.iter().sum();
    assert_eq!(n_decided + matches.unmatched.len(), parameters.len());
    let world = WorldSize::new(3).expect("a small world");
    if let Ok(plan) = hybrid.plan(parameters, world) {
        assert_eq!(plan.parameters().len(), parameters.len());
    }
    let written = serde_json::to_string(hybrid).expect("rules can be written");
    assert_eq!(serde_json::from_str::<Hybrid>(&written).expect("and read again"), *hybrid);
}
