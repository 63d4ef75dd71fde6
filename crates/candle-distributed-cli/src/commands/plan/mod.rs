//! `plan`: shards a model over ranks, and predicts memory and traffic.

mod args;
pub(crate) mod model;
pub(crate) mod svg;

use std::io::{self, Write};

use candle_distributed::{
    finetune::{cost::Strategy, spec::Spec},
    plan::{
        self, ParameterInfo, ShardingPlan,
        cost::CostModel,
        report::{PlanDiff, PlanReport},
        reshard::{MoveVolume, Reshard},
        search::Search,
        strategy::{Choice, Hsdp, Hybrid, Matches, ShardingStrategy},
    },
    types::{WorldSize, human::HumanCount},
};
use serde::Serialize;

use self::args::FormatArg;
pub(crate) use self::args::PlanArgs;
use crate::{
    error::{Error, Result},
    output, strategy,
    train::comparison::Prediction,
};

/// The JSON result. Text and drawing show parts of it.
#[derive(Serialize)]
struct PlanOutput<'a> {
    #[serde(flatten)]
    report: PlanReport<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rules: Option<Matches<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<Prediction>,
}

/// A plan with the cost model of its runtime.
struct Planned {
    plan: ShardingPlan,
    model: CostModel,
    rules: Option<Strategy>,
    /// The prediction of a run, if it is sharded as planned and its text is unchanged.
    run: Option<Prediction>,
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
    let run = if args.model.is_dir() { Spec::read(&args.model)? } else { None };
    let planned = match run {
        Some(run) => plan_run(args, &run)?,
        None => plan_model(args)?,
    };
    if let Some(path) = &args.against {
        return compare(&model::read_plan(path)?, &planned.plan, args.format);
    }
    match explain(args, &planned)? {
        Some(explanation) => output::to_stdout(|out| writeln!(out, "{explanation}")),
        None => report(args, planned),
    }
}

fn plan_model(args: &PlanArgs) -> Result<Planned> {
    let strategy = args.sharding.strategy_or_default()?;
    let model = args.cost_model(None)?;
    let parameters = with_layers(args, model::read(&args.model)?);
    let plan = make_plan(args, &parameters, &strategy, args.world_size(None)?, &model)?;
    Ok(Planned { plan, model, rules: Some(strategy), run: None })
}

/// Plans the units of a run on its runtime, as it is sharded or as the options say.
fn plan_run(args: &PlanArgs, run: &Spec) -> Result<Planned> {
    let sharding = run.session().sharding.as_ref();
    let world_size = args.world_size(Some(run))?;
    let of_run = run.plan(sharding, world_size)?;
    let model = args.cost_model(Some(of_run.cost_model))?;
    if args.changes_sharding() {
        let strategy = args.sharding.strategy_or_default()?;
        let parameters = with_layers(args, of_run.parameters);
        let plan = make_plan(args, &parameters, &strategy, world_size, &model)?;
        return Ok(Planned { plan, model, rules: Some(strategy), run: None });
    }
    let prediction = predict_run(run, &of_run.parameters, world_size)?;
    let plan = if sharding.is_some() {
        of_run.plan
    } else {
        // A run that is not sharded has a copy of the model on every device.
        let copies = Hybrid::new([], [])?.with_rule("**", Choice::Replicate)?;
        copies.plan(&of_run.parameters, world_size)?
    };
    Ok(Planned { plan, model, rules: None, run: prediction })
}

/// Predicts the work of a run's first process, if the run has this number of ranks and recorded its
/// memory before training.
fn predict_run(
    run: &Spec,
    parameters: &[ParameterInfo],
    world_size: WorldSize,
) -> Result<Option<Prediction>> {
    if run.session().world_size != world_size.as_u64() {
        return Ok(None);
    }
    match run.first_epoch() {
        Ok(epoch) => {
            let workload = run.workload(parameters, &epoch.micro_batches)?;
            workload.map(|workload| Prediction::new(&workload)).transpose()
        }
        Err(error) => {
            output::warning(format_args!("the memory of a process is not predicted: {error}"));
            Ok(None)
        }
    }
}

/// Returns the explanation to print instead of a report, if requested.
fn explain(args: &PlanArgs, planned: &Planned) -> Result<Option<String>> {
    let plan = &planned.plan;
    let explanation = match (&args.explain, args.explain_rank(plan)?) {
        (None, None) => return Ok(None),
        (Some(name), _) => plan.explain_parameter(name)?,
        (None, Some(rank)) => plan.explain_rank(rank, &planned.model)?,
    };
    match args.format {
        FormatArg::Text => Ok(Some(explanation)),
        FormatArg::Json | FormatArg::Svg => {
            Err(Error::usage("explanations support only --format text"))
        }
    }
}

fn report(args: &PlanArgs, Planned { plan, model, rules, run }: Planned) -> Result<()> {
    let parameters: Vec<ParameterInfo> =
        plan.parameters().iter().map(|parameter| parameter.info().clone()).collect();
    let rules = rules.as_ref().and_then(|strategy| strategy.matches(&parameters));
    let mut report = PlanReport::new(&plan, &model, args.rank(&plan)?)?;
    if let Some(budget) = args.budget {
        report = report.with_budget(budget);
    }
    if let Some(slots) = args.slots {
        report = report.with_process(slots);
    }
    let answer = PlanOutput { report, rules, run };
    match args.format {
        FormatArg::Text => {
            output::to_stdout(|out| write_text(&answer, out)).map(|()| advise(args, &answer.report))
        }
        FormatArg::Json => output::json(&answer),
        FormatArg::Svg => {
            let drawing = svg::draw(&plan, &answer.report.cost, args.budget)?;
            output::to_stdout(|out| out.write_all(drawing.as_bytes()))
        }
    }
}

/// Prints a hint if the plan does not fit into the budget.
fn advise(args: &PlanArgs, report: &PlanReport<'_>) {
    if args.budget.is_some_and(|budget| report.cost.peak_bytes() > budget.into()) {
        output::hint(if args.search { NOTHING_FITS } else { MAY_FIT });
    }
}

/// Returns the parameters with the layers of `--layer-pattern`.
fn with_layers(args: &PlanArgs, parameters: Vec<ParameterInfo>) -> Vec<ParameterInfo> {
    match &args.layer_pattern {
        Some(pattern) => {
            parameters.into_iter().map(|info| info.with_layer_pattern(pattern)).collect()
        }
        None => parameters,
    }
}

fn make_plan(
    args: &PlanArgs,
    parameters: &[ParameterInfo],
    strategy: &Strategy,
    world_size: WorldSize,
    model: &CostModel,
) -> Result<ShardingPlan> {
    if let (true, Some(budget)) = (args.search, args.budget) {
        let search = Search { world_size, budget_bytes: budget, model: *model };
        return Ok(model::in_file(&args.model, search.run(parameters))?.plan);
    }
    let strategy = Hsdp::new(strategy.planner(), args.sharding.replicas());
    let planned = strategy.plan(parameters, world_size);
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
    if let Some(run) = &answer.run {
        writeln!(out, "\n{run}")?;
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
        FormatArg::Text => output::to_stdout(|out| write_comparison(&comparison, out)),
        FormatArg::Svg => Err(Error::usage("--against does not support --format svg")),
    }
}

fn write_comparison(comparison: &PlanComparison<'_>, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", comparison.diff)?;
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
