//! Collectives on lists in a group of one replica, which needs no communication.

use candle_core::{Device, Result, Tensor};

use crate::{
    device::to_device::{contiguous_copy, leaf_from_parts, to_contiguous, to_device},
    engine::{
        ListRequest,
        layout::{Run, RunLayout},
    },
};

/// Runs a collective on lists. Like an engine, returns copies: results must not change when a
/// program sets an argument in place.
pub(super) fn run(work: ListRequest) -> Result<Vec<Tensor>> {
    match work {
        ListRequest::Gather { own, layout, device } => gather(&own, &layout, &device),
        ListRequest::Sum { list, runs_by_rank } => cut_runs(&list, &runs_by_rank[0]),
    }
}

/// Assembles the tensors of a layout from runs on any device.
fn gather(own: &[Tensor], layout: &RunLayout, device: &Device) -> Result<Vec<Tensor>> {
    let runs: Vec<Tensor> = own
        .iter()
        .map(|x| to_device(&to_contiguous(x)?.flatten_all()?, device))
        .collect::<Result<_>>()?;
    let mut leaves = Vec::with_capacity(layout.tensors().len());
    for ((shape, dtype), owners) in layout.tensors().iter().zip(layout.by_tensor()) {
        let parts = owners.iter().map(|owned| (owned.items.start, &runs[owned.index]));
        leaves.push(leaf_from_parts(shape, *dtype, device, parts)?.into_inner());
    }
    Ok(leaves)
}

/// Returns copies of some runs of a list.
fn cut_runs(list: &[Tensor], runs: &[Run]) -> Result<Vec<Tensor>> {
    let mut copies = Vec::with_capacity(runs.len());
    for Run { tensor, items } in runs {
        let flat = to_contiguous(&list[*tensor])?.flatten_all()?;
        copies.push(contiguous_copy(&flat.narrow(0, items.start, items.len())?)?);
    }
    Ok(copies)
}
