//! Losses of runs that are written down, so that a change of any of them is noticed.
//!
//! Products of matrices differ in their last bits between processors. So the file names the processor
//! of its losses: there they must be equal to the bit, elsewhere nearly.

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Set to write down the losses of this machine. Both programs with pinned runs must then run.
const PIN: &str = "PIN_RUNS";

/// How much losses may differ on another processor, relative to them.
const TOLERANCE: f64 = 1e-4;

pub(crate) type Losses = BTreeMap<String, Vec<f64>>;

#[derive(Default, Serialize, Deserialize)]
struct Pins {
    processor: String,
    runs: Losses,
}

/// Compares the losses of runs with those of the file, or writes them there.
pub(crate) fn check(found: &Losses) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/runs.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|_| String::from("{}"));
    if env::var_os(PIN).is_some() {
        let mut pins: Pins = serde_json::from_str(&text).unwrap_or_default();
        pins.processor = processor();
        pins.runs.extend(found.clone());
        fs::write(&path, serde_json::to_string_pretty(&pins).unwrap() + "\n").unwrap();
        return;
    }
    let pins: Pins = serde_json::from_str(&text).unwrap();
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

/// The model of the processor, as Linux describes it.
fn processor() -> String {
    let known = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = known.lines().find(|line| line.split(':').next().map(str::trim) == Some(name));
        line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim)
    };
    ["model name", "cpu family", "model", "stepping"].map(field).join(", ")
}
