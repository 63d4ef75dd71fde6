//! Data sets in files.

pub(crate) mod file;
pub(crate) mod indexed_text;
pub(crate) mod jsonl;
pub(crate) mod line_index;
pub(crate) mod listing;
pub(crate) mod npy;
pub(crate) mod open_cache;
pub(crate) mod rows;
pub(crate) mod sharded;
pub(crate) mod split_text;
pub(crate) mod text;
pub(crate) mod tokens;
