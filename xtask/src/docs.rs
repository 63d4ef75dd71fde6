//! `cargo xtask docs`: the API pages of the workspace, and the book of its guide.

use std::{fs, path::Path};

use crate::{
    cmd::{Call, Result},
    steps::{self, Done, Step},
    tools::{self, Tool},
    workspace,
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

const MDBOOK: Tool = Tool {
    name: "mdbook",
    probe: ("mdbook", "--version"),
    install: "cargo install --locked mdbook",
};

#[derive(PartialEq)]
enum Pages {
    Api,
    Book,
}

pub(crate) fn run(args: &Args) -> Result {
    let steps = [Step { name: "docs", work: Pages::Api }, Step { name: "book", work: Pages::Book }];
    let steps = if args.book { &steps[1..] } else { &steps };
    steps::run_all(steps, |pages| match pages {
        Pages::Api if args.open => command().arg("--open").run().map(|()| Done::Passed),
        Pages::Api => command().run().map(|()| Done::Passed),
        Pages::Book => book(args.open && args.book, args.strict),
    })
}

/// The call that builds the API pages; CI makes the same one.
pub(crate) fn command() -> Call {
    Call::cargo("doc --workspace --no-deps").env("RUSTDOCFLAGS", "-D warnings")
}

/// The call that checks where the links of all pages lead, if it is to files.
pub(crate) fn links() -> Call {
    Call::new("lychee", "--offline --no-progress --extensions md .")
}

/// Builds the book in the target folder, and checks where its links lead: a text that is included
/// from a crate stands elsewhere in the book.
pub(crate) fn book(open: bool, strict: bool) -> Result<Done> {
    let folder = workspace::read()?.target_directory.join("book");
    let call = Call::new("mdbook", "build docs --dest-dir").arg(folder.as_str());
    let call = if open { call.arg("--open") } else { call };
    let done = tools::run_with(&[MDBOOK], strict, &[call])?;
    if done == Done::Passed {
        all_is_included(folder.as_std_path())?;
        let links = Call::new("lychee", "--offline --no-progress").arg(folder.as_str());
        return tools::run_with(&[tools::LYCHEE], strict, &[links]);
    }
    Ok(done)
}

/// mdbook leaves an include that it cannot read where it is, and goes on.
fn all_is_included(built: &Path) -> Result {
    for page in workspace::files_below(built)? {
        let is_page = page.extension().is_some_and(|end| end == "html");
        if is_page && fs::read_to_string(&page)?.contains("{{#include") {
            return Err(format!("{}: a text was not included", page.display()).into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_was_not_included_is_found() {
        let book = tempfile::tempdir().unwrap();
        fs::write(book.path().join("a.html"), "<p>included</p>").unwrap();
        fs::write(book.path().join("a.md"), "{{#include b.md}}").unwrap();
        all_is_included(book.path()).unwrap();
        fs::write(book.path().join("b.html"), "<p>{{#include c.md}}</p>").unwrap();
        assert!(all_is_included(book.path()).is_err());
    }
}
