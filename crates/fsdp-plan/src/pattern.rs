//! Patterns that match parameters by name.

use std::{fmt, str::FromStr};

use globset::{GlobBuilder, GlobSet};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    param::{ParameterInfo, path},
};

/// Limit on the length of a pattern in bytes. Names of parameters are about ten times shorter.
const MAX_BYTES: usize = 4096;

/// Limit on nested braces. The compiler of regular expressions recurses once per open brace.
const MAX_DEPTH: usize = 16;

/// A pattern that matches parameters by their dotted names.
///
/// - **Components**, one or several in a row: `lm_head`, `h.1`. They match a parameter if they
///   occur anywhere in its name or its layer. Only whole components count: `layer1` does not match
///   `layer10.weight`.
/// - A **glob**, if the text contains `*`, `?`, `[` or `{`: `model.layers.*.mlp.**`. It must match
///   the whole name or the whole layer. `*` and `?` stay within a component, `**` matches any
///   number of components, and `{a,b}` matches either alternative.
///
/// Patterns may come from untrusted files, so they are limited to 4,096 bytes and 16 levels of nested braces.
///
/// # Examples
///
/// ```
/// use fsdp_plan::Pattern;
///
/// let norm = "model.layers.10.norm.weight";
/// for (pattern, is_match) in
///     [("norm", true), ("layers.1", false), ("model.layers.*.norm.*", true), ("*.weight", false)]
/// {
///     assert_eq!(pattern.parse::<Pattern>()?.matches(norm), is_match, "{pattern}");
/// }
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    /// A set with one glob, because `GlobMatcher` panics where `GlobSet` returns an error.
    glob: Option<GlobSet>,
}

impl Pattern {
    /// Creates a pattern of components from `text`, which must contain no glob character.
    pub(crate) fn components(text: &str) -> Self {
        Self { text: text.to_owned(), glob: None }
    }

    /// Returns the length of the pattern in bytes.
    pub(crate) fn n_bytes(&self) -> usize {
        self.text.len()
    }

    /// Returns true if the pattern matches the name or the layer of `info`.
    pub(crate) fn matches_parameter(&self, info: &ParameterInfo) -> bool {
        self.matches(info.name()) || self.matches(info.layer())
    }

    /// Returns the shortest prefix of `name`, in whole components, that the pattern matches.
    pub(crate) fn prefix_of<'a>(&self, name: &'a str) -> Option<&'a str> {
        let ends = name.match_indices('.').map(|(end, _)| end).chain([name.len()]);
        ends.map(|end| &name[..end]).find(|prefix| self.matches(prefix))
    }

    /// Returns true if the pattern matches the dotted `path` of a name, a layer or a unit.
    pub fn matches(&self, path: &str) -> bool {
        match &self.glob {
            Some(glob) => glob.is_match(path.replace('.', "/")),
            None => path::has_components(path, &self.text),
        }
    }
}

impl ParameterInfo {
    /// Sets layer and unit to the shortest prefix of the name that `pattern` matches. Without a
    /// match, layer and unit are unchanged.
    ///
    /// With `model.layers.*.mlp.experts.*` each expert becomes a layer and a unit of its own.
    #[must_use]
    pub fn with_layer_pattern(self, pattern: &Pattern) -> Self {
        match pattern.prefix_of(self.name()).map(str::to_owned) {
            Some(layer) => self.with_layer(layer.as_str()).with_unit(layer),
            None => self,
        }
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let glob = check(text).and_then(|()| compile(text));
        match glob {
            Ok(glob) => Ok(Self { text: text.to_owned(), glob }),
            Err(reason) => Err(Error::InvalidPattern { pattern: truncate(text), reason }),
        }
    }
}

/// Checks the limits of a pattern before it is compiled.
fn check(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err(String::from("it is empty"));
    }
    if text.len() > MAX_BYTES {
        return Err(format!("it has {} bytes, the limit is {MAX_BYTES}", text.len()));
    }
    let depth = brace_depth(text);
    if depth > MAX_DEPTH {
        return Err(format!("it nests {depth} braces, the limit is {MAX_DEPTH}"));
    }
    Ok(())
}

