//! The modules of a crate as its files declare them: what their names stand for, and which paths
//! they mention.

use std::collections::BTreeMap;

use proc_macro2::Span;
use syn::{
    Attribute, Ident, Item, ItemFn, ItemImpl, ItemMod, ItemUse, UseTree,
    visit::{self, Visit},
};

use crate::tidy::Violation;

/// All modules of a crate but those of its tests, the root first.
pub(super) struct Tree {
    pub(super) modules: Vec<Module>,
}

#[derive(Default)]
pub(super) struct Module {
    /// Where it is written; an inline module is written where its parent is.
    pub(super) file: String,
    pub(super) parent: Option<usize>,
    /// What its names stand for. A name may stand for a module and a function at once.
    pub(super) names: BTreeMap<String, Vec<Name>>,
    /// The modules and enums all of whose names it imports.
    pub(super) globs: Vec<Vec<String>>,
    pub(super) mentions: Vec<Mention>,
}

pub(super) enum Name {
    /// Something defined here.
    Item,
    /// A module below this one, by its index.
    Module(usize),
    /// Something that is imported from this path.
    Import(Vec<String>),
}

/// A path that is imported, or written out.
pub(super) struct Mention {
    pub(super) line: usize,
    pub(super) path: Vec<String>,
}

impl Tree {
    /// Reads the crate whose root file is at `root`.
    pub(super) fn read(
        root: &str,
        read: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Violation> {
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let module = Module { file: root.to_owned(), ..Module::default() };
        let mut tree = Self { modules: vec![module] };
        // Files that are declared and not yet read: the module, and the folder of those below it.
        let mut waiting = vec![(0, folder)];
        while let Some((id, folder)) = waiting.pop() {
            let file = tree.modules[id].file.clone();
            let text = read(&file).ok_or_else(|| Violation::new(&file, 1, "no such file"))?;
            let parsed = syn::parse_file(&text).map_err(|error| {
                Violation::new(&file, line(error.span()), format!("cannot be parsed: {error}"))
            })?;
            let mut reader =
                Reader { tree: &mut tree, id, folder, read, waiting: Vec::new(), fault: None };
            reader.items(&parsed.items);
            if let Some(fault) = reader.fault {
                return Err(fault);
            }
            waiting.extend(reader.waiting);
        }
        Ok(tree)
    }
}

/// Reads one file into its module and those inside it.
struct Reader<'a> {
    tree: &'a mut Tree,
    /// The module that is being read.
    id: usize,
    /// Where the files of the modules below it lie.
    folder: String,
    read: &'a dyn Fn(&str) -> Option<String>,
    waiting: Vec<(usize, String)>,
    fault: Option<Violation>,
}

impl Reader<'_> {
    fn module(&mut self) -> &mut Module {
        &mut self.tree.modules[self.id]
    }

    fn name(&mut self, name: &Ident, stands_for: Name) {
        self.module().names.entry(name.to_string()).or_default().push(stands_for);
    }

    fn items(&mut self, items: &[Item]) {
        for item in items {
            if let Some(ident) = defined(item) {
                self.name(ident, Name::Item);
            }
            self.visit_item(item);
        }
    }

    /// Enters a module that stands in this file.
    fn inline(&mut self, ident: &Ident, items: &[Item]) {
        let (parent, folder) = (self.id, self.folder.clone());
        self.id = self.add(ident, self.tree.modules[parent].file.clone());
        self.folder = format!("{folder}/{ident}");
        self.items(items);
        (self.id, self.folder) = (parent, folder);
    }

    /// Notes a module that has a file of its own.
    fn declared(&mut self, ident: &Ident) {
        let folder = format!("{}/{ident}", self.folder);
        let places = [format!("{folder}/mod.rs"), format!("{folder}.rs")];
        if let Some(file) = places.into_iter().find(|place| (self.read)(place).is_some()) {
            let id = self.add(ident, file);
            self.waiting.push((id, folder));
        } else {
            let rule = format!("no file for the module `{ident}`");
            self.fault = Some(Violation::new(&self.module().file, line(ident.span()), rule));
        }
    }

    fn add(&mut self, ident: &Ident, file: String) -> usize {
        let id = self.tree.modules.len();
        self.name(ident, Name::Module(id));
        self.tree.modules.push(Module { file, parent: Some(self.id), ..Module::default() });
        id
    }

    /// Notes every import of a `use`, of which `before` has been read.
    fn import(&mut self, before: &[String], tree: &UseTree) {
        let with = |ident: &Ident| [before, &[ident.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.import(&with(&path.ident), &path.tree),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(before, tree));
            }
            UseTree::Glob(glob) => {
                self.mention(glob.star_token.spans[0], before.to_vec());
                self.module().globs.push(before.to_vec());
            }
            UseTree::Name(name) if name.ident == "self" => {
                self.mention(name.ident.span(), before.to_vec());
                if let Some(last) = before.last() {
                    let import = Name::Import(before.to_vec());
                    self.module().names.entry(last.clone()).or_default().push(import);
                }
            }
            UseTree::Name(name) => self.named(&name.ident, &name.ident, with(&name.ident)),
            UseTree::Rename(rename) if rename.ident == "self" => {
                self.named(&rename.ident, &rename.rename, before.to_vec());
            }
            UseTree::Rename(rename) => {
                self.named(&rename.ident, &rename.rename, with(&rename.ident));
            }
        }
    }

    fn named(&mut self, ident: &Ident, name: &Ident, path: Vec<String>) {
        self.mention(ident.span(), path.clone());
        self.name(name, Name::Import(path));
    }

    fn mention(&mut self, span: Span, path: Vec<String>) {
        self.module().mentions.push(Mention { line: line(span), path });
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        match &module.content {
            _ if is_test(&module.attrs) => {}
            Some((_, items)) => self.inline(&module.ident, items),
            None => self.declared(&module.ident),
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        // A leading `::` names another crate.
        if !is_test(&item.attrs) && item.leading_colon.is_none() {
            self.import(&[], &item.tree);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !is_test(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // A single name is in scope by an import that has been noted, unless that was a glob.
        let may_be_new = names.len() > 1 || !self.module().globs.is_empty();
        if let Some(first) =
            path.segments.first().filter(|_| may_be_new && path.leading_colon.is_none())
        {
            self.mention(first.ident.span(), names);
        }
        visit::visit_path(self, path);
    }
}

/// The name that an item gives to something other than a module.
fn defined(item: &Item) -> Option<&Ident> {
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Macro(item) => item.ident.as_ref(),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::TraitAlias(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

/// Whether something is built for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<Ident>()
                .is_ok_and(|condition| condition == "test" || condition == "doctest")
    })
}

fn line(span: Span) -> usize {
    span.start().line
}
