//! The examples in the help of a subcommand.

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
