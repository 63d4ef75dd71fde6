//! `cargo xtask docs`: the API pages of the workspace, and the book of its guide.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    cmd::{Call, Result},
    steps::Done,
    workspace::{self, Workspace},
};

/// Builds the API documentation, with warnings denied, and the book of the guide if mdbook is
/// installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Opens what was built in a browser.
    #[arg(long)]
    open: bool,
    /// Builds only the book.
    #[arg(long)]
    book: bool,
    /// Fails if mdbook is missing, instead of doing without the book.
    #[arg(long)]
    strict: bool,
}

const INSTALL: &str = "cargo install mdbook --locked";

pub(crate) fn run(args: &Args) -> Result {
    if !args.book {
        let cargo = command();
        if args.open { cargo.arg("--open").run() } else { cargo.run() }?;
    }
    match book(args.open && args.book)? {
        Done::Skipped(reason) if args.strict => {
            Err(format!("{reason}, and --strict asks for it").into())
        }
        Done::Skipped(reason) => {
            println!("== book: SKIPPED, {reason}");
            Ok(())
        }
        Done::Passed | Done::Noted(_) => Ok(()),
    }
}

/// The call that builds the API pages; CI makes the same one.
pub(crate) fn command() -> Call {
    Call::cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings")
}

/// Builds the book in the target folder, and checks where its links lead.
pub(crate) fn book(open: bool) -> Result<Done> {
    if !Call::new("mdbook", "--version").succeeds() {
        return Ok(Done::Skipped(format!("mdbook is not installed; get it with `{INSTALL}`")));
    }
    let built = Workspace::read()?.target_dir.join("book");
    let call = Call::new("mdbook", "build docs --dest-dir").arg(built.to_string_lossy());
    if open { call.arg("--open").run() } else { call.run() }?;
    let faults = faults(&built)?;
    for fault in &faults {
        println!("{fault}");
    }
    match faults.len() {
        0 => Ok(Done::Passed),
        n => Err(format!("{n} faults in the book").into()),
    }
}

/// Chapters that were not built, texts that were not included, and links that lead nowhere.
///
/// `tidy` looks at the links of the sources, but a text that is included from a crate stands
/// elsewhere in the book.
fn faults(built: &Path) -> Result<Vec<String>> {
    let contents = fs::read_to_string(workspace::root().join("docs/SUMMARY.md"))?;
    let pages = contents.split("](").skip(1).filter_map(|rest| rest.split_once(".md)"));
    let pages: BTreeSet<PathBuf> =
        pages.map(|(page, _)| built.join(page).with_extension("html")).collect();
    let mut faults = Vec::new();
    for page in pages {
        let name = page.display();
        let Ok(html) = fs::read_to_string(&page) else {
            faults.push(format!("{name}: was not built"));
            continue;
        };
        if html.contains("{{#include") {
            faults.push(format!("{name}: a text was not included"));
        }
        let folder = page.parent().unwrap_or(built);
        let dead = links(&html).filter(|link| !folder.join(link).exists());
        faults
            .extend(dead.map(|link| format!("{name}: link to `{link}`, which is not in the book")));
    }
    Ok(faults)
}

/// The files that a page links to, without their anchors.
fn links(html: &str) -> impl Iterator<Item = &str> {
    let targets = html.split("<a ").skip(1).filter_map(|rest| {
        let tag = rest.split('>').next()?;
        tag.split_once("href=\"")?.1.split('"').next()
    });
    let leads_elsewhere = |target: &str| target.contains("://") || target.starts_with("mailto:");
    let files = targets
        .filter(move |target| !leads_elsewhere(target))
        .filter_map(|target| target.split('#').next());
    files.filter(|file| !file.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_of_the_book_are_found() {
        let html = r##"<a href="a.html#b">a</a> <a class="x" href="../c.json">c</a> <a href="#d">d</a> <a href="https://e">e</a> <a id="f">"##;
        assert_eq!(links(html).collect::<Vec<_>>(), ["a.html", "../c.json"]);
    }
}
