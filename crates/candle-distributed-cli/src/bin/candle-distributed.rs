//! The command line of candle-distributed: see the library of this package.

use std::process::ExitCode;

use libmimalloc_sys::{mi_option_set_default, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, which the crate gives no name.
const PURGE_DELAY: mi_option_t = 15;

/// Keeps freed memory for what is allocated next, unless `MIMALLOC_PURGE_DELAY` says otherwise.
///
/// What a step of training frees, the next one allocates: with mimalloc's delay of a second, a
/// twentieth of a step goes to pages that are returned to the system, asked for again and cleared.
#[expect(unsafe_code, reason = "mimalloc has its options in C alone")]
fn keep_freed_memory() {
    // SAFETY: the number is that of an option, and no other thread has been started.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}

fn main() -> ExitCode {
    keep_freed_memory();
    candle_distributed_cli::main()
}
