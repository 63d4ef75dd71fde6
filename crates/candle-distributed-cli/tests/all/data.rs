//! Exchange of indices, lengths and batches with other programs: every format holds the same
//! numbers, and results appear as soon as their input is complete.

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::support::{command, file, json, rejects, run};

/// Runs a command, and returns its standard output.
fn bytes(args: &[&str]) -> Vec<u8> {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Runs a command with this standard input, and returns its standard output.
fn piped(args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{args:?}");
    output.stdout
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    assert_eq!(bytes.len() % 8, 0);
    bytes.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Parses the shape and the numbers of a NumPy array.
fn array(bytes: &[u8]) -> (String, Vec<u64>) {
    assert_eq!(bytes[..8], *b"\x93NUMPY\x01\0");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!((end % 64, bytes[end - 1]), (0, b'\n'));
    let header = std::str::from_utf8(&bytes[10..end - 1]).unwrap().trim_end();
    let shape = header.strip_prefix("{'descr': '<i8', 'fortran_order': False, 'shape': ").unwrap();
    (shape.strip_suffix(", }").unwrap().to_owned(), numbers(&bytes[end..]))
}

fn lines_of(answer: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(answer).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn sample_formats_hold_equal_indices() {
    for more in [
        &["--len", "20000"][..],
        &["--len", "11", "--preset", "torch", "--world-size", "4", "--rank", "3"],
        &["--len", "1000000000000", "--start", "999999999999"],
        &["--len", "5", "--count", "0"],
        &["--mix", "9000:1,5000:2", "--count", "6000"],
    ] {
        let sample = |format| bytes(&[&["sample", "--format", format], more].concat());
        let answer: Value = serde_json::from_slice(&sample("json")).unwrap();
        let indices: Vec<u64> = serde_json::from_value(answer["indices"].clone()).unwrap();
        let expected: String =
            indices.iter().flat_map(|index| [index.to_string(), "\n".into()]).collect();
        assert!(sample("text") == expected.as_bytes(), "{more:?}");
        assert_eq!(array(&sample("npy")), (format!("({},)", indices.len()), indices), "{more:?}");
    }
}

#[test]
fn arrays_hold_only_signed_indices() {
    let with = |more: &[&str], words: &[&str]| {
        rejects(&[&["sample", "--len", "9", "--format", "npy"], more].concat(), words);
    };
    with(&["--mark-padding"], &["--mark-padding", "text or json", "npy"]);
    with(&["--locate", "3"], &["--locate", "text or json", "npy"]);
    // More samples than signed integers count.
    let mix = "9223372036854775808:1,1:1";
    let long = ["sample", "--mix", mix, "--count", "1", "--format", "npy"];
    rejects(&long, &["9223372036854775809", "too long"]);
}

/// Opens a pseudoterminal.
#[cfg(unix)]
fn terminal() -> (std::os::fd::OwnedFd, fs::File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    (controller, fs::File::options().read(true).write(true).open(name).unwrap())
}

#[cfg(unix)]
#[test]
fn binary_output_rejects_terminals() {
    let (_dir, lengths) = file("lengths.txt", "12 80 15");
    let batch = ["batch", "--lengths", &lengths, "--strategy", "dynamic", "--max-tokens", "90"];
    for (args, format, code) in [
        (&["sample", "--len", "3"][..], "npy", 2),
        (&["sample", "--len", "3"], "text", 0),
        (&batch, "jsonl", 0),
    ] {
        let (_controller, terminal) = terminal();
        let args = [args, &["--format", format]].concat();
        let output = command(&args).stdout(terminal).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert_eq!(message.contains("terminal"), code == 2, "{args:?}: {message}");
    }
}

/// Joins numbers to a text.
fn words(numbers: impl Iterator<Item = u64>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join("\n")
}

/// Returns the lengths of 200 sequences as a text.
fn two_hundred() -> String {
    words((0..200).map(|n| n * 37 % 50 + 1))
}

#[cfg(target_os = "linux")]
#[test]
fn binary_output_enlarges_pipes() {
    use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};

    const PIPE_BYTES: usize = 1 << 20;
    let (probe, _) = std::io::pipe().unwrap();
    if fcntl_setpipe_size(&probe, PIPE_BYTES).is_err() {
        eprintln!("SKIPPED, this user may not have pipes of {PIPE_BYTES} bytes");
        return;
    }
    for (format, is_widened) in [("npy", true), ("text", false)] {
        let (reader, writer) = std::io::pipe().unwrap();
        let args = ["sample", "--len", "3", "--format", format];
        assert!(command(&args).stdout(writer).status().unwrap().success());
        assert_eq!(fcntl_getpipe_size(&reader).unwrap() == PIPE_BYTES, is_widened, "{format}");
    }
}

/// Returns batches of three sequences each.
fn threes(more: &[&str]) -> Value {
    let args = ["batch", "--strategy", "pad-to-max", "--max-batch-size", "3"];
    json(&[&args[..], more].concat())["batches"].clone()
}

#[test]
fn lengths_are_read_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // Each format alone is tested where it is read.
    let text = write("l.txt", b"12 80\n15 70 9");
    let array = [&header_of("(5,)")[..], &[12, 80, 15, 70, 9].map(u64::to_le_bytes).concat()];
    let array = write("array", &array.concat());
    let tokens = [12, 80, 15, 70, 9].map(|n| json!({"n": n, "tokens": vec![0; n]}).to_string());
    let lines = write("l.jsonl", tokens.join("\n").as_bytes());
    let expected = threes(&["--lengths", &text]);
    assert_eq!(expected[1]["indices"], json!([3, 4]));
    for args in [&["--lengths", &array][..], &["--lengths", &lines, "--field", "tokens"]] {
        assert_eq!(threes(args), expected, "{args:?}");
    }
    let twice = threes(&["--lengths", &text, "--lengths", &array]);
    assert_eq!(twice.as_array().unwrap().len(), 4);
    assert_eq!(twice[1]["indices"], json!([3, 4, 5]));
    assert_eq!(twice[1]["padded_length"], 70);

    let rejected = |args: &[&str], words: &[&str]| {
        let batch = ["batch", "--strategy", "pad-to-max", "--max-batch-size", "3", "--lengths"];
        rejects(&[&batch[..], args].concat(), &[words, &["hint: "]].concat());
    };
    rejected(&[&lines], &["l.jsonl does not hold a list of numbers", "--field NAME"]);
    rejected(&[&lines, "--field", "m"], &["line 1 of", "l.jsonl", "\"m\"", "no such field"]);
    rejected(&[&text, "--field", "n"], &["line 1 of", "l.txt"]);
    rejected(&[&write("wide", &header_of("(5, 2)")), "--count", "1"], &["wide has shape [5, 2]"]);
}

/// Returns the header of an array of this shape.
fn header_of(shape: &str) -> Vec<u8> {
    let text = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n");
    [b"\x93NUMPY\x01\0", &u16::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()]
        .concat()
}

#[test]
fn batch_follows_orders_of_sample() {
    let (dir, lengths) = file("lengths.txt", words(1..=50));
    let weights = dir.path().join("weights.txt");
    fs::write(&weights, words((0..50).map(|n| n % 3))).unwrap();
    let weights = weights.to_str().unwrap();
    let batch = ["batch", "--lengths", &lengths, "--order", "-", "--strategy", "dynamic"];
    let limit = ["--max-tokens", "150", "--format", "json"];
    for sample in [
        &["--len", "50", "--preset", "torch", "--seed", "7"][..],
        &["--len", "80", "--weights", weights],
        &["--mix", "30:1,20:2"],
        &["--len", "50", "--order", "sequential", "--start", "20", "--count", "9"],
    ] {
        let sample = |format| bytes(&[&["sample", "--format", format], sample].concat());
        let expected = array(&sample("npy")).1;
        for order in [sample("text"), sample("json"), sample("npy")] {
            let answer = piped(&[&batch[..], &limit].concat(), &order);
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            let batches = answer["batches"].as_array().unwrap();
            let indices = batches.iter().flat_map(|batch| batch["indices"].as_array().unwrap());
            let indices: Vec<u64> = indices.map(|index| index.as_u64().unwrap()).collect();
            assert_eq!(indices, expected);
        }
    }
    // Ranks share an order from a file like an order of their own.
    let torch = bytes(&["sample", "--len", "50", "--preset", "torch"]);
    let rank_batches = |rank| {
        let ranks = ["--world-size", "2", "--rank", rank];
        let answer = piped(&[&batch[..], &limit, &ranks].concat(), &torch);
        serde_json::from_slice::<Value>(&answer).unwrap()["batches"].as_array().unwrap().clone()
    };
    let batches = [rank_batches("0"), rank_batches("1")];
    assert_eq!(batches[0].len(), batches[1].len());
    let indices = batches.iter().flatten().flat_map(|batch| batch["indices"].as_array().unwrap());
    let mut indices: Vec<u64> = indices.map(|index| index.as_u64().unwrap()).collect();
    indices.sort_unstable();
    assert!(indices.into_iter().eq(0..50));
}

#[test]
fn invalid_positions_are_named() {
    let (dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let order = dir.path().join("order.txt");
    let order = order.to_str().unwrap();
    let batch = ["batch", "--lengths", &lengths, "--order", order, "--strategy", "dynamic"];
    let ranks = ["--world-size", "2", "--rank", "0"];
    for (positions, words) in [
        ("4\n0\n5\n1\n", "position 3 in"),
        ("4\n0\n18446744073709551615\n", "18446744073709551615, out of range for 5 sequences"),
        ("4\n-1\n", "position 2 in"),
        ("4\n0 padding\n", "\"padding\""),
        ("", "there is no position"),
    ] {
        fs::write(order, positions).unwrap();
        for more in [&[][..], &ranks] {
            let args = [&batch[..], &["--max-tokens", "90"], more].concat();
            rejects(&args, &[words, "order.txt", "hint: --order"]);
        }
    }
    let stdin_twice = ["batch", "--lengths", "-", "--order", "-", "--strategy", "pack"];
    rejects(&[&stdin_twice[..], &["--capacity", "9"]].concat(), &["standard input", "twice"]);
}

#[test]
fn batch_formats_hold_equal_batches() {
    let (_dir, lengths) = file("lengths.txt", two_hundred());
    for more in [
        &["dynamic", "--max-tokens", "100"][..],
        &["bucket", "--max-tokens", "100", "--buckets", "4"],
        &["sorted", "--max-tokens", "100", "--window", "3"],
        &["sorted", "--max-tokens", "100", "--shuffle", "--epoch", "2"],
        &["pack", "--capacity", "64"],
        &["sorted", "--max-tokens", "100", "--world-size", "2", "--rank", "1"],
    ] {
        let args = [&["batch", "--lengths", &lengths, "--strategy"], more].concat();
        let batches = json(&args)["batches"].as_array().unwrap().clone();

        let lines = lines_of(&bytes(&[&args[..], &["--format", "jsonl"]].concat()));
        let mut expected = batches;
        for batch in &mut expected {
            batch["format_version"] = json!(1);
        }
        assert!(lines == expected, "{more:?}");
    }
}

#[test]
fn jsonl_warns_about_skipped_sequences() {
    let (_dir, lengths) = file("lengths.txt", "12 80 15 70 9");
    let batch = ["batch", "--lengths", &lengths, "--strategy", "dynamic", "--max-tokens", "90"];
    let skips = ["--max-sequence-length", "20", "--overlong", "skip"];
    for (format, more, is_warned) in
        [("jsonl", &skips[..], true), ("jsonl", &[], false), ("text", &skips, false)]
    {
        let output = run(&[&batch[..], more, &["--format", format]].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success());
        let expected = "warning: 2 sequences are skipped, 0 truncated, 0 dropped\n";
        assert_eq!(message, if is_warned { expected } else { "" }, "{format}");
    }
}

#[test]
fn jsonl_lines_appear_without_delay() {
    for (more, order) in [
        (&["dynamic", "--max-tokens", "100"][..], false),
        (&["pack", "--packing", "in-order", "--open-rows", "1", "--capacity", "100"], false),
        (&["dynamic", "--max-tokens", "100"], true),
    ] {
        let (_dir, lengths) = file("lengths.txt", "60\n60\n60\n60\n60");
        let inputs = if order {
            ["--lengths", &lengths, "--order", "-"]
        } else {
            ["--lengths", "-", "--start", "0"]
        };
        let args = [&["batch", "--format", "jsonl", "--strategy"], more, &inputs].concat();
        let mut child =
            command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = if order { "4\n3\n2\n1\n0\n" } else { "60\n60\n60\n60\n60\n" };
        stdin.write_all(first.as_bytes()).unwrap();
        // Standard input is still open, and the first line must appear.
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(line["indices"], if order { json!([4]) } else { json!([0]) });
        drop(stdin);
        assert_eq!(lines.count(), 4);
        assert!(child.wait().unwrap().success());
    }
}

#[cfg(unix)]
#[test]
fn endless_lengths_are_batched() {
    let mut endless = Command::new("yes").arg("60").stdout(Stdio::piped()).spawn().unwrap();
    let args = ["batch", "--lengths", "-", "--strategy", "dynamic", "--max-tokens", "130"];
    let some = ["--format", "jsonl", "--start", "100000", "--count", "2"];
    let batch =
        command(&[&args[..], &some].concat()).stdin(endless.stdout.take().unwrap()).output();
    let batches = lines_of(&batch.unwrap().stdout);
    endless.wait().unwrap();
    let indices: Vec<_> = batches.iter().map(|batch| &batch["indices"]).collect();
    assert_eq!(indices, [&json!([200_000, 200_001]), &json!([200_002, 200_003])]);
}

/// Returns the batches of one of two ranks, sorted and shuffled.
fn batches_of_rank(lengths: &str, rank: &str, more: &[&str]) -> Value {
    let args = ["batch", "--lengths", lengths, "--strategy", "sorted", "--max-tokens", "400"];
    json(&[&args[..], &["--world-size", "2", "--rank", rank, "--shuffle"], more].concat())
}

#[test]
fn start_and_count_select_batches() {
    let (_dir, path) = file("lengths.txt", two_hundred());
    for is_ranked in [false, true] {
        let batches = |more: &[&str]| {
            if is_ranked {
                return batches_of_rank(&path, "1", more);
            }
            let args = ["batch", "--lengths", &path, "--strategy", "bucket", "--max-tokens", "400"];
            json(&[&args[..], more].concat())
        };
        let whole = batches(&[]);
        let expected = whole["batches"].as_array().unwrap();
        let mut parts = Vec::new();
        for start in (0..expected.len()).step_by(5) {
            let part = batches(&["--start", &start.to_string(), "--count", "5"]);
            let part_batches = part["batches"].as_array().unwrap();
            assert_eq!(part["report"]["batches"], part_batches.len());
            assert_eq!(part["n_steps"], whole["n_steps"], "of the epoch");
            parts.extend(part_batches.clone());
        }
        assert_eq!(&parts, expected);
        assert!(batches(&["--count", "0"])["batches"].as_array().unwrap().is_empty());
        let end = expected.len().to_string();
        assert!(batches(&["--start", &end])["batches"].as_array().unwrap().is_empty());
    }
    let pack = ["batch", "--lengths", &path, "--strategy", "pack", "--capacity", "50"];
    rejects(&[&pack[..], &["--start", "999"]].concat(), &["start 999 is beyond", "batches"]);
    let ranks = ["--world-size", "1", "--rank", "0"];
    rejects(&[&pack[..], &ranks, &["--start", "999"]].concat(), &["start 999 is beyond"]);
}

#[test]
fn batches_resume_where_they_stopped() {
    let (dir, path) = file("lengths.txt", two_hundred());
    let state = dir.path().join("state.json");
    let state = state.to_str().unwrap();
    let epoch = ["--epoch", "3"];
    let whole = batches_of_rank(&path, "0", &epoch)["batches"].as_array().unwrap().clone();
    let first = ["--start", "1", "--count", "2", "--save-state", state];
    batches_of_rank(&path, "1", &[&epoch[..], &first].concat());
    let second = ["--resume", state, "--count", "4", "--save-state", state];
    let second = batches_of_rank(&path, "0", &second);
    assert_eq!(second["batches"].as_array().unwrap()[..], whole[3..7]);
    assert_eq!(second["n_steps"], whole.len());
    let saved: Value = serde_json::from_str(&fs::read_to_string(state).unwrap()).unwrap();
    assert_eq!((&saved["epoch"], &saved["step"]), (&json!(3), &json!(7)));
    assert_eq!(
        batches_of_rank(&path, "0", &["--resume", state])["batches"].as_array().unwrap()[..],
        whole[7..]
    );

    let batch = ["batch", "--lengths", &path, "--strategy", "sorted", "--max-tokens", "400"];
    let resume = ["--world-size", "2", "--rank", "0", "--resume", state];
    rejects(&[&batch[..], &resume].concat(), &["other batches", "hint: resume with"]);
    rejects(&[&batch[..], &resume[4..]].concat(), &["--world-size"]);
    rejects(&[&batch[..], &["--save-state", state]].concat(), &["--world-size"]);
    rejects(
        &[&batch[..], &resume, &["--shuffle", "--epoch", "3"]].concat(),
        &["--resume", "--epoch"],
    );
    let damaged = ["--world-size", "2", "--rank", "0", "--resume", &path];
    rejects(&[&batch[..], &damaged].concat(), &["state of batches", "--save-state"]);
}

#[test]
fn python_example_passes_its_tests() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python");
    let python = ["python3", "python"].into_iter().find(|name| {
        let known = Command::new(name).arg("--version").stdout(Stdio::null()).status();
        known.is_ok_and(|status| status.success())
    });
    let Some(python) = python else {
        eprintln!("SKIPPED, Python is not installed");
        return;
    };
    let output = Command::new(python)
        .args(["test_batch_sampler.py", env!("CARGO_BIN_EXE_candle-distributed")])
        .current_dir(folder)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let faults = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}{faults}");
    assert!(shown.ends_with("all batches are as they must be\n"), "{shown}");
    // Without torch, the script skips a part, and prints a note.
    eprint!("{shown}");
}
