//! `plan`: shards a model over ranks, and predicts memory and traffic.

mod args;
pub(crate) mod model;
pub(crate) mod svg;

use std::io::{self, Write};

use candle_distributed::{
    finetune::cost::Strategy,
    plan::{
        self, ParameterInfo, ShardingPlan,
        report::{PlanDiff, PlanReport},
        reshard::{MoveVolume, Reshard},
        search::Search,
        strategy::{Hsdp, Matches, ShardingStrategy},
    },
    types::human::HumanCount,
};
use serde::Serialize;

use self::args::FormatArg;
pub(crate) use self::args::PlanArgs;
use crate::{
    error::{Error, Result},
    output, strategy,
};

/// The JSON result. Text and drawing show parts of it.
#[derive(Serialize)]
struct PlanOutput<'a> {
    #[serde(flatten)]
    report: PlanReport<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rules: Option<Matches<'a>>,
}

/// The differences between a stored plan and this plan.
#[derive(Serialize)]
struct PlanComparison<'a> {
    format_version: u32,
    diff: PlanDiff<'a>,
    /// Data to move if the ranks keep their numbers; `None` if the models differ.
    reshard: Option<MoveVolume>,
    /// Data to move if the ranks are renumbered to move less; `None` if the models differ.
    reshard_renumbered: Option<MoveVolume>,
}

const MAY_FIT: &str =
    "--search looks for the `full` plan with the least communication time that fits";
const NOTHING_FITS: &str =
    "more ranks, --param-dtype BF16 or --optimizer adam-8bit need less memory per rank";

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let strategy = args.sharding.strategy_or_default()?;
    let parameters = read_model(args)?;
    let plan = make_plan(args, &parameters, &strategy)?;
    if let Some(path) = &args.against {
        return compare(&model::read_plan(path)?, &plan, args.format);
    }
    match explain(args, &plan)? {
        Some(explanation) => output::text(|out| writeln!(out, "{explanation}")),
        None => report(args, &plan, strategy.matches(&parameters)),
    }
}

/// Returns the explanation to print instead of a report, if requested.
fn explain(args: &PlanArgs, plan: &ShardingPlan) -> Result<Option<String>> {
    let explanation = match (&args.explain, args.explain_rank()?) {
        (None, None) => return Ok(None),
        (Some(name), _) => plan.explain_parameter(name)?,
        (None, Some(rank)) => plan.explain_rank(rank, &args.cost_model()?)?,
    };
    match args.format {
        FormatArg::Text => Ok(Some(explanation)),
        FormatArg::Json | FormatArg::Svg => {
            Err(Error::usage("explanations support only --format text"))
        }
    }
}

fn report(args: &PlanArgs, plan: &ShardingPlan, rules: Option<Matches<'_>>) -> Result<()> {
    let mut report = PlanReport::new(plan, &args.cost_model()?, args.rank()?)?;
    if let Some(budget) = args.budget {
        report = report.with_budget(budget);
    }
    if let Some(slots) = args.slots {
        report = report.with_process(slots);
    }
    let answer = PlanOutput { report, rules };
    match args.format {
        FormatArg::Text => {
            output::text(|out| write_text(&answer, out)).map(|()| advise(args, &answer.report))
        }
        FormatArg::Json => output::json(&answer),
        FormatArg::Svg => {
            let drawing = svg::draw(plan, answer.report.cost(), args.budget)?;
            output::text(|out| out.write_all(drawing.as_bytes()))
        }
    }
}

/// Prints a hint if the plan does not fit into the budget.
fn advise(args: &PlanArgs, report: &PlanReport<'_>) {
    if args.budget.is_some_and(|budget| report.cost().peak_bytes() > budget.into()) {
        output::hint(if args.search { NOTHING_FITS } else { MAY_FIT });
    }
}

fn read_model(args: &PlanArgs) -> Result<Vec<ParameterInfo>> {
    let parameters = model::read(&args.model)?;
    Ok(match &args.layer_pattern {
        Some(pattern) => {
            parameters.into_iter().map(|info| info.with_layer_pattern(pattern)).collect()
        }
        None => parameters,
    })
}

fn make_plan(
    args: &PlanArgs,
    parameters: &[ParameterInfo],
    strategy: &Strategy,
) -> Result<ShardingPlan> {
    if let (true, Some(budget)) = (args.search, args.budget) {
        let search = Search::new(args.world_size()?, budget).with_model(args.cost_model()?);
        return Ok(model::in_file(&args.model, search.run(parameters))?.into_candidate().plan);
    }
    let strategy = Hsdp::new(strategy.planner(), args.sharding.replicas());
    let planned = strategy.plan(parameters, args.world_size()?);
    let plan = model::in_file(&args.model, planned)?;
    let kept_units: Vec<String> = plan
        .units()
        .into_iter()
        .filter(|unit| args.stay_gathered.iter().any(|pattern| pattern.matches(unit)))
        .map(str::to_owned)
        .collect();
    Ok(plan.with_kept_units(kept_units)?)
}

fn write_text(answer: &PlanOutput<'_>, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", answer.report)?;
    if let Some(rules) = &answer.rules {
        strategy::write_matches(rules, out)?;
    }
    Ok(())
}

fn compare(old: &ShardingPlan, new: &ShardingPlan, format: FormatArg) -> Result<()> {
    let reshard = match Reshard::new(old, new) {
        Ok(reshard) => Some(reshard),
        Err(plan::Error::ParameterMismatch { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let comparison = PlanComparison {
        format_version: 1,
        diff: PlanDiff::new(old, new),
        reshard: reshard.as_ref().map(Reshard::volume),
        reshard_renumbered: reshard.map(|reshard| reshard.renumbered().volume()),
    };
    match format {
        FormatArg::Json => output::json(&comparison),
        FormatArg::Text => output::text(|out| write_comparison(&comparison, out)),
        FormatArg::Svg => Err(Error::usage("--against does not support --format svg")),
    }
}

fn write_comparison(comparison: &PlanComparison<'_>, out: &mut dyn Write) -> io::Result<()> {
    if comparison.diff.is_empty() {
        writeln!(out, "the plans are the same")?;
    } else {
        writeln!(out, "{}", comparison.diff)?;
    }
    match (comparison.reshard, comparison.reshard_renumbered) {
        (Some(plain), Some(renumbered)) => {
            writeln!(
                out,
                "resharding: {}\nwith ranks renumbered: {}",
                describe(plain),
                describe(renumbered)
            )
        }
        _ => writeln!(out, "the models differ, so nothing can be resharded"),
    }
}

fn describe(MoveVolume { stay_bytes, move_bytes, moves, .. }: MoveVolume) -> String {
    let moving = HumanCount(move_bytes);
    let staying = HumanCount(stay_bytes);
    format!("{moving} bytes move in {moves} transfers, {staying} stay")
}
