//! Sharding options of `plan` and `train`, and their conversion to types of the planner.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use candle_distributed::{
    finetune::cost::Strategy,
    plan::strategy::{Hybrid, Layout, Matches},
};
use clap::ValueEnum;

use crate::{
    error::{Error, Result, WithHint},
    help::cli_name,
    hint, input,
};

/// The sharding options.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StrategyArgs {
    /// Strategy that distributes parameters over ranks [default: `plan` uses full, or hybrid with
    /// --rules; `train` keeps the whole model on every device]
    #[arg(long, value_enum, help_heading = "Sharding")]
    strategy: Option<StrategyArg>,
    /// Layout of the shards of `full` [default: dim0]
    #[arg(long, value_enum, help_heading = "Sharding")]
    layout: Option<LayoutArg>,
    /// Number of rows that `row-ragged` keeps together [default: 1], or number of elements for
    /// `block-ragged` [default: 128]
    #[arg(long, value_name = "N", help_heading = "Sharding")]
    block_size: Option<u64>,
    /// Layers that may share a rank under `layer-wise` [default: any]
    #[arg(long, value_enum, help_heading = "Sharding")]
    layer_order: Option<OrderArg>,
    /// JSON file with the rules of `hybrid`: {"rules": [{"pattern", "choice"}], "default"}
    #[arg(long, value_name = "FILE", help_heading = "Sharding")]
    rules: Option<PathBuf>,
    /// Number of copies of the model, each sharded over a group of ranks (HSDP)
    /// [default: 1]
    #[arg(long, value_name = "G", help_heading = "Sharding")]
    pub(crate) replicas: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StrategyArg {
    /// Shard every parameter over all ranks
    Full,
    /// Assign whole layers
    LayerWise,
    /// Assign whole tensors, and split only as many as exact balance needs
    WholeTensor,
    /// Follow rules; without --rules, classifier and head stay whole, the rest is sharded over all
    /// ranks
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// Split the rows of each parameter, like FSDP2
    Dim0,
    /// Split the concatenated elements of each unit, like FSDP1
    Flat,
    /// Like `flat`, with aligned parameters, like FSDP1 with `use_orig_params`
    FlatAligned,
    /// Split each unit into equal parts at row boundaries
    RowRagged,
    /// Split each unit into equal parts at block boundaries
    BlockRagged,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    /// Any layers
    Any,
    /// Consecutive layers only, like the stages of a pipeline
    Contiguous,
}

impl StrategyArgs {
    /// Returns the strategy of `--strategy`, or `None` without this option.
    ///
    /// # Errors
    ///
    /// Options that contradict each other, and invalid rules.
    pub(crate) fn explicit_strategy(&self) -> Result<Option<Strategy>> {
        self.check(self.strategy)?;
        self.strategy.map(|strategy| self.build_strategy(strategy)).transpose()
    }

    /// Returns the strategy of `--strategy`. Without this option it is hybrid with `--rules`, and
    /// full otherwise.
    ///
    /// # Errors
    ///
    /// Options that contradict each other, and invalid rules.
    pub(crate) fn strategy_or_default(&self) -> Result<Strategy> {
        let default = if self.rules.is_some() { StrategyArg::Hybrid } else { StrategyArg::Full };
        let strategy = self.strategy.unwrap_or(default);
        self.check(Some(strategy))?;
        self.build_strategy(strategy)
    }

    /// Returns true if any option is given.
    pub(crate) fn is_given(&self) -> bool {
        !self.option_string().is_empty()
    }

    /// Returns the number of copies of the model.
    pub(crate) fn replicas(&self) -> u64 {
        self.replicas.unwrap_or(1)
    }

    /// Returns the given options as the user types them, each after a space.
    pub(crate) fn option_string(&self) -> String {
        let options = [
            ("strategy", self.strategy.map(cli_name)),
            ("layout", self.layout.map(cli_name)),
            ("block-size", self.block_size.map(|size| size.to_string())),
            ("layer-order", self.layer_order.map(cli_name)),
            ("rules", self.rules.as_ref().map(|path| hint::in_shell(path.display()))),
            ("replicas", self.replicas.map(|replicas| replicas.to_string())),
        ];
        let mut given_options = String::new();
        for (name, value) in options {
            if let Some(value) = value {
                given_options.extend([" --", name, " ", value.as_str()]);
            }
        }
        given_options
    }

