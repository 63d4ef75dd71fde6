//! Closed pipes, full devices, and writes to files, links and streams.

#[cfg(unix)]
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::Path,
    process::{Command, Output, Stdio},
    thread,
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
fn links_are_followed_and_kept() {
    let (dir, target) = file("target.json", "old");
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    let links = [
        ("absolute", target.as_str(), "target.json"),
        ("relative", "target.json", "target.json"),
        ("second", "relative", "target.json"),
        ("dangling", "folder/new.json", "folder/new.json"),
        ("folder/up", "../other.json", "other.json"),
    ];
    for (link, leads_to, target) in links {
        symlink(leads_to, at(link)).unwrap();
        fs::write(at("target.json"), "old").unwrap();
        assert_eq!(save(at(link)), (Some(0), String::new()), "{link}");
        assert_eq!(fs::read_link(at(link)).unwrap(), Path::new(leads_to));
        assert!(is_state(at(target)), "{link}");
    }
    symlink("round", at("around")).unwrap();
    symlink("around", at("round")).unwrap();
    let (code, message) = save(at("round"));
    assert_eq!(code, Some(1), "{message}");
}

#[cfg(unix)]
#[test]
fn planted_links_are_not_followed() {
    let (dir, victim) = file("victim", "kept");
    let state = dir.path().join("state.json");
    let planted = dir.path().join("state.json.partial");
    symlink(&victim, &planted).unwrap();
    assert_eq!(save(&state).0, Some(0));
    assert!(is_state(&state) && fs::symlink_metadata(&state).unwrap().is_file());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
    assert!(fs::symlink_metadata(&planted).unwrap().is_symlink());
}

#[cfg(unix)]
#[test]
fn files_keep_their_permissions() {
    let (dir, state) = file("state.json", "old");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let usual = mode(Path::new(&state));
    for kept in [0o600, 0o664, 0o644] {
        fs::set_permissions(&state, fs::Permissions::from_mode(kept)).unwrap();
        assert_eq!(save(&state).0, Some(0));
        assert_eq!(mode(Path::new(&state)), kept);
    }
    let new = dir.path().join("new.json");
    assert_eq!(save(&new).0, Some(0));
    assert_eq!(mode(&new), usual);
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

#[test]
fn concurrent_writers_leave_one_result() {
    let (dir, state) = file("state.json", "old");
    for _ in 0..4 {
        let ranks: Vec<_> = (0..8)
            .map(|rank| {
                let rank = rank.to_string();
                let world = ["--world-size", "8", "--rank", &rank];
                let args = [&saving(Path::new(&state))[..], &world].concat();
                command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for rank in ranks {
            let ended = rank.wait_with_output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        }
        assert!(is_state(&state));
        assert_eq!(names_in(dir.path()), ["state.json".into()].into());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn devices_and_pipes_are_written_to() {
    assert_eq!(save("/dev/null").0, Some(0));
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    let (code, message) = save("/dev/full");
    assert_eq!(code, Some(1));
    assert!(message.starts_with("error: cannot write /dev/full: No space left"), "{message}");

    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    assert_eq!(save(&pipe).0, Some(0));
    assert!(reader.join().unwrap().starts_with('{'));
    assert!(!fs::metadata(&pipe).unwrap().is_file());
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
