//! An index of parameters by name that is fast to build.

use core_types::Fingerprint;

/// Positions by name, sorted by a hash of the name and then by the name.
///
/// Names of large models share dozens of leading bytes, so comparing hashes first sorts 45,395
/// names several times faster. The hash order never leaves this module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameIndex(Vec<(u64, usize)>);

impl NameIndex {
    /// Indexes `len` names; `name` returns the name at a position with its [`hash`].
    ///
    /// # Errors
    ///
    /// The position of a duplicate name.
    pub(crate) fn new<'a>(
        len: usize,
        name: impl Fn(usize) -> (u64, &'a str),
    ) -> Result<Self, usize> {
        let mut entries: Vec<_> = (0..len).map(|position| (name(position).0, position)).collect();
        entries.sort_unstable_by_key(|&(hash, _)| hash);
        for run in entries.chunk_by_mut(|left, right| left.0 == right.0) {
            // Hashes rarely collide, so nearly every run has one entry.
            if run.len() > 1 {
                run.sort_unstable_by_key(|&(_, position)| name(position).1);
            }
        }
        for pair in entries.windows(2) {
            let [(left_hash, left), (right_hash, right)] = [pair[0], pair[1]];
            if left_hash == right_hash && name(left).1 == name(right).1 {
                return Err(right);
            }
        }
        Ok(Self(entries))
    }

    /// Returns the position of `wanted`.
    pub(crate) fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let wanted_hash = hash(wanted);
        let entry = self.0.binary_search_by(|&(hash, position)| {
            hash.cmp(&wanted_hash).then_with(|| name(position).cmp(wanted))
        });
        let (_, position) = self.0[entry.ok()?];
        Some(position)
    }
}

/// Returns the hash of a name, the same in every process.
pub(crate) fn hash(name: &str) -> u64 {
    Fingerprint::new().write_bytes(name.as_bytes()).finish()
}
