//! The rule that the files of a crate import in one direction: a reader who follows imports comes
//! to an end.
//!
//! What counts is the file where a name is defined, whatever it is imported through: an import from
//! the root of the crate hides who stands on whom. A module and those below it may know each other,
//! since they are one subject.

mod circle;
mod modules;
mod resolve;

use std::collections::BTreeMap;

use crate::tidy::{
    Violation,
    imports::{
        circle::{Circle, Graph, Import},
        modules::Tree,
    },
};

/// The circles among the files of the crate whose root file is at `root`; `read` returns the text
/// of a file.
pub(super) fn check(root: &str, read: &dyn Fn(&str) -> Option<String>) -> Vec<Violation> {
    match Tree::read(root, read) {
        Ok(tree) => circle::all(&graph(&tree)).iter().map(violation).collect(),
        Err(unread) => vec![unread],
    }
}

/// Which file imports from which others, and where it first does.
fn graph(tree: &Tree) -> Graph {
    let mut graph = Graph::new();
    for (id, module) in tree.modules.iter().enumerate() {
        let imports: &mut BTreeMap<_, _> = graph.entry(module.file.clone()).or_default();
        for mention in &module.mentions {
            for target in tree.resolve(id, &mention.path) {
                if !tree.are_kin(id, target) {
                    let import = Import { line: mention.line, path: mention.path.join("::") };
                    imports.entry(tree.modules[target].file.clone()).or_insert(import);
                }
            }
        }
    }
    graph
}

fn violation(Circle { way, files }: &Circle) -> Violation {
    let (first, import) = &way[0];
    let steps: Vec<_> = way
        .iter()
        .map(|(file, import)| format!("{file}:{} `{}`", import.line, import.path))
        .collect();
    let tangle = match files.len() - way.len() {
        0 => String::new(),
        _ => format!("; {} files are tangled: {}", files.len(), files.join(", ")),
    };
    let rule = format!("circle of imports: {} -> {first}{tangle}", steps.join(" -> "));
    Violation::new(first, import.line, rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules broken by a crate of these files; the root is `src/lib.rs`.
    fn rules(files: &[(&str, &str)]) -> Vec<String> {
        let files: BTreeMap<_, _> = files.iter().copied().collect();
        let read = |path: &str| files.get(path).map(ToString::to_string);
        check("src/lib.rs", &read).into_iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn a_circle_names_its_files_and_imports() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "//! A.\n\nuse crate::b::B;\npub struct A;"),
            ("src/b.rs", "use super::a::A;\npub struct B;"),
        ]);
        let circle = "src/a.rs:3 `crate::b::B` -> src/b.rs:1 `super::a::A` -> src/a.rs";
        assert_eq!(found, [format!("circle of imports: {circle}")]);
    }

    #[test]
    fn one_direction_is_no_circle() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b; pub use crate::{a::A, b::B};"),
            ("src/a.rs", "use crate::B; pub struct A;"),
            ("src/b.rs", "use std::fmt; pub struct B;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_circle_is_found_through_the_root_and_chains_of_re_exports() {
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
    fn a_module_and_those_below_it_may_know_each_other() {
        let found = rules(&[
            ("src/lib.rs", "pub mod a; pub struct Root; use a::b::B;"),
            ("src/a/mod.rs", "mod b; pub use self::b::B; pub struct A;"),
            ("src/a/b/mod.rs", "mod c; use super::A; use crate::Root; pub struct B;"),
            ("src/a/b/c.rs", "use crate::a::{A, B};"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn children_of_a_file_lie_in_its_folder_whatever_the_style() {
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
    fn tests_and_other_crates_are_left_out() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b;"),
            (
                "src/a.rs",
                "pub struct A; #[cfg(test)] use crate::b; #[cfg(test)] mod tests { use crate::b::B; }",
            ),
            ("src/b.rs", "use a_crate::a::A; use crate::a::A as Ours; pub struct B;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_name_may_stand_for_a_module_and_a_function() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod f; pub use f::f;"),
            ("src/a.rs", "use crate::f::f; pub fn a() {}"),
            ("src/f.rs", "pub fn f() { crate::a::a() }"),
        ]);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn the_shortest_circle_is_shown_and_the_tangle_listed() {
        let found = rules(&[
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "use crate::c::C; pub struct B;"),
            ("src/c.rs", "use crate::{a::A, b::B}; pub struct C;"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("circle of imports: src/b.rs:1 `crate::c::C` -> src/c.rs:1 "));
        assert!(found[0].ends_with("; 3 files are tangled: src/a.rs, src/b.rs, src/c.rs"));
    }

    #[test]
    fn what_cannot_be_read_is_no_proof() {
        assert_eq!(rules(&[("src/lib.rs", "mod gone;")]), ["no file for the module `gone`"]);
        assert!(rules(&[("src/lib.rs", "mod {")])[0].starts_with("cannot be parsed: "));
        assert_eq!(rules(&[]), ["no such file"]);
    }
}
