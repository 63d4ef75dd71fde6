//! The `candle-distributed` program. The library of this package does all the work.

use std::process::ExitCode;

use candle_distributed::mesh::keep_freed_memory;

/// Other systems' allocators request large tensors from the system in every step.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    keep_freed_memory();
    candle_distributed_cli::main()
}
