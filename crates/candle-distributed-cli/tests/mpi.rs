//! Runs of several processes with different arguments, started by `mpirun`.

#![cfg(feature = "mpi")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/pins.rs"]
mod pins;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::pins::Losses;

/// Time limit of a run: long enough on a busy machine, and far below the default deadline of
/// processes.
const LIMIT: Duration = Duration::from_mins(4);

/// Creates a folder with a text.
fn home() -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let text = home.path().join("text.txt");
    fs::write(&text, "to be or not to be, that is the question.\n\n".repeat(40)).unwrap();
    (home, text)
}

fn mpirun() -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    mpirun
}

/// Trains in two processes with different arguments.
fn train(data: &Path, ranks: [&[&str]; 2]) -> Output {
    let mut mpirun = mpirun();
    for (rank, args) in ranks.into_iter().enumerate() {
        if rank > 0 {
            mpirun.arg(":");
        }
        mpirun.args(["-n", "1", env!("CARGO_BIN_EXE_candle-distributed"), "train"]);
        mpirun.args(["--engine", "mpi", "--steps", "6", "--deadline", "30", "--data"]);
        mpirun.arg(data).args(args);
    }
    wait_until_end(mpirun)
}

/// Runs a job to its end, and returns its output.
fn wait_until_end(mut mpirun: Command) -> Output {
    let mpirun = mpirun.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = mpirun.spawn().unwrap();
    let start = Instant::now();
    while started.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            started.kill().unwrap();
            panic!("the processes are deadlocked");
        }
        thread::sleep(Duration::from_millis(20));
    }
    started.wait_with_output().unwrap()
}

/// Checks that the processes fail with exit code 2 and a message with these words.
fn assert_differ(data: &Path, ranks: [&[&str]; 2], words: &[&str]) {
    let ended = train(data, ranks);
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(2), "{said}");
    for word in words {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

/// Returns the losses of a run.
fn losses(run: &str) -> Vec<f64> {
    let metrics = fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
    let mut losses = Vec::new();
    for line in metrics.lines() {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        losses.push(step["loss"].as_f64().unwrap());
    }
    losses
}

#[test]
fn processes_report_different_settings() {
    let (home, data) = home();
    let at = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let (run, other) = (at("run"), at("other"));
    let out = ["--out", &run];
    for (more, words) in [
        (
            &["--checkpoint-every", "2"][..],
            ["--checkpoint-every 50, rank 1", "--checkpoint-every 2"],
        ),
        (&["--seed", "3"], ["--seed 0, rank 1", "--seed 3"]),
        (&["--check"], ["--check false, rank 1", "--check true"]),
        (
            &["--max-grad-norm", "1"],
            ["\"warmup_steps\":0}, rank 1", "\"warmup_steps\":0,\"max_grad_norm\":1.0}"],
        ),
        (&["--strategy", "full"], ["is not sharded, rank 1", "is sharded by"]),
        (&["--allow-non-finite"], ["--allow-non-finite false, rank 1", "true"]),
    ] {
        let second = [&out[..], more].concat();
        assert_differ(&data, [&out, &second], &["do not start the same run", words[0], words[1]]);
        assert!(!Path::new(&run).exists());
    }
    let replicas = [&out[..], &["--strategy", "full", "--replicas", "2"]].concat();
    let ended = train(&data, [&out, &replicas]);
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && !Path::new(&run).exists(), "{said}");
    assert!(said.contains("hint: every process needs the same arguments"), "{said}");
    assert_differ(&data, [&out, &["--out", &other]], &["rank 0 has --out", "rank 1 has --out"]);
    let missing = [&out[..], &["--resume", "--seed", "9"]].concat();
    assert!(train(&data, [&out, &out]).status.success());
    assert_differ(&data, [&[&out[..], &["--resume"]].concat(), &missing], &["--seed 0"]);
}

