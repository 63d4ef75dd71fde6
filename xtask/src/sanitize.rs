//! `cargo xtask sanitize`: what threads that share memory do to it, as an interpreter and a
//! sanitizer see it.

use crate::{
    cmd::{Call, Result},
    tools::{self, Tool},
};

/// Looks for undefined behavior and data races in `pmap-mesh`; needs nightly Rust with miri and
/// rust-src.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fails if nightly Rust or one of its components is missing, instead of skipping the run.
    #[arg(long)]
    strict: bool,
}

const TOOLS: [Tool<'static>; 3] = [
    tools::NIGHTLY,
    Tool {
        name: "miri",
        probe: "+nightly miri --version",
        install: "rustup component add miri --toolchain nightly",
    },
    Tool {
        name: "rust-src",
        // The cheapest call that looks for the sources; what it downloads, the build would.
        probe: "+nightly fetch --locked -Zbuild-std --target host-tuple",
        install: "rustup component add rust-src --toolchain nightly",
    },
];

/// The test targets in which replicas meet.
const TESTS: [&str; 4] = ["collectives", "data_parallel", "faults", "pmap"];

pub(crate) fn run(args: &Args) -> Result {
    if tools::all_there("sanitize", &TOOLS, args.strict)? {
        miri().run()?;
        thread_sanitizer().run()?;
    }
    Ok(())
}

/// The interpreter, over the only module of the crate with `unsafe` in it.
fn miri() -> Call {
    // The clock counts as something outside. Each seed is another order of the threads.
    let flags = "-Zmiri-disable-isolation -Zmiri-many-seeds=0..16";
    Call::cargo("+nightly miri test -p pmap-mesh --lib shared_buffer").env("MIRIFLAGS", flags)
}

/// The sanitizer, over everything that replicas do with each other; a report of a race fails the
/// target it is in.
fn thread_sanitizer() -> Call {
    // Through a standard library that is not built for it, the sanitizer could not see one thread
    // wait for another. A target is named so that build scripts are left alone, a folder so that
    // other builds are.
    let cargo =
        Call::cargo("+nightly test -p pmap-mesh --no-fail-fast -Zbuild-std --target host-tuple");
    let cargo =
        cargo.arg("--target-dir").arg("target/sanitize").env("RUSTFLAGS", "-Zsanitizer=thread");
    // Fast, with the checks of debug builds and the lines that a report names.
    let cargo = cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "2");
    TESTS.iter().fold(cargo, |cargo, test| cargo.arg("--test").arg(*test))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn the_sanitizer_sees_the_standard_library_and_tests_that_exist() {
        let shown = thread_sanitizer().to_string();
        assert!(shown.starts_with("RUSTFLAGS=-Zsanitizer=thread "), "{shown}");
        assert!(
            shown.contains(" -Zbuild-std --target host-tuple --target-dir target/sanitize "),
            "{shown}"
        );
        for test in TESTS {
            assert!(shown.contains(&format!(" --test {test}")), "{shown}");
            assert!(
                workspace::root().join(format!("crates/pmap-mesh/tests/{test}.rs")).is_file(),
                "{test}"
            );
        }
    }

    #[test]
    fn the_interpreter_runs_a_module_that_has_tests() {
        let shown = miri().to_string();
        assert!(shown.ends_with(" -p pmap-mesh --lib shared_buffer"), "{shown}");
        let module = std::fs::read_to_string(
            workspace::root().join("crates/pmap-mesh/src/shared_buffer.rs"),
        )
        .unwrap();
        assert!(module.contains("#[test]"));
    }
}
