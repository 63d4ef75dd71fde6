//! Errors with hints.

use crate::support::{file, json, rejects, run};

const MANIFEST: &str = r#"{"w": {"dtype": "F32", "shape": [64, 4]}}"#;

/// Checks that a command is rejected with a hint and all of these words.
fn advises(args: &[&str], words: &[&str]) {
    rejects(args, &[&["\nhint: "], words].concat());
}

#[test]
fn unreadable_files_get_format_hints() {
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
    advises(&["sample", "--classes", &model], &["m.json", "text file of numbers"]);
    advises(&["sample", "--len", "9", "--resume", &model], &["m.json", "--save-state"]);
}

#[test]
fn invalid_models_get_hints() {
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
fn rank_and_device_errors_get_hints() {
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
    if cfg!(not(feature = "mpi")) {
        advises(&["mesh", "--engine", "mpi"], &["--features mpi", "mpirun"]);
    }
    if cfg!(not(feature = "cuda")) {
        advises(&["mesh", "--device", "cuda"], &["device 0", "--device cpu"]);
    }
}

#[test]
fn number_errors_show_plain_digits() {
    for (args, words) in [
        (&["sample", "--len", "1e7"][..], "--len 10000000\n"),
        (&["sample", "--len", "1_000"], "--len 1000\n"),
        (&["sample", "--len", "9", "--count", "5.0"], "--count 5\n"),
        (&["mesh", "--world-size", "2,000"], "--world-size 2000\n"),
        (&["sample", "--len", "-5"], "at least 0"),
        (&["sample", "--len", "9", "--start", "-1e3"], "at least 0"),
        (&["sample", "--len=-5"], "at least 0"),
    ] {
        advises(args, &[words]);
    }
    for value in ["1.5", "ten", "1e300", "nan", "inf", "18446744073709551616"] {
        let output = run(&["sample", "--len", value]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!message.contains("hint:") && message.contains(value), "{message}");
    }
}

#[test]
fn limit_errors_name_options() {
    let (_dir, lengths) = file("lengths.txt", "3 600 4");
    let batch = |strategy, more: &[&'static str], words: &[&str]| {
        advises(&[&["batch", "--lengths", &lengths, "--strategy", strategy], more].concat(), words);
    };
    batch("sorted", &[], &["--max-tokens", "--max-batch-size"]);
    batch("dynamic", &[], &["--max-tokens"]);
    batch("dynamic", &["--max-tokens", "512"], &["--max-sequence-length 512 --overlong skip"]);
    let multiple = ["--max-tokens", "512", "--batch-size-multiple", "4"];
    batch("dynamic", &multiple, &["--max-sequence-length 128 --overlong skip"]);
    let padded = ["--max-tokens", "512", "--length-multiple", "64"];
    batch("dynamic", &padded, &["--max-sequence-length N --overlong skip"]);
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
fn unfillable_step_lists_remainder_options() {
    let (_dir, lengths) = file("lengths.txt", "1000 ".repeat(300));
    let batch = ["batch", "--lengths", &lengths, "--strategy", "dynamic", "--max-tokens", "1000"];
    let of_rank = [&batch[..], &["--world-size", "7", "--rank", "6"]].concat();
    advises(&of_rank, &["300 batches", "--remainder drop", "--remainder repeat"]);
    for (remainder, n_steps) in [("drop", 42), ("repeat", 43)] {
        let answer = json(&[&of_rank[..], &["--remainder", remainder]].concat());
        assert_eq!(answer["n_steps"], n_steps, "{remainder}");
        assert_eq!(answer["report"]["dropped"], if remainder == "drop" { 6 } else { 0 });
    }
}

#[test]
fn names_from_files_are_escaped() {
    let rejected = |args: &[&str], escaped: &str| {
        let output = run(args);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
        let has_control = message.contains(|char: char| char.is_control() && char != '\n');
        assert!(!has_control, "{args:?}: {message:?}");
        assert!(message.contains(escaped), "{args:?}: no {escaped} in {message}");
    };
    let large = "\"shape\": [4611686018427387904, 4611686018427387904]";
    let (_dir, model) =
        file("m.json", format!(r#"{{"\u001b[31mred\n": {{"dtype": "F32", {large}}}}}"#));
    rejected(&["plan", &model, "--world-size", "2"], r"\u{1b}[31mred\n");
    let (_dir, model) = file("m.json", r#"{"w": {"dtype": "F\u001b[31m32", "shape": [2]}}"#);
    rejected(&["plan", &model, "--world-size", "2"], r"F\u{1b}[31m32");
    let (_dir, state) = file("state.json", r#"{"\u001b[31m": 1}"#);
    rejected(&["sample", "--len", "9", "--resume", &state], "state.json");
    rejected(
        &["sample", "--len", "9", "--resume", "no\u{1b}[31m\u{202e}file"],
        r"no\u{1b}[31m\u{202e}file",
    );
    let (_dir, lengths) = file("l\u{1b}[31m.txt", "1 \u{1b}[31m");
    rejected(&["batch", "--lengths", &lengths, "--strategy", "dynamic"], r"l\u{1b}[31m.txt");
}

#[test]
fn plan_rejects_pipes_as_models() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let pipe = |name: &str| {
        assert!(std::process::Command::new("mkfifo").arg(path(name)).status().unwrap().success());
    };
    let plan = |model: &str| rejects(&["plan", model, "--world-size", "2"], &["is not a file"]);
    pipe("model.safetensors");
    plan(&path(""));
    plan(&path("model.safetensors"));
    let index = r#"{"weight_map": {"w": "model.safetensors"}}"#;
    std::fs::write(path("model.safetensors.index.json"), index).unwrap();
    plan(&path(""));
    std::fs::remove_file(path("model.safetensors.index.json")).unwrap();
    pipe("model.safetensors.index.json");
    plan(&path(""));
}

#[cfg(target_os = "linux")]
#[test]
fn oversized_order_gets_matching_hint() {
    use crate::support::command;

    let (_dir, classes) = file("classes.txt", "0 1 2 3 4");
    let args = ["sample", "--classes", &classes, "--fixed", "20000000", "--count", "1"];
    let mut shell = std::process::Command::new("bash");
    // The order itself (400 MB) fits into memory, but the buffer to sort it (1.6 GB) does not.
    shell.args(["-c", r#"ulimit -v 1500000; exec "$0" "$@""#]);
    shell.arg(command(&[]).get_program()).args(args);
    let output = shell.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("1600000000 bytes of memory"), "{message}");
    assert!(message.contains("hint: --capped") && !message.contains("--order"), "{message}");
}

#[test]
fn missed_budget_succeeds_with_hint() {
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
