//! What cuts know of sorted sequences.

/// Groups of sequences with the same padded length, by the longest of each group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// The number of groups up to the last of these.
    pub(super) end: usize,
    pub(super) padded_length: u64,
    /// The most groups in a batch whose longest group is one of these.
    pub(super) max_groups: usize,
}
