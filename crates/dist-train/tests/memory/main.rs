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
use dist_train::{AdamW, DistributedModel, Group, Units};
use fsdp_plan::cost::CostModel;
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
    // A first model fills the buffers that threads keep for matrix products.
    let mut first = make();
    step(&mut first);
    drop(first);
    let before = MEMORY.current_usage();
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
}

/// Returns the sum of all ranks' peaks according to the plan.
fn planned(model: &DistributedModel<Units, AdamW>) -> usize {
    let cost = model.plan().unwrap().cost(&CostModel::default().with_prefetch(0)).unwrap();
    cost.ranks.iter().map(|rank| usize::try_from(rank.peak_bytes()).unwrap()).sum()
}
