//! `cargo xtask release`: checks that this tree can be released, and tags it.
//!
//! It publishes nothing: a person runs the command that it prints.

use std::fs;

use crate::{
    cmd::{self, Call, Result},
    steps::{self, NamedStep, StepDone},
    tools::{self, Tool},
};

/// Checks that this tree can be released, tags it, and prints the command that publishes it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Make no tag, and accept uncommitted changes and the changelog's section "Unreleased"
    #[arg(long)]
    dry_run: bool,
    /// Fail if an optional tool is missing, instead of skipping its check
    #[arg(long)]
    strict: bool,
}

/// The version of the workspace, which all crates share.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const SEMVER_CHECKS: Tool = Tool {
    name: "cargo-semver-checks",
    probe: ("cargo", "semver-checks --version"),
    install: "cargo install --locked cargo-semver-checks",
};

type Check = fn(&Args) -> Result<StepDone>;

pub(crate) fn run(args: &Args) -> Result {
    let steps: [NamedStep<'_, Check>; 4] = [
        NamedStep { name: "changelog", work: changelog },
        NamedStep { name: "semantic version", work: semantic_version },
        NamedStep { name: "packages build", work: packages_build },
        NamedStep { name: "tag", work: tag },
    ];
    steps::run_all(&steps, |step| step(args))?;
    println!("\nTo publish {VERSION}: cargo publish --workspace");
    Ok(())
}

fn changelog(args: &Args) -> Result<StepDone> {
    let text = fs::read_to_string(cmd::root().join("CHANGELOG.md"))?;
    if has_entry(&text, VERSION) || args.dry_run && has_entry(&text, "Unreleased") {
        return Ok(StepDone::Passed);
    }
    Err(format!("CHANGELOG.md has no entry for {VERSION}").into())
}

/// Returns true if a list entry follows the heading of this version.
fn has_entry(text: &str, version: &str) -> bool {
    let mut lines = text.lines().skip_while(|line| heading(line) != Some(version)).skip(1);
    lines
        .find(|line| line.starts_with("- ") || heading(line).is_some())
        .is_some_and(|line| line.starts_with("- "))
}

/// Returns the first word of a heading of the second level.
fn heading(line: &str) -> Option<&str> {
    line.strip_prefix("## ")?.split_whitespace().next()
}

fn semantic_version(args: &Args) -> Result<StepDone> {
    // From the parent, because a release that is checked again already has its tag.
    let Ok(last) = Call::new("git", "describe --tags --abbrev=0 --match v* HEAD^").read() else {
        return Ok(StepDone::Skipped("there is no release to compare with".into()));
    };
    let call = Call::cargo("semver-checks --workspace --baseline-rev").arg(last.trim());
    tools::run_with(SEMVER_CHECKS, args.strict, &[call])
}

/// Builds each package from its packed form; without `--dry-run` cargo refuses uncommitted changes.
fn packages_build(args: &Args) -> Result<StepDone> {
    let call = Call::cargo("publish --workspace --dry-run");
    let call = if args.dry_run { call.arg("--allow-dirty") } else { call };
    call.run().map(|()| StepDone::Passed)
}

fn tag(args: &Args) -> Result<StepDone> {
    if args.dry_run {
        return Ok(StepDone::Skipped(format!("would be v{VERSION}")));
    }
    let call = Call::new("git", "tag --annotate --message").arg(format!("Release {VERSION}"));
    call.arg(format!("v{VERSION}")).run().map(|()| StepDone::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_changelog_entry_is_found() {
        let text = "# Changelog\n\n## Unreleased (soon)\n\n### Added\n\n- a: more\n\n## 0.2.0\n\n## 0.1.0\n\n- a: first\n";
        for (version, expected) in
            [("Unreleased", true), ("0.2.0", false), ("0.1.0", true), ("0.0.1", false)]
        {
            assert_eq!(has_entry(text, version), expected, "{version}");
        }
    }
}
