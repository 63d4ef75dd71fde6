//! The folder of a run: resuming, rejected folders, and damage.

use std::{fs, process::Stdio};

use crate::support::{
    SMALL, as_given, command, rejects,
    run::{Home, STEPS, contents, copy, said},
    text,
};

#[test]
fn models_without_a_run_are_rejected() {
    let home = Home::new();
    home.complete("run");
    assert!(home.resume("run", &[]).status.success());

    // A model without a run is nothing to resume.
    for (name, junk) in [("junk", "junk"), ("empty", "")] {
        fs::create_dir(home.at(name)).unwrap();
        fs::write(home.at(name).join("model"), junk).unwrap();
        home.is_rejected(name, &[], &["holds model, but no run.json", "hint: "]);
    }

    // The program does not remove a file that it did not write.
    home.remove_model("run");
    fs::write(home.at("run/model"), "").unwrap();
    home.is_rejected("run", &[], &["model: it is not a folder"]);
}

#[test]
fn foreign_checkpoint_is_never_loaded() {
    let home = Home::new();
    home.complete("whole");
    home.killed("run");
    home.train("seed", &["--steps", STEPS, "--seed", "1"]);
    copy(&home.at("run"), &home.at("mixed"));
    let checkpoints = home.at("mixed").join("checkpoints");
    let step = "step-0000000008";
    fs::remove_dir_all(checkpoints.join(step)).unwrap();
    copy(&home.at("seed/checkpoints").join(step), &checkpoints.join(step));
    copy(&home.at("mixed"), &home.at("alone"));

    // With an own checkpoint, the foreign one is skipped with a warning.
    let resumed = home.resume("mixed", &[]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    assert!(said(&resumed).contains(step), "{}", said(&resumed));
    assert!(said(&resumed).contains("this is a checkpoint of run"), "{}", said(&resumed));
    assert!(home.model("mixed") == home.model("whole"));

    // Without an own checkpoint, resuming fails.
    fs::remove_dir_all(home.at("alone/checkpoints/step-0000000004")).unwrap();
    home.is_rejected("alone", &[], &["this is a checkpoint of run", "hint: ", "another folder"]);
}

#[test]
fn foreign_checkpoint_is_reported_once() {
    let home = Home::new();
    home.killed("run");
    home.train("other", &["--steps", STEPS, "--seed", "3"]);
    let foreign = home.at("run").join("checkpoints/step-0000000004");
    fs::remove_dir_all(&foreign).unwrap();
    copy(&home.at("other/checkpoints/step-0000000004"), &foreign);
    let out = home.path("run");
    let args = ["train", "--checkpoint-every", "1", "--resume", "--out", &out];
    let resumed = command(&args).output().unwrap();
    assert!(resumed.status.success());
    let said = said(&resumed);
    assert_eq!(said.matches("an old checkpoint stays").count(), 1, "{said}");
    assert!(foreign.exists());
}

#[test]
fn running_run_is_locked() {
    let home = Home::new();
    let (data, out) = (home.path("text.txt"), home.path("run"));
    let args = ["train", "--data", &data, "--steps", "100000", "--resume", "--out", &out];
    let args = [&args[..], &SMALL].concat();
    let first = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut first = first.unwrap();
    let steps = || {
        let metrics = fs::read_to_string(home.at("run").join("metrics.jsonl"));
        metrics.map_or(0, |metrics| metrics.lines().count())
    };
    while steps() == 0 {
        std::thread::yield_now();
    }
    rejects(&args, &["is being trained by process", &first.id().to_string(), "hint: "]);
    let before = steps();
    while steps() <= before {
        std::thread::yield_now();
    }
    // The lock ends with its process.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(steps() > before);
    home.is_rejected("run", &["--steps", "9"], &["--steps 100000"]);
}

#[test]
fn one_of_three_concurrent_starts_trains() {
    let home = Home::new();
    let (data, out) = (home.path("text.txt"), home.path("run"));
    let args = ["train", "--data", &data, "--steps", STEPS, "--resume", "--out", &out];
    let args = [&args[..], &SMALL].concat();
    let start = || command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = [start(), start(), start()];
    let ended = started.map(|process| process.wait_with_output().unwrap());
    for process in &ended {
        let said = said(process);
        match process.status.code() {
            Some(0) => {}
            Some(2) => assert!(
                said.contains("is being trained by") || said.contains("went on while it was read"),
                "{said}"
            ),
            _ => panic!("{said}"),
        }
    }
    // A process that starts after the first has ended finds a complete run.
    assert!(ended.iter().any(|process| process.status.success()));
    home.train("alone", &["--steps", STEPS]);
    assert!(home.model("run") == home.model("alone"));
    let steps = fs::read_to_string(home.at("run").join("metrics.jsonl")).unwrap().lines().count();
    assert_eq!(steps.to_string(), STEPS);
}

#[cfg(target_os = "linux")]
#[test]
fn two_signals_still_save_a_checkpoint() {
    let home = Home::new();
    let (data, out) = (home.path("text.txt"), home.path("run"));
    let train = command(&["train", "--data", &data, "--steps", "100000", "--out", &out])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = home.at("run").join("metrics.jsonl");
    while fs::read(&metrics).map_or(0, |metrics| metrics.len()) == 0 {
        std::thread::yield_now();
    }
    // Two signals are pending while the process is stopped, and arrive together. They differ, since
    // the system merges equal pending signals.
    for signal in ["-STOP", "-TERM", "-HUP", "-CONT"] {
        let mut kill = std::process::Command::new("kill");
        assert!(kill.args([signal, &train.id().to_string()]).status().unwrap().success());
    }
    let ended = train.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert!(said(&ended).contains("--resume"), "{}", said(&ended));
    let saved = contents(&home.at("run").join("checkpoints"));
    assert!(saved.keys().any(|path| path.ends_with("index.json")), "{:?}", saved.keys());
}

#[test]
fn failed_start_leaves_no_files() {
    let home = Home::new();
    let data = home.path("text.txt");
    let out = home.path("run");
    let train = ["train", "--data", &data, "--steps", "1", "--out", &out];
    rejects(&[&train[..], &["--memory-limit", "10MiB"]].concat(), &["10.00 MiB", "--memory-limit"]);
    for device in ["cuda", "metal"] {
        let limited = ["--device", device, "--memory-limit", "4GiB"];
        rejects(&[&train[..], &limited].concat(), &["--memory-limit is for --device cpu"]);
    }
    assert!(!home.at("run").exists());

    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt;

        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(command(&train).stdout(full).status().unwrap().code(), Some(1));
        let name = std::ffi::OsStr::from_bytes(b"text-\xff.txt");
        fs::copy(&data, home.0.path().join(name)).unwrap();
        let mut unnamed = as_given(&["train", "--steps", "1", "--out", &out, "--data"]);
        let output = unnamed.arg(home.0.path().join(name)).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains("must be UTF-8"), "{}", said(&output));
    }
    text(&train);
}

