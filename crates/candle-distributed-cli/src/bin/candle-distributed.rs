//! The command line of candle-distributed: see the library of this package.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    candle_distributed_cli::main()
}
