//! Runs the program, and checks its answers.

pub(crate) mod finetune;
pub(crate) mod run;

use std::{
    fs,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// Every subcommand.
pub(crate) const SUBCOMMANDS: [&str; 10] = [
    "sample",
    "batch",
    "plan",
    "train",
    "generate",
    "report",
    "mesh",
    "launch",
    "completions",
    "man",
];

/// The default model sizes of tests. The program's own model takes minutes in a debug build.
pub(crate) const SMALL: [&str; 6] = ["--hidden", "32", "--n-heads", "2", "--context", "48"];

/// Options of `train` that exclude the sizes of [`SMALL`].
const NAMES_A_MODEL: [&str; 6] =
    ["--model", "--resume", "--n-layers", "--hidden", "--n-heads", "--context"];

/// Returns the program with these arguments; `train` gets a small model unless they name one.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = as_given(args);
    if args.first() == Some(&"train") && !args.iter().any(|arg| NAMES_A_MODEL.contains(arg)) {
        command.args(SMALL);
    }
    command
}

/// Returns the program with exactly these arguments.
pub(crate) fn as_given(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-distributed"));
    command.args(args).stdin(Stdio::null());
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// Runs a command that must succeed, and returns its output.
pub(crate) fn text(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--format", "json"]].concat())).unwrap()
}

/// Checks that a command rejects its input, prints nothing to stdout, and prints all of `words` to
/// stderr.
pub(crate) fn rejects(args: &[&str], words: &[&str]) {
    let output = run(args);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert!(output.stdout.is_empty(), "{args:?}");
    assert!(!message.contains("panicked"), "{args:?}: {message}");
    for word in words {
        assert!(message.contains(word), "{args:?}: no {word:?} in {message}");
    }
}

/// Checks that a command rejects each of these ends of its line, with messages that contain all parts
/// between bars.
pub(crate) fn rejects_each(command: &[&str], cases: &[(&str, &str)]) {
    for (end, parts) in cases {
        let end: Vec<&str> = end.split_whitespace().collect();
        rejects(&[command, &end].concat(), &parts.split('|').map(str::trim).collect::<Vec<_>>());
    }
}

/// Returns the words of a command line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Creates a file in a temporary folder, and returns the folder and the path.
pub(crate) fn file(name: &str, content: impl AsRef<[u8]>) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    (dir, path.to_str().unwrap().into())
}

/// Returns the folder of a small random model, made with transformers.
pub(crate) fn golden(model: &str) -> String {
    format!("{}/../finetune/tests/golden/{model}", env!("CARGO_MANIFEST_DIR"))
}
