//! What the libraries have to say while they work: on stderr, in the form of this program's own
//! messages.

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

/// The variable that says what is shown, unless `-v` does.
const VARIABLE: &str = "RUST_LOG";

/// How much is shown.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// Say more about what happens on the way: -v what is done, -vv every detail [default:
    /// warnings, or what the variable `RUST_LOG` asks for]
    #[arg(short, long, action = ArgAction::Count, global = true)]
    verbose: u8,
}

impl LogArgs {
    /// Shows from now on what the arguments ask for.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(crate) fn start(&self) {
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(self.filter())
            .with_writer(|| anstream::AutoStream::auto(io::stderr()))
            .event_format(House)
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

/// What the variable asks for; warnings if there is none, or none that can be understood.
fn from_variable() -> EnvFilter {
    let warnings = || EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    let Some(asked) = env::var_os(VARIABLE) else { return warnings().parse_lossy("") };
    let parsed = asked.to_str().map(|asked| warnings().parse(asked));
    match parsed {
        Some(Ok(filter)) => filter,
        Some(Err(fault)) => {
            output::warning(format_args!("{VARIABLE} is ignored: {fault}"));
            warnings().parse_lossy("")
        }
        None => {
            output::warning(format_args!("{VARIABLE} is ignored: it is not UTF-8"));
            warnings().parse_lossy("")
        }
    }
}

/// One line for each event, as [`output::warning`] writes its own.
struct House;

impl<S> FormatEvent<S, DefaultFields> for House
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
