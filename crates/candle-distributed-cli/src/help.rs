//! Help texts: example sections, and option values as the user types them.

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

/// Returns an option's value as the user types it.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
#[expect(clippy::needless_pass_by_value, reason = "it is a word")]
pub(crate) fn typed(value: impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("no value is hidden from the command line");
    value.get_name().to_owned()
}
