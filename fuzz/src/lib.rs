//! Common parts of the targets for patterns and rules.

/// Returns the first words of a text that are valid parameter names.
pub fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|char: char| !char.is_alphanumeric() && char != '.' && char != '_')
        .filter(|name| !name.is_empty())
        .take(16)
}
