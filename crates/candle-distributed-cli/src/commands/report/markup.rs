//! HTML building blocks of pages.

use candle_distributed::types::human::HumanCount;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::picture;

const STYLE: &str = include_str!("style.css");

/// Returns a complete HTML page.
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

/// Formats a number with grouped digits.
pub(super) fn count(number: impl Into<u128>) -> String {
    HumanCount(number.into()).to_string()
}

/// Returns a section with its heading.
pub(super) fn section(id: &str, heading: &str, content: &Markup) -> Markup {
    html! {
        section id=(id) {
            h2 { (heading) }
            (content)
        }
    }
}

/// Returns a picture with its caption.
pub(super) fn figure(picture: &str, caption: &str) -> Markup {
    html! {
        figure {
            (PreEscaped(picture::inline(picture)))
            figcaption { (caption) }
        }
    }
}

/// Returns a note about missing information.
pub(super) fn missing_note(why: &str) -> Markup {
    html! { p.missing { (why) } }
}

/// Returns a table of names and values.
pub(super) fn fact_table(rows: &[(&str, String)]) -> Markup {
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

/// Returns a table of numbers, with names in the first column.
pub(super) fn number_table(heads: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        div.scroll {
            table {
                thead { tr { @for head in heads { th scope="col" { (head) } } } }
                tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// Capitalizes the first letter, and adds a full stop.
pub(super) fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    letters
        .next()
        .map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}
