//! Only one group of processes at a time may write checkpoints to a folder.

use std::{
    env,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    path::Path,
    process::{self, Child, ChildStdout, Command, Stdio},
};

use dist_checkpoint::{Checkpoint, Checkpoints, Error};

use super::run::Run;

/// The environment variable with the folder of a child process.
const FOLDER: &str = "CHECKPOINTS_TEST_FOLDER";

fn save(checkpoints: &Checkpoints, run: &Run, step: u64) -> Result<(), Error> {
    checkpoints.save(&run.mesh, step, &run.state_dict(), &())
}

/// Returns the owner of the folder's lock, from the error.
fn lock_owner(result: Result<(), Error>) -> String {
    let error = result.unwrap_err();
    let text = error.to_string();
    let Error::Locked { path, holder } = error else { panic!("{text}") };
    let expected = format!("the run in {} is being trained by {holder}", path.display());
    assert_eq!(text, expected);
    holder
}

#[test]
fn second_writer_in_process_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::cpu(1);
    let first = Checkpoints::new(folder.path());
    save(&first, &run, 1).unwrap();
    let second = Checkpoints::new(folder.path());
    for attempt in [second.lock(&run.mesh), save(&second, &run, 2)] {
        let holder = lock_owner(attempt);
        assert!(holder.starts_with(&format!("process {} on host ", process::id())), "{holder}");
    }

    assert_eq!(second.steps().unwrap(), [1]);
    let checkpoint = second.latest().unwrap().unwrap();
    Checkpoint::open(checkpoint.path()).unwrap();
    let mesh = run.mesh.clone();
    assert!(
        second
            .load_latest(&mesh, |checkpoint: &Checkpoint| run.load(checkpoint))
            .unwrap()
            .is_some()
    );

    // A clone is the same owner: the lock lasts until both are dropped.
    let clone = first.clone();
    drop(first);
    save(&clone, &run, 2).unwrap();
    lock_owner(second.lock(&run.mesh));
    drop(clone);
    second.lock(&run.mesh).unwrap();
    save(&second, &run, 3).unwrap();
}

#[test]
fn lost_folder_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoints");
    let run = Run::cpu(1);
    let is_lost = |result| matches!(result, Err(Error::Lost { path: lost }) if lost == path);
    let checkpoints = Checkpoints::new(&path);
    save(&checkpoints, &run, 1).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert!(is_lost(save(&checkpoints, &run, 2)));
    assert!(!path.exists(), "the folder is not created again");
    // On a file system without locks the first lock does not block the second one.
    let other = Checkpoints::new(&path);
    save(&other, &run, 1).unwrap();
    assert!(is_lost(save(&checkpoints, &run, 3)));
    save(&other, &run, 2).unwrap();
    // The first owner removes no file of the second.
    drop(checkpoints);
    assert!(path.join("holder.json").exists());
    save(&other, &run, 3).unwrap();
}

#[cfg(unix)]
#[test]
fn planted_links_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoints");
    let outside = folder.path().join("outside");
    fs::create_dir(&path).unwrap();
    fs::write(&outside, "precious").unwrap();
    for name in ["lock", "holder.json"] {
        std::os::unix::fs::symlink(&outside, path.join(name)).unwrap();
    }
    let run = Run::cpu(1);
    save(&Checkpoints::new(&path), &run, 1).unwrap();
    assert_eq!(fs::read_to_string(&outside).unwrap(), "precious");
    let names = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
    let names: std::collections::BTreeSet<_> = names.collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["lock", "step-0000000001"]);
}

#[cfg(unix)]
#[test]
fn planted_link_targets_are_not_created() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoints");
    let outside = folder.path().join("outside");
    let lock = path.join("lock");
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::symlink(&outside, &lock).unwrap();
    let saved = save(&Checkpoints::new(&path), &Run::cpu(1), 1);
    let is_rejected = matches!(
        saved,
        Err(Error::Io { path: failed, .. }) if failed == lock
    );
    assert!(is_rejected && !outside.exists());
}