/// Returns the largest number of braces that are open at once, including braces within brackets.
fn brace_depth(text: &str) -> usize {
    let mut depth: usize = 0;
    let mut deepest = 0;
    for byte in text.bytes() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Compiles `text` if it is a glob; returns `None` for plain components.
fn compile(text: &str) -> Result<Option<GlobSet>, String> {
    if !text.contains(['*', '?', '[', '{']) {
        return Ok(None);
    }
    let glob = GlobBuilder::new(&text.replace('.', "/"))
        .literal_separator(true)
        .backslash_escape(false)
        .build();
    let set = glob.and_then(|glob| GlobSet::new([glob]));
    set.map(Some).map_err(|error| error.kind().to_string())
}

/// Truncates a pattern for an error message.
fn truncate(text: &str) -> String {
    /// Longer than a readable line allows.
    const SHOWN_CHARS: usize = 80;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl TryFrom<String> for Pattern {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.text
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Pattern {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn globs_match_whole_paths_by_component() {
        for (pattern, path, expected) in [
            ("model.layers.*", "model.layers.3", true),
            ("model.layers.*", "model.layers.3.mlp", false),
            ("model.layers.**", "model.layers.3.mlp", true),
            ("**.bias", "a.b.bias", true),
            ("**.bias", "bias", true),
            ("h.{0,1}.*", "h.1.w", true),
            ("h.[0-4].w", "h.5.w", false),
            ("h?", "h1", true),
            ("h?", "h.", false),
        ] {
            assert_eq!(
                pattern.parse::<Pattern>().unwrap().matches(path),
                expected,
                "{pattern} on {path}"
            );
        }
    }

    /// Parses a pattern from its JSON form.
    fn from_json(text: &str) -> std::result::Result<Pattern, String> {
        let json = serde_json::to_string(text).unwrap();
        serde_json::from_str(&json).map_err(|error| error.to_string())
    }

    #[test]
    fn malformed_patterns_are_rejected() {
        for pattern in ["", "a.[", "{a", "a.[z-a]"] {
            assert!(
                matches!(pattern.parse::<Pattern>(), Err(Error::InvalidPattern { .. })),
                "{pattern}"
            );
            assert!(from_json(pattern).unwrap_err().starts_with("malformed pattern"), "{pattern}");
        }
    }

    #[test]
    fn oversized_patterns_are_rejected() {
        let nested = |depth| format!("{}a{}", "{".repeat(depth), "}".repeat(depth));
        let long = |len, repeated: &str| format!("*{}", repeated.repeat(len - 1));
        for (pattern, limit) in [
            (nested(MAX_DEPTH + 1), "nests 17 braces, the limit is 16"),
            (nested(250), "nests 250 braces"),
            (nested(200_000), "has 400001 bytes, the limit is 4096"),
            (long(MAX_BYTES + 1, "a"), "has 4097 bytes"),
            (long(200_000, "?"), "has 200000 bytes"),
            ("a".repeat(600_000), "has 600000 bytes"),
        ] {
            let error = pattern.parse::<Pattern>().unwrap_err();
            let Error::InvalidPattern { pattern: shown, reason } = &error else {
                panic!("{error}")
            };
            assert!(reason.contains(limit), "{reason}");
            assert!(pattern.starts_with(shown.trim_end_matches('…')), "{shown}");
            assert!(error.to_string().len() < 200, "{error}");
            assert_eq!(from_json(&pattern), Err(error.to_string()));
        }
        for pattern in [
            nested(MAX_DEPTH),
            long(MAX_BYTES, "a"),
            long(MAX_BYTES, "?"),
            long(MAX_BYTES, "*"),
            "{a,b}".repeat(MAX_BYTES / 5),
            "[z]".repeat(MAX_BYTES / 3),
        ] {
            let read = pattern.parse::<Pattern>();
            assert!(read.is_ok(), "{:?}", read.map_err(|error| error.to_string()));
        }
    }

    /// Generates texts with many glob characters.
    fn text(alphabet: &'static str) -> impl Strategy<Value = String> {
        let chars: Vec<char> = alphabet.chars().collect();
        proptest::collection::vec(proptest::sample::select(chars), 0..12)
            .prop_map(|chars| chars.into_iter().collect())
    }

    proptest! {
        #[test]
        fn parsing_any_text_never_panics(text in text("ab.*?[]{},!-\\/é\u{1b}"), name in ".*") {
            if let Ok(pattern) = text.parse::<Pattern>() {
                pattern.prefix_of(&name);
                prop_assert_eq!(pattern.to_string(), text);
            }
        }

        // `GlobSet` has fast paths for extensions and prefixes; they must agree with the glob itself.
        #[test]
        fn set_matches_like_its_glob(
            text in text("ab.*?[]{},"),
            path in text("ab."),
        ) {
            if let Ok(Pattern { glob: Some(set), .. }) = text.parse() {
                let text = text.replace('.', "/");
                let path = path.replace('.', "/");
                let glob = GlobBuilder::new(&text)
                    .literal_separator(true)
                    .backslash_escape(false)
                    .build()
                    .unwrap();
                prop_assert_eq!(set.is_match(&path), glob.compile_matcher().is_match(&path));
            }
        }
    }
}
