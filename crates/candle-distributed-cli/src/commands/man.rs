//! `man`: the manual pages.

use std::{fs, path::PathBuf};

use clap::CommandFactory;
use clap_mangen::Man;

use crate::{
    Cli,
    error::{Error, Result},
    help::examples,
    output,
};

/// Print the manual page, or write those of all subcommands to a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "candle-distributed man > candle-distributed.1"
    "# Where `man candle-distributed-plan` finds them, if this folder is in its path"
    "candle-distributed man --out ~/.local/share/man/man1"
])]
pub(crate) struct Args {
    /// Folder for the main page and one page per subcommand; created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cli = Cli::command().disable_help_subcommand(true);
    let Some(folder) = &args.out else { return output::text(|out| Man::new(cli).render(out)) };
    let written = fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(cli, folder));
    written.map_err(|source| Error::write(folder, source))
}
