//! What every file needs of the standard library and of candle.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

/// Locks what no panic can leave half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether two tensors are equal to the bit.
pub(crate) fn same(left: &Tensor, right: &Tensor) -> candle_core::Result<bool> {
    let bytes = |tensor: &Tensor| -> candle_core::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        tensor.force_contiguous()?.write_bytes(&mut bytes)?;
        Ok(bytes)
    };
    Ok(left.shape() == right.shape()
        && left.dtype() == right.dtype()
        && bytes(left)? == bytes(right)?)
}
