//! Texts about options: example sections of help pages, and the names of option values.

use clap::ValueEnum;

/// Builds the examples section of a help page. Each line is a command, or a `#` comment on the
/// commands below it.
///
/// The heading looks like clap's own headings. clap removes the escapes where colors are off.
macro_rules! examples {
    ($($line:literal)+) => {
        concat!("\x1b[1m\x1b[4mExamples:\x1b[0m" $(, "\n  ", $line)+)
    };
}

pub(crate) use examples;

/// Returns the name of an option's value on the command line.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
#[expect(
    clippy::needless_pass_by_value,
    reason = "values are small, and `Option::map` takes a function of values"
)]
pub(crate) fn cli_name(value: impl ValueEnum) -> String {
    let possible = value.to_possible_value().expect("no value is hidden from the command line");
    possible.get_name().to_owned()
}
