//! Finds templates with which a value could contain itself.
//!
//! Writing such a value would not end. Only an assignment to an attribute of a namespace can put a
//! value into itself. So a namespace must stay in the variable that `{% set ns = namespace() %}`
//! makes for it, and only its attributes may be used, as in `ns.a`. All known templates do so.

use std::collections::BTreeSet;

use minijinja::{
    machinery::{Token, Tokenizer},
    syntax::SyntaxConfig,
};

/// The function that makes namespaces.
const NAMESPACE: &str = "namespace";

/// Returns the first name in a template that could put a namespace into a value.
pub(super) fn leaked_name(source: &str, syntax: SyntaxConfig) -> Option<String> {
    let tokens = tokens(source, syntax);
    let variables: BTreeSet<&str> =
        (0..tokens.len()).filter_map(|start| declared_variable(&tokens[start..])).collect();
    (0..tokens.len()).find_map(|at| {
        let Token::Ident(name) = tokens[at] else { return None };
        let is_used = name == NAMESPACE || variables.contains(name);
        (is_used && !is_harmless(&tokens, at)).then(|| name.to_owned())
    })
}

/// Returns the tokens of a template up to the first fault, which the compiler reports.
fn tokens(source: &str, syntax: SyntaxConfig) -> Vec<Token<'_>> {
    let mut tokenizer = Tokenizer::new(source, "", false, syntax);
    let mut tokens = Vec::new();
    while let Ok(Some((token, _))) = tokenizer.next_token() {
        tokens.push(token);
    }
    tokens
}

/// Returns the name `ns` if the tokens begin with `{% set ns = namespace(…) %}`.
fn declared_variable<'s>(tokens: &[Token<'s>]) -> Option<&'s str> {
    match tokens {
        [
            Token::BlockStart,
            Token::Ident("set"),
            Token::Ident(name),
            Token::Assign,
            Token::Ident(NAMESPACE),
            Token::ParenOpen,
            arguments @ ..,
        ] if ends_block(arguments) => Some(name),
        _ => None,
    }
}

/// Returns true if the parenthesis that closes these arguments is the end of the block.
fn ends_block(arguments: &[Token<'_>]) -> bool {
    let mut depth = 1;
    let is_closing = |token: &Token<'_>| {
        match token {
            Token::ParenOpen => depth += 1,
            Token::ParenClose => depth -= 1,
            _ => {}
        }
        depth == 0
    };
    let end = arguments.iter().position(is_closing);
    end.is_some_and(|end| matches!(arguments.get(end + 1), Some(Token::BlockEnd)))
}

/// Returns true if the name at this place is not evaluated to a namespace outside of its variable.
fn is_harmless(tokens: &[Token<'_>], at: usize) -> bool {
    let is_attribute = at > 0 && matches!(tokens[at - 1], Token::Dot);
    let is_declared = at >= 4 && declared_variable(&tokens[at - 4..]).is_some();
    let is_harmless = match tokens.get(at + 1) {
        // The name is assigned to, or it is the name of an argument.
        Some(Token::Assign) => true,
        Some(Token::Dot) => !matches!(tokens[at], Token::Ident(NAMESPACE)),
        _ => false,
    };
    is_attribute || is_declared || is_harmless
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_attributes_of_namespaces_are_used() {
        let found = |source: &str| leaked_name(source, SyntaxConfig::default());
        for source in [
            "{%- set ns = namespace(a=(1, 2), b=m|length) -%}{% set ns.a = ns.b + ns.a %}{{ ns.a }}",
            "namespace ns {# namespace ns #}{% raw %}{{ ns }}{% endraw %}{{ 'namespace ns' }}{{ m.ns }}",
            "{% macro f(namespace=1) %}{% endmacro %}{{ f(namespace=2) }}",
            "{% set ns = namespace() %}{% set ns = 1 %}",
        ] {
            assert_eq!(found(source), None, "{source}");
        }
        for (source, name) in [
            ("{% set ns = namespace() %}{% set ns.s = ns %}", "ns"),
            ("{% set ns = namespace() %}{% set a = ns %}{% set ns.s = a %}", "ns"),
            ("{% set ns = namespace() %}{{ {'a': {'b': {}}} }}{% set ns.s = [ns] %}", "ns"),
            ("{% set a = namespace %}{% set ns = a() %}", "namespace"),
            ("{% set ns = [namespace()] %}", "namespace"),
            ("{% set ns = namespace() or 1 %}", "namespace"),
            ("{% set ns = namespace(a=namespace()) %}", "namespace"),
            ("{% with ns = namespace() %}{% endwith %}", "namespace"),
        ] {
            assert_eq!(found(source).as_deref(), Some(name), "{source}");
        }
    }
}
