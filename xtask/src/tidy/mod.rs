//! `cargo xtask tidy`: the house rules that no compiler checks.
//!
//! Each rule is a function that returns violations. All of them run before the report, so that one run
//! shows them all.

mod imports;
mod size;
mod sought;
mod surface;
mod text;

use std::{collections::BTreeSet, fmt, fs, path::Path};

use cargo_metadata::{Package, TargetKind};

use crate::{
    cmd::{self, Result},
    tidy::{imports::ModuleTree, surface::NameUses},
    workspace,
};

/// A broken rule, and its place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    let files = own_files()?;
    let users: Vec<_> = files.iter().map(|path| (path, uses(path))).collect();
    let mut violations = Vec::new();
    let metadata = workspace::read()?;
    let program = metadata.workspace_packages().into_iter().filter(|one| one.name == "xtask");
    for package in workspace::crates(&metadata).chain(program) {
        violations.extend(check_package(package, &users));
    }
    violations.extend(size::folders(files.iter()));
    for path in &files {
        let text = fs::read_to_string(cmd::root().join(path))?;
        violations.extend(text::check(path, &text));
    }
    violations.sort();
    Ok(violations)
}

/// Returns the violations of rules about a whole package.
fn check_package(package: &Package, users: &[(&String, NameUses)]) -> Vec<Violation> {
    let folder = workspace::folder(package);
    let mut violations = Vec::new();
    let mut sources = BTreeSet::new();
    for (root, is_library) in roots(package) {
        let tree = match ModuleTree::read(&root, &read) {
            Ok(tree) => tree,
            Err(unread) => return vec![unread],
        };
        violations.extend(imports::circles_of_files(&tree));
        violations.extend(imports::circles_of_folders(&tree));
        sources.extend(tree.modules.iter().map(|module| module.file.clone()));
        if is_library {
            let users = users.iter().filter(|(path, _)| is_user(path, &folder));
            let users: Vec<_> = users.map(|(_, uses)| uses).collect();
            violations.extend(sought::check(&folder, surface::unused(&tree, &users)));
        }
    }
    let sources: Vec<_> = sources.iter().filter_map(|path| read(path)).collect();
    violations.extend(size::lines(&folder, &sources));
    violations
}

/// Returns the root files of the library and programs of a package, and whether each is a library.
fn roots(package: &Package) -> Vec<(String, bool)> {
    let mut roots = Vec::new();
    for target in &package.targets {
        let is_library = target.kind.contains(&TargetKind::Lib);
        if is_library || target.kind.contains(&TargetKind::Bin) {
            roots.push((workspace::relative(target.src_path.as_std_path()), is_library));
        }
    }
    roots
}

/// Returns the names that a file uses; manifests use none.
fn uses(path: &str) -> NameUses {
    let text = read(path).unwrap_or_default();
    match path.rsplit_once('.') {
        Some((_, "rs")) => NameUses::add_code(&text),
        Some((_, "md")) => NameUses::add_page(&text),
        _ => NameUses::default(),
    }
}

fn is_rust(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|end| end == "rs")
}

/// Returns true if a file is a user of the library in `folder`: a file or page of another package, an
/// example, a program or a page of the guide. The README of the library shows its own names.
fn is_user(path: &str, folder: &str) -> bool {
    match path.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')) {
        Some(rest) => rest.starts_with("examples/") || rest.starts_with("src/bin/"),
        None => is_rust(path) || path.starts_with("docs/") || path.ends_with("README.md"),
    }
}

/// Returns the paths of our sources, manifests and pages, relative to the root.
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

/// Returns the text of a file, given its path relative to the root, or `None` if it does not exist.
fn read(path: &str) -> Option<String> {
    fs::read_to_string(cmd::root().join(path)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_keeps_the_house_rules() {
        let violations = violations().unwrap();
        let report: Vec<_> = violations.iter().map(ToString::to_string).collect();
        assert!(report.is_empty(), "\n{}", report.join("\n"));
    }

    #[test]
    fn users_include_packages_and_pages() {
        for (path, expected) in [
            ("crates/b/src/lib.rs", true),
            ("crates/a/src/lib.rs", false),
            ("crates/a/tests/all/main.rs", false),
            ("crates/a/examples/x.rs", true),
            ("crates/a/src/bin/x.rs", true),
            ("crates/a/README.md", false),
            ("crates/b/README.md", true),
            ("README.md", true),
            ("docs/memory.md", true),
            ("CHANGELOG.md", false),
        ] {
            assert_eq!(is_user(path, "crates/a"), expected, "{path}");
        }
    }
}
