//! What declared models, steps and checkpoints hold at most. A program of its own because its
//! allocator counts bytes, and one test at a time because it counts those of all threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "models are built of builders by value")]

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

/// What a model and its steps hold, in bytes.
struct Held {
    /// Between steps.
    at_rest: usize,
    /// In some steps at most, the least first: it is chance how many slots hold the most at the same
    /// moment.
    peaks: [usize; 3],
}

fn held<M>(make: impl Fn() -> M, step: impl Fn(&mut M)) -> Held {
    // What threads keep for later matrix products is no model's.
    let mut first = make();
    step(&mut first);
    drop(first);
    let before = MEMORY.current_usage();
    let mut model = make();
    step(&mut model);
    let at_rest = MEMORY.current_usage() - before;
    let peak = |_| {
        MEMORY.reset_peak_usage();
        step(&mut model);
        MEMORY.peak_usage() - before
    };
    let mut peaks = [0, 1, 2].map(peak);
    peaks.sort_unstable();
    Held { at_rest, peaks }
}

/// What the plan says that all ranks hold together, at the worst moment of each.
fn planned(model: &DistributedModel<Units, AdamW>) -> usize {
    let cost = model.plan().unwrap().cost(&CostModel::default().with_prefetch(0)).unwrap();
    cost.ranks.iter().map(|rank| usize::try_from(rank.peak_bytes()).unwrap()).sum()
}