#[cfg(unix)]
#[test]
fn named_pipes_are_rejected_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = |path: &Path| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let is_rejected = |error: Error, path: &Path| matches!(error, Error::Io { path: failed, .. } if failed == path);
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path());
    save(&checkpoints, &run, 1).unwrap();
    let index = folder.path().join("step-0000000002/index.json");
    fs::create_dir(index.parent().unwrap()).unwrap();
    pipe(&index);
    assert!(is_rejected(Checkpoint::open(index.parent().unwrap()).unwrap_err(), &index));
    assert_eq!(checkpoints.latest().unwrap().unwrap().step(), 1);

    // A pipe in the place of a shard is rejected too.
    fs::remove_dir_all(index.parent().unwrap()).unwrap();
    save(&checkpoints, &run, 3).unwrap();
    let piped = checkpoints.latest().unwrap().unwrap().path().to_owned();
    let shard = piped.join("shard-00001-of-00001.safetensors");
    fs::remove_file(&shard).unwrap();
    pipe(&shard);
    assert!(is_rejected(Checkpoint::open(&piped).unwrap_err(), &shard));
    assert_eq!(checkpoints.latest().unwrap().unwrap().step(), 1);

    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    let lock = other.join("lock");
    pipe(&lock);
    let checkpoints = Checkpoints::new(&other);
    assert!(is_rejected(checkpoints.lock(&run.mesh).unwrap_err(), &lock));
    // Taking the lock does not read a pipe in the place of the owner's file.
    fs::remove_file(&lock).unwrap();
    pipe(&other.join("holder.json"));
    save(&checkpoints, &run, 1).unwrap();
}

/// A child process that runs one of the tests below.
struct ChildProcess {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl ChildProcess {
    fn start(test: &str, folder: &Path) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    /// Waits until the child prints this word.
    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(
                self.stdout.read_line(&mut line).unwrap() > 0,
                "the child ended before {word:?}"
            );
        }
    }

    /// Kills the child like `kill -9`.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Returns the folder in a child process, or `None` in the process that runs all tests.
fn child_folder() -> Option<String> {
    env::var(FOLDER).ok()
}

/// Sends a word to the parent process.
fn send_word(word: &str) {
    println!("{word}");
    io::stdout().flush().unwrap();
}

/// Sends a word to the parent process, and waits until the parent ends or kills this process.
fn send_word_and_wait(word: &str) {
    send_word(word);
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn child_owns_the_folder() {
    let Some(folder) = child_folder() else { return };
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder);
    save(&checkpoints, &run, 1).unwrap();
    send_word_and_wait("holding");
}

#[test]
fn lock_ends_when_its_owner_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut other = ChildProcess::start("lock::child_owns_the_folder", folder.path());
    other.wait_for("holding");
    let run = Run::cpu(1);
    let checkpoints = Checkpoints::new(folder.path());
    let holder = lock_owner(save(&checkpoints, &run, 2));
    assert!(holder.starts_with(&format!("process {} on host ", other.child.id())), "{holder}");
    assert_eq!(checkpoints.steps().unwrap(), [1]);
    other.kill();
    save(&checkpoints, &run, 2).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [1, 2]);
}

/// Writes the files of a rank whose group has ended, until the folder disappears.
#[test]
fn child_outlives_its_group() {
    let Some(folder) = child_folder() else { return };
    let partial = Path::new(&folder).join("step-0000000003.00000000deadbeef.partial");
    fs::create_dir(&partial).unwrap();
    let mut open = File::create_new(partial.join("shard-00002-of-00002.safetensors")).unwrap();
    send_word("writing");
    let mut n_files = 0;
    let error = loop {
        n_files += 1;
        assert!(n_files < 1_000_000, "the folder has not disappeared");
        if let Err(error) = File::create_new(partial.join(format!("{n_files}"))) {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    open.write_all(b"lost").unwrap();
    send_word("ended");
}

#[cfg(unix)]
#[test]
fn outliving_rank_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = Run::cpu(2);
    let checkpoints = Checkpoints::new(folder.path());
    save(&checkpoints, &run, 1).unwrap();
    let mut other = ChildProcess::start("lock::child_outlives_its_group", folder.path());
    other.wait_for("writing");
    save(&checkpoints, &run, 3).unwrap();
    other.wait_for("ended");
    assert!(other.child.wait().unwrap().success());
    let newest = checkpoints.latest().unwrap().unwrap();
    assert!(newest.skipped().is_empty());
    assert_eq!((newest.step(), fs::read_dir(newest.path()).unwrap().count()), (3, 3));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "two checkpoints and the lock");
    run.load(&newest).unwrap();
}
