//! Resolution of the paths that a module mentions.

use std::{collections::BTreeSet, iter};

use crate::tidy::imports::modules::{ModuleTree, NameMeaning};

/// The target of a path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tidy) enum ImportTarget {
    ModuleFacts(usize),
    /// An item by its module and its name there.
    Item(usize, String),
}

impl ImportTarget {
    /// Returns the name of an item, or `None` for a module.
    pub(in crate::tidy) fn item(&self) -> Option<&str> {
        match self {
            Self::ModuleFacts(_) => None,
            Self::Item(_, name) => Some(name),
        }
    }
}

/// The lookups so far, which stop the recursion if modules import each other.
type Asked = BTreeSet<(usize, Vec<String>)>;

impl ModuleTree {
    /// Returns the modules that define `path` in the module `from`; empty for another crate.
    pub(super) fn resolve(&self, from: usize, path: &[String]) -> BTreeSet<usize> {
        let targets = self.targets(from, path);
        targets
            .into_iter()
            .map(|(ImportTarget::ModuleFacts(id) | ImportTarget::Item(id, _))| id)
            .collect()
    }

    /// Returns the meanings of `path` in the module `from`; none if it means another crate.
    pub(in crate::tidy) fn targets(&self, from: usize, path: &[String]) -> BTreeSet<ImportTarget> {
        self.follow(from, path, &mut Asked::new())
    }

    /// Returns true if one of two modules is in the file of the other, or above it in the tree.
    pub(super) fn are_kin(&self, one: usize, other: usize) -> bool {
        let (one, other) = (self.file_module(one), self.file_module(other));
        self.ancestors(one).any(|id| id == other) || self.ancestors(other).any(|id| id == one)
    }

    /// Returns the module of a file, given a module in it.
    fn file_module(&self, id: usize) -> usize {
        self.ancestors(id)
            .take_while(|ancestor: &usize| self.modules[*ancestor].file == self.modules[id].file)
            .last()
            .unwrap_or(id)
    }

    /// Returns a module, its parent, and so on up to the root.
    fn ancestors(&self, id: usize) -> impl Iterator<Item = usize> {
        iter::successors(Some(id), |&id| self.modules[id].parent)
    }

    fn follow(&self, from: usize, path: &[String], asked: &mut Asked) -> BTreeSet<ImportTarget> {
        let Some((first, rest)) = path.split_first() else { return BTreeSet::new() };
        if !asked.insert((from, path.to_vec())) {
            return BTreeSet::new();
        }
        let mut targets = match first.as_str() {
            "crate" => BTreeSet::from([ImportTarget::ModuleFacts(0)]),
            first => self.step(from, first, asked),
        };
        for name in rest {
            let steps = targets.into_iter().map(|target| match target {
                ImportTarget::ModuleFacts(id) => self.step(id, name, asked),
                // A variant, or an associated item.
                ImportTarget::Item(..) => BTreeSet::from([target]),
            });
            targets = steps.flatten().collect();
        }
        targets
    }

    /// Returns the targets of a name in a module.
    fn step(&self, id: usize, name: &str, asked: &mut Asked) -> BTreeSet<ImportTarget> {
        let module = &self.modules[id];
        match name {
            "self" => return BTreeSet::from([ImportTarget::ModuleFacts(id)]),
            "super" => return module.parent.map(ImportTarget::ModuleFacts).into_iter().collect(),
            _ => {}
        }
        let Some(names) = module.names.get(name) else { return self.in_globs(id, name, asked) };
        let meanings = names.iter().map(|named| match &named.meaning {
            NameMeaning::Item => BTreeSet::from([ImportTarget::Item(id, name.to_owned())]),
            NameMeaning::ModuleFacts(child) => BTreeSet::from([ImportTarget::ModuleFacts(*child)]),
            NameMeaning::ImportLine(path) => self.follow(id, path, asked),
        });
        meanings.flatten().collect()
    }

    fn in_globs(&self, id: usize, name: &str, asked: &mut Asked) -> BTreeSet<ImportTarget> {
        let globs = self.modules[id].globs.iter();
        let paths = globs.map(|glob| [glob.path.as_slice(), &[name.to_owned()]].concat());
        paths.flat_map(|path| self.follow(id, &path, asked)).collect()
    }
}
