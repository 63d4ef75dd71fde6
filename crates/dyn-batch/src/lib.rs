//! Variable-length sequences into batches with little padding.
