//! Runs of `train` in a folder, and what lies there.

#![allow(dead_code, unreachable_pub, reason = "no test file uses all of it")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use crate::support::{command, refuses, text};

/// A folder with a text, and runs on it.
pub struct Home(pub tempfile::TempDir);

pub const STEPS: &str = "12";

impl Home {
    pub fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        let lines: Vec<String> =
            (1..=40).map(|n| format!("Line {n} of a text to learn.\n\n")).collect();
        fs::write(home.at("text.txt"), lines.concat()).unwrap();
        home
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn path(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().into()
    }

    /// Trains all steps in the folder `name`.
    pub fn train(&self, name: &str, more: &[&str]) {
        let (data, out) = (self.path("text.txt"), self.path(name));
        let args = ["train", "--data", &data, "--checkpoint-every", "4", "--out", &out];
        text(&[&args, more].concat());
    }

    /// A complete run.
    pub fn complete(&self, name: &str) {
        self.train(name, &["--steps", STEPS]);
    }

    /// A run as if it had been killed after step 8.
    pub fn killed(&self, name: &str) {
        self.complete(name);
        fs::remove_file(self.at(name).join("model.safetensors")).unwrap();
        fs::remove_file(self.at(name).join("loss.svg")).unwrap();
    }

    pub fn resume(&self, name: &str, more: &[&str]) -> Output {
        let out = self.path(name);
        let args = ["train", "--checkpoint-every", "4", "--resume", "--out", &out];
        command(&[&args, more].concat()).output().unwrap()
    }

    /// Checks that a run cannot be resumed, for a reason in these words, and that nothing of it has
    /// changed.
    pub fn is_refused(&self, name: &str, more: &[&str], words: &[&str]) {
        let before = contents(&self.at(name));
        let out = self.path(name);
        let args = ["train", "--checkpoint-every", "4", "--resume", "--out", &out];
        refuses(&[&args, more].concat(), words);
        assert!(contents(&self.at(name)) == before, "{name} has changed");
    }

    pub fn model(&self, name: &str) -> Vec<u8> {
        fs::read(self.at(name).join("model.safetensors")).unwrap()
    }
}

pub fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Every file and folder under `folder`, with its content.
pub fn contents(folder: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
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

pub fn copy(from: &Path, to: &Path) {
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

pub fn replace(path: PathBuf, from: &str, to: &str) {
    let content = fs::read_to_string(&path).unwrap();
    assert!(content.contains(from), "no {from:?} in {content}");
    fs::write(path, content.replacen(from, to, 1)).unwrap();
}
