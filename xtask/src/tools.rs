//! Optional tools: a check whose tool is missing is skipped, and its message says how to get the tool.

use crate::{
    cmd::{Call, Result},
    steps::Done,
};

/// A program that a command needs besides this workspace.
#[derive(Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// A program with arguments that succeeds if the tool is installed.
    pub(crate) probe: (&'static str, &'static str),
    /// The command that installs it.
    pub(crate) install: &'static str,
}

impl Tool {
    /// Returns a tool that `.ci/tools` installs, a subcommand of cargo.
    pub(crate) const fn of_cargo(name: &'static str, probe: &'static str) -> Self {
        Self { name, probe: ("cargo", probe), install: ".ci/tools" }
    }

    /// Returns a tool that `.ci/tools` installs, a program of its own.
    pub(crate) const fn program(name: &'static str) -> Self {
        Self { name, probe: (name, "--version"), install: ".ci/tools" }
    }

    /// Returns true if this machine has it.
    pub(crate) fn is_installed(&self) -> bool {
        let (program, args) = self.probe;
        // Without the variable rustup would install a toolchain that is only asked for its version.
        Call::new(program, args).env("RUSTUP_AUTO_INSTALL", "0").succeeds()
    }
}

/// Makes the calls if the tool is installed, and skips them otherwise.
///
/// # Errors
///
/// If a call fails, or if the tool is missing and the caller is `strict`.
pub(crate) fn run_with(tool: Tool, strict: bool, calls: &[Call]) -> Result<Done> {
    if tool.is_installed() {
        return run_calls(calls);
    }
    skip(format!("{} is not installed; get it with `{}`", tool.name, tool.install), strict)
}

/// Makes the calls, up to the first that fails.
pub(crate) fn run_calls(calls: &[Call]) -> Result<Done> {
    calls.iter().try_for_each(Call::run).map(|()| Done::Passed)
}

/// Returns the outcome of a step that lacks something.
///
/// # Errors
///
/// If the caller is `strict`.
pub(crate) fn skip(reason: String, strict: bool) -> Result<Done> {
    if strict {
        return Err(format!("{reason} (--strict requires it)").into());
    }
    Ok(Done::Skipped(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_skips_its_calls_unless_strict() {
        let here = Tool { name: "cargo", probe: ("cargo", "--version"), install: "" };
        let missing = Tool { name: "it", probe: ("cargo", "no-such-command"), install: "get it" };
        let fails = [Call::cargo("no-such-command")];
        let reason = "it is not installed; get it with `get it`";
        let skipped = Done::Skipped(reason.to_owned());
        assert_eq!(run_with(missing, false, &fails).unwrap(), skipped);
        let error = run_with(missing, true, &[]).unwrap_err().to_string();
        assert_eq!(error, format!("{reason} (--strict requires it)"));
        assert_eq!(run_with(here, true, &[]).unwrap(), Done::Passed);
        assert!(run_with(here, false, &fails).is_err());
    }
}
