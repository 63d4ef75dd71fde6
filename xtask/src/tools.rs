//! Tools that not every machine has: where one is missing, the command says how to get it, and
//! skips.

use crate::cmd::{Call, Result};

/// What a command needs besides this workspace.
pub(crate) struct Tool<'a> {
    pub(crate) name: &'a str,
    /// A call of cargo that succeeds where the tool is.
    pub(crate) probe: &'a str,
    /// What to type to get it.
    pub(crate) install: &'a str,
}

/// Rust of tonight, for the options that the stable one refuses.
pub(crate) const NIGHTLY: Tool<'static> = Tool {
    name: "nightly Rust",
    probe: "+nightly --version",
    install: "rustup toolchain install nightly --profile minimal",
};

impl Tool<'_> {
    /// Whether this machine has it.
    pub(crate) fn is_there(&self) -> bool {
        // Without the variable rustup would install a toolchain that is only asked for its version.
        Call::cargo(self.probe).env("RUSTUP_AUTO_INSTALL", "0").succeeds()
    }
}

/// Whether all tools are there; if not, says so, and that `command` is skipped.
///
/// # Errors
///
/// If one is missing and the caller is `strict`.
pub(crate) fn all_there(command: &str, tools: &[Tool<'_>], strict: bool) -> Result<bool> {
    let missing: Vec<_> = tools.iter().filter(|tool| !tool.is_there()).collect();
    for Tool { name, install, .. } in &missing {
        println!("{name} is not installed; get it with `{install}`");
    }
    match missing.first() {
        Some(Tool { name, .. }) if strict => {
            Err(format!("{name} is missing, and --strict asks for it").into())
        }
        Some(_) => {
            println!("== {command}: SKIPPED, nothing was checked");
            Ok(false)
        }
        None => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_skips_the_command_unless_it_is_insisted_on() {
        let here = Tool { name: "cargo", probe: "--version", install: "" };
        let missing = Tool { name: "the tool", probe: "no-such-subcommand", install: "" };
        assert!(all_there("test", std::slice::from_ref(&here), true).unwrap());
        assert!(!all_there("test", std::slice::from_ref(&missing), false).unwrap());
        let error = all_there("test", &[here, missing], true).unwrap_err().to_string();
        assert_eq!(error, "the tool is missing, and --strict asks for it");
    }
}
