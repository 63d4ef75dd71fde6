//! The loops, and the only `unsafe` of this crate: writes to fresh memory, and matrix products.
//!
//! A kernel is a struct of slices with one loop over fixed lanes in [`pulp::NullaryFnOnce::call`].
//! The compiler vectorizes the loop once for each instruction set that [`vectorized`] selects from.
//! Multiplications and additions are never fused, so all instruction sets round alike: a result has the
//! same bits on every processor. Only matrix products fuse them, on processors that can.

#![allow(
    clippy::inline_always,
    reason = "a loop has the instructions of the function that it is inlined into"
)]

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod exponential;
pub(crate) mod float;
pub(crate) mod lanes;
pub(crate) mod linear;
pub(crate) mod matmul;
pub(crate) mod memory;
pub(crate) mod norm;
pub(crate) mod parallel;
pub(crate) mod rope;
mod softcap;
pub(crate) mod softmax;
pub(crate) mod vectors;

use std::sync::OnceLock;

use pulp::{Arch, NullaryFnOnce};

/// Runs a kernel with the widest instructions that this processor has.
pub(crate) fn vectorized<K: NullaryFnOnce>(kernel: K) -> K::Output {
    #[cfg(test)]
    if WITHOUT_DISPATCH.get() {
        return kernel.call();
    }
    arch().dispatch(kernel)
}

/// Returns the widest instructions that this processor has.
fn arch() -> Arch {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    *ARCH.get_or_init(Arch::new)
}

#[cfg(test)]
thread_local! {
    /// Whether this thread runs kernels with the target's baseline instructions.
    pub(crate) static WITHOUT_DISPATCH: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
