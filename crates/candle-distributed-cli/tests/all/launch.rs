//! `launch`: environment, output and end of processes.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Output, Stdio},
};

use crate::support::{self, command};

/// Variables that identify a launcher.
const LAUNCHED: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

/// Returns a command that starts `n` shells that run `script`.
fn launch(n: usize, options: &[&str], script: &str) -> Command {
    let n = n.to_string();
    let mut command =
        command(&[&["launch", "--processes", &n], options, &["--", "sh", "-c", script]].concat());
    for name in LAUNCHED {
        command.env_remove(name);
    }
    command
}

fn output(n: usize, script: &str) -> Output {
    launch(n, &[], script).output().unwrap()
}

/// Returns the sorted lines of an output, since ranks print concurrently.
fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> =
        String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

/// Creates a named pipe in a temporary folder.
fn pipe() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    (dir, path)
}

/// A running launcher with its output.
struct RunningLauncher {
    launcher: Child,
    stdout: BufReader<ChildStdout>,
}

impl RunningLauncher {
    fn start(mut command: Command) -> Self {
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(launcher.stdout.take().unwrap());
        Self { launcher, stdout }
    }

    /// Reads the next `n` lines, and sorts them.
    fn next_lines(&mut self, n: usize) -> Vec<String> {
        let mut text = String::new();
        for _ in 0..n {
            self.stdout.read_line(&mut text).unwrap();
        }
        lines(text.as_bytes())
    }

    fn signal(&self, signal: &str) {
        let pid = self.launcher.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits for the end, and returns the exit code and the rest of both outputs.
    fn end(mut self) -> (Option<i32>, Vec<String>, String) {
        let mut rest = Vec::new();
        self.stdout.read_to_end(&mut rest).unwrap();
        let output = self.launcher.wait_with_output().unwrap();
        (output.status.code(), lines(&rest), String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn every_process_gets_its_rank() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR";
    let Output { status, stdout, stderr } = output(3, script);
    assert!(status.success());
    let expected = ["[0] 0 3 0 3 127.0.0.1", "[1] 1 3 1 3 127.0.0.1", "[2] 2 3 2 3 127.0.0.1"];
    assert_eq!(lines(&stdout), expected);
    assert!(stderr.is_empty());
}

#[test]
fn processes_share_port_and_fresh_store() {
    let script = r#"test ! -e "$CANDLE_DISTRIBUTED_STORE" && touch "$CANDLE_DISTRIBUTED_STORE.$RANK"
        echo $MASTER_PORT $CANDLE_DISTRIBUTED_STORE"#;
    let Output { status, stdout, .. } = output(2, script);
    assert!(status.success());
    let lines = lines(&stdout);
    let values: Vec<&str> = lines.iter().map(|line| line.split_once("] ").unwrap().1).collect();
    assert_eq!(values[0], values[1]);
    let (port, store) = values[0].split_once(' ').unwrap();
    assert!(port.parse::<u16>().unwrap() > 0);
    assert!(!Path::new(store).parent().unwrap().exists(), "the folder is removed at the end");
}

#[test]
fn arguments_are_forwarded_unchanged() {
    let mut command = command(&["launch", "--processes", "1", "--", "printf", "%s|", "a b", "--x"]);
    for name in LAUNCHED {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "[0] a b|--x|\n");
}

#[test]
fn output_lines_stay_whole() {
    let script = r#"i=0
        while [ $i -lt 200 ]; do echo "out $RANK $i end"; echo "err $RANK $i end" >&2; i=$((i+1)); done
        printf 'no end'"#;
    let Output { status, stdout, stderr } = output(3, script);
    assert!(status.success());
    for (bytes, word) in [(stdout, "out"), (stderr, "err")] {
        let text = String::from_utf8(bytes).unwrap();
        for rank in 0..3 {
            let prefix = format!("[{rank}] ");
            let rank_lines: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix(&*prefix)).collect();
            let mut expected: Vec<String> =
                (0..200).map(|i| format!("{word} {rank} {i} end")).collect();
            if word == "out" {
                expected.push("no end".into());
            }
            assert_eq!(rank_lines, expected);
        }
    }
}

#[test]
fn binary_output_and_long_lines_pass() {
    let script = r"printf '\377\000\n'; head -c 300000 /dev/zero | tr '\0' x; echo";
    let Output { status, stdout, .. } = output(1, script);
    assert!(status.success());
    assert!(stdout.starts_with(b"[0] \xff\0\n[0] xxx"));
    assert_eq!(stdout.len(), 7 + 4 + 300_001);
}

#[test]
fn standard_input_is_empty() {
    assert_eq!(lines(&output(2, "cat; echo done").stdout), ["[0] done", "[1] done"]);
}

#[test]
fn failure_ends_the_other_processes() {
    // The other processes and their children would wait forever.
    let script = "if [ $RANK = 1 ]; then exit 7; fi; tail -f /dev/null & tail -f /dev/null";
    let Output { status, stderr, .. } = output(3, script);
    let message = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(7), "{message}");
    assert!(message.ends_with("error: rank 1 ended with exit code 7\n"), "{message}");
}

#[test]
fn fatal_signal_is_named() {
    let Output { status, stderr, .. } =
        output(2, "[ $RANK = 0 ] || kill -KILL $$; exec tail -f /dev/null");
    let message = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(137), "{message}");
    assert!(message.contains("error: rank 1 was ended by signal 9 (SIGKILL)"), "{message}");
}