#[test]
fn run_is_complete_for_all_processes() {
    let (home, data) = home();
    let at = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let (run, other) = (at("run"), at("other"));
    let first = ["--resume", "--out", &run];
    assert!(train(&data, [&first, &first]).status.success());
    let complete = train(&data, [&first, &first]);
    assert!(complete.status.success());
    assert!(String::from_utf8(complete.stdout).unwrap().contains("is complete"));
    assert_differ(
        &data,
        [&first, &["--resume", "--out", &other]],
        &["rank 0 finds the run complete, rank 1 starts after step 0"],
    );
}

/// Trains two copies of a model, each sharded over two processes.
#[test]
fn replicas_learn_over_processes() {
    let (home, data) = home();
    let at = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let train = |more: &[&str]| {
        let mut mpirun = mpirun();
        mpirun.args(["-n", "4", env!("CARGO_BIN_EXE_candle-distributed"), "train", "--data"]);
        mpirun.arg(&data).args(["--engine", "mpi", "--deadline", "30"]).args(more);
        let trained = wait_until_end(mpirun);
        assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
        String::from_utf8(trained.stdout).unwrap()
    };
    let (whole, copies) = (at("whole"), at("copies"));
    train(&["--steps", "6", "--out", &whole]);
    let sharded = ["--strategy", "full", "--replicas", "2"];
    train(&[&sharded[..], &["--steps", "6", "--out", &copies]].concat());
    assert_eq!(losses(&whole).len(), 6);
    for (found, expected) in losses(&copies).iter().zip(losses(&whole)) {
        assert!((found - expected).abs() < 1e-6 * expected, "{found}, {expected}");
    }

    // A dry run predicts the process with the most memory.
    let uneven = ["--strategy", "layer-wise", "--dry-run"];
    let printed = train(&uneven);
    let row = printed.lines().find(|line| line.trim_start().starts_with("parameters")).unwrap();
    let bytes = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).nth(1).unwrap();
    // One of the two blocks: 4 · 128² + 3 · 352 · 128 + 2 · 128 parameters of 4 bytes.
    assert_eq!(bytes, "785.00 KiB", "{printed}");
}

#[test]
fn process_losses_match_pinned_runs() {
    let (home, data) = home();
    let out = home.path().join("run").to_str().unwrap().to_owned();
    let small = ["--n-layers", "2", "--hidden", "32", "--n-heads", "4", "--context", "32"];
    let args = [&small[..], &["--max-tokens", "256", "--no-sample", "--out", &out]].concat();
    let trained = train(&data, [&args, &args]);
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    pins::check(&Losses::from([("mpi-2".to_owned(), losses(&out))]));
}

/// Memory limit of each of four processes: enough for a shard of the model, but not for all of it.
/// Open MPI maps some hundred MiB into each process.
const LIMIT_KIB: u32 = 1_400_000;

/// Trains a model of 77 million parameters, 295 MiB, in four processes under that limit.
fn train_large(data: &Path, out: &str, more: &[&str]) -> Output {
    let mut mpirun = mpirun();
    let limit = format!("ulimit -v {LIMIT_KIB}; exec \"$0\" \"$@\"");
    mpirun.args(["-n", "4", "sh", "-c", &limit, env!("CARGO_BIN_EXE_candle-distributed"), "train"]);
    mpirun.args(["--engine", "mpi", "--steps", "3", "--deadline", "30", "--out", out, "--data"]);
    mpirun.arg(data).args(["--n-layers", "8", "--hidden", "896"]).args(more);
    wait_until_end(mpirun)
}

#[test]
fn sharding_trains_model_above_process_limit() {
    let (home, data) = home();
    let at = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let rejected = train_large(&data, &at("whole"), &[]);
    let said = String::from_utf8(rejected.stderr).unwrap();
    assert_eq!(rejected.status.code(), Some(2), "{said}");
    for words in ["would take up to", "but its address space", "--strategy full"] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    // Without that check, the processes run out of memory.
    assert!(!train_large(&data, &at("killed"), &["--memory-limit", "1TiB"]).status.success());

    let trained = train_large(&data, &at("parts"), &["--strategy", "full"]);
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let metrics = fs::read_to_string(home.path().join("parts/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 3);
}
