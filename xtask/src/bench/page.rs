//! Tables of ratios, and their place in `docs/benchmarks.md`.

use std::{env::consts, fmt, fs, thread, time::SystemTime};

use comfy_table::presets::ASCII_MARKDOWN;

use crate::cmd::{self, Result};

const PAGE: &str = "docs/benchmarks.md";
const START: &str = "<!-- bench:peers -->";
const END: &str = "<!-- /bench:peers -->";

/// A table in Markdown, with a sentence that says what it shows.
pub(super) struct Table {
    caption: String,
    cells: comfy_table::Table,
}

impl Table {
    pub(super) fn new(caption: String, head: &[&str]) -> Self {
        let mut cells = comfy_table::Table::new();
        cells.load_preset(ASCII_MARKDOWN).set_header(head);
        Self { caption, cells }
    }

    pub(super) fn add<const N: usize>(&mut self, row: [String; N]) {
        self.cells.add_row(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n\n{}", self.caption, self.cells)
    }
}

/// Puts the table where the page has its marks, with date and machine; the rest of the page stays
/// as it is.
pub(super) fn write(table: &Table) -> Result {
    let path = cmd::root().join(PAGE);
    let body = format!("{}, {}. {table}", today(), machine());
    let page = with_section(&fs::read_to_string(&path)?, &body)
        .ok_or_else(|| format!("{PAGE} has no marks `{START}` and `{END}`"))?;
    fs::write(path, page)?;
    println!("\nwritten to {PAGE}");
    Ok(())
}

/// The page with `body` between the marks, if it has them.
fn with_section(page: &str, body: &str) -> Option<String> {
    let (before, rest) = page.split_once(START)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{START}\n\n{body}\n\n{END}{after}"))
}

/// The day, in UTC.
fn today() -> String {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    now.chars().take_while(|&c| c != 'T').collect()
}

fn machine() -> String {
    let processor = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| model_name(&text));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{}, {cores} cores, {}",
        processor.unwrap_or_else(|| consts::ARCH.to_owned()),
        consts::OS
    )
}

/// The first processor's name, as Linux lists them.
fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_and_the_rest_of_the_page_kept() {
        let page = "# Page\n\n<!-- bench:peers -->\n\nold\n\n<!-- /bench:peers -->\n\nby hand\n";
        let expected =
            "# Page\n\n<!-- bench:peers -->\n\nnew\n\n<!-- /bench:peers -->\n\nby hand\n";
        assert_eq!(with_section(page, "new").unwrap(), expected);
        assert_eq!(with_section(expected, "new").unwrap(), expected);
        assert_eq!(with_section("# Page", "new"), None);
        assert_eq!(with_section(START, "new"), None);
    }

    #[test]
    fn the_page_has_the_marks() {
        let page = fs::read_to_string(cmd::root().join(PAGE)).unwrap();
        assert!(with_section(&page, "").is_some());
    }

    #[test]
    fn the_processor_is_named_as_the_system_names_it() {
        assert_eq!(model_name("processor\t: 0\nmodel name\t: A fast one\n").unwrap(), "A fast one");
        assert_eq!(model_name("BogoMIPS: 48.00\n"), None);
    }

    #[test]
    fn a_table_is_markdown() {
        let mut table = Table::new("What it shows.".into(), &["a", "b"]);
        table.add(["1".to_owned(), "2".to_owned()]);
        assert_eq!(table.to_string(), "What it shows.\n\n| a | b |\n|---|---|\n| 1 | 2 |");
    }
}
