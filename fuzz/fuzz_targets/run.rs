//! The folder of a run that nobody checked: whatever `run.json` and `metrics.jsonl` say, `report`
//! and `train --resume` refuse the run or go on with it, and do not panic.
//!
//! What lies before the first NUL of an input is `run.json`, and the rest `metrics.jsonl`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut files = bytes.splitn(2, |&byte| byte == 0);
    let mut file = || files.next().unwrap_or_default();
    candle_distributed_cli::fuzzing::run(file(), file());
});
