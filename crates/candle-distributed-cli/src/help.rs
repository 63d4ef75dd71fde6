//! What the command line says of itself: examples of subcommands, and names of values.

use clap::ValueEnum;

/// The section of commands to try. A line is a command, or a `#` and what the commands below it are
/// for.
///
/// Its heading looks like those that clap writes; clap removes the escapes where colors are not
/// shown.
macro_rules! examples {
    ($($line:literal)+) => {
        concat!("\x1b[1m\x1b[4mExamples:\x1b[0m" $(, "\n  ", $line)+)
    };
}

pub(crate) use examples;

/// A value as it is typed on the command line.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
#[expect(clippy::needless_pass_by_value, reason = "it is a word")]
pub(crate) fn typed(value: impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("no value is hidden from the command line");
    value.get_name().to_owned()
}
