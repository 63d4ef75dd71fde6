//! `completions`: a script that lets a shell complete commands and options.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, error::Result, help::examples, output};

/// Print a script that completes commands and options in a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# For this session of bash; in ~/.bashrc it is for every session"
    "source <(candle-distributed completions bash)"
    "# For every session of fish, and of zsh if this folder is in its $fpath"
    "candle-distributed completions fish > ~/.config/fish/completions/candle-distributed.fish"
    "candle-distributed completions zsh > ~/.zfunc/_candle-distributed"
])]
pub(crate) struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut cli = Cli::command();
    let name = cli.get_name().to_owned();
    // Into memory first, where writing cannot fail: clap panics if it fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli, name, &mut script);
    output::text(|out| out.write_all(&script))
}
