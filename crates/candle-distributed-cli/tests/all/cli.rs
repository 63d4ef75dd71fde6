//! The contract of the command line: results, JSON shapes, exit codes, messages.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::support::{command, file, json, rejects, rejects_each, text, words};

#[test]
fn sample_prints_one_index_per_line() {
    assert_eq!(
        text(&["sample", "--len", "11", "--world-size", "4", "--rank", "3", "--preset", "spdl"]),
        "3\n7\n"
    );
    let spread =
        ["sample", "--len", "11", "--world-size", "4", "--preset", "spdl", "--tail", "spread"];
    assert_eq!(text(&spread), "0\n4\n8\n");
    let part = ["sample", "--len", "10", "--order", "sequential", "--start", "3", "--count", "2"];
    assert_eq!(text(&part), "3\n4\n");
}

#[test]
fn sample_json_has_documented_fields() {
    let report =
        json(&words("sample --len 10 --world-size 4 --rank 3 --order sequential --count 2"));
    let expected = json!({"format_version": 1, "len": 10, "world_size": 4, "rank": 3, "per_rank_len": 4, "indices": [6, 7]});
    assert_eq!(report, expected);
}

#[test]
fn sample_matches_torch_and_marks_padding() {
    // torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0, seed=45)
    let torch = ["sample", "--preset", "torch", "--len", "10", "--seed", "45"];
    assert_eq!(json(&torch)["indices"], json!([7, 6, 5, 3, 4, 9, 0, 8, 2, 1]));
    assert_eq!(
        json(&["sample", "--preset", "torch", "--len", "10", "--seed", "-1", "--epoch", "46"]),
        json(&torch)
    );
    let padded = words("sample --preset torch --order sequential --len 5 --world-size 3 --rank 2");
    let marked = [&padded[..], &["--mark-padding"]].concat();
    assert_eq!(text(&marked), "2\n0 padding\n");
    assert_eq!(json(&marked)["padding"], json!([false, true]));
}

#[test]
fn sample_resumes_with_another_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state.json");
    let state = state.to_str().unwrap();
    let world = words("sample --len 1000000 --order streaming --partition strided --tail spread");
    let read = |more: &[&str]| -> Vec<u64> {
        text(&[&world[..], more].concat()).lines().map(|line| line.parse().unwrap()).collect()
    };
    let mut first = Vec::new();
    for rank in ["0", "1", "2", "3"] {
        let world = ["--world-size", "4", "--rank", rank];
        let save = ["--epoch", "3", "--count", "100", "--save-state", state];
        first.extend(read(&[&world[..], &save].concat()));
    }
    let whole = read(&["--epoch", "3", "--count", "410"]);
    assert!((0..400).all(|n| first.contains(&whole[n])));
    assert_eq!(read(&["--resume", state, "--count", "10"]), whole[400..]);
    rejects(
        &["sample", "--len", "999", "--order", "streaming", "--resume", state],
        &["data set length 1000000", "999"],
    );
    let (_dir, broken) = file("state.json", "{}");
    rejects(&["sample", "--len", "9", "--resume", &broken], &["state.json"]);
}

