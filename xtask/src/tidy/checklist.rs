//! The checklists of CONTRIBUTING, as far as a program can follow them: where everything of a kind
//! must be named.
//!
//! Names are read from the code, so that a new strategy is asked for its pages and tests as soon as
//! it exists.

use std::path::Path;

use syn::{Item, Type};

use crate::tidy::Violation;

/// Things of one kind, and the places that must name each.
struct Kind {
    what: &'static str,
    /// The folder with their code; without it there are none yet.
    code: &'static str,
    names: Names,
    places: &'static [Place],
}

/// Where the names of a kind are read.
enum Names {
    /// The types that implement this trait.
    Implementors(&'static str),
    /// The variants of this enum.
    Variants(&'static str),
}

/// Where something must be named.
enum Place {
    /// In this file, as in Rust: `` `WholeTensor` `` or `WholeTensor::new`.
    File(&'static str),
    /// On this page, as on the command line: `` `whole-tensor` ``.
    Option(&'static str),
    /// In a test below this folder that asserts no snapshot.
    Laws(&'static str),
    /// In a test below this folder that asserts snapshots.
    Snapshots(&'static str),
}

const KINDS: [Kind; 5] = [
    Kind {
        what: "sharding strategy",
        code: "crates/fsdp-plan/src/strategy/",
        names: Names::Implementors("ShardingStrategy"),
        places: &[
            Place::File("crates/fsdp-plan/README.md"),
            Place::File("CHANGELOG.md"),
            Place::Laws("crates/fsdp-plan/tests/"),
            Place::Snapshots("crates/fsdp-plan/tests/"),
        ],
    },
    Kind {
        what: "sharding strategy with a name",
        code: "crates/fsdp-plan/src/strategy/",
        names: Names::Variants("StrategyKind"),
        places: &[Place::Option("crates/candle-distributed-cli/README.md")],
    },
    Kind {
        what: "batching strategy",
        code: "crates/dyn-batch/src/",
        names: Names::Variants("DynamicBatchStrategy"),
        places: &[
            Place::File("crates/dyn-batch/README.md"),
            Place::Option("crates/candle-distributed-cli/README.md"),
            Place::Laws("crates/dyn-batch/tests/laws/"),
            Place::File("crates/dyn-batch/tests/golden.rs"),
        ],
    },
    Kind {
        what: "engine",
        code: "crates/pmap-mesh/src/",
        names: Names::Implementors("Backend"),
        places: &[Place::Option("crates/pmap-mesh/README.md")],
    },
    Kind {
        what: "optimizer",
        code: "crates/dist-train/src/",
        names: Names::Implementors("StatefulOptimizer"),
        places: &[
            Place::File("crates/dist-train/README.md"),
            Place::File("CHANGELOG.md"),
            Place::Laws("crates/dist-train/tests/"),
        ],
    },
];

/// What is not named where the checklists want it; `files` are ours, and `read` returns the text of
/// one.
pub(super) fn check(files: &[String], read: &dyn Fn(&str) -> Option<String>) -> Vec<Violation> {
    KINDS.iter().flat_map(|kind| missing(kind, files, read)).collect()
}

fn missing(kind: &Kind, files: &[String], read: &dyn Fn(&str) -> Option<String>) -> Vec<Violation> {
    let code: Vec<_> = rust_below(kind.code, files).collect();
    if code.is_empty() {
        return Vec::new();
    }
    let mut names: Vec<_> = code.iter().flat_map(|path| kind.names.of(read(path))).collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return vec![Violation::new(kind.code, 1, format!("no {} is found here", kind.what))];
    }
    let places = kind.places.iter().flat_map(|place| names.iter().map(move |name| (place, name)));
    let missing = places.filter(|(place, name)| !place.names(name, files, read));
    missing.map(|(place, name)| place.violation(kind.what, name)).collect()
}

fn rust_below<'a>(folder: &str, files: &'a [String]) -> impl Iterator<Item = &'a str> {
    files.iter().map(String::as_str).filter(move |path| {
        path.starts_with(folder) && Path::new(path).extension().is_some_and(|end| end == "rs")
    })
}

impl Names {
    /// The names in a source; what cannot be parsed is reported where imports are.
    fn of(&self, text: Option<String>) -> Vec<String> {
        let file = text.and_then(|text| syn::parse_file(&text).ok());
        let items = file.into_iter().flat_map(|file| file.items);
        items.flat_map(|item| self.of_item(&item)).collect()
    }

    fn of_item(&self, item: &Item) -> Vec<String> {
        match (self, item) {
            (Self::Variants(name), Item::Enum(item)) if item.ident == name => {
                item.variants.iter().map(|variant| variant.ident.to_string()).collect()
            }
            (Self::Implementors(name), Item::Impl(item)) => {
                let implements = item.trait_.as_ref().and_then(|(path, _)| path.segments.last());
                let is_it = implements.is_some_and(|segment| segment.ident == name);
                is_it.then(|| implementor(&item.self_ty)).flatten().into_iter().collect()
            }
            _ => Vec::new(),
        }
    }
}

/// The name of a type of ours: a box around one is none of its own.
fn implementor(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    let name = path.path.segments.last()?.ident.to_string();
    (name != "Box").then_some(name)
}

impl Place {
    fn names(&self, name: &str, files: &[String], read: &dyn Fn(&str) -> Option<String>) -> bool {
        let test = |folder, snapshots| {
            let mut tests = rust_below(folder, files).filter_map(read);
            tests
                .any(|text| has_word(&text, name) && text.contains("assert_snapshot!") == snapshots)
        };
        match self {
            Self::File(path) => read(path).is_some_and(|text| has_word(&text, name)),
            Self::Option(path) => {
                read(path).is_some_and(|text| text.contains(&format!("`{}`", kebab_case(name))))
            }
            Self::Laws(folder) => test(folder, false),
            Self::Snapshots(folder) => test(folder, true),
        }
    }

    fn violation(&self, what: &str, name: &str) -> Violation {
        let (path, rule) = match self {
            Self::File(path) => (path, format!("the {what} `{name}` is not named here")),
            Self::Option(path) => {
                (path, format!("the {what} `{}` is not named here", kebab_case(name)))
            }
            Self::Laws(path) => (path, format!("no test here is about the {what} `{name}`")),
            Self::Snapshots(path) => (path, format!("no snapshot here is of the {what} `{name}`")),
        };
        Violation::new(path, 1, rule)
    }
}

/// Whether a text has a name as a word: `Full`, but not as a part of `FullyShard`.
fn has_word(text: &str, name: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name)
}

/// `PadToMax` as the command line calls it, `pad-to-max`.
fn kebab_case(name: &str) -> String {
    let mut kebab = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.extend(letter.to_lowercase());
    }
    kebab
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const CODE: &str = "
        enum Kind { Full, WholeTensor }
        impl Strategy for Full {}
        impl<S: Strategy> crate::Strategy for Whole<S> {}
        impl<S: Strategy + ?Sized> Strategy for Box<S> {}
        impl Other for Layout {}
    ";

    const PLACES: &[Place] = &[
        Place::File("README.md"),
        Place::Option("cli.md"),
        Place::Laws("tests/"),
        Place::Snapshots("tests/"),
    ];

    fn rules(names: Names, files: &[(&str, &str)]) -> Vec<String> {
        let kind = Kind { what: "strategy", code: "src/", names, places: PLACES };
        let files: BTreeMap<_, _> = files.iter().copied().collect();
        let read = |path: &str| files.get(path).map(ToString::to_string);
        let paths: Vec<_> = files.keys().map(ToString::to_string).collect();
        missing(&kind, &paths, &read).into_iter().map(|violation| violation.to_string()).collect()
    }

    #[test]
    fn names_are_read_from_the_code() {
        let of = |names: Names| names.of(Some(CODE.to_owned()));
        assert_eq!(of(Names::Variants("Kind")), ["Full", "WholeTensor"]);
        assert_eq!(of(Names::Implementors("Strategy")), ["Full", "Whole"]);
    }

    #[test]
    fn each_place_that_does_not_name_a_thing_is_told() {
        let all = [
            ("src/a.rs", "enum Kind { WholeTensor }"),
            ("README.md", "| `WholeTensor::new` |"),
            ("cli.md", "| `whole-tensor` |"),
            ("tests/laws.rs", "fn f() { WholeTensor.plan() }"),
            ("tests/pinned.rs", "insta::assert_snapshot!(WholeTensor.plan())"),
        ];
        assert!(rules(Names::Variants("Kind"), &all).is_empty());
        for left_out in 1..all.len() {
            let mut files = all;
            files[left_out].1 = "WholeTensors wholeTensor whole-tensor `whole-tensors`";
            assert_eq!(rules(Names::Variants("Kind"), &files).len(), 1, "{}", files[left_out].0);
        }
        let none = rules(Names::Variants("Kind"), &all[..1]);
        assert_eq!(none[0], "README.md:1: the strategy `WholeTensor` is not named here");
        assert_eq!(none[1], "cli.md:1: the strategy `whole-tensor` is not named here");
        assert_eq!(none.len(), 4);
    }

    #[test]
    fn a_kind_without_code_has_no_names_and_code_without_names_is_a_fault() {
        assert!(rules(Names::Variants("Kind"), &[]).is_empty());
        let found = rules(Names::Variants("Gone"), &[("src/a.rs", CODE)]);
        assert_eq!(found, ["src/:1: no strategy is found here"]);
    }

    #[test]
    fn names_are_as_on_the_command_line() {
        assert_eq!(kebab_case("PadToMax"), "pad-to-max");
        assert_eq!(kebab_case("Full"), "full");
    }
}
