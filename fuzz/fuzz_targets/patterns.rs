//! Untrusted patterns: no text panics or overflows the stack, the cost is in proportion to the
//! input, and an accepted pattern obeys laws.
//!
//! The input up to its first NUL is a pattern. The words of the whole input, split at other
//! characters, are parameter names to match.

#![no_main]

use fsdp_plan::{ElemType, Error, ParameterInfo, Pattern};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let pattern = text.split('\0').next().unwrap_or(&text);
    check(pattern, fuzz::names(&text));
});

fn check<'a>(text: &str, names: impl Iterator<Item = &'a str>) {
    let json = serde_json::to_string(text).expect("a text can be written");
    let from_json = serde_json::from_str::<Pattern>(&json);
    match text.parse::<Pattern>() {
        Ok(pattern) => {
            assert!(text.len() <= 4096);
            assert_eq!(pattern.to_string(), text);
            assert_eq!(from_json.expect("it can be read both ways"), pattern);
            for name in names {
                let Ok(info) = ParameterInfo::new(name, [1], ElemType::F32) else { continue };
                let unit = info.with_layer_pattern(&pattern).unit().to_owned();
                assert!(unit.is_empty() || name.starts_with(&unit));
            }
        }
        Err(error) => {
            let message = error.to_string();
            assert!(matches!(error, Error::InvalidPattern { .. }), "{message}");
            assert!(message.len() < 4096 && !message.contains(char::is_control), "{message:?}");
            assert_eq!(from_json.map_err(|error| error.to_string()), Err(message));
        }
    }
}
