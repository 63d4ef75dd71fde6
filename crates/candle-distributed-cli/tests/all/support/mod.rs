//! The program, run with arguments, and what it must answer.

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

/// The sizes of the model of a test that names none. The program's own model takes minutes in a debug build.
pub(crate) const SMALL: [&str; 6] = ["--hidden", "32", "--n-heads", "2", "--context", "48"];

/// Options of `train` beside which the sizes of [`SMALL`] are not given.
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

/// Returns the program with these arguments and no other.
pub(crate) fn as_given(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-distributed"));
    command.args(args).stdin(Stdio::null());
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// The text a successful command prints.
pub(crate) fn text(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--format", "json"]].concat())).unwrap()
}

/// Checks that a command finds fault with its input, says so on stderr alone, and names all of
/// `words`.
pub(crate) fn refuses(args: &[&str], words: &[&str]) {
    let output = run(args);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert!(output.stdout.is_empty(), "{args:?}");
    for word in words {
        assert!(message.contains(word), "{args:?}: no {word:?} in {message}");
    }
}

/// Returns the words of a command line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// A file of this content that lives as long as the folder returned with its path.
pub(crate) fn file(name: &str, content: impl AsRef<[u8]>) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    (dir, path.to_str().unwrap().into())
}

/// The folder of a small random model, which transformers has made.
pub(crate) fn golden(model: &str) -> String {
    format!("{}/../finetune/tests/golden/{model}", env!("CARGO_MANIFEST_DIR"))
}
