//! `train` with a sharded model: losses as without sharding, model sizes, resuming, and models that
//! fit only when sharded.

use std::fs;

use serde_json::Value;

use crate::support::{
    self, rejects, rejects_each, run,
    run::{Home, STEPS, said},
    text, words,
};

fn run_json(home: &Home, name: &str) -> Value {
    serde_json::from_slice(&fs::read(home.at(name).join("run.json")).unwrap()).unwrap()
}

#[test]
fn sharding_does_not_change_results() {
    let home = Home::new();
    let rules = r#"{"rules": [{"pattern": "**.norm.*", "choice": "replicate"}]}"#;
    fs::write(home.at("rules.json"), rules).unwrap();
    let rules = home.path("rules.json");
    let short = ["--steps", "4", "--world-size", "3"];
    home.train("whole", &short);
    for (n, what) in [
        "--strategy full --keep gathered --layout flat-aligned",
        "--strategy full --keep graph --prefetch 2 --layout row-ragged --block-size 3",
        "--strategy layer-wise --layer-order contiguous",
        "--strategy whole-tensor",
        &format!("--strategy hybrid --rules {rules}"),
        "--strategy full --replicas 1 --max-grad-norm 1e9",
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("sharded-{n}");
        home.train(&name, &[&short[..], &words(what)].concat());
        assert_eq!(home.losses(&name), home.losses("whole"), "{what}");
        assert!(home.model(&name) == home.model("whole"), "{what}");
    }
}

/// Compares with a tolerance, since two copies add gradients in another order than four devices.
#[test]
fn replicas_learn_the_same() {
    let home = Home::new();
    let four = ["--steps", STEPS, "--world-size", "4"];
    home.train("whole", &four);
    let copies = ["--strategy", "full", "--replicas", "2"];
    home.train("two", &[&four[..], &copies].concat());
    for (found, expected) in home.losses("two").iter().zip(home.losses("whole")) {
        assert!((found - expected).abs() < 1e-6 * expected, "{found}, {expected}");
    }
    assert_eq!(run_json(&home, "two")["sessions"][0]["sharding"]["replicas"], 2);

    // Runs resume with another number of copies.
    home.end_again("two", &["--world-size", "4", "--strategy", "full"]);
    assert_eq!(home.losses("two").len(), home.losses("whole").len());
    let copies = [&["train", "--data", &home.path("text.txt"), "--dry-run"], &four[2..], &copies];
    let printed = text(&copies.concat());
    for kind in ["all_gather", "reduce_scatter", "all_reduce"] {
        assert!(row(&printed, kind)[1] != "0", "{printed}");
    }
    let reduced = row(&printed, "reduce_scatter");
    assert_eq!((reduced[1], reduced[3]), (reduced[2], reduced[4]), "{printed}");
}

#[test]
fn only_clipping_keeps_all_gradients() {
    let home = Home::new();
    let data = home.path("text.txt");
    // Gradients outweigh activations.
    let sizes = ["--hidden", "256", "--context", "16", "--max-tokens", "64"];
    let train =
        [&["train", "--data", &data, "--strategy", "full", "--dry-run"], &sizes[..]].concat();
    let within = text(&train);
    assert!(!within.contains("--max-grad-norm none"), "{within}");
    let clipped = [&train[..], &["--max-grad-norm", "1e9"]].concat();
    let after = text(&clipped);
    let gradients = |table| row(table, "gradients")[1].to_owned();
    assert_ne!(gradients(&within), gradients(&after), "{within}{after}");
    // Devices agree on gradients once per step instead of once per unit.
    assert_ne!(row(&within, "all_gather")[2], row(&after, "all_gather")[2], "{within}");
    let saved = after.lines().find(|line| line.starts_with("--max-grad-norm none saves")).unwrap();
    rejects(&[&clipped[..], &["--memory-limit", "1MiB"]].concat(), &[saved]);
}

