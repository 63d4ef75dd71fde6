//! What the targets of patterns and of rules have in common.

/// The words of a text that parameters may be called, of which some are enough.
pub fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |char: char| char.is_alphanumeric() || char == '.' || char == '_';
    text.split(move |char| !is_name(char)).filter(|name| !name.is_empty()).take(16)
}
