//! The modules of a crate as its files declare them: the meaning of their names, and the paths that
//! they mention.

use std::collections::BTreeMap;

use proc_macro2::Span;
use syn::{
    Attribute, Ident, ImplItem, Item, ItemFn, ItemImpl, ItemMod, ItemUse, Type, UseTree,
    Visibility,
    visit::{self, Visit},
};

use crate::tidy::Violation;

/// All modules of a crate but those of its tests, the root first.
pub(in crate::tidy) struct Tree {
    pub(in crate::tidy) modules: Vec<Module>,
    /// The public methods and associated constants of its types.
    pub(in crate::tidy) methods: Vec<Method>,
}

#[derive(Default)]
pub(in crate::tidy) struct Module {
    /// Its file; the file of an inline module is its parent's.
    pub(in crate::tidy) file: String,
    pub(in crate::tidy) parent: Option<usize>,
    /// The meanings of its names. A name may mean a module and a function at once.
    pub(in crate::tidy) names: BTreeMap<String, Vec<Name>>,
    /// The modules and enums whose names it imports without a list.
    pub(in crate::tidy) globs: Vec<Glob>,
    pub(in crate::tidy) mentions: Vec<Mention>,
}

/// One meaning of a name.
pub(in crate::tidy) struct Name {
    /// Whether it is `pub` and on the pages of the reference.
    pub(in crate::tidy) is_public: bool,
    pub(in crate::tidy) line: usize,
    pub(in crate::tidy) meaning: Meaning,
}

pub(in crate::tidy) enum Meaning {
    /// Something defined here.
    Item,
    /// A module below this one, by its index.
    Module(usize),
    /// Something that is imported from this path.
    Import(Vec<String>),
}

/// An import of all names of a path.
pub(in crate::tidy) struct Glob {
    pub(in crate::tidy) is_public: bool,
    pub(in crate::tidy) path: Vec<String>,
}

/// A public method or associated constant.
pub(in crate::tidy) struct Method {
    pub(in crate::tidy) owner: String,
    pub(in crate::tidy) name: String,
    /// Whether it is called on a value, `x.name()`.
    pub(in crate::tidy) has_receiver: bool,
    pub(in crate::tidy) file: String,
    pub(in crate::tidy) line: usize,
}

/// A path that is imported, or written out.
pub(in crate::tidy) struct Mention {
    pub(in crate::tidy) line: usize,
    pub(in crate::tidy) path: Vec<String>,
}

