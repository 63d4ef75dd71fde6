//! `cargo xtask msrv`: whether each crate builds with the oldest Rust that its manifest promises.

use crate::{
    ci,
    cmd::{Call, Result},
    steps::{self, Done, Step},
    tools::{self, Tool},
    workspace::{Package, Workspace},
};

/// Checks each crate with the oldest Rust that it promises to build with.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Installs, through rustup, the toolchains that are missing.
    #[arg(long)]
    install: bool,
    /// Fails if a toolchain is missing, instead of skipping the crates that promise it.
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let workspace = Workspace::read()?;
    let steps: Vec<_> =
        workspace.crates().map(|package| Step { name: &package.name, work: package }).collect();
    steps::run_all(&steps, |package| check(package, args))
}

fn check(package: &Package, args: &Args) -> Result<Done> {
    let version = oldest_patch(&package.rust_version);
    let install = format!("toolchain install {version} --profile minimal");
    let (name, probe, to_install) =
        (format!("Rust {version}"), format!("+{version} --version"), format!("rustup {install}"));
    let rust = Tool { name: &name, probe: &probe, install: &to_install };
    if args.install && !rust.is_there() {
        Call::new("rustup", &install).run()?;
    }
    if !tools::all_there(&package.name, &[rust], args.strict)? {
        return Ok(Done::Skipped(format!("{name} is not installed")));
    }
    command(package, &version).run()?;
    Ok(Done::Noted(name))
}

/// `1.85` promises that 1.85.0 will do, which is also how rustup calls it.
fn oldest_patch(version: &str) -> String {
    if version.matches('.').count() < 2 { format!("{version}.0") } else { version.to_owned() }
}

/// The call that checks a crate, with the versions of dependencies that everything else is checked
/// with.
fn command(package: &Package, version: &str) -> Call {
    let features: Vec<_> = promised_features(package).collect();
    let call = Call::cargo(&format!("+{version} check --locked --package {}", package.name));
    if features.is_empty() { call } else { call.arg("--features").arg(features.join(",")) }
}

/// The features under the promise: not those that bring candle into a crate which does without it
/// otherwise, because candle asks for a newer Rust. They are checked as features of the umbrella
/// crate.
fn promised_features(package: &Package) -> impl Iterator<Item = &str> {
    let without_candle = ci::cpu_features(package)
        .filter(|(_, enables)| !enables.contains(&"dep:candle-core".to_owned()));
    without_candle.map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_patch_of_a_version_is_what_is_promised() {
        assert_eq!(oldest_patch("1.85"), "1.85.0");
        assert_eq!(oldest_patch("1.85.1"), "1.85.1");
    }

    #[test]
    fn a_crate_is_checked_with_all_features_but_devices_and_candle() {
        let features = [
            ("candle", "dep:candle-core"),
            ("cuda", "x/cuda"),
            ("rayon", "dep:rayon"),
            ("serde", "dep:serde"),
        ];
        let features =
            features.map(|(name, enables)| (name.to_owned(), vec![enables.to_owned()])).into();
        let package = Package { name: "a".into(), features, ..Package::default() };
        let expected = Call::cargo("+1.85.0 check --locked --package a --features rayon,serde");
        assert_eq!(command(&package, "1.85.0"), expected);
        let plain = Package { name: "a".into(), ..Package::default() };
        assert_eq!(command(&plain, "1.88.0"), Call::cargo("+1.88.0 check --locked --package a"));
    }
}
