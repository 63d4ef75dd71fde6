//! Patterns and rules that nobody checked: no text panics or overflows the stack, what one takes is
//! in proportion to it, and what is read obeys laws.
//!
//! What lies before the first NUL of an input is a pattern, and the rest the JSON of rules. The words
//! of both, cut at everything that is no name, are names of parameters to match.

#![no_main]

use core_types::WorldSize;
use fsdp_plan::{
    ElemType, Error, ParameterInfo, Pattern,
    strategy::{Hybrid, ShardingStrategy},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut texts = bytes.splitn(2, |&byte| byte == 0).map(String::from_utf8_lossy);
    let pattern = texts.next().unwrap_or_default();
    let rules = texts.next().unwrap_or_default();
    let names: Vec<&str> = names(&pattern).chain(names(&rules)).take(16).collect();
    check_pattern(&pattern, &names);
    check_rules(&rules, &names);
});

/// Runs of characters that names are made of.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |char: char| char.is_alphanumeric() || char == '.' || char == '_';
    text.split(move |char| !is_name(char)).filter(|name| !name.is_empty())
}

fn check_pattern(text: &str, names: &[&str]) {
    let json = serde_json::to_string(text).expect("a text can be written");
    let from_json = serde_json::from_str::<Pattern>(&json);
    match text.parse::<Pattern>() {
        Ok(pattern) => {
            assert!(text.len() <= Pattern::MAX_BYTES);
            assert_eq!(pattern.to_string(), text);
            assert_eq!(from_json.expect("it can be read both ways"), pattern);
            for name in names {
                if let Some(prefix) = pattern.prefix_of(name) {
                    assert!(name.starts_with(prefix) && pattern.matches(prefix));
                }
            }
        }
        Err(error) => {
            let message = error.to_string();
            assert!(matches!(error, Error::BadPattern { .. }), "{message}");
            assert!(message.len() < 4096 && !message.contains(char::is_control), "{message:?}");
            assert_eq!(from_json.map_err(|error| error.to_string()), Err(message));
        }
    }
}

fn check_rules(json: &str, names: &[&str]) {
    let Ok(hybrid) = serde_json::from_str::<Hybrid>(json) else { return };
    let parameters: Vec<_> = names
        .iter()
        .filter_map(|name| ParameterInfo::new(*name, [4, 2], ElemType::F32).ok())
        .collect();
    let matches = hybrid.matches(&parameters);
    let n_decided: usize = matches.decided.iter().sum();
    assert_eq!(n_decided + matches.unmatched.len(), parameters.len());
    let world = WorldSize::new(3).expect("a small world");
    if let Ok(plan) = hybrid.plan(&parameters, world) {
        assert_eq!(plan.parameters().len(), parameters.len());
    }
    let written = serde_json::to_string(&hybrid).expect("rules can be written");
    assert_eq!(serde_json::from_str::<Hybrid>(&written).expect("and read again"), hybrid);
}
