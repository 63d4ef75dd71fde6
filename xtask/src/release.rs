//! `cargo xtask release`: whether this tree can be released, and the tag that says so.
//!
//! Nothing is published here: the command for that is printed, for a person to run.

use std::fs;

use crate::{
    changelog,
    cmd::{self, Call, Result},
    steps::{self, Done, Step},
    tools::{self, Tool},
    workspace,
};

/// Checks that this tree can be released, tags it, and prints the command that publishes it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Makes no tag, and takes an uncommitted change or an unreleased changelog for what is still
    /// to come.
    #[arg(long)]
    dry_run: bool,
    /// Fails if an optional tool is missing, instead of doing without it.
    #[arg(long)]
    strict: bool,
}

type Work = fn(&Args, &str) -> Result<Done>;

const STEPS: [Step<'static, Work>; 5] = [
    Step { name: "changelog", work: changelog },
    Step { name: "clean tree", work: clean_tree },
    Step { name: "semantic version", work: semantic_version },
    Step { name: "packages build", work: packages_build },
    Step { name: "tag", work: tag },
];

const SEMVER_CHECKS: Tool = Tool {
    name: "cargo-semver-checks",
    probe: ("cargo", "semver-checks --version"),
    install: "cargo install --locked cargo-semver-checks",
};

pub(crate) fn run(args: &Args) -> Result {
    let version = version()?;
    steps::run_all(&STEPS, |step| step(args, &version))?;
    println!("\nTo publish {version}: cargo publish --workspace");
    Ok(())
}

/// The version of all crates: they share one, and cargo refuses a dependency on another.
fn version() -> Result<String> {
    let metadata = workspace::read()?;
    let mut versions: Vec<_> =
        workspace::crates(&metadata).map(|package| &package.version).collect();
    versions.dedup();
    match versions.as_slice() {
        [version] => Ok(version.to_string()),
        others => Err(format!("the crates have {} versions", others.len()).into()),
    }
}

fn changelog(args: &Args, version: &str) -> Result<Done> {
    let text = fs::read_to_string(cmd::root().join("CHANGELOG.md"))?;
    match changelog_heading(&text, version, args.dry_run) {
        Some(heading) => Ok(Done::Noted(format!("`{heading}`"))),
        None => Err(format!("CHANGELOG.md says nothing about {version}").into()),
    }
}

/// The heading under which the changelog says something about the coming version.
fn changelog_heading<'a>(text: &str, version: &'a str, dry_run: bool) -> Option<&'a str> {
    let headings = [Some(version), dry_run.then_some("Unreleased")];
    let says_something =
        |name: &&str| changelog::section(text, name).is_some_and(changelog::says_something);
    headings.into_iter().flatten().find(says_something)
}

fn clean_tree(args: &Args, _: &str) -> Result<Done> {
    let changes = Call::new("git", "status --porcelain").read()?;
    print!("{changes}");
    match changes.lines().count() {
        0 => Ok(Done::Passed),
        n if args.dry_run => Ok(Done::Noted(format!("but {n} files are not committed"))),
        n => Err(format!("{n} files are not committed").into()),
    }
}

fn semantic_version(args: &Args, _: &str) -> Result<Done> {
    // From the parent, because a release that is being checked again has its tag already.
    let Ok(last) = Call::new("git", "describe --tags --abbrev=0 --match v* HEAD^").read() else {
        return Ok(Done::Skipped("there is no release to compare with".into()));
    };
    let call = Call::cargo("semver-checks --workspace --baseline-rev").arg(last.trim());
    tools::run_with(&[SEMVER_CHECKS], args.strict, &[call])
}

/// Builds each package from what the registry would get, and nothing else.
fn packages_build(args: &Args, _: &str) -> Result<Done> {
    let call = Call::cargo("publish --workspace --dry-run");
    let call = if args.dry_run { call.arg("--allow-dirty") } else { call };
    call.run().map(|()| Done::Passed)
}

fn tag(args: &Args, version: &str) -> Result<Done> {
    let tag = format!("v{version}");
    let tags = Call::new("git", "tag --points-at HEAD --list v*").read()?;
    match tags.lines().next() {
        Some(here) if here == tag => Ok(Done::Noted(format!("{tag} is here"))),
        Some(other) => Err(format!("this commit has the tag {other}, not {tag}").into()),
        None if args.dry_run => Ok(Done::Skipped(format!("would be {tag}"))),
        None => {
            let message = format!("Release {version}");
            Call::new("git", "tag --annotate --message").arg(message).arg(&tag).run()?;
            Ok(Done::Noted(tag))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dry_run_takes_what_is_unreleased_for_the_coming_version() {
        let text = "## Unreleased\n\n- a: more\n\n## 0.1.0\n\n- a: first\n\n## 0.0.1\n";
        assert_eq!(changelog_heading(text, "0.2.0", true), Some("Unreleased"));
        assert_eq!(changelog_heading(text, "0.2.0", false), None);
        assert_eq!(changelog_heading(text, "0.1.0", true), Some("0.1.0"));
        assert_eq!(changelog_heading(text, "0.0.1", false), None);
    }

    #[test]
    fn the_crates_have_one_version() {
        assert_eq!(version().unwrap(), env!("CARGO_PKG_VERSION"));
    }
}
