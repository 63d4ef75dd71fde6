//! Nothing here: this package exists for its benches.
