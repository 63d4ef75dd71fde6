//! Short runs of every kind with pinned losses.

use std::fs;

use crate::{
    pins::{self, Losses},
    support::{finetune::ModelHome, golden, run::said, words},
};

const SMALL: &str = "--n-layers 2 --hidden 32 --n-heads 4 --context 32 --max-tokens 256 --steps 4 \
                     --checkpoint-every 2";

/// Trains the small model in the folder `name`, and returns its losses.
fn small(home: &ModelHome, name: &str, more: &[&str]) -> Vec<f64> {
    let data = home.path("texts");
    let out = home.path(name);
    let args = ["train", "--no-sample", "--out", &out];
    let data = ["--data", &data];
    let data = if more.contains(&"--stories") { &data[..0] } else { &data[..] };
    let more: Vec<&str> = more.iter().copied().filter(|option| *option != "--stories").collect();
    crate::support::text(&[&args[..], data, &words(SMALL), &more].concat());
    home.losses(name)
}

/// Fine-tunes a model made with transformers, and returns its losses.
fn finetuned(home: &ModelHome, name: &str, more: &[&str]) -> Vec<f64> {
    let llama = golden("llama");
    let usual =
        ["--model", &llama, "--steps", "3", "--lr", "0.001", "--no-sample", "--max-tokens", "256"];
    home.train(name, &[&usual[..], more].concat());
    home.losses(name)
}

#[test]
fn losses_match_pinned_runs() {
    let home = ModelHome::with_lines();
    let full = ["--strategy", "full"];
    let mut found = Losses::new();
    for (name, more) in [
        ("whole-1", &["--world-size", "1"][..]),
        ("whole-2", &[]),
        ("whole-4", &["--world-size", "4"]),
        ("sharded-2", &full),
        (
            "sharded-4",
            &["--strategy", "full", "--world-size", "4", "--keep", "graph", "--prefetch", "1"],
        ),
        ("clipped-2", &["--strategy", "full", "--max-grad-norm", "1e9"]),
        ("bf16-whole-2", &["--dtype", "bf16"]),
        ("bf16-sharded-2", &["--dtype", "bf16", "--strategy", "full"]),
        ("stories-2", &["--stories"]),
    ] {
        found.insert(name.to_owned(), small(&home, name, more));
    }
    for (name, more) in [
        ("llama-whole-2", &["--rows", "packed"][..]),
        ("llama-sharded-2", &["--rows", "packed", "--strategy", "full"]),
        ("lora-2", &["--lora", "2"]),
    ] {
        found.insert(name.to_owned(), finetuned(&home, name, more));
    }
    pins::check(&found);
    for (sharded, whole) in [
        ("sharded-2", "whole-2"),
        ("sharded-4", "whole-4"),
        ("clipped-2", "whole-2"),
        ("bf16-sharded-2", "bf16-whole-2"),
        ("llama-sharded-2", "llama-whole-2"),
    ] {
        assert_eq!(found[sharded], found[whole], "{sharded}");
    }
    // Simulates a kill after step 2.
    fs::remove_dir_all(home.at("whole-2/model")).unwrap();
    let out = home.path("whole-2");
    let resumed = ["train", "--resume", "--no-sample", "--out", &out];
    let resumed = crate::support::run(&resumed);
    assert!(resumed.status.success(), "{}", said(&resumed));
    assert_eq!(home.losses("whole-2"), found["whole-2"], "resumed");
}
