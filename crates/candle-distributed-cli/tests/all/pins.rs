//! Pinned losses of runs, to detect any change.
//!
//! Matrix products differ in their last bits between processors. The file names the processor of
//! its losses: on this processor, losses must be bit-identical, and elsewhere nearly equal.

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use serde::{Deserialize, Serialize};

/// The variable that makes tests store the losses of this machine. Run both test programs with it.
const PIN: &str = "PIN_RUNS";

/// Maximum relative difference of losses on another processor.
const TOLERANCE: f64 = 1e-4;

pub(crate) type Losses = BTreeMap<String, Vec<f64>>;

#[derive(Default, Serialize, Deserialize)]
struct PinFile {
    processor: String,
    runs: Losses,
}

/// Compares the losses of runs with the file, or stores them in it.
pub(crate) fn check(found: &Losses) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/runs.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|_| String::from("{}"));
    if env::var_os(PIN).is_some() {
        let mut pins: PinFile = serde_json::from_str(&text).unwrap_or_default();
        pins.processor = processor();
        pins.runs.extend(found.clone());
        fs::write(&path, serde_json::to_string_pretty(&pins).unwrap() + "\n").unwrap();
        return;
    }
    let pins: PinFile = serde_json::from_str(&text).unwrap();
    let is_exact = pins.processor == processor();
    for (run, losses) in found {
        let expected = pins.runs.get(run).unwrap_or_else(|| panic!("{run} is not pinned"));
        let is_same = losses.len() == expected.len()
            && losses.iter().zip(expected).all(|(&loss, &pin)| is_pinned(loss, pin, is_exact));
        assert!(is_same, "{run}: {losses:?}, pinned {expected:?}");
    }
}

fn is_pinned(loss: f64, pin: f64, is_exact: bool) -> bool {
    if is_exact { loss.to_bits() == pin.to_bits() } else { (loss - pin).abs() < TOLERANCE * pin }
}

/// Returns the model of the processor from `/proc/cpuinfo`.
fn processor() -> String {
    let known = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    ["model name", "cpu family", "model", "stepping"].map(|name| cpu_field(&known, name)).join(", ")
}

fn cpu_field<'a>(known: &'a str, name: &str) -> &'a str {
    let line = known.lines().find(|line| line.split(':').next().map(str::trim) == Some(name));
    line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim)
}
