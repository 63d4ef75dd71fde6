//! Collectives of lists in a group of one replica, which sends nothing.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::{
    device::to_device::{copied, filled, in_one_piece, moved},
    engine::{
        Wanted, Work,
        layout::{Owned, Run},
    },
};

/// What an engine would return: copies, since results must not change when an argument is set.
pub(super) fn run(work: Work) -> Result<Vec<Tensor>> {
    match work {
        Work::Gather { own, layout, device } => {
            // Of whatever device, as engines take them.
            let flat = |x: &Tensor| moved(&in_one_piece(x)?.flatten_all()?, &device);
            let own: Vec<Tensor> = own.iter().map(flat).collect::<Result<_>>()?;
            let whole = |((shape, dtype), owners): (&(Shape, DType), &Vec<Owned>)| {
                let part = |owned: &Owned| (owned.items.start, &own[owned.n_th]);
                Ok(filled(shape, *dtype, &device, owners.iter().map(part))?.into_inner())
            };
            layout.tensors().iter().zip(layout.owners()).map(whole).collect()
        }
        Work::Reduce { list, wanted: Wanted::Everything, .. } => list.iter().map(copied).collect(),
        Work::Reduce { list, wanted: Wanted::Own(wanted), .. } => {
            let sum = |&n: &usize| match list.get(n) {
                Some(x) => copied(x),
                None => bail!("there is no tensor {n} to sum"),
            };
            wanted.iter().map(sum).collect()
        }
        Work::Reduce { list, wanted: Wanted::ByRank(runs), .. } => {
            let sum = |run: &Run| {
                let flat = in_one_piece(&list[run.tensor])?.flatten_all()?;
                copied(&flat.narrow(0, run.items.start, run.items.len())?)
            };
            runs[0].iter().map(sum).collect()
        }
    }
}
