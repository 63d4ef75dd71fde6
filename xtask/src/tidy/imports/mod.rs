//! The rule that the files and folders of a crate import in one direction, so that a reader who
//! follows imports comes to an end.
//!
//! An import counts for the file that defines the name, even if another module re-exports it: an
//! import from the root of the crate hides the dependency. A module and its submodules may import
//! each other, since they are one subject.

mod circle;
mod modules;
mod resolve;
mod signature;

pub(super) use crate::tidy::imports::{
    modules::{MethodUse, ModuleTree, NameMeaning},
    resolve::ImportTarget,
};
use crate::tidy::{
    Violation,
    imports::circle::{Graph, ImportCircle, ImportLine},
};

/// Returns the circles among the files of a crate.
pub(super) fn circles_of_files(tree: &ModuleTree) -> Vec<Violation> {
    let graph = graph(tree, |from, to| Some((from.to_owned(), to.to_owned())));
    circle::all(&graph).iter().map(|circle| violation("imports", circle)).collect()
}

/// Returns the circles among the files and folders that lie in one folder of a crate.
pub(super) fn circles_of_folders(tree: &ModuleTree) -> Vec<Violation> {
    circle::all(&graph(tree, rooms)).iter().map(|circle| violation("folders", circle)).collect()
}

/// Returns the folders or files that two files belong to in the deepest folder that has both, or
/// `None` if one is the module of that folder.
fn rooms(from: &str, to: &str) -> Option<(String, String)> {
    let (from, to) = (places(from), places(to));
    let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
    let room = |places: &[String]| places.get(..=shared).map(|room| room.join("/"));
    Some((room(&from)?, room(&to)?))
}

/// Returns the folders of a file, then its name unless it is the module of its folder.
fn places(file: &str) -> Vec<String> {
    let module = ["/mod.rs", "/lib.rs", "/main.rs"].iter().find_map(|end| file.strip_suffix(end));
    let path = module.unwrap_or_else(|| file.trim_end_matches(".rs"));
    path.split('/').map(str::to_owned).collect()
}

/// Returns the first import between each two nodes; `nodes` returns the nodes of two files, if
/// imports between them count.
fn graph(tree: &ModuleTree, nodes: impl Fn(&str, &str) -> Option<(String, String)>) -> Graph {
    let mut graph = Graph::new();
    for (id, module) in tree.modules.iter().enumerate() {
        for mention in &module.mentions {
            for target in tree.resolve(id, &mention.path) {
                if tree.are_kin(id, target) {
                    continue;
                }
                if let Some((from, to)) = nodes(&module.file, &tree.modules[target].file) {
                    let path = mention.path.join("::");
                    let import = ImportLine { file: module.file.clone(), line: mention.line, path };
                    graph.entry(from).or_default().entry(to).or_insert(import);
                }
            }
        }
    }
    graph
}

