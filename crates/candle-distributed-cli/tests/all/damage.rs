//! Damage to the files of a run: it is detected, or does not change the result.

use std::{fs, path::Path};

use crate::support::{
    SMALL,
    run::{Home, contents, copy, replace, said},
};

/// A function that damages the folder of a run. It may use the folder of another run.
type DamageFn = fn(&Path, other: &Path);

/// Folder of the newest checkpoint.
const NEWEST: &str = "checkpoints/step-0000000008";
const OLDER: &str = "checkpoints/step-0000000004";
const FIRST_SHARD: &str = "checkpoints/step-0000000008/shard-00001-of-00002.safetensors";
const SECOND_SHARD: &str = "shard-00002-of-00002.safetensors";
const INDEX: &str = "checkpoints/step-0000000008/index.json";

/// Flips a bit of the byte at this distance from the end.
fn flip(path: &Path, from_end: usize, bit: u32) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
}

/// Cuts a file to half its length.
fn cut_in_half(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
}

/// Damage to a run that was killed after step 8.
const TO_A_KILLED_RUN: [(&str, DamageFn); 15] = [
    ("seed", |run, _| replace(run.join("run.json"), "\"seed\": 0", "\"seed\": 4")),
    ("half the settings", |run, _| cut_in_half(&run.join("run.json"))),
    ("no settings", |run, _| fs::remove_file(run.join("run.json")).unwrap()),
    ("settings of another run", |run, other| {
        fs::copy(other.join("run.json"), run.join("run.json")).unwrap();
    }),
    ("a line of metrics", |run, _| {
        replace(run.join("metrics.jsonl"), "\"step\":2,", "\"step\";2,");
    }),
    ("no metrics", |run, _| fs::remove_file(run.join("metrics.jsonl")).unwrap()),
    ("a tensor of the first device", |run, _| flip(&run.join(FIRST_SHARD), 4001, 6)),
    ("a tensor of the second device", |run, _| flip(&run.join(NEWEST).join(SECOND_SHARD), 77, 0)),
    ("no file of tensors", |run, _| fs::remove_file(run.join(FIRST_SHARD)).unwrap()),
    ("step of the index", |run, _| replace(run.join(INDEX), "\"step\": 8", "\"step\": 9")),
    ("position in the epoch", |run, _| {
        let index = run.join(INDEX);
        let text = fs::read_to_string(&index).unwrap();
        let at = text.find("\"epoch\"").unwrap();
        let digit = at + text[at..].find(|character: char| character.is_ascii_digit()).unwrap();
        let length = text.len();
        flip(&index, length - digit, 0);
    }),
    ("no index", |run, _| fs::remove_file(run.join(INDEX)).unwrap()),
    ("tensors of another step", |run, _| {
        fs::copy(run.join(OLDER).join(SECOND_SHARD), run.join(NEWEST).join(SECOND_SHARD)).unwrap();
    }),
    ("a checkpoint of another run", |run, other| {
        fs::remove_dir_all(run.join(NEWEST)).unwrap();
        copy(&other.join(NEWEST), &run.join(NEWEST));
    }),
    ("a checkpoint of another name", |run, _| {
        fs::remove_dir_all(run.join(NEWEST)).unwrap();
        fs::rename(run.join(OLDER), run.join(NEWEST)).unwrap();
    }),
];

const MODEL: &str = "model/model.safetensors";

/// Damage to a complete run.
const TO_A_COMPLETE_RUN: [(&str, DamageFn); 4] = [
    ("a bit of the model", |run, _| flip(&run.join(MODEL), 5001, 6)),
    ("a model of another run", |run, other| {
        fs::copy(other.join(MODEL), run.join(MODEL)).unwrap();
    }),
    ("fingerprint of the model", |run, _| {
        replace(run.join("run.json"), "\"model_fingerprint\": \"", "\"model_fingerprint\": \"0");
    }),
    ("last line of metrics", |run, _| {
        replace(run.join("metrics.jsonl"), "\"step\":11,", "\"step\":71,");
    }),
];

#[test]
fn damaged_runs_are_rejected_or_recovered() {
    let home = Home::new();
    home.complete("whole");
    let model = home.model("whole");
    home.killed("killed");
    home.train("other", &["--steps", "12", "--seed", "3"]);
    let cases = TO_A_KILLED_RUN
        .iter()
        .map(|case| ("killed", case))
        .chain(TO_A_COMPLETE_RUN.iter().map(|case| ("whole", case)));
    let mut n_rejected = 0;
    for (original, (name, damage)) in cases {
        copy(&home.at(original), &home.at(name));
        damage(&home.at(name), &home.at("other"));
        let damaged = contents(&home.at(name));
        assert!(damaged != contents(&home.at(original)), "{name}: nothing is damaged");
        let resumed = home.resume(name, &SMALL);
        if resumed.status.success() {
            assert!(home.model(name) == model, "{name}: another model");
        } else {
            n_rejected += 1;
            let said = said(&resumed);
            assert_eq!(resumed.status.code(), Some(2), "{name}: {said}");
            assert!(said.contains("error: "), "{name}: {said}");
            assert!(contents(&home.at(name)) == damaged, "{name}: the rejected run has changed");
        }
        fs::remove_dir_all(home.at(name)).unwrap();
    }
    assert!(n_rejected >= 6, "{n_rejected} rejected");
}
