//! `man`: prints or writes manual pages.

use std::{fs, iter, path::PathBuf};

use clap::CommandFactory;
use clap_mangen::Man;

use crate::{
    Cli,
    error::{Error, Result},
    help::examples,
    output,
};

/// Print the manual page, or write the manual pages of all subcommands to a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "candle-distributed man > candle-distributed.1"
    "# `man candle-distributed-plan` finds this page if the folder is on its search path"
    "candle-distributed man --out ~/.local/share/man/man1"
])]
pub(crate) struct ManArgs {
    /// Folder for the main page and one page per subcommand; created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &ManArgs) -> Result<()> {
    let mut cli = Cli::command().disable_help_subcommand(true);
    let Some(folder) = &args.out else { return output::to_stdout(|out| Man::new(cli).render(out)) };
    fs::create_dir_all(folder).map_err(|source| Error::write(folder, source))?;
    // Prefixes the names of subcommands with the name of the program.
    cli.build();
    iter::once(&cli).chain(cli.get_subcommands()).try_for_each(|command| {
        let man = Man::new(command.clone());
        let mut page = Vec::new();
        man.render(&mut page)?;
        output::file(&folder.join(man.get_filename()), &page)
    })
}
