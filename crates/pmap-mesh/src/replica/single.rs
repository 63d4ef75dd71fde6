//! Collectives of lists in a group of one replica, which needs no communication.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::{
    device::to_device::{contiguous_copy, leaf_from_parts, to_contiguous, to_device},
    engine::{
        ListRequest, WantedTensors,
        layout::{OwnedRun, Run},
    },
};

/// Returns copies, like an engine: results must not change when a program sets an argument in
/// place.
pub(super) fn run(work: ListRequest) -> Result<Vec<Tensor>> {
    match work {
        ListRequest::Gather { own, layout, device } => {
            // Accept runs on any device, as engines do.
            let own: Vec<Tensor> = own
                .iter()
                .map(|x: &Tensor| to_device(&to_contiguous(x)?.flatten_all()?, &device))
                .collect::<Result<_>>()?;
            layout
                .tensors()
                .iter()
                .zip(layout.owners())
                .map(|((shape, dtype), owners): (&(Shape, DType), &Vec<OwnedRun>)| {
                    Ok(leaf_from_parts(
                        shape,
                        *dtype,
                        &device,
                        owners
                            .iter()
                            .map(|owned: &OwnedRun| (owned.items.start, &own[owned.index])),
                    )?
                    .into_inner())
                })
                .collect()
        }
        ListRequest::Reduce { list, wanted: WantedTensors::Everything, .. } => {
            list.iter().map(contiguous_copy).collect()
        }
        ListRequest::Reduce { list, wanted: WantedTensors::Own(wanted), .. } => wanted
            .iter()
            .map(|&n: &usize| match list.get(n) {
                Some(x) => contiguous_copy(x),
                None => bail!("there is no tensor {n} to sum"),
            })
            .collect(),
        ListRequest::Reduce { list, wanted: WantedTensors::ByRank(runs), .. } => runs[0]
            .iter()
            .map(|run: &Run| {
                let flat = to_contiguous(&list[run.tensor])?.flatten_all()?;
                contiguous_copy(&flat.narrow(0, run.items.start, run.items.len())?)
            })
            .collect(),
    }
}
