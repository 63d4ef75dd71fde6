//! Optional tools: a check without its tool is skipped, and its message explains how to install the
//! tool.

use crate::{
    cmd::{Call, Result},
    steps::StepDone,
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
    pub(crate) const fn cargo_subcommand(name: &'static str, probe: &'static str) -> Self {
        Self { name, probe: ("cargo", probe), install: ".ci/tools" }
    }

    /// Returns a stand-alone tool that `.ci/tools` installs.
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
pub(crate) fn run_with(tool: Tool, strict: bool, calls: &[Call]) -> Result<StepDone> {
    if tool.is_installed() {
        return run_calls(calls);
    }
    skip(format!("{} is not installed; get it with `{}`", tool.name, tool.install), strict)
}

/// Makes the calls, up to the first that fails.
pub(crate) fn run_calls(calls: &[Call]) -> Result<StepDone> {
    calls.iter().try_for_each(Call::run).map(|()| StepDone::Passed)
}

/// Returns the outcome of a step that lacks something.
///
/// # Errors
///
/// If the caller is `strict`.
pub(crate) fn skip(reason: String, strict: bool) -> Result<StepDone> {
    if strict {
        return Err(format!("{reason} (--strict requires it)").into());
    }
    Ok(StepDone::Skipped(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tool_skips_unless_strict() {
        let found = Tool { name: "cargo", probe: ("cargo", "--version"), install: "" };
        let missing = Tool { name: "it", probe: ("cargo", "no-such-command"), install: "get it" };
        let fails = [Call::cargo("no-such-command")];
        let reason = "it is not installed; get it with `get it`";
        let skipped = StepDone::Skipped(reason.to_owned());
        assert_eq!(run_with(missing, false, &fails).unwrap(), skipped);
        let error = run_with(missing, true, &[]).unwrap_err().to_string();
        assert_eq!(error, format!("{reason} (--strict requires it)"));
        assert_eq!(run_with(found, true, &[]).unwrap(), StepDone::Passed);
        assert!(run_with(found, false, &fails).is_err());
    }
}
