//! The rule that each public name has a user: another crate, a program, an example or a page other
//! than the README of its crate. A type in a public signature needs no other user.
//!
//! A name on a page of the reference is a promise; without a user it promises nothing.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tidy::{
    Violation,
    imports::{ImportTarget, MethodUse, ModuleTree, NameMeaning},
};

/// The names that a file uses.
#[derive(Default)]
pub(super) struct NameUses {
    /// The names, except for those that it defines.
    names: BTreeSet<String>,
    /// Names after a dot that are called, and names after `::`.
    members: BTreeSet<String>,
    /// Names after `::`, with the name before.
    paths: BTreeSet<(String, String)>,
}

/// Items and modules, each with its public names.
type Items = BTreeMap<ImportTarget, BTreeSet<String>>;

/// A public name that no user names.
pub(super) struct UnusedName {
    /// The name; of a method, with its type and `::` before.
    pub(super) name: String,
    pub(super) file: String,
    pub(super) line: usize,
}

impl UnusedName {
    /// Returns true if it is `name`, or a method of the type `name`.
    pub(super) fn belongs_to(&self, name: &str) -> bool {
        let rest = self.name.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    }

    pub(super) fn into_violation(self) -> Violation {
        let rule = format!("no other crate, program, example or page uses `{}`", self.name);
        Violation::new(&self.file, self.line, rule)
    }
}

/// Returns the public names of a crate that none of the `users` uses.
pub(super) fn unused(tree: &ModuleTree, users: &[&NameUses]) -> Vec<UnusedName> {
    let items = public_items(tree);
    let unused = |name: String, file: &str, line| UnusedName { name, file: file.to_owned(), line };
    let mut names: Vec<_> = methods(tree, &items)
        .filter(|method| !users.iter().any(|uses| uses.has_method(method)))
        .map(|method| {
            unused(format!("{}::{}", method.owner, method.name), &method.file, method.line)
        })
        .collect();
    for (target, aliases) in &items {
        if tree.signatures.is_disjoint(aliases)
            && !users.iter().any(|uses| !uses.names.is_disjoint(aliases))
        {
            let (file, line) = place(tree, target);
            names.extend(aliases.first().map(|name| unused(name.clone(), file, line)));
        }
    }
    names
}

/// Returns the methods of public types.
fn methods<'a>(tree: &'a ModuleTree, items: &'a Items) -> impl Iterator<Item = &'a MethodUse> {
    let types: BTreeSet<_> = items.keys().filter_map(ImportTarget::item).collect();
    tree.methods.iter().filter(move |method| types.contains(method.owner.as_str()))
}

/// Returns the items and modules that a chain of public modules and imports reaches from the root,
/// with their public names.
fn public_items(tree: &ModuleTree) -> Items {
    let mut items = Items::new();
    let mut waiting = vec![0];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id) {
            continue;
        }
        for (name, target) in public_names(tree, id) {
            if let ImportTarget::ModuleFacts(child) = target {
                waiting.push(child);
            }
            items.entry(target).or_default().insert(name);
        }
        let globs = tree.modules[id].globs.iter().filter(|glob| glob.is_public);
        for target in globs.flat_map(|glob| tree.targets(id, &glob.path)) {
            if let ImportTarget::ModuleFacts(child) = target {
                waiting.push(child);
            }
        }
    }
    items
}

/// Returns the public names of a module, with their targets.
fn public_names(tree: &ModuleTree, id: usize) -> Vec<(String, ImportTarget)> {
    let mut names = Vec::new();
    for (name, meanings) in &tree.modules[id].names {
        for meaning in meanings.iter().filter(|meaning| meaning.is_public) {
            let targets = match &meaning.meaning {
                NameMeaning::Item => BTreeSet::from([ImportTarget::Item(id, name.clone())]),
                NameMeaning::ModuleFacts(child) => {
                    BTreeSet::from([ImportTarget::ModuleFacts(*child)])
                }
                NameMeaning::ImportLine(path) => tree.targets(id, path),
            };
            names.extend(targets.into_iter().map(|target| (name.clone(), target)));
        }
    }
    names
}

/// Returns the file and line of an item or module.
fn place<'a>(tree: &'a ModuleTree, target: &ImportTarget) -> (&'a str, usize) {
    match target {
        ImportTarget::Item(id, name) => {
            let module = &tree.modules[*id];
            let line = module.names.get(name).and_then(|meanings| meanings.first());
            (&module.file, line.map_or(1, |named| named.line))
        }
        ImportTarget::ModuleFacts(id) => (&tree.modules[*id].file, 1),
    }
}

