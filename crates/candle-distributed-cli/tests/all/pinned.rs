//! Short runs of every kind, whose losses change only with a commit that says so.

use std::fs;

use crate::{
    pins::{self, Losses},
    support::{finetune::Model, golden, run::said},
};

const SMALL: [&str; 14] = [
    "--n-layers",
    "2",
    "--hidden",
    "32",
    "--n-heads",
    "4",
    "--context",
    "32",
    "--max-tokens",
    "256",
    "--steps",
    "4",
    "--checkpoint-every",
    "2",
];

/// Trains the small model in the folder `name`, and returns its losses.
fn small(home: &Model, name: &str, more: &[&str]) -> Vec<f64> {
    let (data, out) = (home.path("texts"), home.path(name));
    let args = ["train", "--no-sample", "--out", &out];
    let data = ["--data", &data];
    let data = if more.contains(&"--stories") { &data[..0] } else { &data[..] };
    let more: Vec<&str> = more.iter().copied().filter(|option| *option != "--stories").collect();
    crate::support::text(&[&args[..], data, &SMALL, &more].concat());
    home.losses(name)
}

/// Fine-tunes a model that transformers has made.
fn finetuned(home: &Model, name: &str, more: &[&str]) -> Vec<f64> {
    let llama = golden("llama");
    let usual =
        ["--model", &llama, "--steps", "3", "--lr", "0.001", "--no-sample", "--max-tokens", "256"];
    home.train(name, &[&usual[..], more].concat());
    home.losses(name)
}

#[test]
fn losses_are_those_of_the_file() {
    let home = Model::of_lines();
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
        ("in-backward-2", &["--strategy", "full", "--optimizer-in-backward"]),
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
        ("in-backward-2", "whole-2"),
        ("bf16-sharded-2", "bf16-whole-2"),
        ("llama-sharded-2", "llama-whole-2"),
    ] {
        assert_eq!(found[sharded], found[whole], "{sharded}");
    }
    // As if it had been killed after step 2.
    fs::remove_dir_all(home.at("whole-2/model")).unwrap();
    let out = home.path("whole-2");
    let resumed = ["train", "--resume", "--no-sample", "--out", &out];
    let resumed = crate::support::run(&resumed);
    assert!(resumed.status.success(), "{}", said(&resumed));
    assert_eq!(home.losses("whole-2"), found["whole-2"], "resumed");
}
