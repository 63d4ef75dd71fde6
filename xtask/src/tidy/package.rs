//! Rules about what belongs to every package: its manifest, its page, its line in the changelog.

use cargo_metadata::Metadata;

use crate::{changelog, tidy::Violation, workspace};

/// What registries and users look for in a manifest.
const MANIFEST_KEYS: [&str; 3] = ["description", "license", "rust-version"];

/// Every rule; `read` returns the text of the file at a path, if there is one.
pub(super) fn check(metadata: &Metadata, read: &dyn Fn(&str) -> Option<String>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for package in metadata.workspace_packages() {
        let path = format!("{}/Cargo.toml", workspace::folder(package));
        violations.extend(manifest(&path, &read(&path).unwrap_or_default()));
    }
    for package in workspace::crates(metadata) {
        let path = format!("{}/README.md", workspace::folder(package));
        violations.extend(page(&path, read(&path).as_deref()));
    }
    let version = workspace::crates(metadata).next().map(|first| first.version.to_string());
    let text = read("CHANGELOG.md").unwrap_or_default();
    violations.extend(version.and_then(|version| changelog(&text, &version)));
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

fn page(path: &str, text: Option<&str>) -> Option<Violation> {
    let is_empty = text.is_none_or(|text| text.trim().is_empty());
    is_empty.then(|| Violation::new(path, 1, "a crate has a README, which is its page"))
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
        let path = "crates/a/README.md";
        assert_eq!(page(path, None).unwrap().path, path);
        assert!(page(path, Some(" \n")).is_some());
        assert_eq!(page(path, Some("# A\n")), None);
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
