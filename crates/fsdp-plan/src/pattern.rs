//! Patterns that pick parameters by name.

use std::{fmt, str::FromStr};

use globset::{GlobBuilder, GlobMatcher};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    param::ParameterInfo,
    path,
};

/// A pattern that picks parameters by their dotted names.
///
/// - **Components**, one or several side by side: `lm_head`, `h.1`. They pick a parameter if they
///   occur anywhere among the components of its name or of its layer. Only whole components count:
///   `layer1` does not pick `layer10.weight`.
/// - A **glob**, if it contains `*`, `?`, `[` or `{`: `model.layers.*.mlp.**`. It must match the
///   whole name or the whole layer. `*` and `?` stay within a component, `**` matches any number of
///   components, `{a,b}` either of several.
///
/// # Examples
///
/// ```
/// use fsdp_plan::{ElemType, ParameterInfo, Pattern};
///
/// let norm = ParameterInfo::new("model.layers.10.norm.weight", [64], ElemType::F32)?;
/// for (pattern, picks) in
///     [("norm", true), ("layers.1", false), ("model.layers.*.norm.*", true), ("*.weight", false)]
/// {
///     assert_eq!(pattern.parse::<Pattern>()?.picks(&norm), picks, "{pattern}");
/// }
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    glob: Option<GlobMatcher>,
}

impl Pattern {
    /// The pattern of components that `text` is, which holds no character of a glob.
    pub(crate) fn components(text: &str) -> Self {
        Self { text: text.to_owned(), glob: None }
    }

    /// Whether the pattern picks `info`, by its name or its layer.
    pub fn picks(&self, info: &ParameterInfo) -> bool {
        self.matches(info.name()) || self.matches(info.layer())
    }

    /// The first components of `name` that the pattern matches: the shortest prefix at which it
    /// does.
    ///
    /// # Examples
    ///
    /// ```
    /// # use fsdp_plan::Pattern;
    /// let expert: Pattern = "model.layers.*.experts.*".parse()?;
    /// assert_eq!(
    ///     expert.prefix_of("model.layers.3.experts.7.up.weight"),
    ///     Some("model.layers.3.experts.7")
    /// );
    /// assert_eq!(expert.prefix_of("model.layers.3.norm.weight"), None);
    /// # Ok::<(), fsdp_plan::Error>(())
    /// ```
    pub fn prefix_of<'a>(&self, name: &'a str) -> Option<&'a str> {
        let ends = name.match_indices('.').map(|(end, _)| end).chain([name.len()]);
        ends.map(|end| &name[..end]).find(|prefix| self.matches(prefix))
    }

    /// Whether the pattern matches the dotted `path`: a name, a layer or a unit.
    pub fn matches(&self, path: &str) -> bool {
        match &self.glob {
            Some(glob) => glob.is_match(path.replace('.', "/")),
            None => path::has_components(path, &self.text),
        }
    }
}

impl ParameterInfo {
    /// Sets layer and unit to the first components of the name that `pattern` matches; leaves them
    /// if it does not.
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
        let bad = |reason: String| Error::BadPattern { pattern: text.to_owned(), reason };
        if text.is_empty() {
            return Err(bad(String::from("it is empty")));
        }
        let glob = text.contains(['*', '?', '[', '{']).then(|| {
            GlobBuilder::new(&text.replace('.', "/"))
                .literal_separator(true)
                .backslash_escape(false)
                .build()
        });
        let glob = glob.transpose().map_err(|error| bad(error.kind().to_string()))?;
        Ok(Self { text: text.to_owned(), glob: glob.map(|glob| glob.compile_matcher()) })
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

    #[test]
    fn what_cannot_be_read_is_an_error() {
        for pattern in ["", "a.[", "{a", "a.[z-a]"] {
            assert!(
                matches!(pattern.parse::<Pattern>(), Err(Error::BadPattern { .. })),
                "{pattern}"
            );
        }
    }
}