/// Returns the predicted terms of a printed table, but for the first, which is measured.
fn predicted_terms(printed: &str) -> Vec<(&str, &str)> {
    let lines = printed.lines().map(str::trim);
    let terms = lines.skip_while(|line| !line.starts_with("program, text and batches")).skip(1);
    terms
        .take_while(|line| !line.starts_with("peak"))
        .map(|line| line.split_once("  ").map(|(name, bytes)| (name, bytes.trim())).unwrap())
        .collect()
}

#[test]
fn plan_of_a_run_predicts_what_a_dry_run_predicts() {
    let home = Home::new();
    let data = home.path("text.txt");
    for (name, more) in [
        ("whole", &[][..]),
        ("parts", &["--strategy", "full"]),
        ("halves", &["--strategy", "whole-tensor", "--dtype", "bf16", "--keep", "graph"]),
    ] {
        home.train(name, &[&["--steps", "2"], more].concat());
        let plan = ["plan", &home.path(name)];
        let planned = text(&plan);
        let dry = text(&[&["train", "--data", &data, "--dry-run"], more].concat());
        assert!(predicted_terms(&planned).len() >= 5, "{planned}");
        assert_eq!(predicted_terms(&planned), predicted_terms(&dry), "{planned}{dry}");
        if more.is_empty() {
            let plan = support::json(&plan);
            let cuts = plan["parameters"].as_array().unwrap().iter().map(|info| &info["cut"]);
            assert!(cuts.eq(["replicated"; 21]), "{plan}");
            continue;
        }
        for kind in ["all_gather", "reduce_scatter"] {
            let (planned, dry) = (row(&planned, kind), row(&dry, kind));
            assert_eq!([planned[1], planned[2]], [dry[1], dry[3]], "{name}");
            let calls = &support::json(&plan)["collectives"][kind]["count"];
            assert_eq!(calls.to_string(), planned[1], "{name}");
        }
    }
    // Another number of ranks is a plan of the same units, without batches.
    let two = text(&["plan", &home.path("parts"), "--world-size", "4"]);
    assert!(two.contains("full over 4 ranks") && !two.contains("memory of a process"), "{two}");
    fs::write(home.at("text.txt"), "another text").unwrap();
    let changed = run(&["plan", &home.path("parts")]);
    assert!(said(&changed).contains("the memory of a process is not predicted"), "{changed:?}");
}

/// Compares with a tolerance, since a sharded model adds devices before micro-batches.
#[test]
fn sharded_gradients_accumulate() {
    let home = Home::new();
    let accumulated = ["--steps", "4", "--accumulate", "2"];
    home.train("whole", &accumulated);
    home.train("parts", &[&accumulated[..], &["--strategy", "full"]].concat());
    assert_eq!(home.losses("parts").len(), home.losses("whole").len());
    for (found, expected) in home.losses("parts").iter().zip(home.losses("whole")) {
        assert!((found - expected).abs() < 1e-6 * expected, "{found}, {expected}");
    }
    let sharding = &run_json(&home, "parts")["sessions"][0]["sharding"];
    assert!(sharding.get("optimizer_in_backward").is_none(), "{sharding}");
    // Without clipping, gradients would have to accumulate all the same.
    let data = home.path("text.txt");
    let clipped =
        ["train", "--data", &data, "--strategy", "full", "--accumulate", "2", "--dry-run"];
    let printed = text(&[&clipped[..], &["--max-grad-norm", "1e9"]].concat());
    assert!(!printed.contains("--max-grad-norm none"), "{printed}");
}

/// The batches of a step stay the same ones, so its loss differs in rounding.
#[test]
fn limited_micro_batches_have_the_loss_of_their_step() {
    let home = Home::new();
    let lines: Vec<String> = (1..=60).map(|n| "a word ".repeat(1 + n * n % 17) + "\n\n").collect();
    fs::write(home.at("text.txt"), lines.concat()).unwrap();
    let steps = ["--steps", "5", "--batch-size", "12"];
    home.train("one", &[&steps[..], &["--accumulate", "1"]].concat());
    home.train("several", &[&steps[..], &["--max-tokens-per-batch", "300"]].concat());
    for (found, expected) in home.losses("several").iter().zip(home.losses("one")) {
        assert!((found - expected).abs() < 1e-6 * expected, "{found}, {expected}");
    }
    assert_eq!(home.numbers("several", "real_tokens"), home.numbers("one", "real_tokens"));
    let padded = |name| home.numbers(name, "padded_tokens").iter().sum::<f64>();
    assert!(padded("several") < padded("one"));

    let data = home.path("text.txt");
    let small = ["train", "--data", &data, "--max-tokens-per-batch", "100", "--context", "128"];
    rejects(&small, &["--max-tokens-per-batch is 100, must be at least 128"]);
}

