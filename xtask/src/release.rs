//! `cargo xtask release`: whether this tree can be released, and the tag that says so.
//!
//! Nothing is published here: the commands for that are printed, for a person to run.

use std::fs;

use crate::{
    changelog,
    cmd::{Call, Result},
    steps::{self, Done},
    tools::{self, Tool},
    workspace::{self, Package, Workspace},
};

/// Checks that this tree can be released, tags it, and prints the commands that publish it.
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

type Step = steps::Step<'static, fn(&Release<'_>) -> Result<Done>>;

/// What is to be released.
struct Release<'a> {
    version: &'a str,
    /// What goes to the registry, each after those that it needs.
    packages: Vec<&'a Package>,
    args: &'a Args,
}

const STEPS: [Step; 6] = [
    Step { name: "one version", work: one_version },
    Step { name: "changelog", work: changelog },
    Step { name: "clean tree", work: clean_tree },
    Step { name: "semantic version", work: semantic_version },
    Step { name: "packages build", work: packages_build },
    Step { name: "tag", work: tag },
];

const SEMVER_CHECKS: Tool<'static> = Tool {
    name: "cargo-semver-checks",
    probe: "semver-checks --version",
    install: "cargo install cargo-semver-checks",
};

pub(crate) fn run(args: &Args) -> Result {
    let workspace = Workspace::read()?;
    let packages = in_publish_order(
        workspace.packages.iter().filter(|package| package.is_published).collect(),
    )?;
    let version = packages.first().map_or("", |package| &package.version);
    let release = Release { version, packages, args };
    steps::run_all(&STEPS, |step| step(&release))?;
    println!("\nTo publish {version}, in this order:");
    for package in &release.packages {
        println!("  cargo publish --package {}", package.name);
    }
    Ok(())
}

/// Each package after those that it depends on, in tests too, because a registry wants to see them
/// all.
///
/// # Errors
///
/// If some need each other, which cargo allows for tests.
fn in_publish_order(mut waiting: Vec<&Package>) -> Result<Vec<&Package>> {
    let mut ordered = Vec::new();
    while !waiting.is_empty() {
        let names: Vec<_> = waiting.iter().map(|package| package.name.clone()).collect();
        let is_ready = |package: &&Package| {
            !package.dependencies.iter().any(|needed| names.contains(&needed.name))
        };
        let (ready, rest): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_ready);
        if ready.is_empty() {
            return Err(format!("{} need each other", names.join(", ")).into());
        }
        ordered.extend(ready);
        waiting = rest;
    }
    Ok(ordered)
}

fn one_version(release: &Release<'_>) -> Result<Done> {
    let others = other_versions(release.version, &release.packages);
    for other in &others {
        println!("{other}");
    }
    match others.len() {
        0 => Ok(Done::Noted(release.version.to_owned())),
        n => Err(format!("{n} places disagree with version {}", release.version).into()),
    }
}

/// The packages with another version, and the dependencies on one of them that ask for another.
fn other_versions(version: &str, packages: &[&Package]) -> Vec<String> {
    let mut others = Vec::new();
    for package in packages {
        if package.version != version {
            others.push(format!("{} has version {}", package.name, package.version));
        }
        let is_ours = |name: &str| packages.iter().any(|package| package.name == name);
        let ours = package.dependencies.iter().filter(|dependency| is_ours(&dependency.name));
        let differ = ours.filter(|dependency| dependency.requirement != format!("^{version}"));
        others.extend(differ.map(|other| {
            format!("{} asks for {} {}", package.name, other.name, other.requirement)
        }));
    }
    others
}

fn changelog(release: &Release<'_>) -> Result<Done> {
    let text = fs::read_to_string(workspace::root().join("CHANGELOG.md"))?;
    let heading = changelog_heading(&text, release.version, release.args.dry_run)
        .ok_or_else(|| format!("CHANGELOG.md says nothing about {}", release.version))?;
    Ok(Done::Noted(format!("`{heading}`")))
}

/// The heading under which the changelog says something about the coming version.
fn changelog_heading<'a>(text: &str, version: &'a str, dry_run: bool) -> Option<&'a str> {
    let headings = [Some(version), dry_run.then_some("Unreleased")];
    let says_something =
        |name: &&str| changelog::section(text, name).is_some_and(changelog::says_something);
    headings.into_iter().flatten().find(says_something)
}

