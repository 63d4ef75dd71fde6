//! What each collective gives.

use crate::differential::{
    array::Array,
    bits::Fold,
    op::{Op, dim_index},
    reference::has_sum,
};

/// What the member of rank `rank` gets if the members of its group pass these, by rank; `None` if the
/// collective is not possible.
pub(crate) fn result(op: &Op, passed: &[&Array], rank: usize) -> Option<Array> {
    let (mine, size) = (passed[rank], passed.len());
    let agree = passed.iter().all(|array| array.agrees(mine));
    let place = |dim: isize| dim_index(dim, mine.shape.len());
    let splits = |dim: usize| mine.shape[dim].is_multiple_of(size);
    let folded = |fold: Fold| {
        let fits = agree && has_sum(mine.dtype) && (fold != Fold::Mean || mine.dtype.is_float());
        fits.then(|| Array::folded(passed, fold))
    };
    match op {
        Op::Psum => folded(Fold::Sum),
        Op::Pmean => folded(Fold::Mean),
        Op::Pmax => folded(Fold::Max),
        Op::Pmin => folded(Fold::Min),
        // What the members pass need not agree: nothing is sent.
        Op::Pvary | Op::Barrier => Some(mine.clone()),
        Op::AllGather { dim } => Array::concatenated(passed, place(*dim)?),
        Op::PsumScatter { dim } => {
            let dim = place(*dim).filter(|&dim| splits(dim))?;
            Some(folded(Fold::Sum)?.part(dim, rank, size))
        }
        Op::Ppermute { pairs } if agree => Some(match pairs.iter().find(|(_, to)| *to == rank) {
            Some((from, _)) => passed[*from].clone(),
            None => Array::zeros(mine.dtype, &mine.shape),
        }),
        Op::AllToAll { split, concat } if agree => {
            let split = place(*split).filter(|&dim| splits(dim))?;
            let parts: Vec<Array> =
                passed.iter().map(|array| array.part(split, rank, size)).collect();
            Array::concatenated(&parts.iter().collect::<Vec<_>>(), place(*concat)?)
        }
        Op::Broadcast { root } if agree => Some(passed[*root].clone()),
        Op::Ppermute { .. } | Op::AllToAll { .. } | Op::Broadcast { .. } => None,
    }
}