#[test]
fn runs_resume_with_other_sharding() {
    let home = Home::new();
    home.complete("whole");
    home.train("parts", &["--steps", STEPS, "--strategy", "full", "--keep", "gathered"]);
    assert!(home.model("parts") == home.model("whole"));
    let [whole, parts] = ["whole", "parts"].map(|name| run_json(&home, name));
    assert_eq!(whole["identity"], parts["identity"]);
    assert!(whole["sessions"][0].get("sharding").is_none());
    let sharding = &parts["sessions"][0]["sharding"];
    let expected = serde_json::json!({
        "strategy": {"full": "dim0"}, "keep": "gathered", "optimizer_in_backward": true,
    });
    assert_eq!(*sharding, expected);

    for (name, first, second) in [
        ("into-parts", &[][..], &["--strategy", "full", "--layout", "block-ragged"][..]),
        ("into-others", &["--strategy", "layer-wise"], &["--strategy", "whole-tensor"]),
    ] {
        home.train(name, &[&["--steps", STEPS][..], first].concat());
        home.end_again(name, second);
        assert!(home.model(name) == home.model("whole"), "{name}");
        let sessions = run_json(&home, name)["sessions"].clone();
        let sharded = |n: usize| sessions[n].get("sharding").is_some();
        assert_eq!((sharded(0), sharded(1)), (!first.is_empty(), !second.is_empty()), "{name}");
    }
    // Another number of devices gives nearly equal losses.
    home.end_again("into-parts", &["--world-size", "3"]);
    for (found, expected) in home.losses("into-parts").iter().zip(home.losses("whole")) {
        assert!((found - expected).abs() < 1e-4, "{found} for {expected}");
    }
}

#[test]
fn report_describes_sharding() {
    let home = Home::new();
    let data = home.path("text.txt");
    let out = home.path("run");
    let args = ["train", "--data", &data, "--steps", "2", "--out", &out];
    let sharded = ["--strategy", "full", "--layout", "row-ragged", "--keep", "graph"];
    let copies = ["--replicas", "2", "--prefetch", "2"];
    text(&[&args[..], &sharded, &copies, &["--lr-schedule", "cosine"]].concat());
    text(&["report", &out]);
    let page = fs::read_to_string(home.at("run").join("report.html")).unwrap();
    for words in [
        "2 devices, sharded by full, where units keep their graphs, in 2 copies, with 2 units \
         gathered ahead, with the optimizer inside",
        "planned calls",
        "gathered parameters",
        "lr_schedule",
        "cosine",
    ] {
        assert!(page.contains(words), "no {words:?} in {page}");
    }
}

#[test]
fn conflicting_options_are_rejected() {
    rejects_each(
        &["train"],
        &[
            ("--keep inputs", "--keep needs a --strategy"),
            ("--replicas 1", "--replicas needs a --strategy"),
            ("--prefetch 1", "--prefetch needs a --strategy"),
            ("--layout flat", "--layout needs --strategy full"),
            ("--rules rules.json", "--rules needs --strategy hybrid"),
            ("--strategy layer-wise --layout flat", "--layout needs --strategy full"),
            ("--strategy full --layer-order any", "needs --strategy layer-wise"),
            ("--strategy full --block-size 2", "needs a ragged --layout"),
            (
                "--strategy full --replicas 2 --world-size 3",
                "--replicas 2 does not divide the 3 devices",
            ),
            (
                "--strategy full --replicas 0 --device cuda",
                "--replicas 0 does not divide the 2 devices",
            ),
            ("--n-heads 3", "--n-heads is 3, must be a divisor of hidden 128"),
            ("--n-layers 0", "num_hidden_layers is 0"),
            ("--hidden 100000000", "hidden_size is 100000000"),
            ("--dry-run --out run", "--dry-run | --out"),
            ("--dry-run --steps 3", "--dry-run | --steps"),
        ],
    );
}

