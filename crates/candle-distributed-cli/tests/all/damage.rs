//! Damage to the files of a run: it is noticed, or the run ends as if there had been none.

use std::{fs, path::Path};

use crate::support::{
    SMALL,
    run::{Home, contents, copy, replace, said},
};

/// What befalls the folder of a run, given that of another.
type Damage = fn(&Path, other: &Path);

/// Where the files of the newest checkpoint lie.
const NEWEST: &str = "checkpoints/step-0000000008";
const OLDER: &str = "checkpoints/step-0000000004";
const FIRST_SHARD: &str = "checkpoints/step-0000000008/shard-00001-of-00002.safetensors";
const SECOND_SHARD: &str = "shard-00002-of-00002.safetensors";
const INDEX: &str = "checkpoints/step-0000000008/index.json";

/// Flips a bit of a byte that lies this far from the end.
fn flip(path: &Path, from_end: usize, bit: u32) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 1 << bit;
    fs::write(path, bytes).unwrap();
}

/// Cuts a file to this share of its length.
fn cut(path: &Path, parts: usize, of: usize) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() * parts / of]).unwrap();
}

/// Damage to a run that was killed after step 8.
const TO_A_KILLED_RUN: [(&str, Damage); 25] = [
    ("seed", |run, _| replace(run.join("run.json"), "\"seed\": 0", "\"seed\": 4")),
    ("steps", |run, _| replace(run.join("run.json"), "\"steps\": 12", "\"steps\": 13")),
    ("text", |run, _| replace(run.join("run.json"), "\"text\": \"", "\"text\": \"0")),
    ("tokens", |run, _| replace(run.join("run.json"), "4096", "4097")),
    ("sizes", |run, _| {
        replace(run.join("run.json"), "\"num_attention_heads\": 2", "\"num_attention_heads\": 4");
    }),
    ("path of the text", |run, _| replace(run.join("run.json"), "text.txt", "text.txu")),
    ("name of a field", |run, _| replace(run.join("run.json"), "\"seed\"", "\"teee\"")),
    ("half the settings", |run, _| cut(&run.join("run.json"), 1, 2)),
    ("no settings", |run, _| fs::remove_file(run.join("run.json")).unwrap()),
    ("settings of another run", |run, other| {
        fs::copy(other.join("run.json"), run.join("run.json")).unwrap();
    }),
    ("a line of metrics", |run, _| {
        replace(run.join("metrics.jsonl"), "\"step\":2,", "\"step\";2,");
    }),
    ("number of a step", |run, _| replace(run.join("metrics.jsonl"), "\"step\":5,", "\"step\":7,")),
    ("half the metrics", |run, _| cut(&run.join("metrics.jsonl"), 1, 2)),
    ("no metrics", |run, _| fs::remove_file(run.join("metrics.jsonl")).unwrap()),
    ("a tensor of the first device", |run, _| flip(&run.join(FIRST_SHARD), 4001, 6)),
    ("a tensor of the second device", |run, _| flip(&run.join(NEWEST).join(SECOND_SHARD), 77, 0)),
    ("a header", |run, _| {
        let shard = run.join(FIRST_SHARD);
        let length = usize::try_from(fs::metadata(&shard).unwrap().len()).unwrap();
        flip(&shard, length - 30, 2);
    }),
    ("half a file of tensors", |run, _| cut(&run.join(FIRST_SHARD), 1, 2)),
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

/// Damage to a run that is complete.
const TO_A_COMPLETE_RUN: [(&str, Damage); 6] = [
    ("a bit of the model", |run, _| flip(&run.join(MODEL), 5001, 6)),
    ("half the model", |run, _| cut(&run.join(MODEL), 1, 2)),
    ("a model of another run", |run, other| {
        fs::copy(other.join(MODEL), run.join(MODEL)).unwrap();
    }),
    ("fingerprint of the model", |run, _| {
        replace(run.join("run.json"), "\"model_fingerprint\": \"", "\"model_fingerprint\": \"0");
    }),
    ("seed of a complete run", |run, _| {
        replace(run.join("run.json"), "\"seed\": 0", "\"seed\": 1");
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
    let mut refused = 0;
    for (of, (name, damage)) in cases {
        copy(&home.at(of), &home.at(name));
        damage(&home.at(name), &home.at("other"));
        let damaged = contents(&home.at(name));
        assert!(damaged != contents(&home.at(of)), "{name}: nothing is damaged");
        let resumed = home.resume(name, &SMALL);
        if resumed.status.success() {
            assert!(home.model(name) == model, "{name}: another model");
        } else {
            refused += 1;
            let said = said(&resumed);
            assert_eq!(resumed.status.code(), Some(2), "{name}: {said}");
            assert!(said.contains("error: "), "{name}: {said}");
            assert!(contents(&home.at(name)) == damaged, "{name}: a refusal changed the run");
        }
        fs::remove_dir_all(home.at(name)).unwrap();
    }
    assert!(refused >= 9, "{refused} refused");
}
