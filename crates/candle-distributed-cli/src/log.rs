//! Log events of the libraries, printed to stderr in the format of this program's own messages.

use std::{env, fmt, io};

use clap::{ArgAction, builder::Styles};
use tracing::{Event, Level, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{DefaultFields, Writer},
    },
    registry::LookupSpan,
};

use crate::output;

/// The environment variable with the log filter. `-v` overrides it.
const VARIABLE: &str = "RUST_LOG";

/// The verbosity option.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// Print more: -v for info, -vv for debug [default: warnings, or the filter in the variable
    /// `RUST_LOG`]
    #[arg(short, long, action = ArgAction::Count, global = true)]
    verbose: u8,
}

impl LogArgs {
    /// Installs the log subscriber. Call it once.
    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    pub(crate) fn start(&self) {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(self.filter())
            .with_writer(|| anstream::AutoStream::auto(io::stderr()))
            .event_format(MessageFormat)
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("a program starts its log once");
    }

    fn filter(&self) -> EnvFilter {
        match self.verbose {
            0 => from_variable(),
            1 => EnvFilter::new("info"),
            _ => EnvFilter::new("debug"),
        }
    }
}

/// Returns the filter in [`VARIABLE`]; warnings if it is unset or invalid.
fn from_variable() -> EnvFilter {
    let warnings = || EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    let Some(value) = env::var_os(VARIABLE) else { return warnings().parse_lossy("") };
    match value.to_str().map(|value| warnings().parse(value)) {
        Some(Ok(filter)) => filter,
        Some(Err(fault)) => {
            output::warning(format_args!("{VARIABLE} is ignored: {fault}"));
            warnings().parse_lossy("")
        }
        None => {
            output::warning(format_args!("{VARIABLE} is ignored: not UTF-8"));
            warnings().parse_lossy("")
        }
    }
}

/// Prints one line per event, in the format of [`output::warning`].
struct MessageFormat;

impl<S> FormatEvent<S, DefaultFields> for MessageFormat
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, DefaultFields>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let styles = Styles::styled();
        let (style, label) = match *event.metadata().level() {
            Level::ERROR => (styles.get_error(), "error"),
            Level::WARN => (styles.get_invalid(), "warning"),
            Level::INFO => (styles.get_valid(), "info"),
            Level::DEBUG => (styles.get_valid(), "debug"),
            Level::TRACE => (styles.get_valid(), "trace"),
        };
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        writeln!(out, "{style}{label}:{style:#} {}", output::printable(&text))
    }
}
