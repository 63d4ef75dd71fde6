//! Runs of `train` in a temporary folder, and their files.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use crate::support::{command, rejects, text};

/// A folder with a text, and runs on it.
pub(crate) struct Home(pub(crate) tempfile::TempDir);

pub(crate) const STEPS: &str = "12";

impl Home {
    pub(crate) fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        let lines: Vec<String> =
            (1..=40).map(|n| format!("Line {n} of a text to learn.\n\n")).collect();
        fs::write(home.at("text.txt"), lines.concat()).unwrap();
        home
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().into()
    }

    /// Trains all steps in the folder `name`.
    pub(crate) fn train(&self, name: &str, more: &[&str]) {
        let (data, out) = (self.path("text.txt"), self.path(name));
        let args = ["train", "--data", &data, "--checkpoint-every", "4", "--out", &out];
        text(&[&args, more].concat());
    }

    /// Trains a run to its end.
    pub(crate) fn complete(&self, name: &str) {
        self.train(name, &["--steps", STEPS]);
    }

    /// Trains a run, and simulates a kill after step 8.
    pub(crate) fn killed(&self, name: &str) {
        self.complete(name);
        fs::remove_dir_all(self.at(name).join("model")).unwrap();
        fs::remove_file(self.at(name).join("loss.svg")).unwrap();
    }

    /// Returns a number of each step of a run.
    pub(crate) fn numbers(&self, name: &str, field: &str) -> Vec<f64> {
        let metrics = fs::read_to_string(self.at(name).join("metrics.jsonl")).unwrap();
        let mut numbers = Vec::new();
        for line in metrics.lines() {
            let step: serde_json::Value = serde_json::from_str(line).unwrap();
            numbers.push(step[field].as_f64().unwrap());
        }
        numbers
    }

    pub(crate) fn losses(&self, name: &str) -> Vec<f64> {
        self.numbers(name, "loss")
    }

    pub(crate) fn remove_model(&self, name: &str) {
        fs::remove_dir_all(self.at(name).join("model")).unwrap();
    }

    /// Removes the model of a complete run, and resumes it from its last checkpoint.
    pub(crate) fn end_again(&self, name: &str, more: &[&str]) {
        self.remove_model(name);
        let resumed = self.resume(name, more);
        assert!(resumed.status.success(), "{name}: {}", said(&resumed));
    }

    pub(crate) fn resume(&self, name: &str, more: &[&str]) -> Output {
        let out = self.path(name);
        let args = ["train", "--checkpoint-every", "4", "--resume", "--out", &out];
        command(&[&args, more].concat()).output().unwrap()
    }

    /// Checks that resuming fails with these words, and changes no file.
    pub(crate) fn is_rejected(&self, name: &str, more: &[&str], words: &[&str]) {
        let before = contents(&self.at(name));
        let out = self.path(name);
        let args = ["train", "--checkpoint-every", "4", "--resume", "--out", &out];
        rejects(&[&args, more].concat(), words);
        assert!(contents(&self.at(name)) == before, "{name} has changed");
    }

    pub(crate) fn model(&self, name: &str) -> Vec<u8> {
        fs::read(self.at(name).join("model/model.safetensors")).unwrap()
    }
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Returns every file and folder under `folder`, with its content.
pub(crate) fn contents(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
            found.insert(path, None);
        } else {
            let content = fs::read(&path).unwrap();
            found.insert(path, Some(content));
        }
    }
    found
}

pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

pub(crate) fn replace(path: PathBuf, from: &str, to: &str) {
    let content = fs::read_to_string(&path).unwrap();
    assert!(content.contains(from), "no {from:?} in {content}");
    fs::write(path, content.replacen(from, to, 1)).unwrap();
}
