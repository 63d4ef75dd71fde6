//! The result of each collective.

use crate::differential::{
    array::Array,
    bits::FoldOp,
    op::{Op, dim_index},
    reference::has_sum,
};

/// Returns the result of rank `rank` for the arrays that the members of its group pass, or `None`
/// if the collective is impossible.
pub(crate) fn result(op: &Op, passed: &[&Array], rank: usize) -> Option<Array> {
    let (mine, size) = (passed[rank], passed.len());
    let agree = passed.iter().all(|array| array.agrees(mine));
    let place = |dim: isize| dim_index(dim, mine.shape.len());
    let splits = |dim: usize| mine.shape[dim].is_multiple_of(size);
    let folded = |fold: FoldOp| {
        let fits = agree && has_sum(mine.dtype) && (fold != FoldOp::Mean || mine.dtype.is_float());
        fits.then(|| Array::folded(passed, fold))
    };
    match op {
        Op::Psum => folded(FoldOp::Sum),
        Op::Pmean => folded(FoldOp::Mean),
        Op::Pmax => folded(FoldOp::Max),
        Op::Pmin => folded(FoldOp::Min),
        // The arrays may differ in dtype and shape, because nothing is sent.
        Op::Pvary | Op::Barrier => Some(mine.clone()),
        Op::AllGather { dim } => Array::concatenated(passed, place(*dim)?),
        Op::PsumScatter { dim } => {
            let dim = place(*dim).filter(|&dim| splits(dim))?;
            Some(folded(FoldOp::Sum)?.part(dim, rank, size))
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
