//! Limits on the size of folders and crates: beyond them a reader loses the overview.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tidy::Violation;

/// The most files in one folder of sources.
const MAX_FILES: usize = 16;

/// The most lines with code in one crate, without its tests.
const MAX_LINES: usize = 10_000;

/// Returns the folders of sources among `files` with too many files.
pub(super) fn folders<'a>(files: impl Iterator<Item = &'a String>) -> Vec<Violation> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for path in files.filter(|path| path.contains("/src/") && super::is_rust(path)) {
        if let Some((folder, _)) = path.rsplit_once('/') {
            *counts.entry(folder).or_default() += 1;
        }
    }
    let large = counts.into_iter().filter(|(_, n_files)| *n_files > MAX_FILES);
    large
        .map(|(folder, n_files)| {
            let rule = format!("{n_files} files in a folder, more than {MAX_FILES}");
            Violation::new(folder, 1, rule)
        })
        .collect()
}

/// Returns a violation if a crate with these sources is too large.
pub(super) fn lines(folder: &str, sources: &[String]) -> Option<Violation> {
    let n_lines: usize = sources.iter().map(|source| code_lines(source)).sum();
    (n_lines > MAX_LINES).then(|| {
        let rule = format!("{n_lines} lines of code in a crate, more than {MAX_LINES}");
        Violation::new(folder, 1, rule)
    })
}

/// Returns the number of lines with code, without comments and tests.
fn code_lines(source: &str) -> usize {
    let mut lines = BTreeSet::new();
    // A source that is no Rust is a violation elsewhere.
    collect_lines(source.parse().unwrap_or_default(), &mut lines);
    lines.len()
}

fn collect_lines(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        if is_punct(&token, '#') {
            // The `!` of an attribute of the file belongs to the same line.
            tokens.next_if(|next| is_punct(next, '!'));
            let attribute = tokens.next().map(|group| group.to_string()).unwrap_or_default();
            if is_test(&attribute) {
                skip_item(&mut tokens);
            } else if !attribute.starts_with("[doc =") {
                lines.insert(token.span().start().line);
            }
            continue;
        }
        if let TokenTree::Group(group) = &token {
            collect_lines(group.stream(), lines);
            lines.insert(group.span_open().start().line);
            lines.insert(group.span_close().start().line);
        } else {
            lines.extend(token.span().start().line..=token.span().end().line);
        }
    }
}

/// Skips the item after an attribute: up to its body, or to its semicolon.
fn skip_item(tokens: &mut std::iter::Peekable<impl Iterator<Item = TokenTree>>) {
    for token in tokens.by_ref() {
        let is_body =
            matches!(&token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
        if is_body || is_punct(&token, ';') {
            break;
        }
    }
    // After the list of a `use`, or the value of a constant.
    tokens.next_if(|next| is_punct(next, ';'));
}

fn is_test(attribute: &str) -> bool {
    attribute == "[test]" || attribute.starts_with("[cfg") && has_test(attribute)
}

fn has_test(condition: &str) -> bool {
    let mut words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.any(|word| word == "test") && !condition.contains("not")
}

fn is_punct(token: &TokenTree, char: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == char)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crowded_folder_is_found() {
        let files = |n: usize| (0..n).map(|n| format!("crates/a/src/b/{n}.rs")).collect::<Vec<_>>();
        assert!(folders(files(MAX_FILES).iter()).is_empty());
        let found = folders(files(MAX_FILES + 1).iter());
        assert_eq!(found[0].to_string(), "crates/a/src/b:1: 17 files in a folder, more than 16");
    }

    #[test]
    fn oversized_crate_is_found() {
        let source = "fn f() {}\n".repeat(MAX_LINES);
        assert_eq!(lines("crates/a", std::slice::from_ref(&source)), None);
        let found = lines("crates/a", &[source, "struct S;".into()]).unwrap();
        assert_eq!(
            found.to_string(),
            "crates/a:1: 10001 lines of code in a crate, more than 10000"
        );
    }

    #[test]
    fn comments_and_tests_do_not_count() {
        let source = "//! Page.\n\n/// Text.\n#[must_use]\npub fn f() -> &'static str {\n    // Why.\n    \"a\n    b\"\n}\n";
        assert_eq!(code_lines(source), 5);
        for test in [
            "#[cfg(test)]\nuse a::{b, c};\n",
            "#[cfg(test)]\nmod tests;\n",
            "#[cfg(all(test, unix))]\nmod tests {\n    fn f() {}\n}\n",
            "#[test]\nfn f() {}\n",
        ] {
            assert_eq!(code_lines(&format!("{test}fn g() {{}}\n")), 1, "{test}");
        }
        assert_eq!(code_lines("#[cfg(not(test))]\nfn f() {}\n"), 2);
    }
}