    /// Rejects options that have no effect with this strategy.
    fn check(&self, strategy: Option<StrategyArg>) -> Result<()> {
        let strategy_options = [
            ("--layout", self.layout.is_some(), StrategyArg::Full),
            ("--block-size", self.block_size.is_some(), StrategyArg::Full),
            ("--layer-order", self.layer_order.is_some(), StrategyArg::LayerWise),
            ("--rules", self.rules.is_some(), StrategyArg::Hybrid),
        ];
        for (option, is_given, needed) in strategy_options {
            if is_given && strategy != Some(needed) {
                return Err(Error::usage(format!(
                    "{option} needs --strategy {}",
                    cli_name(needed)
                )));
            }
        }
        Ok(())
    }

    fn build_strategy(&self, strategy: StrategyArg) -> Result<Strategy> {
        Ok(match strategy {
            StrategyArg::Full => Strategy::Full(self.layout()?),
            StrategyArg::LayerWise => {
                let contiguous = matches!(self.layer_order, Some(OrderArg::Contiguous));
                Strategy::LayerWise { contiguous }
            }
            StrategyArg::WholeTensor => Strategy::WholeTensor,
            StrategyArg::Hybrid => Strategy::Hybrid(self.rules()?),
        })
    }

    /// Returns the rules of the file, or the default rules.
    fn rules(&self) -> Result<Hybrid> {
        match &self.rules {
            Some(path) => input::read_json(path, "rules").with_hint(hint::RULES),
            None => Ok(Hybrid::default()),
        }
    }

    fn layout(&self) -> Result<Layout> {
        let layout = match (self.layout, self.block_size) {
            (Some(LayoutArg::RowRagged), rows) => Layout::RowRagged { rows: rows.unwrap_or(1) },
            (Some(LayoutArg::BlockRagged), None) => Layout::BLOCKS,
            (Some(LayoutArg::BlockRagged), Some(block)) => Layout::BlockRagged { block },
            (_, Some(_)) => {
                return Err(Error::usage("--block-size needs a ragged --layout"));
            }
            (None | Some(LayoutArg::Dim0), None) => Layout::Dim0,
            (Some(LayoutArg::Flat), None) => Layout::Flat,
            (Some(LayoutArg::FlatAligned), None) => Layout::FlatAligned,
        };
        Ok(layout)
    }
}

/// Maximum number of names in a list.
const MAX_NAMES: usize = 8;

/// Writes the number of parameters that each rule decides, and the names of parameters that match
/// no rule or several.
pub(crate) fn write_matches(matches: &Matches<'_>, out: &mut dyn Write) -> io::Result<()> {
    let counts: Vec<_> =
        matches.decided.iter().enumerate().map(|(rule, n)| format!("{n} by rule {rule}")).collect();
    writeln!(
        out,
        "parameters decided: {}; {} by default",
        counts.join(", "),
        matches.unmatched.len()
    )?;
    if !matches.unmatched.is_empty() {
        writeln!(out, "no rule matches {}", join_names(&matches.unmatched))?;
    }
    if !matches.overlaps.is_empty() {
        let overlaps: Vec<_> = matches.overlaps.iter().map(|(name, _)| *name).collect();
        writeln!(out, "several rules match {}; the first one decides", join_names(&overlaps))?;
    }
    Ok(())
}

/// Joins up to [`MAX_NAMES`] names. An ellipsis stands for further names.
fn join_names(names: &[&str]) -> String {
    let ellipsis = if names.len() > MAX_NAMES { ", …" } else { "" };
    names[..names.len().min(MAX_NAMES)].join(", ") + ellipsis
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct StrategyLine {
        #[command(flatten)]
        sharding: StrategyArgs,
    }

    #[test]
    fn option_string_repeats_the_given_options() {
        for line in [
            "",
            " --strategy full --layout row-ragged --block-size 4",
            " --strategy layer-wise --layer-order contiguous",
            " --strategy hybrid --rules rules.json --replicas 2",
            " --strategy hybrid --rules 'my rules.json'",
        ] {
            let args = StrategyLine::parse_from(shlex::split(line).unwrap()).sharding;
            assert_eq!(args.option_string(), line);
        }
    }
}