#[test]
fn run_files_must_be_regular_files() {
    let home = Home::new();
    home.complete("run");
    #[cfg(target_os = "linux")]
    for name in ["run.json", "metrics.jsonl"] {
        let endless = format!("endless-{name}");
        copy(&home.at("run"), &home.at(&endless));
        fs::remove_file(home.at(&endless).join(name)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", home.at(&endless).join(name)).unwrap();
        rejects(&["report", &home.path(&endless)], &[name, "is not a file"]);
        home.resume(&endless, &[]);
        let piped = home.at(&endless).join(name);
        fs::remove_file(&piped).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&piped).status().unwrap().success());
        rejects(&["report", &home.path(&endless)], &[name, "is not a file"]);
    }
}

#[test]
fn checkpoint_names_are_escaped() {
    let home = Home::new();
    let name = "\u{1b}[2Jrun\u{202e}";
    home.killed(name);
    let checkpoints = home.at(name).join("checkpoints");
    fs::remove_file(checkpoints.join("step-0000000008/index.json")).unwrap();
    let resumed = home.resume(name, &[]);
    let lines = said(&resumed);
    assert!(resumed.status.success(), "{lines}");
    assert!(lines.contains("\\u{1b}[2Jrun\\u{202e}/checkpoints/step-0000000008"), "{lines}");
    assert!(!lines.contains(['\u{1b}', '\u{202e}']), "{lines:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn unreadable_checkpoint_fails_with_hint() {
    let home = Home::new();
    home.complete("whole");
    home.killed("run");
    let newest = home.at("run").join("checkpoints/step-0000000008");
    let index = newest.join("index.json");
    fs::remove_file(&index).unwrap();
    // Even root cannot follow a link to itself.
    std::os::unix::fs::symlink("index.json", &index).unwrap();
    let rejected = home.resume("run", &[]);
    assert_eq!(rejected.status.code(), Some(1));
    assert!(said(&rejected).contains("move its folder away"), "{}", said(&rejected));

    fs::rename(&newest, home.at("away")).unwrap();
    let resumed = home.resume("run", &[]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    assert!(home.model("run") == home.model("whole"));
}

#[test]
fn invalid_thread_counts_cause_warnings() {
    let said = |value: &str| {
        let mut mesh = command(&["mesh", "--bytes", "1", "--repetitions", "1"]);
        said(&mesh.env("RAYON_NUM_THREADS", value).output().unwrap())
    };
    for nonsense in ["0", "", "abc", "-1"] {
        let said = said(nonsense);
        assert!(said.contains("warning: RAYON_NUM_THREADS is \"") && said.contains("not a number"));
    }
    assert_eq!(said("1"), "");
}

#[test]
fn too_many_devices_cause_warning() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let said = |n_devices: usize| {
        let size = n_devices.to_string();
        said(
            &command(&["mesh", "--bytes", "1", "--repetitions", "1", "--world-size", &size])
                .output()
                .unwrap(),
        )
    };
    assert_eq!(said(8 * cores), "");
    let many = format!("warning: {} devices share {cores} cores", 8 * cores + 1);
    assert!(said(8 * cores + 1).starts_with(&many));
}

#[test]
fn deadline_must_be_positive() {
    rejects(&["mesh", "--deadline", "0"], &["--deadline", "0"]);
    text(&["mesh", "--deadline", "60", "--bytes", "1", "--repetitions", "1"]);
}
