//! The shapes of a batch, for the error messages of losses.

use std::fmt;

use pmap_mesh::TensorTree;

use crate::tree;

/// The shapes of a batch's tensors before it is split.
#[derive(Debug)]
pub(crate) struct BatchShapes(Vec<Vec<usize>>);

/// The shapes of a batch's tensors before they are split, and the shapes in one replica's shard.
struct ShardShapes {
    full: Vec<Vec<usize>>,
    local: Vec<Vec<usize>>,
}

impl BatchShapes {
    pub(crate) fn new(batch: &impl TensorTree) -> Self {
        Self(shapes(batch))
    }

    /// Calls `loss` on a shard, and adds the full and local shapes of the batch to its error.
    pub(crate) fn explain<I: TensorTree, L>(
        &self,
        shard: I,
        loss: impl FnOnce(I) -> candle_core::Result<L>,
    ) -> candle_core::Result<L> {
        let local = shapes(&shard);
        loss(shard).map_err(|error| error.context(ShardShapes { full: self.0.clone(), local }))
    }
}

impl fmt::Display for ShardShapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the loss of a shard")?;
        for (n, (full, local)) in self.full.iter().zip(&self.local).enumerate() {
            f.write_str(if n == 0 { ", of tensors " } else { ", " })?;
            if full == local {
                write!(f, "{full:?} whole")?;
            } else {
                write!(f, "{full:?} cut to {local:?}")?;
            }
        }
        Ok(())
    }
}

fn shapes(tree: &impl TensorTree) -> Vec<Vec<usize>> {
    tree::each(tree, |leaf| leaf.dims().to_vec())
}
