//! The modules of a crate as its files declare them: the meaning of their names, and the paths that
//! they mention.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::Span;
use syn::{
    Attribute, Ident, ImplItem, Item, ItemFn, ItemImpl, ItemMod, ItemUse, Type, UseTree,
    Visibility,
    visit::{self, Visit},
};

use crate::tidy::{Violation, imports::signature};

/// All modules of a crate except its tests, with the root first.
pub(in crate::tidy) struct ModuleTree {
    pub(in crate::tidy) modules: Vec<ModuleFacts>,
    /// The public methods and associated constants of its types.
    pub(in crate::tidy) methods: Vec<MethodUse>,
    /// The names of types in its public signatures.
    pub(in crate::tidy) signatures: BTreeSet<String>,
}

#[derive(Default)]
pub(in crate::tidy) struct ModuleFacts {
    /// Its file; the file of an inline module is its parent's.
    pub(in crate::tidy) file: String,
    pub(in crate::tidy) parent: Option<usize>,
    /// The meanings of its names. A name may mean a module and a function at once.
    pub(in crate::tidy) names: BTreeMap<String, Vec<PublicName>>,
    /// The modules and enums that it imports by glob.
    pub(in crate::tidy) globs: Vec<GlobImport>,
    pub(in crate::tidy) mentions: Vec<PathMention>,
}

/// One meaning of a name.
pub(in crate::tidy) struct PublicName {
    /// Whether it is `pub` and on the pages of the reference.
    pub(in crate::tidy) is_public: bool,
    pub(in crate::tidy) line: usize,
    pub(in crate::tidy) meaning: NameMeaning,
}

pub(in crate::tidy) enum NameMeaning {
    /// Something defined here.
    Item,
    /// A module below this one, by its index.
    ModuleFacts(usize),
    /// Something that is imported from this path.
    ImportLine(Vec<String>),
}

/// An import of all names of a path.
pub(in crate::tidy) struct GlobImport {
    pub(in crate::tidy) is_public: bool,
    pub(in crate::tidy) path: Vec<String>,
}

/// A public method or associated constant.
pub(in crate::tidy) struct MethodUse {
    pub(in crate::tidy) owner: String,
    pub(in crate::tidy) name: String,
    /// Whether it is called on a value, `x.name()`.
    pub(in crate::tidy) has_receiver: bool,
    pub(in crate::tidy) file: String,
    pub(in crate::tidy) line: usize,
}

/// A path that is imported, or written out.
pub(in crate::tidy) struct PathMention {
    pub(in crate::tidy) line: usize,
    pub(in crate::tidy) path: Vec<String>,
}

impl ModuleTree {
    /// Reads the crate with its root file at `root`.
    pub(in crate::tidy) fn read(
        root: &str,
        read: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, Violation> {
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let module = ModuleFacts { file: root.to_owned(), ..ModuleFacts::default() };
        let mut tree =
            Self { modules: vec![module], methods: Vec::new(), signatures: BTreeSet::new() };
        // Files that are declared and not yet read: the module, and the folder of those below it.
        let mut waiting = vec![(0, folder)];
        while let Some((id, folder)) = waiting.pop() {
            let file = tree.modules[id].file.clone();
            let text = read(&file).ok_or_else(|| Violation::new(&file, 1, "no such file"))?;
            let parsed = syn::parse_file(&text).map_err(|error| {
                Violation::new(&file, line(error.span()), format!("cannot be parsed: {error}"))
            })?;
            let mut reader = ModuleReader {
                tree: &mut tree,
                id,
                folder,
                read,
                waiting: Vec::new(),
                fault: None,
            };
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
struct ModuleReader<'a> {
    tree: &'a mut ModuleTree,
    /// The module that is being read.
    id: usize,
    /// The folder of its submodules' files.
    folder: String,
    read: &'a dyn Fn(&str) -> Option<String>,
    waiting: Vec<(usize, String)>,
    fault: Option<Violation>,
}

impl ModuleReader<'_> {
    fn module(&mut self) -> &mut ModuleFacts {
        &mut self.tree.modules[self.id]
    }

    fn name(&mut self, name: &Ident, is_public: bool, meaning: NameMeaning) {
        let name_here = PublicName { is_public, line: line(name.span()), meaning };
        self.module().names.entry(name.to_string()).or_default().push(name_here);
    }

    fn items(&mut self, items: &[Item]) {
        for item in items {
            if let Some((ident, visibility, attributes)) = defined(item) {
                self.name(ident, is_public(visibility, attributes), NameMeaning::Item);
            }
            self.tree.signatures.extend(signature::names(item));
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

    /// Records a module in a separate file.
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
        self.name(
            &module.ident,
            is_public(&module.vis, &module.attrs),
            NameMeaning::ModuleFacts(id),
        );
        self.tree.modules.push(ModuleFacts {
            file,
            parent: Some(self.id),
            ..ModuleFacts::default()
        });
        id
    }

    /// Records every import of a `use`, where `prefix` is the path so far.
    fn import(&mut self, is_public: bool, prefix: &[String], tree: &UseTree) {
        let extended = |ident: &Ident| [prefix, &[ident.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.import(is_public, &extended(&path.ident), &path.tree),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(is_public, prefix, tree));
            }
            UseTree::Glob(glob) => {
                self.mention(glob.star_token.spans[0], prefix.to_vec());
                self.module().globs.push(GlobImport { is_public, path: prefix.to_vec() });
            }
            UseTree::Name(name) if name.ident == "self" => {
                if let Some(last) = prefix.last() {
                    let ident = Ident::new(last, name.ident.span());
                    self.named(is_public, &ident, &ident, prefix.to_vec());
                }
            }
            UseTree::Name(name) => {
                self.named(is_public, &name.ident, &name.ident, extended(&name.ident));
            }
            UseTree::Rename(rename) if rename.ident == "self" => {
                self.named(is_public, &rename.ident, &rename.rename, prefix.to_vec());
            }
            UseTree::Rename(rename) => {
                self.named(is_public, &rename.ident, &rename.rename, extended(&rename.ident));
            }
        }
    }

    fn named(&mut self, is_public: bool, ident: &Ident, name: &Ident, path: Vec<String>) {
        self.mention(ident.span(), path.clone());
        self.name(name, is_public, NameMeaning::ImportLine(path));
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
                self.tree.methods.push(MethodUse { owner, name, has_receiver, file, line });
            }
        }
    }

    fn mention(&mut self, span: Span, path: Vec<String>) {
        self.module().mentions.push(PathMention { line: line(span), path });
    }
}

impl<'ast> Visit<'ast> for ModuleReader<'_> {
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

/// Returns the name, visibility and attributes of an item; `None` for modules.
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
fn type_name(item: &Type) -> Option<String> {
    let Type::Path(path) = item else { return None };
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
