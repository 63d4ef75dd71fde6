//! Causes in one line.

use candle_core::Error;

/// What candle says, in one line and without the backtraces that it adds where `RUST_BACKTRACE` is
/// set: they are of the library's inside, and a hundred lines long.
pub(super) fn one_line(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => one_line(inner),
        Error::WithPath { inner, path } => format!("{}: {}", path.display(), one_line(inner)),
        Error::Context { inner, context } => format!("{context}: {}", one_line(inner)),
        other => other.to_string().split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn backtraces_and_line_breaks_are_left_out() {
        let inner = Box::new(Error::Msg("no such\n  tensor".to_owned()));
        let backtrace = Box::new(Backtrace::force_capture());
        let traced = Error::WithBacktrace { inner, backtrace };
        let error = traced.with_path("weights").context("loading");
        assert_eq!(one_line(&error), "loading: weights: no such tensor");
    }
}
