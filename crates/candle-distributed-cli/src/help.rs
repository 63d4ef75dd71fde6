//! What the help of a subcommand shows besides its options.

/// The section of commands to try. A line is a command, or after a `#` what the commands below it
/// are for.
///
/// Its heading looks like those that clap writes; clap removes the escapes where nobody sees
/// colors.
macro_rules! examples {
    ($($line:literal)+) => {
        concat!("\x1b[1m\x1b[4mExamples:\x1b[0m" $(, "\n  ", $line)+)
    };
}

pub(crate) use examples;
