//! Peak memory of declared models, steps and checkpoints. This is a separate program because its
//! allocator counts bytes; tests run one at a time because it counts all threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "constructors take builders by value")]

mod declare;
mod growth;
mod steps;
mod table;

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Result;
use candle_nn::{Optimizer as _, ParamsAdamW};
use dist_train::{AdamW, Group};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Guards the counter, which counts for all threads of the test program.
static COUNTING: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    COUNTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW::default())
}

/// Memory of a model and its steps, in bytes.
struct MemoryUse {
    /// Memory between steps.
    at_rest: usize,
    /// Peaks of some steps, in ascending order; they vary with the number of slots that peak at the
    /// same time.
    peaks: [usize; 3],
}

/// Measures a model and its steps.
fn measure<M>(make: impl Fn() -> M, step: impl Fn(&mut M)) -> MemoryUse {
    // Most threads take their buffers here.
    step(&mut make());
    without_new_buffers(|before| {
        let mut model = make();
        step(&mut model);
        let at_rest = MEMORY.current_usage() - before;
        let mut peaks = [0; 3].map(|_| {
            MEMORY.reset_peak_usage();
            step(&mut model);
            MEMORY.peak_usage() - before
        });
        peaks.sort_unstable();
        MemoryUse { at_rest, peaks }
    })
}

/// Returns what `measure` finds from the memory in use before it, when that is also in use after it.
///
/// A thread keeps a buffer from its first matrix product on, and which threads have a part in a
/// product varies. So a measurement that leaves memory behind is repeated.
fn without_new_buffers<T>(mut measure: impl FnMut(usize) -> T) -> T {
    // More than any test has threads.
    for _ in 0..32 {
        let before = MEMORY.current_usage();
        let found = measure(before);
        if MEMORY.current_usage() < before + SMALLEST_BUFFER {
            return found;
        }
    }
    panic!("each measurement left memory behind");
}

/// Less than a thread's buffer for products, which has the size of a core's second-level cache.
const SMALLEST_BUFFER: usize = 128 << 10;
