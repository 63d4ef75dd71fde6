//! Errors that say what to do next.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use crate::support::{file, json, refuses, run};

const MANIFEST: &str = r#"{"w": {"dtype": "F32", "shape": [64, 4]}}"#;

/// Checks that a refusal comes with advice that has all of these words.
fn advises(args: &[&str], words: &[&str]) {
    refuses(args, &[&["\nhint: "], words].concat());
}

#[test]
fn files_are_described_that_cannot_be_read() {
    let (_dir, model) = file("m.json", MANIFEST);
    advises(
        &["plan", "/no/such/model", "--world-size", "2"],
        &["/no/such/model", ".safetensors", "manifest"],
    );
    advises(&["plan", &model, "--world-size", "2", "--rules", "/no/such"], &["\"rules\""]);
    advises(
        &["plan", &model, "--world-size", "2", "--against", &model],
        &["m.json", "--format json"],
    );
    advises(
        &["batch", "--lengths", "/no/such", "--strategy", "pack", "--capacity", "9"],
        &["--lengths takes a text file"],
    );
    advises(&["sample", "--len", "9", "--weights", "/no/such"], &["text file of numbers"]);
    advises(&["sample", "--classes", &model], &["class 1", "text file of numbers"]);
    advises(&["sample", "--len", "9", "--resume", &model], &["m.json", "--save-state"]);
}

#[test]
fn models_are_described_that_are_none() {
    let (_dir, pickle) = file("model.bin", b"\x80\x02\x8a");
    advises(&["plan", &pickle, "--world-size", "2"], &["model.bin", ".safetensors"]);
    let (_dir, list) = file("m.json", "[]");
    advises(&["plan", &list, "--world-size", "2"], &["m.json", ".safetensors"]);
    let (_dir, dtype) = file("m.json", MANIFEST.replace("F32", "float32"));
    advises(&["plan", &dtype, "--world-size", "2"], &["float32", "BF16"]);
    let (_dir, scalar) = file("m.json", MANIFEST.replace("64, 4", ""));
    advises(&["plan", &scalar, "--world-size", "2"], &["--layout flat"]);
    let (_dir, model) = file("m.json", MANIFEST);
    advises(
        &["plan", &model, "--world-size", "2", "--explain", "v"],
        &["no parameter v", "names of all parameters"],
    );
}

#[test]
fn ranks_and_devices_are_explained() {
    advises(
        &["sample", "--len", "9", "--world-size", "0"],
        &["world size 0", "--world-size is the number of ranks"],
    );
    advises(&["sample", "--len", "9", "--world-size", "4", "--rank", "4"], &["the last one is 3"]);
    advises(
        &["sample", "--len", "9", "--world-size", "2", "--rank-weights", "1"],
        &["--rank-weights", "per rank"],
    );
    advises(&["sample", "--len", "0"], &["--len"]);
    advises(&["sample", "--len", "5000000000", "--order", "exact"], &["--order streaming"]);
    advises(&["mesh", "--world-size", "0"], &["world size 0", "--world-size"]);
    advises(&["mesh", "--world-size", "1025"], &["1025", "1024", "--world-size"]);
    if cfg!(not(feature = "cuda")) {
        advises(&["mesh", "--device", "cuda"], &["device 0", "--device cpu"]);
    }
}

#[test]
fn limits_are_named_as_on_the_command_line() {
    let (_dir, lengths) = file("lengths.txt", "3 600 4");
    let batch = |strategy, more: &[&'static str], words: &[&str]| {
        advises(&[&["batch", "--lengths", &lengths, "--strategy", strategy], more].concat(), words);
    };
    batch("sorted", &[], &["--max-tokens", "--max-batch-size"]);
    batch("dynamic", &[], &["--max-tokens"]);
    batch("dynamic", &["--max-tokens", "512"], &["--max-sequence-length 512 --overlong skip"]);
    batch(
        "dynamic",
        &["--max-tokens", "900", "--max-sequence-length", "512"],
        &["--overlong truncate"],
    );
    batch(
        "sorted",
        &["--max-tokens", "900", "--world-size", "8", "--rank", "0"],
        &["8 ranks", "makes more batches"],
    );
}

#[test]
fn a_missed_budget_is_no_error_but_comes_with_advice() {
    let (_dir, model) = file("m.json", MANIFEST);
    let plan = ["plan", &model, "--world-size", "2", "--budget"];
    for (more, advice) in [(&["9"][..], "--search"), (&["9", "--search"], "more ranks")] {
        let output = run(&[&plan[..], more].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.success() && message.starts_with("hint: ") && message.contains(advice),
            "{message}"
        );
    }
    assert!(run(&[&plan[..], &["1GiB"]].concat()).stderr.is_empty());
    assert!(json(&[&plan[..], &["9"]].concat())["budget"]["missing_bytes"].is_u64());
}