fn clean_tree(release: &Release<'_>) -> Result<Done> {
    let changes = Call::new("git", "status --porcelain").read()?;
    print!("{changes}");
    match changes.lines().count() {
        0 => Ok(Done::Passed),
        n if release.args.dry_run => Ok(Done::Noted(format!("but {n} files are not committed"))),
        n => Err(format!("{n} files are not committed").into()),
    }
}

fn semantic_version(release: &Release<'_>) -> Result<Done> {
    // From the parent, because a release that is being checked again has its tag already.
    let Ok(last) = Call::new("git", "describe --tags --abbrev=0 --match v* HEAD^").read() else {
        return Ok(Done::Skipped("there is no release to compare with".into()));
    };
    if !tools::all_there("semantic version", &[SEMVER_CHECKS], release.args.strict)? {
        return Ok(Done::Skipped("cargo-semver-checks is not installed".into()));
    }
    let call = Call::cargo("semver-checks --baseline-rev").arg(last.trim());
    let libraries = release.packages.iter().filter(|package| package.is_library);
    libraries.fold(call, |call, package| call.arg("--package").arg(&package.name)).run()?;
    Ok(Done::Noted(format!("since {}", last.trim())))
}

/// Builds each package from what the registry would get, and nothing else.
fn packages_build(release: &Release<'_>) -> Result<Done> {
    let mut call = Call::cargo("package");
    if release.args.dry_run {
        call = call.arg("--allow-dirty");
    }
    release
        .packages
        .iter()
        .fold(call, |call, package| call.arg("--package").arg(&package.name))
        .run()?;
    Ok(Done::Noted(format!("{} packages", release.packages.len())))
}

fn tag(release: &Release<'_>) -> Result<Done> {
    let tag = format!("v{}", release.version);
    let tags = Call::new("git", "tag --points-at HEAD --list v*").read()?;
    match tags.lines().next() {
        Some(here) if here == tag => Ok(Done::Noted(format!("{tag} is here"))),
        Some(other) => {
            Err(format!("this commit has the tag {other}, but the version is {}", release.version)
                .into())
        }
        None if release.args.dry_run => Ok(Done::Skipped(format!("would be {tag}"))),
        None => {
            Call::new("git", "tag --annotate --message")
                .arg(format!("Release {}", release.version))
                .arg(&tag)
                .run()?;
            Ok(Done::Noted(tag))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, needs: &[(&str, &str)]) -> Package {
        let dependency = |&(name, requirement): &(&str, &str)| Dependency {
            name: name.to_owned(),
            requirement: requirement.to_owned(),
            ..Dependency::default()
        };
        let dependencies = needs.iter().map(dependency).collect();
        Package { name: name.into(), version: "0.2.0".into(), dependencies, ..Package::default() }
    }

    #[test]
    fn a_package_is_published_after_those_it_needs() {
        let (a, b) = (
            package("a", &[("b", "^0.2.0"), ("c", "^0.2.0")]),
            package("b", &[("c", "^0.2.0"), ("serde", "^1.0")]),
        );
        let c = package("c", &[]);
        let ordered = in_publish_order(vec![&a, &b, &c]).unwrap();
        assert_eq!(
            ordered.iter().map(|package| &package.name).collect::<Vec<_>>(),
            ["c", "b", "a"]
        );
        let d = package("d", &[("d", "^0.2.0")]);
        assert!(in_publish_order(vec![&a, &b, &c, &d]).is_err());
    }

    #[test]
    fn another_version_is_found_in_packages_and_dependencies() {
        let (a, b) = (package("a", &[("b", "^0.2.0"), ("serde", "^1.0")]), package("b", &[]));
        assert!(other_versions("0.2.0", &[&a, &b]).is_empty());
        assert_eq!(other_versions("0.3.0", &[&a, &b]).len(), 3);
        let late = package("a", &[("b", "^0.1.0")]);
        assert_eq!(other_versions("0.2.0", &[&late, &b]), ["a asks for b ^0.1.0"]);
    }

    #[test]
    fn a_dry_run_takes_what_is_unreleased_for_the_coming_version() {
        let text = "## Unreleased\n\n- a: more\n\n## 0.1.0\n\n- a: first\n\n## 0.0.1\n";
        assert_eq!(changelog_heading(text, "0.2.0", true), Some("Unreleased"));
        assert_eq!(changelog_heading(text, "0.2.0", false), None);
        assert_eq!(changelog_heading(text, "0.1.0", true), Some("0.1.0"));
        assert_eq!(changelog_heading(text, "0.0.1", false), None);
    }
}