#[test]
fn stubborn_process_is_killed_after_grace() {
    let (_dir, pipe) = pipe();
    // Rank 0 fails as soon as rank 1 ignores SIGTERM.
    let script = format!(
        "if [ $RANK = 0 ]; then read line < {0}; exit 5; fi
        trap '' TERM; echo ready > {0}; while :; do tail -f /dev/null; done",
        pipe.display()
    );
    let output = launch(2, &["--grace", "0"], &script).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(5), "{message}");
    assert!(message.contains("SIGKILL after 0 s"), "{message}");
}

#[test]
fn hanging_process_is_killed_after_signal() {
    let script = "trap '' TERM; echo ready; while :; do tail -f /dev/null; done";
    // If a process ended earlier, the shorter --grace period would apply.
    let options = ["--stop-grace", "0", "--grace", "600"];
    let mut running = RunningLauncher::start(launch(2, &options, script));
    assert_eq!(running.next_lines(2), ["[0] ready", "[1] ready"]);
    running.signal("-TERM");
    let (code, _, message) = running.end();
    assert_eq!(code, Some(137), "{message}");
    assert!(message.contains("signal 9 (SIGKILL)"), "{message}");
}

#[test]
fn child_processes_end_with_their_parent() {
    // A surviving child would keep the output open.
    let Output { status, stdout, .. } = output(2, "tail -f /dev/null & echo started");
    assert!(status.success());
    assert_eq!(lines(&stdout), ["[0] started", "[1] started"]);
}

#[cfg(target_os = "linux")]
#[test]
fn open_output_is_awaited_until_signal() {
    let (_dir, pipe) = pipe();
    // A process in a separate session, which ends when the pipe is opened for the second time.
    let script = format!(
        "setsid sh -c 'echo ready > {0}; read line < {0}' & read line < {0}; echo done",
        pipe.display()
    );
    let mut running = RunningLauncher::start(launch(1, &["--grace", "0"], &script));
    assert_eq!(running.next_lines(1), ["[0] done"]);
    let mut message = String::new();
    let mut stderr = BufReader::new(running.launcher.stderr.take().unwrap());
    stderr.read_line(&mut message).unwrap();
    assert!(message.contains("their output is still open"), "{message}");
    running.signal("-INT");
    assert_eq!(running.launcher.wait().unwrap().code(), Some(0));
    fs::write(&pipe, "end").unwrap();
}

