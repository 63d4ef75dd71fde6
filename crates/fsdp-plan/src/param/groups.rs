//! Groups of items by name, such as the parameters of each unit or layer.

use std::collections::BTreeMap;

/// The distinct names of some items in order of first occurrence, and the group of each item.
#[derive(Debug, Default)]
pub(crate) struct NamedGroups<'a> {
    pub(crate) names: Vec<&'a str>,
    pub(crate) group_of_item: Vec<usize>,
}

impl<'a> NamedGroups<'a> {
    /// Groups items by their names.
    pub(crate) fn from_names(items: impl Iterator<Item = &'a str>) -> Self {
        let mut positions = BTreeMap::new();
        let mut groups = Self::default();
        let mut last = 0;
        for name in items {
            // Items of a group are mostly adjacent, so compare with the last name before searching.
            if groups.names.get(last) != Some(&name) {
                last = *positions.entry(name).or_insert(groups.names.len());
                if last == groups.names.len() {
                    groups.names.push(name);
                }
            }
            groups.group_of_item.push(last);
        }
        groups
    }
}
