//! Rules about what stands in one file.

use super::Violation;

/// Marks of work that was left for later; written in two parts, or this file would break its own
/// rule.
const MARKS: [&str; 5] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("todo", "!"),
    concat!("unimplemented", "!"),
];

/// Every rule for the file at `path`; `exists` tells whether there is a file at a path.
pub(super) fn check(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Violation> {
    let mut violations = unfinished(path, text);
    match path.rsplit('.').next() {
        Some("rs") => violations.extend(module_docs(path, text)),
        Some("md") => violations.extend(dead_links(path, text, exists)),
        _ => {}
    }
    violations
}

fn module_docs(path: &str, text: &str) -> Option<Violation> {
    let page = path.ends_with("lib.rs") && text.starts_with("#![doc = include_str!");
    let documented = page || text.starts_with("//!");
    (!documented).then(|| Violation::new(path, 1, "a module starts with its `//!` documentation"))
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

fn dead_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Violation> {
    let links = prose(text).flat_map(|(line, text)| {
        targets(text).map(move |target| (line, target)).collect::<Vec<_>>()
    });
    let dead = links.filter(|(_, target)| is_relative(target) && !exists(&resolve(path, target)));
    dead.map(|(line, target)| {
        Violation::new(path, line, format!("link to `{target}`, which does not exist"))
    })
    .collect()
}

/// The lines of a page outside its code blocks.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    numbered(text).filter(move |(_, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !in_code && !fence
    })
}

/// Where the inline links of a line lead; code spans may contain anything.
fn targets(line: &str) -> impl Iterator<Item = String> {
    let outside_code: String = line.split('`').step_by(2).collect();
    let starts: Vec<_> = outside_code.split("](").skip(1).map(str::to_owned).collect();
    starts.into_iter().filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()))
}

/// Whether a link means a file here: not another site, a heading of the same page, or an item of
/// the API.
fn is_relative(target: &str) -> bool {
    let leads_elsewhere = ["://", "mailto:", "::"].iter().any(|mark| target.contains(mark));
    !leads_elsewhere && !target.starts_with('#')
}

/// The path, relative to the root, of `target` as linked from the page at `path`.
fn resolve(path: &str, target: &str) -> String {
    let file = target.split(['#', ' ']).next().unwrap_or_default();
    match path.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{file}"),
        None => file.to_owned(),
    }
}

/// Lines with their numbers, from 1 as editors count.
fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines at which `text` at `path` breaks a rule, in a tree whose only other file is
    /// `docs/guide.md`.
    fn lines(path: &str, text: &str) -> Vec<usize> {
        let exists = |path: &str| ["docs/guide.md", "docs/../docs/guide.md"].contains(&path);
        check(path, text, &exists).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_module_without_documentation_is_found() {
        assert_eq!(lines("crates/a/src/b.rs", "use std::fmt;\n"), [1]);
        assert_eq!(lines("crates/a/src/b.rs", "#![doc = include_str!(\"../README.md\")]\n"), [1]);
        assert!(
            lines("crates/a/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n").is_empty()
        );
        assert!(lines("crates/a/src/b.rs", "//! What it is for.\n").is_empty());
    }

    #[test]
    fn a_mark_of_unfinished_work_is_found_in_sources_manifests_and_pages() {
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

    #[test]
    fn a_link_to_a_missing_file_is_found() {
        assert_eq!(lines("README.md", "# A\n\n[a](docs/guide.md), [`b`](docs/gone.md)\n"), [3]);
        assert_eq!(
            lines("docs/other.md", "[a](guide.md#part) [b](../docs/guide.md) [c](docs/guide.md)"),
            [1]
        );
    }

    #[test]
    fn links_elsewhere_and_code_are_left_alone() {
        let text = "[a](https://example.org) [b](#part) [c](crate::Item) `x[0](gone)`\n```\ny[1](gone)\n```\n";
        assert!(lines("README.md", text).is_empty());
    }
}