#[test]
fn signals_are_forwarded_to_all() {
    for (signal, name) in [("-TERM", "TERM"), ("-INT", "INT"), ("-HUP", "HUP")] {
        let (_dir, pipe) = pipe();
        // A shell runs its trap after its current command has ended, here a blocked `read`.
        let script = format!(
            "trap 'echo got {name}; exit 9' {name}; echo ready; while :; do read line < {}; done 2> /dev/null",
            pipe.display()
        );
        let mut running = RunningLauncher::start(launch(2, &[], &script));
        assert_eq!(running.next_lines(2), ["[0] ready", "[1] ready"]);
        running.signal(signal);
        let (code, lines, message) = running.end();
        assert_eq!(lines, [format!("[0] got {name}"), format!("[1] got {name}")]);
        assert_eq!(code, Some(9), "{message}");
        assert!(!message.contains("SIGKILL after"), "no process is killed: {message}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ignored_signals_stay_ignored() {
    let (_dir, pipe) = pipe();
    // Ignores SIGHUP, like `nohup`. The launcher inherits this.
    let script = format!(
        "trap 'exit 9' TERM; echo ready; while :; do read line < {}; done 2> /dev/null",
        pipe.display()
    );
    let launcher = launch(1, &[], &script);
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"trap '' HUP; exec "$0" "$@""#]).arg(launcher.get_program());
    let mut running = RunningLauncher::start({
        shell.args(launcher.get_args());
        shell
    });
    running.next_lines(1);
    running.signal("-HUP");
    running.signal("-TERM");
    assert_eq!(running.end().0, Some(9));
}

#[test]
fn clean_exit_after_signal_is_success() {
    let (_dir, pipe) = pipe();
    let script = format!(
        "trap 'exit 0' TERM; echo ready; while :; do read line < {}; done 2> /dev/null",
        pipe.display()
    );
    let mut running = RunningLauncher::start(launch(2, &[], &script));
    running.next_lines(2);
    running.signal("-TERM");
    let (code, _, message) = running.end();
    assert_eq!((code, message.as_str()), (Some(0), ""));
}

#[cfg(target_os = "linux")]
#[test]
fn processes_end_with_a_killed_launcher() {
    let (_dir, pipe) = pipe();
    // The pipe closes when the last process has ended.
    let script = format!("exec 3> {}; echo ready >&3; exec tail -f /dev/null", pipe.display());
    let mut running = RunningLauncher::start(launch(3, &[], &script));
    let mut reader = BufReader::new(File::open(&pipe).unwrap());
    let mut text = String::new();
    for _ in 0..3 {
        reader.read_line(&mut text).unwrap();
    }
    assert_eq!(text, "ready\nready\nready\n");
    running.signal("-KILL");
    assert_eq!(reader.read_to_string(&mut text).unwrap(), 0);
    running.launcher.wait().unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn full_output_ends_the_program() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = launch(2, &[], "echo text; exec tail -f /dev/null");
    let output = command.stdout(full).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("error: cannot write to standard output: No space left"), "{message}");
}

#[test]
fn nested_launch_is_rejected() {
    let rejects = |variables: &[(&str, &str)], words: &[&str]| {
        let output = launch(2, &[], "true").envs(variables.iter().copied()).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        for word in words {
            assert!(message.contains(word), "{message}");
        }
    };
    rejects(&[("RANK", "1"), ("WORLD_SIZE", "4")], &["rank 1 of 4", "launch starts the ranks"]);
    rejects(&[("WORLD_SIZE", "4")], &["WORLD_SIZE", "RANK"]);
    let open_mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
    rejects(&open_mpi, &["Open MPI"]);

    let nested =
        format!("{} launch --processes 1 -- true", env!("CARGO_BIN_EXE_candle-distributed"));
    assert_eq!(output(1, &nested).status.code(), Some(2));
}

#[test]
fn missing_program_is_reported_once() {
    let message_of = |args: &[&str]| {
        let output = command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    for program in ["no-such-program\u{1b}[2J", "/no/such/program\u{1b}[2J"] {
        let message = message_of(&["launch", "--processes", "2", "--", program]);
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(
            message.contains("there is no program") && message.contains("\\u{1b}"),
            "{message}"
        );
    }
    for n in ["0", "1025"] {
        assert!(message_of(&["launch", "--processes", n, "--", "true"]).contains("1..=1024"));
    }
    assert!(message_of(&["launch", "--processes", "2"]).contains("PROGRAM"));
    assert!(message_of(&["launch", "--", "true"]).contains("--processes"));

    let (_dir, path) = support::file("text", "no program");
    let output = launch(1, &[], "true").arg("unused").output().unwrap();
    assert!(output.status.success());
    let output = command(&["launch", "--processes", "1", "--", &path]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("[0] error: cannot start"));
    assert!(fs::metadata(&path).is_ok());
}
