//! The types that public signatures name. Callers get values of them without writing their names.

use std::collections::BTreeSet;

use syn::{
    ImplItem, Item, TraitItem, Visibility,
    visit::{self, Visit},
};

/// Returns the names in the signatures of an item and its public members, except for its own name.
pub(super) fn names(item: &Item) -> BTreeSet<String> {
    let mut names = TypeNames::default();
    match item {
        Item::Fn(item) if is_pub(&item.vis) => names.visit_signature(&item.sig),
        Item::Type(item) if is_pub(&item.vis) => names.visit_type(&item.ty),
        Item::Struct(item) if is_pub(&item.vis) => {
            let fields = item.fields.iter().filter(|field| is_pub(&field.vis));
            fields.for_each(|field| names.visit_type(&field.ty));
        }
        Item::Enum(item) if is_pub(&item.vis) => {
            let fields = item.variants.iter().flat_map(|variant| &variant.fields);
            fields.for_each(|field| names.visit_type(&field.ty));
        }
        Item::Trait(item) if is_pub(&item.vis) => {
            for member in &item.items {
                match member {
                    TraitItem::Fn(member) => names.visit_signature(&member.sig),
                    member => names.visit_trait_item(member),
                }
            }
        }
        Item::Impl(item) => {
            for member in &item.items {
                match member {
                    ImplItem::Fn(member) if is_pub(&member.vis) => {
                        names.visit_signature(&member.sig);
                    }
                    ImplItem::Type(member) => names.visit_type(&member.ty),
                    _ => {}
                }
            }
            let mut own = TypeNames::default();
            own.visit_type(&item.self_ty);
            names.0.retain(|name| !own.0.contains(name));
        }
        _ => {}
    }
    names.0
}

#[derive(Default)]
struct TypeNames(BTreeSet<String>);

impl<'ast> Visit<'ast> for TypeNames {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.extend(path.segments.last().map(|segment| segment.ident.to_string()));
        visit::visit_path(self, path);
    }
}

fn is_pub(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}
