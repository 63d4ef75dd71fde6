//! Closed pipes, full devices, and writes to files, links and streams.

#[cfg(unix)]
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::support::{command, file};

/// Calls `check` with the arguments of every command that prints a result, except training.
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
    check(&["sample", "--len", "100000", "--format", "npy"]);
    let batch = ["batch", "--lengths", &lengths, "--strategy", "dynamic", "--max-tokens", "160"];
    for format in ["text", "json", "jsonl"] {
        check(&[&batch[..], &["--format", format]].concat());
    }
    for format in ["text", "json", "svg"] {
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
fn closed_pipe_is_no_failure() {
    every_result(|args| {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert_eq!(run_into(writer, args), (Some(0), String::new()), "{args:?}");
    });
}

#[cfg(target_os = "linux")]
#[test]
fn full_device_is_a_named_failure() {
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
fn file_size_limit_is_a_named_failure() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("run");
    let out = out.to_str().unwrap();
    let program = command(&["train", "--steps", "1", "--no-sample", "--out", out]);
    let output = Command::new("sh")
        .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(out) && said.contains("too large"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn unwritable_messages_keep_exit_code() {
    for (args, code) in
        [(&["sample", "--len", "0"][..], 2), (&["sample"], 2), (&["sample", "--len", "1"], 0)]
    {
        let stderr = File::options().write(true).open("/dev/full").unwrap();
        let status = command(args).stdout(Stdio::null()).stderr(stderr).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

/// Saves a state to this path. All files are written in the same way.
fn save(path: impl AsRef<Path>) -> (Option<i32>, String) {
    run_into(Stdio::null(), &saving(path.as_ref()))
}

fn saving(path: &Path) -> [&str; 7] {
    ["sample", "--len", "9", "--count", "3", "--save-state", path.to_str().unwrap()]
}

fn is_state(path: impl AsRef<Path>) -> bool {
    serde_json::from_slice::<Value>(&fs::read(path).unwrap())
        .is_ok_and(|state| state["format_version"].is_u64())
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn state_files_appear_atomically() {
    let (dir, state) = file("state.json", "old");
    assert_eq!(save(&state).0, Some(0));
    assert!(is_state(&state));
    assert_eq!(names_in(dir.path()), ["state.json".into()].into());

    let (code, message) = save("/no/such/folder/state.json");
    assert_eq!(code, Some(1));
    assert!(message.contains("cannot write /no/such/folder/state.json"), "{message}");
    let (code, message) = save(dir.path());
    assert_eq!(code, Some(1), "{message}");
}

#[cfg(unix)]
#[test]
fn files_keep_their_owner() {
    let (_dir, state) = file("state.json", "old");
    let owner = || {
        let known = fs::metadata(&state).unwrap();
        (known.uid(), known.gid(), known.permissions().mode() & 0o7777)
    };
    // Only root can change the owner. For other users, the owner stays the same.
    drop(chown(&state, Some(12345), Some(54321)));
    // The system clears this bit when the owner changes.
    fs::set_permissions(&state, fs::Permissions::from_mode(0o4640)).unwrap();
    let before = owner();
    assert_eq!(save(&state).0, Some(0));
    assert!(is_state(&state));
    assert_eq!(owner(), before);
}

#[cfg(target_os = "linux")]
#[test]
fn standard_streams_are_appended_to() {
    let dir = tempfile::tempdir().unwrap();
    let printed = dir.path().join("printed");
    for stream in ["/dev/stdout", "/proc/self/fd/1", printed.to_str().unwrap()] {
        let (code, message) = run_into(File::create(&printed).unwrap(), &saving(Path::new(stream)));
        assert_eq!((code, message.as_str()), (Some(0), ""), "{stream}");
        let printed = fs::read_to_string(&printed).unwrap();
        // Three samples, and the state after them.
        let lines: Vec<&str> = printed.lines().collect();
        assert!(lines[..3].iter().all(|line| line.parse::<u64>().is_ok()), "{stream}: {printed}");
        assert!(serde_json::from_str::<Value>(&lines[3..].concat()).is_ok(), "{printed}");
    }
    let piped = command(&saving(Path::new("/dev/stdout"))).output().unwrap();
    assert!(String::from_utf8(piped.stdout).unwrap().contains("format_version"));
    assert!(fs::symlink_metadata("/dev/stdout").unwrap().is_symlink());
}

#[test]
fn log_follows_option_and_variable() {
    let said = |args: &[&str], asked: &str| {
        let output = command(args).env("RUST_LOG", asked).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let sample = ["sample", "--len", "1"];
    assert_eq!(said(&sample, "debug,dist_train=off"), "");
    assert_eq!(said(&["-vv", "sample", "--len", "1"], ""), "");
    assert_eq!(said(&[&sample[..], &["-v"]].concat(), "no=such=level"), "");
    let ignored = said(&sample, "no=such=level");
    assert!(ignored.starts_with("warning: RUST_LOG is ignored: "), "{ignored}");
}
