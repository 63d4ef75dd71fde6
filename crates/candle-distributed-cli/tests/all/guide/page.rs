//! Parser for pages of the guide and their blocks.

/// The checked parts of a page.
#[derive(Debug)]
pub(crate) struct Page {
    /// Path under `docs`.
    pub(crate) name: String,
    pub(crate) blocks: Vec<Block>,
}

/// A block between two fences.
///
/// The info string has a kind, then `ignore,why-reason`, `needs-tool` or `figures-vary`, with
/// hyphens for spaces, since rustdoc reads the info string too.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// First line, counted from 1.
    pub(crate) line: usize,
    pub(crate) kind: String,
    /// Whether the block is not run.
    pub(crate) is_ignored: bool,
    /// Reason why the block is not run.
    pub(crate) reason: Option<String>,
    /// Required program. The block is skipped if it is not installed.
    pub(crate) needs: Option<String>,
    /// Whether numbers with a decimal point, such as times, vary between runs.
    pub(crate) figures_vary: bool,
    pub(crate) text: String,
}

impl Page {
    pub(crate) fn parse(name: &str, text: &str) -> Self {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_open = false;
        for (line, text) in (1..).zip(text.lines()) {
            match (text.strip_prefix("```"), is_open) {
                (Some(info), false) => blocks.push(Block::begin(line, info)),
                (Some(_), true) => {}
                (None, true) => blocks.last_mut().unwrap().text.extend([text, "\n"]),
                (None, false) => continue,
            }
            is_open ^= text.starts_with("```");
        }
        assert!(!is_open, "{name}: the last block has no end");
        Self { name: name.to_owned(), blocks }
    }
}

impl Block {
    fn begin(line: usize, info: &str) -> Self {
        let mut words = info.split(',');
        let kind = words.next().unwrap_or_default().to_owned();
        let mut is_ignored = false;
        let mut reason = None;
        let mut needs = None;
        let mut figures_vary = false;
        for word in words {
            match word.split_once('-').unwrap_or((word, "")) {
                ("ignore", "") => is_ignored = true,
                ("why", why) => reason = Some(why.to_owned()),
                ("needs", tool) => needs = Some(tool.to_owned()),
                ("figures", "vary") => figures_vary = true,
                // Only for rustdoc.
                ("standalone_crate", "") => {}
                _ => panic!("line {line}: unknown word {word:?}"),
            }
        }
        Self { line, kind, is_ignored, reason, needs, figures_vary, text: String::new() }
    }

    /// Returns true for a script to run. Scripts that build or test the workspace are not run.
    pub(crate) fn is_script(&self) -> bool {
        self.kind == "sh" && !self.is_ignored && !self.text.starts_with("cargo ")
    }

    /// Returns true for a console to run.
    pub(crate) fn is_run(&self) -> bool {
        self.kind == "console" && !self.is_ignored
    }
}

/// Returns the link targets of a page, outside blocks.
pub(crate) fn links(text: &str) -> impl Iterator<Item = &str> {
    let mut in_block = false;
    let prose = text.lines().filter(move |line| {
        let is_fence = line.starts_with("```");
        in_block ^= is_fence;
        !in_block && !is_fence
    });
    let outside_code = prose.flat_map(|line| line.split('`').step_by(2));
    outside_code
        .flat_map(|text| text.split("](").skip(1))
        .filter_map(|rest| Some(rest.split_once(')')?.0))
}

#[test]
fn parse_reads_block_kinds_and_reasons() {
    let text = "a\n```console\n$ b\n```\n[c](d.md) `[e](f)`\n```console,ignore,why-takes-hours\n[g](h)\n```\n```json,needs-x\n```\n";
    let blocks = Page::parse("page.md", text).blocks;
    assert_eq!(blocks.iter().map(Block::is_run).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!((blocks[0].line, blocks[0].text.as_str()), (2, "$ b\n"));
    assert_eq!(blocks[1].reason.as_deref(), Some("takes-hours"));
    assert_eq!((blocks[2].kind.as_str(), blocks[2].needs.as_deref()), ("json", Some("x")));
    assert_eq!(links(text).collect::<Vec<_>>(), ["d.md"]);
}
