//! `cargo xtask tidy`: the house rules that no compiler checks.
//!
//! Each rule is a function from what it looks at to the list of violations. All of them run before
//! the report, so that one run shows everything there is to mend.

mod checklist;
mod direction;
mod imports;
mod package;
mod text;

use std::{fmt, fs};

use cargo_metadata::{Metadata, TargetKind};

use crate::{
    cmd::{self, Result},
    workspace,
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
        0 => {
            println!("all house rules hold");
            Ok(())
        }
        n => Err(format!("{n} house rules broken").into()),
    }
}

fn violations() -> Result<Vec<Violation>> {
    let metadata = workspace::read()?;
    let files = own_files()?;
    let mut violations = direction::check(&metadata, &read);
    violations.extend(package::check(&metadata, &read));
    violations.extend(checklist::check(&files, &read));
    violations.extend(roots(&metadata).iter().flat_map(|root| imports::check(root, &read)));
    for path in &files {
        let text = fs::read_to_string(cmd::root().join(path))?;
        violations.extend(text::check(path, &text));
    }
    violations.sort();
    Ok(violations)
}

/// The root files of the crates and of this program.
fn roots(metadata: &Metadata) -> Vec<String> {
    let own = metadata.workspace_packages().into_iter().filter(|package| package.name == "xtask");
    let targets = workspace::crates(metadata).chain(own).flat_map(|package| &package.targets);
    let ours = targets.filter(|target| {
        target.kind.iter().any(|kind| matches!(kind, TargetKind::Lib | TargetKind::Bin))
    });
    ours.map(|target| workspace::relative(target.src_path.as_std_path())).collect()
}

/// The paths of our sources, manifests and pages, relative to the root.
fn own_files() -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(cmd::root())? {
        files.push(entry?.path());
    }
    for folder in FOLDERS {
        files.extend(workspace::files_below(&cmd::root().join(folder))?);
    }
    files.retain(|path| {
        path.extension().is_some_and(|end| ["rs", "md", "toml"].iter().any(|ours| end == *ours))
    });
    Ok(files.iter().map(|path| workspace::relative(path)).collect())
}

/// The text of a file, given relative to the root, if there is one.
fn read(path: &str) -> Option<String> {
    fs::read_to_string(cmd::root().join(path)).ok()
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

    #[test]
    fn the_roots_of_libraries_and_programs_are_found() {
        let roots = roots(&workspace::read().unwrap());
        for root in ["crates/core-types/src/lib.rs", "xtask/src/main.rs"] {
            assert!(roots.contains(&root.to_owned()), "{roots:?}");
        }
    }
}