/// Returns the cells of the table row that begins with this name.
fn row<'a>(table: &'a str, name: &str) -> Vec<&'a str> {
    let row = table.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
    let cells = row.trim().split("  ").map(str::trim).filter(|cell| !cell.is_empty());
    cells.collect()
}

#[test]
fn dry_run_compares_and_writes_nothing() {
    let home = Home::new();
    let data = home.path("text.txt");
    let train = ["train", "--data", &data, "--world-size", "3", "--dry-run"];
    let before = support::run::contents(&home.at(""));
    for keep in ["inputs", "gathered"] {
        let printed = text(&[&train[..], &["--strategy", "full", "--keep", keep]].concat());
        // Predicted and counted calls and bytes are equal.
        let reduced = row(&printed, "reduce_scatter");
        assert_eq!((reduced[1], reduced[3]), (reduced[2], reduced[4]), "{printed}");
        assert_ne!(reduced[3], "0", "{printed}");
        let gathered = row(&printed, "all_gather");
        let number = |cell: &str| cell.replace(',', "").parse::<u64>().unwrap();
        // Not in the plan: the loss, and for each unit the set of parameters with a gradient and the
        // gradient norms.
        let n_units = number(reduced[1]);
        assert_eq!(number(gathered[2]), number(gathered[1]) + 1 + 2 * n_units, "{printed}");
        let more = number(gathered[4]) - number(gathered[3]);
        assert!((1..1000).contains(&more), "{printed}");
        for term in ["parameters", "gathered parameters", "activations", "peak"] {
            assert!(row(&printed, term).len() >= 2, "{printed}");
        }
    }
    let whole = text(&train);
    assert!(whole.contains("a run that is not sharded has no plan"), "{whole}");
    assert!(support::run::contents(&home.at("")) == before);
    assert!(run(&["report", &home.path("")]).status.code() == Some(2));
}

/// A model of 13 million parameters, 48 MiB, and few tokens: the parameters outweigh everything else.
#[cfg(target_os = "linux")]
const LARGE: &str =
    "--n-layers 4 --hidden 512 --context 32 --max-tokens 128 --steps 1 --world-size 4 --no-sample";

/// Memory limit of four devices in one process: enough for a sharded model, but not for four full
/// sets of gradients.
#[cfg(target_os = "linux")]
const LIMIT_KIB: u32 = 480_000;

/// Trains the large model on four devices in a process with that limit.
#[cfg(target_os = "linux")]
fn train_limited(home: &Home, name: &str, more: &[&str]) -> std::process::Output {
    let limit = format!("ulimit -v {LIMIT_KIB}; exec \"$0\" \"$@\"");
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", &limit, env!("CARGO_BIN_EXE_candle-distributed"), "train"]);
    limited.args(["--data", &home.path("text.txt"), "--out", &home.path(name)]);
    limited.args(words(LARGE)).args(more).output().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn sharding_trains_oversized_model() {
    let home = Home::new();
    // The run is rejected before the first step, with both sizes and a hint.
    let rejected = train_limited(&home, "whole", &[]);
    assert_eq!(rejected.status.code(), Some(2), "{}", said(&rejected));
    for words in ["would take up to", "iB, but its address space", "hint: --strategy full"] {
        assert!(said(&rejected).contains(words), "{}", said(&rejected));
    }
    assert!(!home.at("whole").exists());

    // Without that check, the process runs out of memory.
    let killed = train_limited(&home, "killed", &["--memory-limit", "1TiB"]);
    assert!(!killed.status.success(), "{}", said(&killed));
    assert!(!home.at("killed").join("model").exists());

    let trained = train_limited(&home, "parts", &["--strategy", "full"]);
    assert!(trained.status.success(), "{}", said(&trained));
    assert!(matches!(home.losses("parts")[..], [loss] if loss.is_finite()));
}
