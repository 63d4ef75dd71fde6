//! `completions`: prints a script for shell completion.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, error::Result, help::examples, output};

/// Print a script that completes commands and options in a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# For this bash session; put it into ~/.bashrc for every session"
    "source <(candle-distributed completions bash)"
    "# For every fish session, and for every zsh session if this folder is in its $fpath"
    "candle-distributed completions fish > ~/.config/fish/completions/candle-distributed.fish"
    "candle-distributed completions zsh > ~/.zfunc/_candle-distributed"
])]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut cli = Cli::command();
    let name = cli.get_name().to_owned();
    // clap panics if a write fails, so the script goes to memory first.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli, name, &mut script);
    output::to_stdout(|out| out.write_all(&script))
}
