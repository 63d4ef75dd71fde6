//! `train --lora`: adapters of a model that stays as it is.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{collections::BTreeSet, fs};

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::support::{
    refuses,
    run::{Home, STEPS, said},
    text,
};

/// A home with a model that was trained for a few steps, and its file.
fn home_with_model() -> (Home, String) {
    let home = Home::new();
    home.train("base", &["--steps", "8"]);
    let model = home.path("base/model.safetensors");
    (home, model)
}

fn names(file: &[u8]) -> BTreeSet<String> {
    SafeTensors::deserialize(file).unwrap().names().into_iter().map(str::to_owned).collect()
}

fn losses(home: &Home, name: &str) -> Vec<f64> {
    let metrics = fs::read_to_string(home.at(name).join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    metrics.lines().map(loss).collect()
}

#[test]
fn adapters_learn_and_the_model_stays_as_it_is() {
    let (home, base) = home_with_model();
    let lora = ["--steps", STEPS, "--weights", &base, "--lora", "2"];
    home.train("lora", &lora);
    let found = losses(&home, "lora");
    assert!(found[11] < 0.9 * found[0], "{found:?}");
    // It begins where the model has ended: B is zero.
    home.train("all", &["--steps", "1", "--weights", &base]);
    assert_eq!(losses(&home, "all"), found[..1]);

    // The model with their effect has the names of the model, and other linear layers alone.
    let (before, after) = (fs::read(&base).unwrap(), home.model("lora"));
    assert_eq!(names(&before), names(&after));
    let tensors = [&before, &after].map(|file| SafeTensors::deserialize(file).unwrap());
    for name in names(&before) {
        let [old, new] = [&tensors[0], &tensors[1]].map(|model| model.tensor(&name).unwrap());
        let is_linear = name.starts_with("blocks.") && !name.contains("norm");
        assert_eq!(old.data() != new.data(), is_linear, "{name}");
    }
    let adapter = fs::read(home.at("lora").join("adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(names(&adapter).len(), 2 * 2 * 4);
    let config = fs::read(home.at("lora").join("adapter/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(2), &json!(4.0)));
    assert!(!home.at("lora").join("merged.partial").exists());

    // Another run begins with it.
    home.train("next", &["--steps", "1", "--weights", &home.path("lora")]);
    assert!(losses(&home, "next")[0] < found[0]);
}

#[test]
fn adapters_are_resumed_and_sharded() {
    let (home, base) = home_with_model();
    let lora = ["--steps", STEPS, "--weights", &base, "--lora", "4", "--lora-alpha", "4"];
    home.train("whole", &lora);
    let model = home.model("whole");
    fs::remove_file(home.at("whole").join("model.safetensors")).unwrap();
    home.is_refused("whole", &["--lora", "2"], &["with --lora 4"]);
    let resumed = home.resume("whole", &["--strategy", "full"]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    assert!(home.model("whole") == model);
    for (n, more) in [
        &["--strategy", "full", "--keep", "graph"][..],
        &["--strategy", "layer-wise", "--optimizer-in-backward"],
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("parts-{n}");
        home.train(&name, &[&lora[..], more].concat());
        assert!(home.model(&name) == model, "{more:?}");
    }
    // A checkpoint has adapters alone, a quarter of the model's bytes or less.
    let checkpoints = fs::read_dir(home.at("parts-0").join("checkpoints")).unwrap();
    let folder = checkpoints.map(|entry| entry.unwrap().path()).find(|path| path.is_dir()).unwrap();
    let sizes = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert!(sizes.sum::<u64>() < model.len() as u64 / 4);

    text(&["report", &home.path("whole")]);
    let page = fs::read_to_string(home.at("whole").join("report.html")).unwrap();
    assert!(page.contains("lora") && page.contains("began with"), "{page}");
    let dry = ["train", "--data", &home.path("text.txt"), "--dry-run", "--weights", &base];
    let printed = text(&[&dry[..], &["--lora", "4", "--strategy", "full"]].concat());
    assert!(printed.contains("weights with adapters"), "{printed}");
}

#[test]
fn adapters_of_nothing_are_refused() {
    let (home, base) = home_with_model();
    refuses(&["train", "--lora", "2"], &["--lora 2 needs the --weights", "hint: --weights takes"]);
    refuses(&["train", "--lora-alpha", "2"], &["--lora"]);
    for (options, words) in [
        (&["--lora", "0"][..], "the rank of adapters is 0"),
        (&["--lora", "1", "--lora-alpha", "0"], "the alpha of adapters is 0"),
    ] {
        refuses(&[&["train", "--weights", &base], options].concat(), &[words]);
    }
    // Shapes do not tell the number of heads.
    home.train("eight", &["--steps", "1", "--n-heads", "8"]);
    let eight = home.path("eight");
    refuses(&["train", "--weights", &eight], &["was trained with --n-heads 8, this run has 4"]);
    home.train("again", &["--steps", "1", "--n-heads", "8", "--weights", &eight]);
}

#[test]
fn adapters_of_somebody_are_not_overwritten() {
    let (home, base) = home_with_model();
    fs::create_dir_all(home.at("taken").join("adapter")).unwrap();
    home.is_refused("taken", &["--weights", &base, "--lora", "2"], &["adapter"]);
}
