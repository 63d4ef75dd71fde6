//! Where the paths that a module mentions lead.

use std::{collections::BTreeSet, iter};

use crate::tidy::imports::modules::{Meaning, Tree};

/// The target of a path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tidy) enum Target {
    Module(usize),
    /// An item by its module and its name there.
    Item(usize, String),
}

impl Target {
    /// Returns the name of an item, or `None` for a module.
    pub(in crate::tidy) fn item(&self) -> Option<&str> {
        match self {
            Self::Module(_) => None,
            Self::Item(_, name) => Some(name),
        }
    }
}

/// What has been asked already, or modules that import each other would be followed for ever.
type Asked = BTreeSet<(usize, Vec<String>)>;

impl Tree {
    /// Returns the modules that define what `path` means in the module `from`; none if it means
    /// another crate.
    pub(super) fn resolve(&self, from: usize, path: &[String]) -> BTreeSet<usize> {
        let targets = self.targets(from, path);
        targets.into_iter().map(|(Target::Module(id) | Target::Item(id, _))| id).collect()
    }

    /// Returns the meanings of `path` in the module `from`; none if it means another crate.
    pub(in crate::tidy) fn targets(&self, from: usize, path: &[String]) -> BTreeSet<Target> {
        self.follow(from, path, &mut Asked::new())
    }

    /// Whether one of two modules stands in the file of the other, or above it in the tree.
    pub(super) fn are_kin(&self, one: usize, other: usize) -> bool {
        let (one, other) = (self.of_file(one), self.of_file(other));
        self.ancestors(one).any(|id| id == other) || self.ancestors(other).any(|id| id == one)
    }

    /// The module that a file is, for one that stands in it.
    fn of_file(&self, id: usize) -> usize {
        let same_file = |ancestor: &usize| self.modules[*ancestor].file == self.modules[id].file;
        self.ancestors(id).take_while(same_file).last().unwrap_or(id)
    }

    /// A module, its parent, and so on up to the root.
    fn ancestors(&self, id: usize) -> impl Iterator<Item = usize> {
        iter::successors(Some(id), |&id| self.modules[id].parent)
    }

    fn follow(&self, from: usize, path: &[String], asked: &mut Asked) -> BTreeSet<Target> {
        let Some((first, rest)) = path.split_first() else { return BTreeSet::new() };
        if !asked.insert((from, path.to_vec())) {
            return BTreeSet::new();
        }
        let mut targets = match first.as_str() {
            "crate" => BTreeSet::from([Target::Module(0)]),
            first => self.step(from, first, asked),
        };
        for name in rest {
            let steps = targets.into_iter().map(|target| match target {
                Target::Module(id) => self.step(id, name, asked),
                // A variant, or an associated item.
                Target::Item(..) => BTreeSet::from([target]),
            });
            targets = steps.flatten().collect();
        }
        targets
    }

    /// What a name stands for in a module.
    fn step(&self, id: usize, name: &str, asked: &mut Asked) -> BTreeSet<Target> {
        let module = &self.modules[id];
        match name {
            "self" => return BTreeSet::from([Target::Module(id)]),
            "super" => return module.parent.map(Target::Module).into_iter().collect(),
            _ => {}
        }
        let Some(names) = module.names.get(name) else { return self.in_globs(id, name, asked) };
        let meanings = names.iter().map(|named| match &named.meaning {
            Meaning::Item => BTreeSet::from([Target::Item(id, name.to_owned())]),
            Meaning::Module(child) => BTreeSet::from([Target::Module(*child)]),
            Meaning::Import(path) => self.follow(id, path, asked),
        });
        meanings.flatten().collect()
    }

    fn in_globs(&self, id: usize, name: &str, asked: &mut Asked) -> BTreeSet<Target> {
        let globs = self.modules[id].globs.iter();
        let paths = globs.map(|glob| [glob.path.as_slice(), &[name.to_owned()]].concat());
        paths.flat_map(|path| self.follow(id, &path, asked)).collect()
    }
}
