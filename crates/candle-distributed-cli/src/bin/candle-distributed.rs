//! The `candle-distributed` program. The library of this package does all the work.

use std::process::ExitCode;

use libmimalloc_sys::{mi_option_set_default, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, for which the crate has no constant.
const PURGE_DELAY: mi_option_t = 15;

/// Keeps freed memory for later allocations, unless `MIMALLOC_PURGE_DELAY` is set.
///
/// Each training step allocates the memory that the step before it freed. With mimalloc's default
/// delay of a second, a twentieth of a step is spent on returning pages to the system, requesting
/// them again and clearing them.
#[expect(unsafe_code, reason = "mimalloc exposes its options only through its C API")]
fn keep_freed_memory() {
    // SAFETY: `PURGE_DELAY` is a valid option, and no other thread is running yet.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}

fn main() -> ExitCode {
    keep_freed_memory();
    candle_distributed_cli::main()
}
