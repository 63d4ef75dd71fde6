//! Several tensors on the processor, open for writing at the same time.

use std::{cell::Cell, ops::Range};

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// A storage, and the range of it in which a tensor's items lie.
pub(super) type Opened<'a> = (&'a mut CpuStorage, Range<usize>);

/// What is done with open storages.
type Then<'f> = dyn FnMut(Vec<Opened<'_>>) -> Result<()> + 'f;

/// Calls `then` with the storages of `tensors`.
///
/// candle hands a storage out for writing to an operation in place, and one at a time: so each of
/// these operations starts the next.
///
/// # Errors
///
/// If a tensor is not contiguous or not on the processor, and those of `then`.
pub(super) fn open(tensors: &[&Tensor], then: &mut Then<'_>) -> Result<()> {
    open_next(tensors, Vec::with_capacity(tensors.len()), then)
}

fn open_next(tensors: &[&Tensor], opened: Vec<Opened<'_>>, then: &mut Then<'_>) -> Result<()> {
    match tensors {
        [] => then(opened),
        [first, rest @ ..] => {
            first.inplace_op1(&Opening { rest, before: Cell::new(Some((opened, then))) })
        }
    }
}

struct Opening<'a, 'f> {
    rest: &'a [&'a Tensor],
    /// What is open already, until the operation runs.
    before: Cell<Option<(Vec<Opened<'a>>, &'a mut Then<'f>)>>,
}

impl InplaceOp1 for Opening<'_, '_> {
    fn name(&self) -> &'static str {
        "update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a variable that is not contiguous cannot be updated")
        };
        let Some((mut opened, then)) = self.before.take() else {
            bail!("an operation in place runs once")
        };
        opened.push((storage, start..end));
        open_next(self.rest, opened, then)
    }
}
