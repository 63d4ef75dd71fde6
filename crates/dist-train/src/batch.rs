//! The shapes of a batch, for the error messages of losses.

use std::fmt;

use pmap_mesh::TensorTree;

use crate::tree;

/// The shapes of a batch's tensors before it is split.
#[derive(Debug)]
pub(crate) struct BatchShapes(Vec<Vec<usize>>);

/// The shapes of one replica's shard, next to the full shapes.
struct ShardShapes {
    whole: Vec<Vec<usize>>,
    here: Vec<Vec<usize>>,
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
        let here = shapes(&shard);
        loss(shard).map_err(|error| error.context(ShardShapes { whole: self.0.clone(), here }))
    }
}

impl fmt::Display for ShardShapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the loss of a shard")?;
        for (n, (whole, here)) in self.whole.iter().zip(&self.here).enumerate() {
            f.write_str(if n == 0 { ", of tensors " } else { ", " })?;
            if whole == here {
                write!(f, "{whole:?} whole")?;
            } else {
                write!(f, "{whole:?} cut to {here:?}")?;
            }
        }
        Ok(())
    }
}

fn shapes(tree: &impl TensorTree) -> Vec<Vec<usize>> {
    tree::each(tree, |leaf| leaf.dims().to_vec())
}
