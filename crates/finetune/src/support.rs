//! Items for the command line alone.

pub use crate::files::read_if_there;
