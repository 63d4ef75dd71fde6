//! What goes where: the options by which `plan` and `train` decide which rank owns what, and the
//! planner's types that they stand for.

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
    help::typed,
    hint, input,
};

/// The options.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StrategyArgs {
    /// How parameters are distributed over ranks [default: `plan` takes full, or hybrid with
    /// --rules; `train` keeps all of them on every device]
    #[arg(long, value_enum, help_heading = "What goes where")]
    strategy: Option<StrategyArg>,
    /// How `full` cuts parameters [default: dim0]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layout: Option<LayoutArg>,
    /// Number of rows that `row-ragged` keeps together [default: 1], or of elements that
    /// `block-ragged` does [default: 128]
    #[arg(long, value_name = "N", help_heading = "What goes where")]
    block_size: Option<u64>,
    /// Which layers may share a rank under `layer-wise` [default: any]
    #[arg(long, value_enum, help_heading = "What goes where")]
    layer_order: Option<OrderArg>,
    /// JSON file with the rules of `hybrid`: {"rules": [{"pattern", "choice"}], "default"}
    #[arg(long, value_name = "FILE", help_heading = "What goes where")]
    rules: Option<PathBuf>,
    /// Number of copies of the model, each sharded over its own part of the ranks (HSDP)
    /// [default: 1]
    #[arg(long, value_name = "G", help_heading = "What goes where")]
    pub(crate) replicas: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StrategyArg {
    /// Every parameter over all ranks
    Full,
    /// Whole layers
    LayerWise,
    /// Whole tensors, as few of them cut as exact balance allows
    WholeTensor,
    /// By rules; without --rules, classifier and head whole, the rest over all ranks
    Hybrid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// Rows of each parameter, as FSDP2 does
    Dim0,
    /// Elements of each unit end to end, as FSDP1 does
    Flat,
    /// The same with aligned parameters, as FSDP1 does with `use_orig_params`
    FlatAligned,
    /// Each unit in equal parts, cut between rows
    RowRagged,
    /// Each unit in equal parts, cut between blocks of elements
    BlockRagged,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderArg {
    /// Any
    Any,
    /// Neighbors only, like the stages of a pipeline
    Contiguous,
}

impl StrategyArgs {
    /// The strategy that is asked for.
    pub(crate) fn asked(&self) -> Result<Option<Strategy>> {
        self.check(self.strategy)?;
        self.strategy.map(|strategy| self.strategy(strategy)).transpose()
    }

    /// The strategy that is asked for, or that the other options mean.
    pub(crate) fn or_default(&self) -> Result<Strategy> {
        let default = if self.rules.is_some() { StrategyArg::Hybrid } else { StrategyArg::Full };
        let strategy = self.strategy.unwrap_or(default);
        self.check(Some(strategy))?;
        self.strategy(strategy)
    }

    /// The number of copies of the model.
    pub(crate) fn replicas(&self) -> u64 {
        self.replicas.unwrap_or(1)
    }

    /// The options as they would be typed again, each with a space before it.
    pub(crate) fn typed(&self) -> String {
        let options = [
            ("strategy", self.strategy.map(typed)),
            ("layout", self.layout.map(typed)),
            ("block-size", self.block_size.map(|size| size.to_string())),
            ("layer-order", self.layer_order.map(typed)),
            ("rules", self.rules.as_ref().map(|path| hint::in_shell(path.display()))),
            ("replicas", self.replicas.map(|replicas| replicas.to_string())),
        ];
        let given = options.into_iter().filter_map(|(name, value)| Some((name, value?)));
        given
            .flat_map(|(name, value)| [String::from(" --"), name.into(), String::from(" "), value])
            .collect()
    }

    /// Refuses the options that the strategy would leave without effect.
    fn check(&self, strategy: Option<StrategyArg>) -> Result<()> {
        let of_one_strategy = [
            ("--layout", self.layout.is_some(), StrategyArg::Full),
            ("--block-size", self.block_size.is_some(), StrategyArg::Full),
            ("--layer-order", self.layer_order.is_some(), StrategyArg::LayerWise),
            ("--rules", self.rules.is_some(), StrategyArg::Hybrid),
        ];
        for (option, is_given, needed) in of_one_strategy {
            if is_given && strategy != Some(needed) {
                return Err(Error::usage(format!("{option} needs --strategy {}", typed(needed))));
            }
        }
        Ok(())
    }

    fn strategy(&self, strategy: StrategyArg) -> Result<Strategy> {
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

    /// The rules of the file, or the default ones.
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

/// The number of names that are listed at most.
const MAX_NAMES: usize = 8;

/// Says which rules decide how many parameters, and which decide none.
pub(crate) fn write_matches(rules: &Matches<'_>, out: &mut dyn Write) -> io::Result<()> {
    let decided: Vec<_> =
        rules.decided.iter().enumerate().map(|(rule, n)| format!("{n} by rule {rule}")).collect();
    writeln!(
        out,
        "parameters decided: {}; {} by default",
        decided.join(", "),
        rules.unmatched.len()
    )?;
    if !rules.unmatched.is_empty() {
        writeln!(out, "no rule matches {}", listed(&rules.unmatched))?;
    }
    if !rules.overlaps.is_empty() {
        let overlaps: Vec<_> = rules.overlaps.iter().map(|(name, _)| *name).collect();
        writeln!(out, "several rules match {}; the first one decides", listed(&overlaps))?;
    }
    Ok(())
}

/// The first names of a list.
fn listed(names: &[&str]) -> String {
    let more = if names.len() > MAX_NAMES { ", …" } else { "" };
    names[..names.len().min(MAX_NAMES)].join(", ") + more
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        what: StrategyArgs,
    }

    #[test]
    fn options_are_typed_again_as_they_were() {
        for line in [
            "",
            " --strategy full --layout row-ragged --block-size 4",
            " --strategy layer-wise --layer-order contiguous",
            " --strategy hybrid --rules rules.json --replicas 2",
            " --strategy hybrid --rules 'my rules.json'",
        ] {
            let args = Line::parse_from(shlex::split(line).unwrap()).what;
            assert_eq!(args.typed(), line);
        }
    }
}
