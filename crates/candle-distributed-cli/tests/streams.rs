//! Readers that go away, and places that are full.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    fs::{self, File},
    io,
    process::{Output, Stdio},
};

use crate::support::{command, file};

/// Checks what becomes of everything that prints a result, but training, if it is printed to a
/// place like this.
fn every_result(check: impl Fn(&[&str])) {
    let (dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let model = dir.path().join("model.json");
    fs::write(&model, r#"{"w": {"dtype": "F32", "shape": [10, 4]}}"#).unwrap();
    let model = model.to_str().unwrap();
    check(&["--help"]);
    check(&["--version"]);
    check(&["plan", "--help"]);
    for format in ["text", "json"] {
        check(&["sample", "--len", "100000", "--format", format]);
        check(&["sample", "--len", "9", "--locate", "3", "--format", format]);
        check(&["sample", "--mix", "9:1,5:2", "--format", format]);
        check(&["mesh", "--bytes", "1", "--repetitions", "1", "--format", format]);
    }
    for format in ["text", "json", "svg"] {
        check(&[
            "batch",
            "--lengths",
            &lengths,
            "--strategy",
            "sorted",
            "--max-tokens",
            "160",
            "--format",
            format,
        ]);
        check(&["plan", model, "--world-size", "4", "--format", format]);
    }
    check(&["plan", model, "--world-size", "4", "--explain", "w"]);
    check(&["completions", "bash"]);
    check(&["man"]);
}

fn run_into(stdout: impl Into<Stdio>, args: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command(args).stdout(stdout).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    every_result(|args| {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert_eq!(run_into(writer, args), (Some(0), String::new()), "{args:?}");
    });
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_device_is_a_failure_that_is_named() {
    every_result(|args| {
        let (code, message) =
            run_into(File::options().write(true).open("/dev/full").unwrap(), args);
        assert_eq!(code, Some(1), "{args:?}: {message}");
        assert!(
            message.starts_with("error: cannot write to standard output: No space left"),
            "{args:?}: {message}"
        );
    });
}

#[cfg(target_os = "linux")]
#[test]
fn messages_that_nobody_can_read_change_no_exit_code() {
    for (args, code) in
        [(&["sample", "--len", "0"][..], 2), (&["sample"], 2), (&["sample", "--len", "1"], 0)]
    {
        let stderr = File::options().write(true).open("/dev/full").unwrap();
        let status = command(args).stdout(Stdio::null()).stderr(stderr).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn a_state_appears_in_one_piece_or_not_at_all() {
    let (dir, state) = file("state.json", "old");
    let save = |path: &str| {
        run_into(Stdio::null(), &["sample", "--len", "9", "--count", "3", "--save-state", path])
    };
    assert_eq!(save(&state).0, Some(0));
    assert!(fs::read_to_string(&state).unwrap().starts_with('{'));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(save("/dev/null").0, Some(0));

    let (code, message) = save("/no/such/folder/state.json");
    assert_eq!(code, Some(1));
    assert!(message.contains("cannot write /no/such/folder/state.json"), "{message}");
}