fn violation(kind: &str, ImportCircle { way, files }: &ImportCircle) -> Violation {
    let (_, first) = &way[0];
    let steps: Vec<_> = way
        .iter()
        .map(|(_, import)| format!("{}:{} `{}`", import.file, import.line, import.path))
        .collect();
    let tangle = match files.len() - way.len() {
        0 => String::new(),
        _ => format!("; {} are tangled: {}", files.len(), files.join(", ")),
    };
    let rule = format!("circle of {kind}: {} -> {}{tangle}", steps.join(" -> "), way[0].0);
    Violation::new(&first.file, first.line, rule)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Applies a rule to a crate of these files; the root is `src/lib.rs`.
    fn apply(rule: fn(&ModuleTree) -> Vec<Violation>, files: &[(&str, &str)]) -> Vec<String> {
        let files: BTreeMap<_, _> = files.iter().copied().collect();
        let read = |path: &str| files.get(path).map(ToString::to_string);
        let violations = match ModuleTree::read("src/lib.rs", &read) {
            Ok(tree) => rule(&tree),
            Err(unread) => vec![unread],
        };
        violations.into_iter().map(|violation| violation.rule).collect()
    }

    fn rules(files: &[(&str, &str)]) -> Vec<String> {
        apply(circles_of_files, files)
    }

    #[test]
    fn mutual_folder_imports_are_a_circle() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "pub mod low; pub mod high;"),
            ("src/a/low.rs", "pub struct Low;"),
            ("src/a/high.rs", "use crate::b::B; pub struct High;"),
            ("src/b.rs", "use crate::a::low::Low; pub struct B;"),
        ];
        assert!(rules(&files).is_empty());
        let circle = "src/a/high.rs:1 `crate::b::B` -> src/b.rs:1 `crate::a::low::Low` -> src/a";
        assert_eq!(apply(circles_of_folders, &files), [format!("circle of folders: {circle}")]);
        let mut one_way = files;
        one_way[3].1 = "use super::low::Low; pub struct High;";
        assert!(apply(circles_of_folders, &one_way).is_empty());
    }

    #[test]
    fn circle_names_files_and_imports() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "//! A.\n\nuse crate::b::B;\npub struct A;"),
            ("src/b.rs", "use super::a::A;\npub struct B;"),
        ]);
        let circle = "src/a.rs:3 `crate::b::B` -> src/b.rs:1 `super::a::A` -> src/a.rs";
        assert_eq!(found, [format!("circle of imports: {circle}")]);
    }

    #[test]
    fn imports_without_a_circle_are_allowed() {
        for files in [
            // One direction.
            [
                ("src/lib.rs", "mod a; mod b; pub use crate::{a::A, b::B};"),
                ("src/a.rs", "use crate::B; pub struct A;"),
                ("src/b.rs", "use std::fmt; pub struct B;"),
            ],
            // A module and its submodules.
            [
                ("src/lib.rs", "pub mod a; pub struct Root; use a::b::B;"),
                ("src/a/mod.rs", "mod b; pub use self::b::B; pub struct A;"),
                ("src/a/b.rs", "use super::A; use crate::Root; pub struct B;"),
            ],
            // Tests and other crates.
            [
                ("src/lib.rs", "mod a; mod b;"),
                (
                    "src/a.rs",
                    "pub struct A; #[cfg(test)] use crate::b; #[cfg(test)] mod tests { use crate::b::B; }",
                ),
                ("src/b.rs", "use a_crate::a::A; use crate::a::A as Ours; pub struct B;"),
            ],
        ] {
            let found = rules(&files);
            assert!(found.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn circle_through_re_exports_is_found() {
        for (lib, import) in [
            ("pub use b::B;", "use crate::B;"),
            ("pub use c::B;", "use crate::B;"),
            ("pub use c::*;", "use crate::B as Other;"),
            ("pub use c as d;", "use super::d::B;"),
            ("", "use crate::c::{self, B};"),
            ("pub use c::*;", "use crate::*; fn f(_: B) {}"),
            ("", "use crate::c; fn f() -> c::B { c::B }"),
            ("", "fn f() { crate::b::f() }"),
            ("", "use crate::{c::{b::{f as _}}};"),
        ] {
            let found = rules(&[
                ("src/lib.rs", &format!("mod a; mod b; mod c; {lib}")),
                ("src/a.rs", &format!("{import} pub struct A;")),
                ("src/b.rs", "use crate::a::A; pub struct B; pub fn f() {}"),
                ("src/c/mod.rs", "pub use crate::b; pub use super::b::B;"),
            ]);
            assert_eq!(found.len(), 1, "{lib} {import}");
            assert!(
                found[0].contains("src/a.rs:1 ") && found[0].contains("src/b.rs:1 "),
                "{found:?}"
            );
        }
    }

    #[test]
    fn submodule_files_are_found() {
        let found = rules(&[
            ("src/lib.rs", "mod a { mod b; } mod c;"),
            ("src/a/b.rs", "use crate::c::d::D; pub struct B;"),
            ("src/c.rs", "pub mod d;"),
            ("src/c/d.rs", "use crate::a::b::B; pub struct D;"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("src/c/d.rs:1 `crate::a::b::B`"), "{found:?}");
    }

    #[test]
    fn name_may_be_module_and_function() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod f; pub use f::f;"),
            ("src/a.rs", "use crate::f::f; pub fn a() {}"),
            ("src/f.rs", "pub fn f() { crate::a::a() }"),
        ]);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn shortest_circle_is_shown() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "use crate::c::C; pub struct B;"),
            ("src/c.rs", "use crate::{a::A, b::B}; pub struct C;"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("circle of imports: src/b.rs:1 `crate::c::C` -> src/c.rs:1 "));
        assert!(found[0].ends_with("; 3 are tangled: src/a.rs, src/b.rs, src/c.rs"));
    }

    #[test]
    fn unreadable_file_is_an_error() {
        assert_eq!(rules(&[("src/lib.rs", "mod gone;")]), ["no file for the module `gone`"]);
        assert!(rules(&[("src/lib.rs", "mod {")])[0].starts_with("cannot be parsed: "));
        assert_eq!(rules(&[]), ["no such file"]);
    }
}
