//! Who carries out a plan.

/// The runtime that carries out a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Runtime {
    /// PyTorch's `fully_shard` and `FullyShardedDataParallel`: parts are padded to equal sizes, one
    /// unit is gathered ahead, and the graphs of all units are kept for the backward pass.
    #[default]
    Torch,
    /// dist-train's `FullyShard` on candle: no padding, nothing ahead by default. Gradients of halves are
    /// reduced and held as [`F32`](crate::ElemType::F32). Replicated parameters are copied like the others while
    /// their unit computes, and so is everything where a shard group has one rank. Units that do not
    /// stay gathered keep their inputs and are computed again, unless [their graphs are
    /// kept](crate::cost::CostModel::with_kept_graphs). candle's `backward` makes a
    /// parameter's gradient of zeros, to which it adds the first contribution: the largest gradient
    /// is there two times more for a moment.
    Candle,
}