impl NameUses {
    fn has_method(&self, method: &MethodUse) -> bool {
        let is_member = method.has_receiver && self.members.contains(&method.name);
        is_member || self.paths.contains(&(method.owner.clone(), method.name.clone()))
    }

    /// Reads the names in Rust code.
    pub(super) fn add_code(code: &str) -> Self {
        let mut words = Vec::new();
        // A file that is no Rust is a violation elsewhere.
        flatten(code.parse().unwrap_or_default(), &mut words);
        let mut uses = Self::default();
        for (nth, word) in words.iter().enumerate() {
            let preceding = |n: usize| nth.checked_sub(n).map_or("", |at| words[at].as_str());
            if !word.starts_with(|c: char| c.is_alphabetic() || c == '_') || defines(preceding(1)) {
                continue;
            }
            uses.names.insert(word.clone());
            let is_path = preceding(1) == ":" && preceding(2) == ":";
            let following = words.get(nth + 1).map_or("", String::as_str);
            if is_path || preceding(1) == "." && ["(", ":"].contains(&following) {
                uses.members.insert(word.clone());
            }
            if is_path {
                uses.paths.insert((preceding(3).to_owned(), word.clone()));
            }
        }
        uses
    }

    /// Reads the names in code font on a page.
    pub(super) fn add_page(page: &str) -> Self {
        let mut uses = Self::default();
        // Every other piece between backticks is code; three of them around a block leave pieces
        // without text between them.
        for code in page.split('`').skip(1).step_by(2) {
            let names = code.split(|c: char| !c.is_alphanumeric() && c != '_');
            uses.names.extend(names.map(str::to_owned));
            uses.paths.extend(paths(code));
        }
        uses.members = uses.names.clone();
        uses
    }
}

/// Returns each two names in a text with `::` between them.
fn paths(code: &str) -> Vec<(String, String)> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let words = code.split(|c: char| !is_part(c));
    let pairs = words.flat_map(|word| {
        let parts: Vec<_> = word.split("::").map(str::to_owned).collect();
        parts.windows(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect::<Vec<_>>()
    });
    pairs.collect()
}

/// Returns true if the name after this word is defined by it.
fn defines(word: &str) -> bool {
    ["const", "enum", "fn", "let", "mod", "mut", "static", "struct", "trait", "type"]
        .contains(&word)
}

/// Appends the words and signs of code, without the ends of groups.
fn flatten(tokens: TokenStream, words: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                words.push(
                    if group.delimiter() == Delimiter::Parenthesis { "(" } else { "" }.into(),
                );
                flatten(group.stream(), words);
                words.push(String::new());
            }
            token => words.push(token.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRATE: [(&str, &str); 3] = [
        ("src/lib.rs", "mod a; pub mod b; pub use a::{Answer, Used, Idle as Still}; #[doc(hidden)] pub use a::support;"),
        (
            "src/a.rs",
            "pub struct Used; pub struct Idle; pub struct Inner; pub fn support() {}
             pub struct Answer; impl Idle { pub fn same(self, _: Idle) {} }
             impl Used { pub fn new() -> Self { Self } pub fn ask(&self) -> Vec<Answer> { vec![] } pub fn rest(&self) {} fn own(&self) {} }
             impl Inner { pub fn never(&self) {} }",
        ),
        ("src/b.rs", "pub fn free() {} pub(crate) fn ours() {}"),
    ];

    /// Returns the unused names of a crate with this code and this page as its only users.
    fn names(code: &str, page: &str) -> Vec<String> {
        let files = BTreeMap::from(CRATE);
        let read = |path: &str| files.get(path).map(ToString::to_string);
        let tree = ModuleTree::read("src/lib.rs", &read).unwrap();
        let unused = unused(&tree, &[&NameUses::add_code(code), &NameUses::add_page(page)]);
        unused.into_iter().map(|one| one.name).collect()
    }

    #[test]
    fn unused_public_name_is_found() {
        let all =
            ["b", "Idle::same", "Still", "Used", "free", "Used::new", "Used::ask", "Used::rest"];
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names
        };
        let expected = sorted(all.map(str::to_owned).to_vec());
        // Callers get an `Answer` of `ask` without its name.
        assert_eq!(sorted(names("", "")), expected);
        // A name that the code defines, or that is not a call, is not a use.
        assert_eq!(
            sorted(names("fn free() { let b = x.rest; Other::new() }", "free rest")),
            expected
        );
        let code = "use a_crate::{Still, b::free}; fn f(x: a_crate::Used) { vec![x.ask(), x.same(x), Used::new()]; }";
        assert_eq!(names(code, ""), ["Used::rest"]);
        assert!(names(code, "Call `Used::rest`.").is_empty());
        assert!(names(code, "```rust\nx.rest()\n```\n").is_empty());
    }
}
