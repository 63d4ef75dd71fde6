//! The built-in model generates grammatical sentences after training on short stories.

use std::env;

use crate::support::{as_given, run::said};

#[path = "../../../finetune/src/text/stories.rs"]
mod grammar;

/// The variable with the number of seeds to train with, about a minute each with `--release`.
const SEEDS: &str = "STORY_SEEDS";

/// Minimum fraction of grammatical sentences.
const LEAST: f64 = 0.8;

#[test]
fn model_generates_grammatical_sentences() {
    let Some(n_seeds) = env::var(SEEDS).ok().and_then(|seeds| seeds.parse::<u64>().ok()) else {
        println!("SKIPPED: {SEEDS}=5 trains with five seeds");
        return;
    };
    for seed in 0..n_seeds {
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("run");
        let seed = seed.to_string();
        let trained =
            as_given(&["train", "--seed", &seed, "--out", out.to_str().unwrap()]).output().unwrap();
        assert!(trained.status.success(), "{}", said(&trained));
        let text = std::fs::read_to_string(out.join("sample.txt")).unwrap();
        let sentences: Vec<&str> = text.split_inclusive('.').map(str::trim_start).collect();
        let n_right = sentences.iter().filter(|sentence| grammar::parses(sentence)).count();
        println!("seed {seed}: {n_right} of {} sentences: {text}", sentences.len());
        assert!(n_right as f64 >= LEAST * sentences.len() as f64, "seed {seed}: {text}");
        assert!((200..=400).contains(&text.len()), "seed {seed}: {} bytes", text.len());
    }
}
