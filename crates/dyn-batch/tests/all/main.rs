//! Laws of batches, pinned values, errors, and the pictures of the crate page.

mod efficiency;
mod errors;
mod golden;
mod hostile;
mod laws;
mod lengths;
mod readme;
mod resume;
