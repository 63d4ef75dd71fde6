//! Untrusted run folders: for any `run.json` and `metrics.jsonl`, `report` and `train --resume`
//! reject or continue the run without a panic.
//!
//! The input up to its first NUL is `run.json`, and the rest is `metrics.jsonl`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut files = bytes.splitn(2, |&byte| byte == 0);
    let mut file = || files.next().unwrap_or_default();
    candle_distributed_cli::fuzzing::run(file(), file());
});
