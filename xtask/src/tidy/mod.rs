//! `cargo xtask tidy`: the house rules that no compiler checks.
//!
//! Each rule is a function from what it looks at to the list of violations. All of them run before
//! the report, so that one run shows everything there is to mend.

mod direction;
mod package;
mod text;

use std::{fmt, fs, path::Path};

use crate::{
    cmd::Result,
    workspace::{self, Workspace},
};

/// A broken rule, and where.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    /// Relative to the root, with `/` on every system.
    path: String,
    line: usize,
    rule: String,
}

impl Violation {
    fn new(path: &str, line: usize, rule: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule: rule.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.rule)
    }
}

/// The folders that hold our own files.
const FOLDERS: [&str; 6] = ["benches", "crates", "docs", "fuzz", "tests", "xtask"];

pub(crate) fn run() -> Result {
    let violations = violations()?;
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => Ok(()),
        n => Err(format!("{n} house rules broken").into()),
    }
}

fn violations() -> Result<Vec<Violation>> {
    let workspace = Workspace::read()?;
    let mut violations = direction::check(&workspace);
    violations.extend(direction::unnamed(
        &workspace,
        &read_if_exists(direction::ARCHITECTURE).unwrap_or_default(),
    ));
    violations.extend(package::check(&workspace, &read_if_exists));
    for path in own_files()? {
        violations.extend(text::check(&path, &read_if_exists(&path).unwrap_or_default(), &exists));
    }
    violations.sort();
    Ok(violations)
}

/// The paths of our sources, manifests and pages, relative to the root.
fn own_files() -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(workspace::root())? {
        files.push(entry?.path());
    }
    for folder in FOLDERS {
        files.extend(workspace::files_below(&workspace::root().join(folder))?);
    }
    let ours = files.iter().filter(|path| {
        path.extension().is_some_and(|end| end == "rs" || end == "md" || end == "toml")
    });
    Ok(ours.map(|path| relative(path)).collect())
}

fn relative(path: &Path) -> String {
    path.strip_prefix(workspace::root()).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// The text of a file, given relative to the root.
fn read_if_exists(path: &str) -> Option<String> {
    fs::read_to_string(workspace::root().join(path)).ok()
}

fn exists(path: &str) -> bool {
    workspace::root().join(path).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_keeps_the_house_rules() {
        let violations = violations().unwrap();
        let report: Vec<_> = violations.iter().map(ToString::to_string).collect();
        assert!(report.is_empty(), "\n{}", report.join("\n"));
    }

    #[test]
    fn a_violation_reads_like_a_compiler_error() {
        let violation = Violation::new("crates/a/src/lib.rs", 7, "why");
        assert_eq!(violation.to_string(), "crates/a/src/lib.rs:7: why");
    }
}
