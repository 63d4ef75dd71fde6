//! Rules about what belongs to every package: its manifest, its page, its line in the changelog.

use super::Violation;
use crate::{
    changelog,
    workspace::{Package, Workspace},
};

/// What registries and users look for in a manifest.
const MANIFEST_KEYS: [&str; 3] = ["description", "license", "rust-version"];

/// Every rule; `read` returns the text of the file at a path, if there is one.
pub(super) fn check(
    workspace: &Workspace,
    read: &dyn Fn(&str) -> Option<String>,
) -> Vec<Violation> {
    let text = |path: &str| read(path).unwrap_or_default();
    let paths = workspace.packages.iter().map(|package| format!("{}/Cargo.toml", package.dir));
    let mut violations: Vec<_> = paths.flat_map(|path| manifest(&path, &text(&path))).collect();
    violations
        .extend(workspace.crates().filter_map(|package| page(package, &text(&page_path(package)))));
    violations.extend(
        workspace
            .crates()
            .next()
            .and_then(|first| changelog(&text("CHANGELOG.md"), &first.version)),
    );
    violations
}

fn manifest(path: &str, text: &str) -> Vec<Violation> {
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let has_key =
        |key: &str| lines.iter().any(|line| line.split(['=', '.', ' ']).next() == Some(key));
    let missing = MANIFEST_KEYS.into_iter().filter(|key| !has_key(key));
    let mut violations: Vec<_> =
        missing.map(|key| Violation::new(path, 1, format!("no `{key}`"))).collect();
    if !lines.windows(2).any(|pair| pair == ["[lints]", "workspace = true"]) {
        violations.push(Violation::new(path, 1, "no `[lints] workspace = true`"));
    }
    violations
}

fn page_path(package: &Package) -> String {
    format!("{}/README.md", package.dir)
}

fn page(package: &Package, text: &str) -> Option<Violation> {
    let rule = "a crate has a README, which is its page";
    text.trim().is_empty().then(|| Violation::new(&page_path(package), 1, rule))
}

fn changelog(text: &str, version: &str) -> Option<Violation> {
    let found =
        ["Unreleased", version].into_iter().any(|name| changelog::section(text, name).is_some());
    (!found).then(|| {
        Violation::new("CHANGELOG.md", 1, format!("no `## Unreleased` and no `## {version}`"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[package]\ndescription = \"d\"\nlicense.workspace = true\nrust-version = \"1.85\"\n\n[lints]\nworkspace = true\n";

    #[test]
    fn a_manifest_without_a_key_is_found() {
        assert!(manifest("Cargo.toml", GOOD).is_empty());
        assert!(manifest("Cargo.toml", &GOOD.replace('\n', "\r\n")).is_empty());
        for line in [
            "description = \"d\"\n",
            "license.workspace = true\n",
            "rust-version = \"1.85\"\n",
            "[lints]\n",
        ] {
            assert_eq!(manifest("Cargo.toml", &GOOD.replace(line, "")).len(), 1, "{line}");
        }
    }

    #[test]
    fn a_crate_without_a_page_is_found() {
        let package = Package { dir: "crates/a".into(), ..Package::default() };
        assert_eq!(page(&package, " \n").unwrap().path, "crates/a/README.md");
        assert_eq!(page(&package, "# A\n"), None);
    }

    #[test]
    fn a_changelog_that_does_not_know_the_version_is_found() {
        for text in [
            "## Unreleased\n",
            "## [Unreleased]\n",
            "# Changes\n\n## 0.2.0 (2025-01-01)\n",
            "## [0.2.0]\n",
        ] {
            assert_eq!(changelog(text, "0.2.0"), None, "{text}");
        }
        for text in ["", "## 0.1.0\n", "## 0.2.0-rc1\n", "Unreleased\n"] {
            assert!(changelog(text, "0.2.0").is_some(), "{text}");
        }
    }
}