impl Tree {
    /// Reads the crate whose root file is at `root`.
    pub(in crate::tidy) fn read(
        root: &str,
        read: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Violation> {
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let module = Module { file: root.to_owned(), ..Module::default() };
        let mut tree = Self { modules: vec![module], methods: Vec::new() };
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

    fn name(&mut self, name: &Ident, is_public: bool, meaning: Meaning) {
        let name_here = Name { is_public, line: line(name.span()), meaning };
        self.module().names.entry(name.to_string()).or_default().push(name_here);
    }

    fn items(&mut self, items: &[Item]) {
        for item in items {
            if let Some((ident, visibility, attributes)) = defined(item) {
                self.name(ident, is_public(visibility, attributes), Meaning::Item);
            }
            self.visit_item(item);
        }
    }

    /// Enters a module that stands in this file.
    fn inline(&mut self, module: &ItemMod, items: &[Item]) {
        let (parent, folder) = (self.id, self.folder.clone());
        self.id = self.add(module, self.tree.modules[parent].file.clone());
        self.folder = format!("{folder}/{}", module.ident);
        self.items(items);
        (self.id, self.folder) = (parent, folder);
    }

    /// Notes a module that has a file of its own.
    fn declared(&mut self, module: &ItemMod) {
        let ident = &module.ident;
        let folder = format!("{}/{ident}", self.folder);
        let places = [format!("{folder}/mod.rs"), format!("{folder}.rs")];
        if let Some(file) = places.into_iter().find(|place| (self.read)(place).is_some()) {
            let id = self.add(module, file);
            self.waiting.push((id, folder));
        } else {
            let rule = format!("no file for the module `{ident}`");
            self.fault = Some(Violation::new(&self.module().file, line(ident.span()), rule));
        }
    }

    fn add(&mut self, module: &ItemMod, file: String) -> usize {
        let id = self.tree.modules.len();
        self.name(&module.ident, is_public(&module.vis, &module.attrs), Meaning::Module(id));
        self.tree.modules.push(Module { file, parent: Some(self.id), ..Module::default() });
        id
    }

    /// Notes every import of a `use`, of which `before` has been read.
    fn import(&mut self, is_public: bool, before: &[String], tree: &UseTree) {
        let with = |ident: &Ident| [before, &[ident.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.import(is_public, &with(&path.ident), &path.tree),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(is_public, before, tree));
            }
            UseTree::Glob(glob) => {
                self.mention(glob.star_token.spans[0], before.to_vec());
                self.module().globs.push(Glob { is_public, path: before.to_vec() });
            }
            UseTree::Name(name) if name.ident == "self" => {
                if let Some(last) = before.last() {
                    let ident = Ident::new(last, name.ident.span());
                    self.named(is_public, &ident, &ident, before.to_vec());
                }
            }
            UseTree::Name(name) => {
                self.named(is_public, &name.ident, &name.ident, with(&name.ident));
            }
            UseTree::Rename(rename) if rename.ident == "self" => {
                self.named(is_public, &rename.ident, &rename.rename, before.to_vec());
            }
            UseTree::Rename(rename) => {
                self.named(is_public, &rename.ident, &rename.rename, with(&rename.ident));
            }
        }
    }

    fn named(&mut self, is_public: bool, ident: &Ident, name: &Ident, path: Vec<String>) {
        self.mention(ident.span(), path.clone());
        self.name(name, is_public, Meaning::Import(path));
    }

    /// Notes the public methods of an `impl` of a type's own.
    fn methods(&mut self, item: &ItemImpl) {
        let Some(owner) = type_name(&item.self_ty).filter(|_| item.trait_.is_none()) else {
            return;
        };
        for member in &item.items {
            let (visibility, attributes, name, has_receiver) = match member {
                ImplItem::Fn(f) => (&f.vis, &f.attrs, &f.sig.ident, f.sig.receiver().is_some()),
                ImplItem::Const(value) => (&value.vis, &value.attrs, &value.ident, false),
                _ => continue,
            };
            if is_public(visibility, attributes) {
                let (owner, name, line) = (owner.clone(), name.to_string(), line(name.span()));
                let file = self.module().file.clone();
                self.tree.methods.push(Method { owner, name, has_receiver, file, line });
            }
        }
    }

    fn mention(&mut self, span: Span, path: Vec<String>) {
        self.module().mentions.push(Mention { line: line(span), path });
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        match &module.content {
            _ if is_test(&module.attrs) => {}
            Some((_, items)) => self.inline(module, items),
            None => self.declared(module),
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        // A leading `::` names another crate.
        if !is_test(&item.attrs) && item.leading_colon.is_none() {
            self.import(is_public(&item.vis, &item.attrs), &[], &item.tree);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !is_test(&item.attrs) {
            self.methods(item);
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

/// Returns the name, visibility and attributes of an item that is no module.
fn defined(item: &Item) -> Option<(&Ident, &Visibility, &[Attribute])> {
    Some(match item {
        Item::Const(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Enum(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Fn(item) => (&item.sig.ident, &item.vis, &item.attrs),
        Item::Macro(item) => (item.ident.as_ref()?, &Visibility::Inherited, &item.attrs),
        Item::Static(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Struct(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Trait(item) => (&item.ident, &item.vis, &item.attrs),
        Item::TraitAlias(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Type(item) => (&item.ident, &item.vis, &item.attrs),
        Item::Union(item) => (&item.ident, &item.vis, &item.attrs),
        _ => return None,
    })
}

/// Returns the last name of a type's path.
fn type_name(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    Some(path.path.segments.last()?.ident.to_string())
}

/// Returns true if something is `pub` and not hidden from the pages of the reference.
fn is_public(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let is_hidden = attributes.iter().any(|attribute| {
        attribute.path().is_ident("doc")
            && attribute.parse_args::<Ident>().is_ok_and(|word| word == "hidden")
    });
    matches!(visibility, Visibility::Public(_)) && !is_hidden
}

/// Returns true if something is built for tests or for pages of the reference only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<Ident>().is_ok_and(|condition| {
                ["test", "doctest", "doc"].iter().any(|only| condition == only)
            })
    })
}

fn line(span: Span) -> usize {
    span.start().line
}
