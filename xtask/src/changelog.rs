//! The sections of `CHANGELOG.md`.

/// What stands under the heading of a version, which may be in brackets or have a date.
pub(crate) fn section<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    // The first part is what stands above all versions.
    let sections = text.split("\n## ").skip(usize::from(!text.starts_with("## ")));
    let mut parts = sections.map(|section| section.split_once('\n').unwrap_or((section, "")));
    let is_named = |heading: &str| {
        let heading = heading.trim_start_matches("## ").trim_start_matches('[');
        heading.split([']', ' ', '\r']).next() == Some(name)
    };
    parts.find(|(heading, _)| is_named(heading)).map(|(_, body)| body)
}

/// Whether a section says anything: has a line that is not a heading.
pub(crate) fn says_something(section: &str) -> bool {
    section.lines().any(|line| !line.trim().is_empty() && !line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n## 0.2.0 (2025-01-01)\n\n- a: more\n\n## 0.1.0";

    #[test]
    fn a_section_ends_at_the_next_version() {
        assert_eq!(section(TEXT, "0.2.0"), Some("\n- a: more\n"));
        assert_eq!(section(TEXT, "0.1.0"), Some(""));
        assert_eq!(section("## 0.1.0\r\n- a\r\n", "0.1.0"), Some("- a\r\n"));
        assert_eq!(section(TEXT, "0.2"), None);
        assert_eq!(section(TEXT, "Added"), None);
    }

    #[test]
    fn headings_alone_say_nothing() {
        assert!(says_something("\n- a: more\n"));
        assert!(!says_something("\n### Added\n\n"));
    }
}