#[test]
fn sample_splits_by_worker_and_rank_weight() {
    let sequential = ["sample", "--len", "10", "--order", "sequential"];
    let with = |more: &[&'static str]| text(&[&sequential[..], more].concat());
    assert_eq!(with(&["--workers", "3", "--worker", "1"]), "1\n4\n7\n");
    assert_eq!(with(&["--world-size", "2", "--rank", "1", "--rank-weights", "4,1"]), "8\n9\n");
    rejects(
        &["sample", "--len", "10", "--world-size", "2", "--rank-weights", "1,2,3"],
        &["3 rank weights", "world of 2"],
    );
}

#[test]
fn sample_draws_by_weight() {
    let (_dir, path) = file("weights.txt", "1 0\n2.5e0");
    let drawn = text(&["sample", "--len", "3500", "--weights", &path]);
    let of = |index| drawn.lines().filter(|line| *line == index).count();
    assert_eq!(of("0") + of("2"), 3500);
    assert!((2400..2600).contains(&of("2")), "{}", of("2"));
    for (weights, words) in [
        ("1 -1", &["-1", "index 1"][..]),
        ("0 0", &["of the 2 weights"]),
        ("1 x", &["weight 2", "\"x\""]),
        ("", &["no weight"]),
    ] {
        let (_dir, path) = file("weights.txt", weights);
        rejects(&["sample", "--len", "10", "--weights", &path], words);
    }
}

#[test]
fn sample_balances_classes_over_ranks() {
    let (_dir, path) = file("classes.txt", "0 0 0 1 ".repeat(10));
    for rank in ["0", "1"] {
        let read = text(&["sample", "--classes", &path, "--world-size", "2", "--rank", rank]);
        let rare = read.lines().filter(|line| line.parse::<u64>().unwrap() % 4 == 3).count();
        assert_eq!(read.lines().count(), 20);
        assert!((4..=6).contains(&rare), "{rare}");
    }
    assert_eq!(json(&["sample", "--classes", &path, "--capped", "3"])["len"], 6);
    assert_eq!(json(&["sample", "--classes", &path, "--fixed", "40"])["len"], 80);
    rejects(&["sample", "--classes", &path, "--fixed", "0"], &["length 0"]);
    rejects(&["sample", "--len", "9", "--fixed", "3"], &["--fixed needs --classes"]);
    rejects(&["sample", "--len", "9", "--capped", "3"], &["--capped needs --classes"]);
    rejects(
        &["sample", "--classes", &path, "--fixed", "3000000000"],
        &["6000000000", "4294967296"],
    );
}

#[test]
fn sample_mixes_data_sets_by_weight() {
    let mix = ["sample", "--order", "sequential", "--mix", "100:2,3:1"];
    assert_eq!(text(&[&mix[..], &["--count", "4"]].concat()), "0\n100\n1\n2\n");
    let report = json(&mix);
    assert_eq!((&report["per_rank_len"], &report["indices"][4]), (&json!(10), &json!(101)));
    assert_eq!(report["len"], 103);
    let half = "9223372036854775808:1";
    let too_long = ["sample", "--mix", &[half, half].join(",")];
    rejects(&too_long, &["18446744073709551615 is too long"]);
    rejects(&["sample", "--mix", "100"], &["colon"]);
    rejects(&["sample", "--mix", "100:0"], &["weights is above 0"]);
    rejects(&["sample", "--mix", "0:1"], &["length 0"]);
    let two_ranks = text(&[&mix[..], &["--world-size", "2", "--rank", "1"]].concat());
    assert_eq!(two_ranks, "100\n2\n3\n102\n6\n", "ranks share one order");
}

#[test]
fn sample_locates_a_sample() {
    let world = ["sample", "--len", "1000000000000", "--world-size", "8", "--partition", "strided"];
    let place = json(&[&world[..], &["--locate", "7"]].concat());
    let (position, rank) = (place["position"].as_u64().unwrap(), place["rank"].as_u64().unwrap());
    assert_eq!(position % 8, rank);
    let (rank, start) = (rank.to_string(), (position / 8).to_string());
    let found = json(&[&world[..], &["--rank", &rank, "--start", &start, "--count", "1"]].concat());
    assert_eq!(found["indices"], json!([7]));
    assert!(
        text(&["sample", "--len", "9", "--locate", "3"]).starts_with("sample 3 is at position")
    );
    for order in ["sequential", "exact", "streaming"] {
        rejects(&["sample", "--len", "9", "--order", order, "--locate", "9"], &["sample 9"]);
    }
}

#[test]
fn sample_rejects_bad_input() {
    rejects_each(
        &["sample"],
        &[
            ("", "--len"),
            ("--len 0", "length 0"),
            ("--len 9223372036854775809", "9223372036854775809 | 9223372036854775808"),
            ("--len 5000000000 --order exact", "5000000000 | 4294967296"),
            ("--len 10 --world-size 0", "world size 0 | 1048576"),
            ("--len 10 --world-size 1048577", "1048577 | 1048576"),
            ("--len 10 --world-size 4 --rank 4", "rank 4 | world of 4"),
            ("--len 10 --start 11", "start 11 | 10"),
            ("--len -1", ""),
            ("--len 18446744073709551616", ""),
        ],
    );
}

#[test]
fn batch_reads_files_and_standard_input() {
    let (_dir, path) = file("lengths.txt", "12 80\n15\t70 9\n");
    let args = |path| ["batch", "--lengths", path, "--strategy", "bucket", "--max-tokens", "160"];
    let expected = "2 x 80: 1 3\n3 x 15: 0 2 4\n";
    assert!(text(&args(&path)).starts_with(expected));

    let mut child =
        command(&args("-")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"12 80 15 70 9").unwrap();
    assert!(child.wait_with_output().unwrap().stdout.starts_with(expected.as_bytes()));
}

#[test]
fn batch_json_has_documented_fields() {
    let (_dir, path) = file("lengths.txt", "3 6 4");
    let report =
        json(&["batch", "--lengths", &path, "--strategy", "pad-to-max", "--max-batch-size", "2"]);
    let batches = json!([
        {"indices": [0, 1], "padded_length": 6, "padded_tokens": 12, "real_tokens": 9},
        {"indices": [2], "padded_length": 4, "padded_tokens": 4, "real_tokens": 4},
    ]);
    assert_eq!((&report["format_version"], &report["batches"]), (&json!(1), &batches));
    let figures = ["efficiency", "batches", "sequences", "max_padded_tokens"]
        .map(|name| &report["report"][name]);
    assert_eq!(figures, [&json!(0.8125), &json!(2), &json!(3), &json!(12)]);
}

/// Returns the JSON output of `batch` for these lengths.
fn batches(lengths: &str, args: &[&str]) -> Value {
    let (_dir, path) = file("lengths.txt", lengths);
    json(&[&["batch", "--lengths", &path, "--strategy"], args].concat())
}

/// Checks the batches, as (indices, padded length), and the numbers of real and padded tokens.
fn batches_are(lengths: &str, args: &[&str], expected: &[(&[u64], u64)], tokens: (u64, u64)) {
    let answer = batches(lengths, args);
    let mut found = Vec::new();
    for batch in answer["batches"].as_array().unwrap() {
        found.push((batch["indices"].clone(), batch["padded_length"].clone()));
    }
    let expected: Vec<_> =
        expected.iter().map(|(indices, length)| (json!(indices), json!(length))).collect();
    assert_eq!(found, expected, "{args:?}");
    let found = ["real_tokens", "padded_tokens"].map(|name| &answer["report"][name]);
    assert_eq!(found, [&json!(tokens.0), &json!(tokens.1)], "{args:?}");
}

#[test]
fn batch_cuts_sorted_sequences() {
    let both = ["sorted", "--max-batch-size", "3"];
    let with = |cut| [&both[..], &["--cut", cut]].concat();
    let lengths = "1 5 1 1 1 5 1";
    // A greedy cut leaves the incomplete batch at an end, the optimal cut here in between.
    let greedy: [(&[_], _); 3] = [(&[0], 1), (&[2, 3, 4], 1), (&[6, 1, 5], 5)];
    batches_are(lengths, &with("greedy"), &greedy, (15, 19));
    for optimal in [&both[..], &with("optimal")] {
        let batches: [(&[_], _); 3] = [(&[0, 2], 1), (&[3, 4, 6], 1), (&[1, 5], 5)];
        batches_are(lengths, optimal, &batches, (15, 15));
    }
    batches_are(
        "12 80 15 70 9",
        &["sorted", "--max-tokens", "160"],
        &[(&[4, 0, 2], 15), (&[3, 1], 80)],
        (186, 205),
    );
}

#[test]
fn batch_sorts_within_windows() {
    let sorted = ["sorted", "--max-batch-size", "2"];
    batches_are("1 9 1 9 5 1", &sorted, &[(&[0, 2], 1), (&[5, 4], 5), (&[1, 3], 9)], (26, 30));
    // One batch from each window of four: first from the long end, then from the short one.
    let window = [&sorted[..], &["--window", "1"]].concat();
    batches_are("1 9 1 9 5 1", &window, &[(&[1, 3], 9), (&[0, 2], 1), (&[5, 4], 5)], (26, 30));
}

#[test]
fn batch_optimizes_bucket_boundaries() {
    let bucket = ["bucket", "--max-batch-size", "2", "--buckets", "2"];
    batches_are("10 80 15 70 9", &bucket, &[(&[0, 2], 15), (&[1, 3], 80), (&[4], 9)], (184, 199));
    let fixed = [&bucket[..], &["--fixed-shapes"]].concat();
    batches_are("10 80 15 70 9", &fixed, &[(&[0, 2], 15), (&[1, 3], 80), (&[4], 15)], (184, 205));
    // A skipped sequence moves no boundary. A truncated sequence counts with its new length.
    let skip = [&fixed[..], &["--max-sequence-length", "15", "--overlong", "skip"]].concat();
    batches_are("10 80 15 70 9", &skip, &[(&[0, 4], 10), (&[2], 15)], (34, 35));
    let truncate =
        [&fixed[..], &["--max-sequence-length", "60", "--overlong", "truncate"]].concat();
    batches_are(
        "10 80 15 70 9",
        &truncate,
        &[(&[0, 2], 15), (&[1, 3], 60), (&[4], 15)],
        (154, 165),
    );
}

#[test]
fn batch_packs_and_counts_rows() {
    let answer = batches("12 80 15 70 9", &["pack", "--capacity", "100"]);
    let rows = json!([
        {"indices": [1, 2], "padded_length": 100, "padded_tokens": 100, "real_tokens": 95},
        {"indices": [3, 0, 4], "padded_length": 100, "padded_tokens": 100, "real_tokens": 91},
    ]);
    assert_eq!(answer["batches"], rows);
    let figures =
        ["bins", "density", "efficiency", "sequences"].map(|name| &answer["report"][name]);
    assert_eq!(figures, [&json!(2), &json!(0.93), &json!(0.93), &json!(5)]);
    assert_eq!(batches("12 80 15 70 9", &["pack", "--max-tokens", "100"]), answer);
    assert!(batches("1 2", &["dynamic", "--max-tokens", "9"])["report"].get("bins").is_none());
}

#[test]
fn batch_supports_every_packing() {
    let bins = |lengths, more: &[&'static str]| {
        batches(lengths, &[&["pack", "--capacity", "10", "--packing"], more].concat())["report"]["bins"].clone()
    };
    // 5 + 4, 3 + 3 + 3 and 2; but 5 + 3 + 2 and 4 + 3 + 3.
    assert_eq!(bins("5 4 3 3 3 2", &["best-fit"]), 3);
    assert_eq!(bins("5 4 3 3 3 2", &["minimum-slack"]), 2);
    assert_eq!(bins("6 7 4 3", &["in-order"]), 2);
    assert_eq!(bins("6 7 4 3", &["in-order", "--open-rows", "1"]), 3);
}

#[test]
fn batch_respects_multiples() {
    let with = |more: &[&'static str]| [&["pad-to-max", "--max-batch-size", "2"], more].concat();
    batches_are("3 6 4", &with(&["--length-multiple", "4"]), &[(&[0, 1], 8), (&[2], 4)], (13, 20));
    let dropped = with(&["--batch-size-multiple", "2"]);
    batches_are("3 6 4", &dropped, &[(&[0, 1], 6)], (9, 12));
    assert_eq!(batches("3 6 4", &dropped)["report"]["dropped"], 1);
    let kept = [&dropped[..], &["--last-batch", "keep"]].concat();
    batches_are("3 6 4", &kept, &[(&[0, 1], 6), (&[2], 4)], (13, 16));
}

#[test]
fn batch_respects_max_cost() {
    let pad = ["pad-to-max", "--max-cost"];
    let cuts = [(&[0, 1][..], 6), (&[2], 4), (&[3], 10)];
    // 2 x 6 tokens and 2 x 6 x 6 pairs; a third sequence makes 3 x 6 and 3 x 6 x 6.
    batches_are("3 6 4 10", &[&pad[..], &["12"]].concat(), &cuts, (23, 26));
    batches_are("3 6 4 10", &[&pad[..], &["100", "--cost", "quadratic"]].concat(), &cuts, (23, 26));
}

#[test]
fn batch_json_with_ranks_has_documented_fields() {
    // Three batches for two ranks: the one with padding, of 1 and 3, becomes two.
    let args = ["pad-to-max", "--max-batch-size", "2", "--world-size", "2", "--rank"];
    let ranks = ["0", "1"].map(|rank| batches("5 5 1 3 5 5", &[&args[..], &[rank]].concat()));
    for (rank, answer) in (0..).zip(&ranks) {
        let figures = ["format_version", "world_size", "rank", "n_steps"].map(|name| &answer[name]);
        assert_eq!(figures, [&json!(1), &json!(2), &json!(rank), &json!(2)]);
        assert_eq!(answer["report"]["batches"], 2, "of this rank");
    }
    let batch = json!({
        "indices": [0, 1], "padded_length": 5, "padded_tokens": 10, "real_tokens": 10, "step_real_tokens": 20,
    });
    assert_eq!(ranks[0]["batches"][0], batch);
    let small = [0, 1].map(|rank| ranks[rank]["batches"][1]["real_tokens"].as_u64().unwrap());
    assert_eq!((small, &ranks[1]["batches"][1]["step_real_tokens"]), ([1, 3], &json!(4)));
}

#[test]
fn batch_rejects_conflicting_options() {
    let (_dir, path) = file("lengths.txt", "3 6 4");
    rejects_each(
        &["batch", "--lengths", &path, "--max-batch-size", "8", "--strategy"],
        &[
            ("pad-to-max --bucket-width 8", "--bucket-width | --strategy bucket | pad-to-max"),
            ("pad-to-max --buckets 2", "--buckets | --strategy bucket"),
            ("pad-to-max --fixed-shapes", "--fixed-shapes | --strategy bucket"),
            ("pad-to-max --window 2", "--window | --strategy sorted"),
            ("pad-to-max --cut greedy", "--cut | --strategy sorted"),
            ("pad-to-max --capacity 9", "--capacity | --strategy pack"),
            ("pad-to-max --packing best-fit", "--packing | --strategy pack"),
            ("pad-to-max --open-rows 2", "--open-rows | --strategy pack"),
            ("bucket --buckets 2 --bucket-width 8", "--buckets | --bucket-width"),
            ("pack", "--strategy pack | --capacity"),
            ("pack --capacity 9 --max-tokens 9", "--capacity | --max-tokens"),
            ("pack --capacity 9 --open-rows 2", "--open-rows | --packing in-order"),
            ("pack --capacity 9 --length-multiple 2", "--length-multiple | --strategy pack"),
            (
                "pack --capacity 9 --batch-size-multiple 2",
                "--batch-size-multiple | --strategy pack",
            ),
            ("sorted --last-batch keep", "--last-batch | --batch-size-multiple"),
            ("sorted --cost quadratic", "--cost | --max-cost"),
            ("sorted --remainder repeat", "--remainder | --world-size"),
            ("sorted --world-size 2", "--world-size | --rank"),
            ("sorted --rank 0", "--rank | --world-size"),
            ("sorted --steps grouped", "--steps | --world-size"),
            ("sorted --step-cost tokens", "--step-cost | --world-size"),
            ("bucket --steps dealt --world-size 2 --rank 0", "--steps dealt | --strategy | bucket"),
            ("pack --capacity 9 --steps dealt --world-size 2 --rank 0", "--steps dealt | pack"),
        ],
    );
}

#[test]
fn batch_rejects_values_out_of_range() {
    let (_dir, path) = file("lengths.txt", "3 6 4");
    rejects_each(
        &["batch", "--lengths", &path, "--strategy"],
        &[
            ("bucket --max-tokens 9 --buckets 0", "number of buckets | 0"),
            ("bucket --max-batch-size 8 --bucket-width 0", "width | 0"),
            ("sorted --max-tokens 9 --window 0", "window | 0"),
            ("pack --capacity 9 --packing in-order --open-rows 0", "open_rows | 0"),
            ("pack --capacity 5", "sequence 1 | 6 | 5"),
            ("pack --capacity 16777217", "16777217 | 16777216"),
            ("sorted --max-tokens 9 --world-size 2 --rank 2", "rank 2 | world of 2"),
            ("sorted --max-tokens 9 --world-size 4 --rank 0", "4 ranks"),
            ("dynamic", "max_tokens"),
            ("dynamic --max-tokens 0", "max_tokens | 0"),
            ("dynamic --max-tokens 5", "6 | 5"),
            ("dynamic --max-tokens 1000 --max-sequence-length 5", "6 | 5"),
            ("dynamic --max-batch-size 5000000000 --max-sequence-length 5000000000", "5000000000"),
            ("dynamic --max-tokens 9 --bucket-width 8", "--bucket-width | --strategy bucket"),
            ("dynamic --max-tokens 9 --epoch 1", "--shuffle"),
        ],
    );
}

const MANIFEST: &str =
    r#"{"h.0.w": {"dtype": "F32", "shape": [10, 4]}, "h.0.b": {"dtype": "F32", "shape": [4]}}"#;

/// Builds a safetensors file with this header and no tensor bytes.
fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

#[test]
fn plan_json_has_documented_fields() {
    let (_dir, path) = file("model.json", MANIFEST);
    let report = json(&["plan", &path, "--world-size", "4", "--rank", "3"]);
    assert_eq!((&report["format_version"], &report["world_size"]), (&json!(1), &json!(4)));
    assert_eq!(report["parameters"][0]["name"], "h.0.w");
    assert_eq!(report["parameters"][0]["shape"], json!([10, 4]));
    let bytes: Vec<_> =
        (0..4).map(|rank| report["ranks"][rank]["param_bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes, [52, 52, 52, 20]);
    for field in ["storage_bytes", "grad_bytes", "optimizer_bytes"] {
        assert!(report["ranks"][0][field].is_u64(), "{field}");
    }
    assert!(report["max_over_mean"].is_f64() && report["collectives"].is_object());
    let shard = &report["shards"][0];
    let place = ["start_offset", "shard_size", "dim0_start", "dim0_rows"]
        .map(|name| shard[name].as_u64().unwrap());
    assert_eq!((&shard["name"], place), (&json!("h.0.w"), [36, 4, 9, 1]));
}

#[test]
fn plan_reads_every_model_format() {
    let header = r#"{"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}"#;
    let (dir, path) = file("model.safetensors", safetensors(header));
    let of_file = json(&["plan", &path, "--world-size", "2"]);
    assert_eq!(of_file["ranks"][1]["param_bytes"], 8);
    let folder = dir.path().to_str().unwrap();
    assert_eq!(json(&["plan", folder, "--world-size", "2"]), of_file);

    let second = r#"{"v": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}"#;
    fs::write(dir.path().join("second.safetensors"), safetensors(second)).unwrap();
    let index = r#"{"weight_map": {"w": "model.safetensors", "v": "second.safetensors"}}"#;
    let index_path = dir.path().join("model.safetensors.index.json");
    fs::write(&index_path, index).unwrap();
    let of_index = json(&["plan", index_path.to_str().unwrap(), "--world-size", "2"]);
    assert_eq!(of_index["ranks"][1]["param_bytes"], 10);
    assert_eq!(json(&["plan", folder, "--world-size", "2"]), of_index);
    rejects(&["plan", folder], &["--world-size"]);

    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let mut config = crate::support::finetune::config();
    config["torch_dtype"] = json!("bfloat16");
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let of_config = json(&["plan", folder, "--world-size", "1"]);
    let embedding = &of_config["parameters"][1];
    assert_eq!(embedding["name"], "model.embed_tokens.weight");
    assert_eq!((&embedding["shape"], &embedding["dtype"]), (&json!([260, 32]), &json!("BF16")));
    assert_eq!(of_config["parameters"].as_array().unwrap().len(), 3 + 2 * 9);
}

#[test]
fn plan_supports_strategies_layouts_and_optimizers() {
    let (_dir, path) = file("model.json", MANIFEST);
    let plan =
        |more: &[&'static str]| json(&[&["plan", &path, "--world-size", "2"][..], more].concat());
    let owned =
        |report: &Value| [0, 1].map(|rank| report["ranks"][rank]["param_bytes"].as_u64().unwrap());
    assert_eq!(owned(&plan(&[])), [88, 88]);
    assert_eq!(owned(&plan(&["--strategy", "layer-wise"])), [176, 0]);
    assert_eq!(owned(&plan(&["--strategy", "hybrid"])), [88, 88]);
    assert_eq!(owned(&plan(&["--layout", "flat"])), [88, 88]);
    assert_eq!(plan(&["--optimizer", "sgd"])["ranks"][0]["optimizer_bytes"], 88);
    assert_eq!(plan(&["--optimizer", "none"])["ranks"][0]["optimizer_bytes"], 0);
    assert!(text(&["plan", &path, "--world-size", "2"]).contains("h.0"));
}

#[test]
fn plan_supports_replicas_and_ragged_layouts() {
    let (_dir, path) = file("model.json", MANIFEST);
    let plan =
        |more: &[&'static str]| json(&[&["plan", &path, "--world-size", "4"][..], more].concat());
    let owned = |report: &Value| {
        [0, 1, 2, 3].map(|rank| report["ranks"][rank]["param_bytes"].as_u64().unwrap())
    };
    let replicas = plan(&["--replicas", "2"]);
    assert_eq!((owned(&replicas), &replicas["replicas"]), ([88; 4], &json!(2)));
    let all_reduce = json!({"count": 1, "bytes": 88, "payload_bytes": 88});
    assert_eq!(replicas["collectives"]["all_reduce"], all_reduce);
    assert_eq!(owned(&plan(&["--layout", "row-ragged"])).iter().sum::<u64>(), 176);
    assert_eq!(owned(&plan(&["--layout", "block-ragged", "--block-size", "1"])), [44; 4]);
    assert_eq!(owned(&plan(&["--strategy", "whole-tensor"])), [44; 4]);
    assert_eq!(plan(&["--optimizer", "adam-mixed"])["ranks"][0]["optimizer_bytes"], 12 * 13 + 8);
    let half = plan(&["--param-dtype", "bf16", "--mixed-precision", "F16,F32"]);
    assert_eq!(owned(&half), [26, 26, 26, 10]);
    let reduce_scatter = json!({"count": 1, "bytes": 4 * 52, "payload_bytes": 4 * 44});
    assert_eq!(half["collectives"]["reduce_scatter"], reduce_scatter);
    let times = |links| plan(&["--links", links])["step_seconds"].as_f64().unwrap();
    assert!(times("h100") < times("2:450:1"));
}

#[test]
fn plan_follows_rules_and_patterns() {
    let rules = r#"{"rules": [{"pattern": "*.*.b", "choice": "replicate"}, {"pattern": "h", "choice": {"full": "dim0"}}]}"#;
    let (_dir, model) = file("model.json", MANIFEST);
    let (_dir, rules) = file("rules.json", rules);
    let plan = ["plan", &model, "--world-size", "2", "--rules", &rules];
    let report = json(&plan);
    assert_eq!(report["parameters"][1]["cut"], "replicated");
    assert_eq!(
        report["rules"],
        json!({"decided": [1, 1], "overlaps": [["h.0.b", [0, 1]]], "unmatched": []})
    );
    assert!(text(&plan).contains("several rules match h.0.b;"));

    let layers = json(&[
        "plan",
        &model,
        "--world-size",
        "2",
        "--layer-pattern",
        "h.*.?",
        "--stay-gathered",
        "h.0.w",
    ]);
    assert_eq!(
        (&layers["parameters"][0]["layer"], &layers["kept_units"]),
        (&json!("h.0.w"), &json!(["h.0.w"]))
    );
    // Each of the two units would be gathered twice, but one of them stays.
    assert_eq!(layers["collectives"]["all_gather"]["count"], 3);
}

#[test]
fn plan_itemizes_memory_of_candle_runtime() {
    let (_dir, model) = file("model.json", MANIFEST);
    let plan = ["plan", &model, "--world-size", "4", "--runtime", "candle"];
    let with_batch = [&plan[..], &["--tokens", "10", "--width", "8", "--slots", "2"]].concat();
    let report = json(&with_batch);
    let rank = &report["ranks"][0];
    assert_eq!(rank["storage_bytes"], rank["param_bytes"]);
    let bytes = |field: &str| rank[field].as_u64().unwrap();
    let once = bytes("gathered_bytes");
    let others = ["unreduced_bytes", "backward_bytes", "activation_bytes"].map(bytes);
    let of_rank = |rank: &Value| {
        let stored = ["storage_bytes", "grad_bytes", "optimizer_bytes"];
        stored.iter().map(|field| rank[field].as_u64().unwrap()).sum::<u64>()
    };
    let both: u64 = report["ranks"].as_array().unwrap()[..2].iter().map(of_rank).sum();
    let expected = both + once + 2 * others.iter().sum::<u64>();
    assert_eq!(report["process"], json!({"slots": 2, "peak_bytes": expected}));

    let words = text(&with_batch).replace(',', "");
    assert!(words.contains("a process of 2 ranks that share gathered parameters needs"), "{words}");
    for (term, bytes) in [
        ("gathered units", once),
        ("unreduced gradients", others[0]),
        ("gradient temporaries", others[1]),
        ("activations", others[2]),
    ] {
        assert!(words.contains(&format!("{term} {bytes}")), "{term}: {words}");
    }
    // Activations need --tokens and --width.
    assert!(json(&plan)["ranks"][0].get("activation_bytes").is_none());
    rejects(&["plan", &model, "--world-size", "4", "--tokens", "10"], &["--width"]);

    let in_backward = json(&[&plan[..], &["--optimizer-in-backward"]].concat());
    assert_eq!(in_backward["ranks"][0]["grad_bytes"], 0);
}

#[test]
fn plan_checks_budget_and_searches() {
    let (_dir, path) = file("model.json", MANIFEST);
    let plan =
        |more: &[&'static str]| json(&[&["plan", &path, "--world-size", "8"][..], more].concat());
    let budget = plan(&["--budget", "1KiB"])["budget"].clone();
    assert_eq!((&budget["bytes"], &budget["missing_bytes"]), (&json!(1024), &json!(0)));
    let missing = plan(&["--budget", "100"])["budget"]["missing_bytes"].as_u64().unwrap();
    assert_eq!(missing, plan(&["--budget", "100"])["budget"]["peak_bytes"].as_u64().unwrap() - 100);
    let found = plan(&["--search", "--budget", "600"]);
    assert_eq!(found["budget"]["missing_bytes"], 0);
    let nothing = text(&["plan", &path, "--world-size", "8", "--search", "--budget", "9"]);
    assert!(nothing.contains("are missing"), "{nothing}");
}

#[test]
fn plan_explains_and_compares() {
    let (dir, path) = file("model.json", MANIFEST);
    let plan = |world_size, more: &[&str]| {
        text(&[&["plan", &path, "--world-size", world_size][..], more].concat())
    };
    assert!(plan("4", &["--explain", "h.0.w"]).contains("ranks 0–2: 3 rows (12 elements) each"));
    assert!(plan("4", &["--explain-rank", "3"]).contains("at most on any rank"));
    rejects(&["plan", &path, "--world-size", "4", "--explain", "h.1.w"], &["no parameter h.1.w"]);

    let stored = dir.path().join("plan.json");
    fs::write(&stored, plan("4", &["--format", "json"])).unwrap();
    let against = ["--against", stored.to_str().unwrap()];
    assert!(plan("4", &against).starts_with("the plans are the same\nresharding: 0 bytes move"));
    let fewer = plan("2", &against);
    assert!(
        fewer.starts_with("world size: 4 → 2\nresharding: ") && fewer.contains("renumbered"),
        "{fewer}"
    );
    rejects(
        &["plan", &path, "--world-size", "4", "--against", &path],
        &["model.json does not hold a plan"],
    );
    rejects(
        &["plan", &path, "--world-size", "4", "--explain", "h.0.w", "--format", "json"],
        &["--format"],
    );

    let (_dir, grown) = file("grown.json", MANIFEST.replace("[4]", "[5]"));
    let other = text(&["plan", &grown, "--world-size", "4", "--against", stored.to_str().unwrap()]);
    assert!(
        other.contains("~ h.0.b: [4] F32") && other.ends_with("nothing can be resharded\n"),
        "{other}"
    );
}

#[test]
fn plan_rejects_bad_input() {
    let (_dir, path) = file("model.json", MANIFEST);
    rejects_each(
        &["plan", &path, "--world-size"],
        &[
            ("0", "world size 0"),
            ("2 --strategy hybrid --layout flat", "--layout | --strategy full"),
            ("2 --rank 2", "rank 2 | world of 2"),
            ("2 --explain-rank 9", "rank 9 | world of 2"),
            ("2 --replicas 3", "world of 2 | 3 replicas"),
            ("2 --replicas 0", "0 replicas"),
            ("2 --layout dim0 --block-size 4", "--block-size | ragged"),
            ("2 --layout row-ragged --block-size 0", "rows in a granule is 0"),
            ("2 --strategy full --rules x.json", "--rules needs --strategy hybrid"),
            ("2 --rules /no/such/rules", "/no/such/rules"),
            ("2 --search", "--budget"),
            ("2 --budget 99999999999TiB", "18446744073709551615"),
            ("2 --layer-pattern a.[", "malformed pattern | a.["),
            ("2 --links 8:450", "three whole numbers"),
            ("2 --links 8:450:50:x", "three whole numbers"),
            ("2 --links 8:0:1", "bytes per second of a link is 0"),
            ("2 --param-dtype F33", "unknown dtype"),
        ],
    );
    rejects(&["plan", &path, "--world-size", "2", "--budget", "3 apples"], &["KiB"]);
    rejects(&["plan", "/no/such/model", "--world-size", "2"], &["/no/such/model"]);
}

/// Counts the folders in a folder.
fn folders(path: &Path) -> usize {
    fs::read_dir(path).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
}

#[test]
fn train_check_does_not_change_training() {
    let dir = tempfile::tempdir().unwrap();
    let (_data, data) =
        file("text.txt", "to be or not to be, that is the question.\n\n".repeat(20));
    let path = |name: &str| dir.path().join(name);
    let run = |name: &str, more: &[&str]| {
        let out = path(name);
        let args = ["train", "--steps", "3", "--data", &data, "--out", out.to_str().unwrap()];
        let output = command(&[&args, more].concat()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        said
    };
    let checked = |said: &str| {
        let (heading, after) = said.split_once("(found)").unwrap();
        assert!(!heading.contains("step "), "{said}");
        let parts =
            ["lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"];
        let lines: Vec<&str> = after.lines().skip(1).take(parts.len()).collect();
        for (line, part) in lines.iter().zip(parts) {
            assert!(line.starts_with(part) && line.ends_with("  right"), "{said}");
            assert_eq!(line.find("expected"), lines[0].find("expected"), "{said}");
        }
        assert!(after.contains("step 3 of 3"), "{said}");
    };
    let trained = |name: &str| {
        let metrics = fs::read_to_string(path(name).join("metrics.jsonl")).unwrap();
        let mut losses = Vec::new();
        for line in metrics.lines() {
            losses.push(serde_json::from_str::<Value>(line).unwrap()["loss"].clone());
        }
        assert_eq!(losses.len(), 3);
        (losses, fs::read(path(name).join("model/model.safetensors")).unwrap())
    };
    let said = run("plain", &["--checkpoint-every", "2"]);
    assert!(!said.contains("(found)"), "{said}");
    let plain = trained("plain");
    checked(&run("checked", &["--check"]));
    assert!(trained("checked") == plain);

    // A resumed run checks the resumed model.
    fs::remove_dir_all(path("plain").join("model")).unwrap();
    checked(&run("plain", &["--resume", "--check"]));
    assert!(trained("plain") == plain);
}

/// Runs `train` to its end, and sends it signals after each of its first steps.
#[cfg(unix)]
fn interrupted(mut train: Command, signals: &[&str], out: &Path) -> Output {
    let steps = || {
        fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |metrics| metrics.lines().count())
    };
    let child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    for signals in signals {
        // After a step, the handler is installed. Another step shows that a signal was ignored.
        let before = steps();
        while steps() <= before {
            std::thread::yield_now();
        }
        for signal in signals.split(' ') {
            let kill = Command::new("kill").args([signal, &child.id().to_string()]).status();
            assert!(kill.unwrap().success());
        }
    }
    child.wait_with_output().unwrap()
}

#[test]
#[cfg(unix)]
fn interrupted_train_saves_and_prints_hint() {
    for signal in ["-INT -INT -INT", "-TERM", "-HUP"] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("my run");
        let session = "--steps 100000 --strategy full --keep gathered --world-size 3 \
                       --checkpoint-every 20 --temperature 0.5";
        let arguments = ["train", "--out", out.to_str().unwrap(), "--prompt", "a b"];
        let train = command(&[&arguments[..], &words(session)].concat());
        let ended = interrupted(train, &[signal], &out);
        assert_eq!(ended.status.code(), Some(130), "{signal}");
        let said = String::from_utf8(ended.stderr).unwrap();
        // The command must be quoted for a shell.
        let hint = format!(
            "hint: to resume: candle-distributed train --out '{}' --resume --world-size 3 \
             --strategy full --keep gathered --checkpoint-every 20 \
             --prompt 'a b' --temperature 0.5\n",
            out.display()
        );
        assert!(said.contains(&hint), "{said}");
        assert_eq!(folders(&out.join("checkpoints")), 1);
        assert!(fs::read_to_string(out.join("loss.svg")).unwrap().contains("<circle "));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn train_keeps_ignored_signals_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut train = Command::new("sh");
    // Ignores SIGHUP, like `nohup`.
    let program = env!("CARGO_BIN_EXE_candle-distributed");
    train.args(["-c", "trap '' HUP; exec \"$0\" train --steps 100000 --out \"$1\"", program]);
    train.arg(&out);
    let ended = interrupted(train, &["-HUP", "-INT"], &out);
    assert_eq!(ended.status.code(), Some(130));
    assert!(n_steps(&out) >= 2);
}

#[cfg(target_os = "linux")]
fn n_steps(out: &Path) -> usize {
    fs::read_to_string(out.join("metrics.jsonl")).unwrap().lines().count()
}

#[test]
fn train_prints_batches_first_text_last() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = ["train", "--steps", "1", "--context", "32", "--out", out.to_str().unwrap()];
    let printed = text(&args);
    assert!(printed.starts_with("each epoch: "), "{printed}");
    let end = format!("\nmetrics and model are in {}\nthe model writes:\n", out.display());
    let (_, written) = printed.split_once(&end).unwrap_or_else(|| panic!("{printed}"));
    assert!(written.starts_with("Once there was a "), "{written}");
}

#[test]
fn train_survives_a_closed_stdout() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut child = command(&["train", "--steps", "1", "--out", out.to_str().unwrap()]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    child.wait().unwrap();
    assert!(out.join("model/model.safetensors").exists());
}

#[test]
fn train_rejects_bad_input_and_existing_runs() {
    let (_dir, data) = file("text.txt", "to be or not to be");
    rejects_each(
        &["train", "--data", &data],
        &[
            ("--steps 0", "--steps is 0 | at least 1"),
            ("--world-size 0", "world size 0"),
            ("--world-size 1025", "1025 | 1024"),
            ("--data /no/such/folder", "/no/such/folder"),
            ("--device cuda --world-size 1", "device 0"),
            ("--checkpoint-every 0", "--checkpoint-every is 0 | at least 1"),
            ("--resume", "--out"),
        ],
    );
    let (_dir, lines) = file("texts.jsonl", "\"right\"\n\n{\"text\": 3}\n");
    rejects(&["train", "--data", &lines], &["line 3 of ", "texts.jsonl", "hint: "]);
    let dir = tempfile::tempdir().unwrap();
    let out = ["train", "--steps", "1", "--out", dir.path().to_str().unwrap()];
    fs::write(dir.path().join("run.json"), "kept").unwrap();
    rejects(&out, &["already holds a run"]);
}

#[test]
fn batch_reports_the_waiting_of_micro_batches() {
    let numbers: Vec<String> = (0..256).map(|n| (20 + n * 37 % 480).to_string()).collect();
    let (_dir, lengths) = file("lengths.txt", numbers.join(" "));
    let grid =
        words("--strategy sorted --max-tokens 4096 --world-size 8 --accumulate 4 --cost attention");
    let batch = [&["batch", "--lengths", &lengths][..], &grid].concat();
    let printed = text(&batch);
    assert!(printed.lines().last().unwrap().contains("over 8 ranks: waiting "), "{printed}");
    let steps = [&batch[..], &words("--steps grid --global-batch 128")].concat();
    let whole = json(&steps);
    assert_eq!((&whole["grid"]["cells"], &whole["batches"]), (&json!(64), &json!([])));
    assert_eq!(whole["report"]["sequences"], 256);
    let one = json(&[&steps[..], &["--rank", "3"]].concat());
    assert_eq!(one["batches"].as_array().unwrap().len(), 8);
    assert_eq!(one["grid"], whole["grid"]);
}
