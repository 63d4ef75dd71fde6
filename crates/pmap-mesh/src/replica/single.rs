//! Collectives on lists in a group of one replica, which needs no communication.

use candle_core::{Device, Result, Tensor, bail};

use crate::{
    device::to_device::{contiguous_copy, leaf_from_parts, to_contiguous, to_device},
    engine::{ListRequest, WantedTensors, layout::RunLayout},
};

/// Runs a collective on lists. Like an engine, returns copies: results must not change when a
/// program sets an argument in place.
pub(super) fn run(work: ListRequest) -> Result<Vec<Tensor>> {
    match work {
        ListRequest::Gather { own, layout, device } => gather(&own, &layout, &device),
        ListRequest::Reduce { list, wanted, .. } => reduce(&list, &wanted),
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

fn reduce(list: &[Tensor], wanted: &WantedTensors) -> Result<Vec<Tensor>> {
    let mut sums = Vec::new();
    match wanted {
        WantedTensors::Everything => return list.iter().map(contiguous_copy).collect(),
        WantedTensors::Own(wanted) => {
            for &index in wanted {
                let Some(x) = list.get(index) else { bail!("there is no tensor {index} to sum") };
                sums.push(contiguous_copy(x)?);
            }
        }
        WantedTensors::ByRank(runs) => {
            for run in &runs[0] {
                let flat = to_contiguous(&list[run.tensor])?.flatten_all()?;
                sums.push(contiguous_copy(&flat.narrow(0, run.items.start, run.items.len())?)?);
            }
        }
    }
    Ok(sums)
}
