//! Rules about the text of one file.

use std::path::Path;

use crate::tidy::Violation;

/// Marks of work that was left for later; written in two parts, or this file would break its own
/// rule.
const MARKS: [&str; 5] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("todo", "!"),
    concat!("unimplemented", "!"),
];

/// Returns the violations of every rule in the file at `path`.
pub(super) fn check(path: &str, text: &str) -> Vec<Violation> {
    let mut violations = unfinished(path, text);
    if Path::new(path).extension().is_some_and(|end| end == "rs") {
        violations.extend(module_docs(path, text));
    }
    if path.ends_with("/Cargo.toml") {
        violations.extend(lints(path, text));
    }
    violations
}

fn module_docs(path: &str, text: &str) -> Option<Violation> {
    let page = path.ends_with("lib.rs") && text.starts_with("#![doc = include_str!");
    let documented = page || text.starts_with("//!");
    (!documented).then(|| Violation::new(path, 1, "a module starts with its `//!` documentation"))
}

fn lints(path: &str, text: &str) -> Option<Violation> {
    let is_member = !path.starts_with("fuzz/");
    let has_lints = text.replace('\r', "").contains("[lints]\nworkspace = true\n");
    (is_member && !has_lints)
        .then(|| Violation::new(path, 1, "a package has `[lints] workspace = true`"))
}

fn unfinished(path: &str, text: &str) -> Vec<Violation> {
    let marked = numbered(text)
        .filter_map(|(line, text)| Some((line, MARKS.iter().find(|mark| text.contains(**mark))?)));
    marked
        .map(|(line, mark)| {
            Violation::new(path, line, format!("`{mark}`: finish it, or open an issue"))
        })
        .collect()
}

/// Lines with their numbers, from 1 as editors count.
fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines at which `text` at `path` breaks a rule.
    fn lines(path: &str, text: &str) -> Vec<usize> {
        check(path, text).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn undocumented_module_is_found() {
        assert_eq!(lines("crates/a/src/b.rs", "use std::fmt;\n"), [1]);
        assert_eq!(lines("crates/a/src/b.rs", "#![doc = include_str!(\"../README.md\")]\n"), [1]);
        assert!(
            lines("crates/a/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n").is_empty()
        );
        assert!(lines("crates/a/src/b.rs", "//! What it is for.\n").is_empty());
    }

    #[test]
    fn missing_lints_are_found() {
        assert_eq!(lines("crates/a/Cargo.toml", "[package]\n"), [1]);
        assert!(lines("crates/a/Cargo.toml", "[lints]\r\nworkspace = true\r\n").is_empty());
    }

    #[test]
    fn unfinished_work_is_found() {
        for mark in MARKS {
            assert_eq!(
                lines("crates/a/src/b.rs", &format!("//! Docs.\n\nfn f() {{ {mark} }}\n")),
                [3]
            );
            assert_eq!(lines("docs/guide.md", &format!("# Guide\n{mark}\n")), [2]);
            assert_eq!(lines("Cargo.toml", &format!("# {mark}")), [1]);
        }
        assert!(lines("Cargo.toml", "todo = \"warn\"").is_empty());
    }
}
