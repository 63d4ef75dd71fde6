//! Shapes of a batch, for the error messages of losses, and fingerprints of batches.

use candle_core::{Device, Tensor};
use core_types::{Fingerprint, Seed};
use pmap_mesh::{DeviceMesh, TensorTree};

use crate::{
    error::{Doing, Result},
    tree,
};

/// The shapes of a batch's tensors before it is split.
#[derive(Debug)]
pub(crate) struct BatchShapes(Vec<Vec<usize>>);

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
        loss(shard).map_err(|error| error.context(self.describe(&local)))
    }

    /// Returns the context of an error, with the shapes of a shard.
    fn describe(&self, local: &[Vec<usize>]) -> String {
        let mut shapes = Vec::with_capacity(local.len());
        for (full, local) in self.0.iter().zip(local) {
            let is_whole = full == local;
            let cut = if is_whole { "whole".to_owned() } else { format!("cut to {local:?}") };
            shapes.push(format!("{full:?} {cut}"));
        }
        let of = if shapes.is_empty() { "" } else { ", of tensors " };
        format!("the loss of a shard{of}{}", shapes.join(", "))
    }
}

/// The largest number of items of a tensor that a [`fingerprint`] reads. Batches of different rows
/// differ in nearly all of them.
const MAX_SAMPLES: usize = 1024;

/// Returns the [`fingerprint`] of a batch that all processes of the mesh must pass; `None` in a single
/// process.
pub(crate) fn shared_fingerprint(
    mesh: &DeviceMesh,
    batch: &impl TensorTree,
) -> Result<Option<f64>> {
    if !mesh.spans_processes() {
        return Ok(None);
    }
    fingerprint(batch).map(Some).doing("reading a batch")
}

/// Returns a fingerprint of the shapes and dtypes in a batch, and of values in memory: an integer of
/// 52 bits, which every engine transfers exactly as a number.
///
/// Of a large tensor it reads [`MAX_SAMPLES`] items at random positions, because positions at equal
/// distances may all be in one column of a table. Values on a GPU are not read.
fn fingerprint(batch: &impl TensorTree) -> candle_core::Result<f64> {
    let mut fingerprint = Fingerprint::new();
    for leaf in tree::each(batch, Tensor::clone) {
        fingerprint.write_bytes(leaf.dtype().as_str().as_bytes());
        fingerprint.extend(leaf.dims().iter().map(|&size| size as u64));
        if leaf.device().is_cpu() {
            let mut bytes = Vec::new();
            samples(&leaf)?.write_bytes(&mut bytes)?;
            fingerprint.write_bytes(&bytes);
        }
    }
    Ok((fingerprint.finish() >> 12) as f64)
}

/// Returns all items of a tensor, or a sample of them, as a contiguous list.
fn samples(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let items = tensor.detach().flatten_all()?;
    if items.elem_count() <= MAX_SAMPLES {
        return items.force_contiguous();
    }
    let n_items = items.elem_count() as u64;
    let positions =
        (0..MAX_SAMPLES as u64).map(|n| Seed::new(n_items).derive(n).as_u64() % n_items);
    let positions: Vec<i64> = positions.map(u64::cast_signed).collect();
    items.index_select(&Tensor::new(positions, &Device::Cpu)?, 0)
}

fn shapes(tree: &impl TensorTree) -> Vec<Vec<usize>> {
    tree::each(tree, |leaf| leaf.dims().to_vec())
}
