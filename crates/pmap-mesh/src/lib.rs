//! Run one function on every device of a mesh: shard, run in parallel, reduce, gather.
