//! Which parameter has which name: an index that is quick to make.

use core_types::Fingerprint;

/// Positions by name, sorted by a hash of the name and then by the name.
///
/// Names of large models begin alike for dozens of bytes, so that comparing hashes first makes
/// sorting 45,395 of them several times faster. The hash orders nothing that leaves this module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names(Vec<(u64, usize)>);

impl Names {
    /// Indexes `len` names; `name` returns the one at a position, with its [`hash`].
    ///
    /// # Errors
    ///
    /// A position whose name another position has as well.
    pub(crate) fn new<'a>(
        len: usize,
        name: impl Fn(usize) -> (u64, &'a str),
    ) -> Result<Self, usize> {
        let mut entries: Vec<_> = (0..len).map(|position| (name(position).0, position)).collect();
        entries.sort_unstable_by_key(|&(hash, _)| hash);
        let equal_hashes =
            entries.chunk_by_mut(|left, right| left.0 == right.0).filter(|run| run.len() > 1);
        equal_hashes.for_each(|run| run.sort_unstable_by_key(|&(_, position)| name(position).1));
        let same = |pair: &&[(u64, usize)]| {
            pair[0].0 == pair[1].0 && name(pair[0].1).1 == name(pair[1].1).1
        };
        match entries.windows(2).find(same) {
            Some(pair) => Err(pair[1].1),
            None => Ok(Self(entries)),
        }
    }

    /// The position of `wanted`.
    pub(crate) fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let key = (hash(wanted), wanted);
        let found = self.0.binary_search_by(|&(hash, position)| {
            hash.cmp(&key.0).then_with(|| name(position).cmp(key.1))
        });
        found.ok().map(|found| self.0[found].1)
    }
}

/// The hash of a name, the same in every process.
pub(crate) fn hash(name: &str) -> u64 {
    Fingerprint::new().write_bytes(name.as_bytes()).finish()
}
