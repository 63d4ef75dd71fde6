//! Which parameters belong together: the positions of those of each unit or layer.

use std::collections::BTreeMap;

/// Names in the order in which they first occur, and for every item which of them it has.
#[derive(Debug, Default)]
pub(crate) struct NamedGroups<'a> {
    pub(crate) names: Vec<&'a str>,
    pub(crate) of_item: Vec<usize>,
}

impl<'a> NamedGroups<'a> {
    pub(crate) fn of(items: impl Iterator<Item = &'a str>) -> Self {
        let mut positions = BTreeMap::new();
        let mut groups = Self::default();
        let mut last = 0;
        for name in items {
            // Items of a group mostly stand side by side, which makes it worth a look before a
            // search.
            if groups.names.get(last) != Some(&name) {
                last = *positions.entry(name).or_insert(groups.names.len());
                if last == groups.names.len() {
                    groups.names.push(name);
                }
            }
            groups.of_item.push(last);
        }
        groups
    }
}
