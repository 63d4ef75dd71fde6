//! Write access to several CPU tensors at once.

use std::{cell::Cell, ops::Range};

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

/// A storage, and the range in it that a tensor's items occupy.
pub(super) type Opened<'a> = (&'a mut CpuStorage, Range<usize>);

/// The operation on the opened storages.
type Then<'f> = dyn FnMut(Vec<Opened<'_>>) -> Result<()> + 'f;

/// Calls `then` with write access to the storages of `tensors`.
///
/// candle gives write access to one storage at a time, inside an in-place operation, so the
/// operation on each tensor runs the operation on the next one.
///
/// # Errors
///
/// Returns an error if a tensor is not contiguous or not on the CPU, and the errors of `then`.
pub(super) fn open(tensors: &[&Tensor], then: &mut Then<'_>) -> Result<()> {
    open_next(tensors, Vec::with_capacity(tensors.len()), then)
}

fn open_next(tensors: &[&Tensor], opened: Vec<Opened<'_>>, then: &mut Then<'_>) -> Result<()> {
    match tensors {
        [] => then(opened),
        [first, rest @ ..] => {
            first.inplace_op1(&OpenOperation { rest, before: Cell::new(Some((opened, then))) })
        }
    }
}

struct OpenOperation<'a, 'f> {
    rest: &'a [&'a Tensor],
    /// Storages opened so far and the operation; taken when the in-place operation runs.
    before: Cell<Option<(Vec<Opened<'a>>, &'a mut Then<'f>)>>,
}

impl InplaceOp1 for OpenOperation<'_, '_> {
    fn name(&self) -> &'static str {
        "update"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("cannot update a variable that is not contiguous")
        };
        let Some((mut opened, then)) = self.before.take() else {
            bail!("an in-place operation runs only once")
        };
        opened.push((storage, start..end));
        open_next(self.rest, opened, then)
    }
}
