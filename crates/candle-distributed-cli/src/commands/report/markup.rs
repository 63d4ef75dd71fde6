//! What pages are made of.

use candle_distributed::types::human::HumanCount;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::picture;

const STYLE: &str = include_str!("style.css");

/// A whole page.
pub(super) fn page(title: &str, lead: &str, sections: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(picture::STYLE.as_str())) }
            }
            body {
                header {
                    h1 { (title) }
                    p.lead { (lead) }
                }
                main { (sections) }
                footer { "candle-distributed " (env!("CARGO_PKG_VERSION")) }
            }
        }
    };
    page.into_string()
}

/// A number in digits that are grouped.
pub(super) fn count(number: impl Into<u128>) -> String {
    HumanCount(number.into()).to_string()
}

/// A section with its heading.
pub(super) fn section(id: &str, heading: &str, content: &Markup) -> Markup {
    html! {
        section id=(id) {
            h2 { (heading) }
            (content)
        }
    }
}

pub(super) fn figure(picture: &str, caption: &str) -> Markup {
    html! {
        figure {
            (PreEscaped(picture::inline(picture)))
            figcaption { (caption) }
        }
    }
}

/// What is not known, and why.
pub(super) fn missing(why: &str) -> Markup {
    html! { p.missing { (why) } }
}

/// A table of names and values.
pub(super) fn listed(rows: &[(&str, String)]) -> Markup {
    html! {
        table.facts {
            tbody {
                @for (name, value) in rows {
                    tr { th scope="row" { (name) } td { (value) } }
                }
            }
        }
    }
}

/// A table of numbers whose first column holds names.
pub(super) fn numbers(heads: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        div.scroll {
            table {
                thead { tr { @for head in heads { th scope="col" { (head) } } } }
                tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// The words with a capital at the start and a full stop at the end.
pub(super) fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    letters
        .next()
        .map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}
