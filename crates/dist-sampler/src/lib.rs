//! Which samples this rank reads this epoch: disjoint, reproducible, resumable.
