//! The page about a run, with one section per topic.

use candle_distributed::{
    finetune::{
        Rows,
        cost::{self, Keep, RunPlan},
        run::{ValidationPoint, best_validation},
        spec::{FirstEpoch, Session, Spec},
    },
    plan::cost::RankCost,
    train::StepMetrics,
    types::{
        WorldSize,
        human::{HumanBytes, HumanCount},
    },
};
use maud::{Markup, html};

use super::{
    coverage::{self, Coverage},
    facts::{RunFacts, data_names},
    markup::{self, count, fact_table, figure, missing_note, number_table, section, sentence},
};
use crate::{
    commands::plan::svg,
    error::Result,
    train::{
        comparison::{Comparison, MEMORY_HEADS, PeakMemory, TRAFFIC_HEADS},
        curve,
    },
};

/// Maximum number of rows of most tables.
const MAX_ROWS: usize = 16;

/// Returns the page about one run.
pub(super) fn page(facts: &RunFacts) -> Result<String> {
    let sections = html! {
        (summary_section(facts))
        (settings_section(facts))
        @if let Some(text) = &facts.sample { (sample_section(text)) }
        (training_section(facts)?)
        (plan_section(facts)?)
        (batches_section(facts))
        (coverage_section(facts)?)
    };
    Ok(markup::page(&format!("run {}", facts.path.display()), &state(facts), &sections))
}

/// Describes the progress of the run.
fn state(facts: &RunFacts) -> String {
    let done = count(facts.n_done());
    let steps = count(facts.settings.steps);
    let devices = devices(facts.session());
    if facts.is_complete {
        format!("Complete: {steps} steps on {devices}.")
    } else {
        format!("{done} of {steps} steps done on {devices}.")
    }
}

fn devices(session: &Session) -> String {
    HumanCount(session.world_size.into()).with_noun("device")
}

/// Returns the summary of the main figures.
fn summary_section(facts: &RunFacts) -> Markup {
    let Some(figures) = summary_figures(facts) else {
        return section("summary", "Summary", &missing_note("No step is done yet."));
    };
    html! {
        dl.figures id="summary" {
            @for SummaryFigure { name, value, more } in figures {
                div { dt { (name) } dd { (value) } dd.more { (more) } }
            }
        }
    }
}

/// A figure of a run, with an explanation.
pub(super) struct SummaryFigure {
    pub(super) name: &'static str,
    pub(super) value: String,
    pub(super) more: String,
}

/// Returns the figures of a run, or `None` before its first step.
pub(super) fn summary_figures(facts: &RunFacts) -> Option<[SummaryFigure; 6]> {
    let steps = facts.metrics.steps();
    let first = steps.first()?;
    let last_step = steps.last()?;
    let seconds: f64 = facts.metrics.timed().map(|step| step.seconds).sum();
    let n_last = curve::n_last(&facts.metrics);
    let real = facts.metrics.sum(|step| step.real_tokens);
    let padded = facts.metrics.sum(|step| step.padded_tokens);
    let last = HumanCount(n_last as u128).with_noun("step");
    let figure = |name, value, more: String| SummaryFigure { name, value, more };
    Some([
        figure("first loss", format!("{:.3}", first.loss), "nats per token".into()),
        figure(
            "last loss",
            format!("{:.3}", curve::last_loss(&facts.metrics)),
            format!("mean of the last {last}"),
        ),
        figure("speed", format!("{:.0}", real as f64 / seconds), "real tokens per second".into()),
        figure(
            "padding efficiency",
            format!("{:.4}", real as f64 / padded as f64),
            format!("{} of {} tokens are real", count(real), count(padded)),
        ),
        figure("time", duration(seconds), "in training steps".into()),
        figure(
            "sequences",
            count(facts.metrics.sum(|step| step.sequences)),
            epochs_text(last_step),
        ),
    ])
}

fn epochs_text(last: &StepMetrics) -> String {
    match last.epoch {
        Some(epoch) => {
            format!("read, {} started", HumanCount(u128::from(epoch) + 1).with_noun("epoch"))
        }
        None => "read".to_owned(),
    }
}

/// Formats seconds in a readable unit.
fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        120.0..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn settings_section(facts: &RunFacts) -> Markup {
    section("settings", "Settings", &fact_table(&setting_rows(facts)))
}

/// Returns one row per setting.
pub(super) fn setting_rows(facts: &RunFacts) -> Vec<(&'static str, String)> {
    let settings = &facts.settings;
    let data = data_names(settings).unwrap_or_else(|| String::from("built-in short stories"));
    let mut rows = vec![
        ("folder", facts.path.display().to_string()),
        ("steps", count(settings.steps)),
        ("seed", settings.seed.to_string()),
        ("text", format!("{data}, fingerprint {}", settings.text)),
        ("batches", batching_text(settings)),
    ];
    let folder = settings.finetune.folder.as_ref();
    rows.extend(folder.map(|folder| ("started from", folder.display().to_string())));
    for (name, value) in settings.recipe.options() {
        rows.extend(value.map(|value| (name, value)));
    }
    rows.extend(settings.sessions.iter().map(|session| ("ran on", session_text(session))));
    let saved_steps: Vec<String> = facts.checkpoints.iter().map(|&step| count(step)).collect();
    let checkpoints = if saved_steps.is_empty() {
        String::from("none")
    } else {
        format!("steps {}", saved_steps.join(", "))
    };
    rows.push(("checkpoints", checkpoints));
    rows.push(("model", String::from(if facts.is_complete { "saved" } else { "not yet" })));
    rows
}

/// Returns the section with the generated text.
fn sample_section(text: &str) -> Markup {
    section("sample", "Generated text", &html! { pre.sample { (text) } })
}

fn session_text(session: &Session) -> String {
    let peak = session.peak_bytes.map_or_else(String::new, |bytes| {
        format!(", peak memory of the process {}", HumanBytes(bytes.into()))
    });
    let sharded = session.sharding.as_ref().map_or_else(String::new, sharding_text);
    let first = count(u128::from(session.first_step) + 1);
    format!("{}{sharded} from step {first} on{peak}", devices(session))
}

/// Describes the sharding of a session, to follow its devices.
fn sharding_text(sharding: &cost::Sharding) -> String {
    let keep = match sharding.keep {
        Keep::Inputs => "inputs",
        Keep::Graph => "graphs",
        Keep::Gathered => "parameters",
    };
    let strategy = sharding.strategy.name();
    let copies = match sharding.replicas {
        1 => String::new(),
        replicas => format!(", in {replicas} copies"),
    };
    let prefetch = match sharding.prefetch {
        0 => String::new(),
        units => format!(", with {units} units gathered ahead"),
    };
    let in_backward = if sharding.optimizer_in_backward {
        ", with the optimizer inside the backward pass"
    } else {
        ""
    };
    format!(
        ", sharded by {strategy}, where units keep their {keep}{copies}{prefetch}{in_backward},"
    )
}

fn training_section(facts: &RunFacts) -> Result<Markup> {
    let steps = facts.metrics.steps();
    let content = if steps.is_empty() {
        missing_note("No step is done yet.")
    } else {
        let non_finite = steps.iter().find(|step| !step.loss.is_finite()).map(|step| step.step + 1);
        let caption = "The numbers of every step, and their means over the steps around it.";
        let is_resumed = facts.metrics.timed().any(|step| step.is_resumed);
        let resumed_note =
            if is_resumed { " A vertical line marks where the run was resumed." } else { "" };
        html! {
            (figure(
                &curve::draw(&facts.metrics, &facts.validations)?,
                &format!("{caption}{resumed_note}{}", best_validation_text(facts)),
            ))
            @if let Some(step) = non_finite {
                (missing_note(&format!("The loss of step {} is infinite or NaN.", count(step))))
            }
        }
    };
    Ok(section("training", "Training", &content))
}

/// Describes the lowest validation loss; the text is empty without validations.
fn best_validation_text(facts: &RunFacts) -> String {
    best_validation(&facts.validations).map_or(String::new(), |best| {
        let ValidationPoint { step, loss, .. } = best;
        format!(" The loss of held-out examples was lowest after step {step}: {loss:.3}.")
    })
}

fn plan_section(facts: &RunFacts) -> Result<Markup> {
    Ok(section("plan", "Sharding plan", &plan_content(facts)?))
}

fn plan_content(facts: &RunFacts) -> Result<Markup> {
    let RunPlan { parameters, plan, cost, bytes: needs, .. } = &facts.plan;
    let memory = PeakMemory::new(facts.session(), *needs);
    let heads = ["ranks", "owned", "stored", "gradients", "optimizer", "total", "peak"];
    let parameter_rows: Vec<Vec<String>> = parameters
        .iter()
        .take(4 * MAX_ROWS)
        .map(|info| {
            vec![
                info.name().to_owned(),
                format!("{:?}", info.shape()),
                info.dtype().to_string(),
                count(info.numel()),
            ]
        })
        .collect();
    Ok(html! {
        p.note {
            @if needs.is_sharded {
                "Each rank stores its shard of the model; activations are not counted."
            } @else {
                "The run keeps the whole model on every device. The plan shows the memory of each \
                 rank if the model were sharded over the same number of ranks; activations are not \
                 counted."
            }
        }
        (number_table(&heads, &rank_rows(&cost.ranks)))
        @if let Some(memory) = memory { p { (sentence(&memory.to_string())) } }
        (figure(
            &svg::draw(plan, cost, None)?,
            "Memory of each rank under this plan at its peak, and between two steps."
        ))
        (number_table(&["parameter", "shape", "type", "elements"], &parameter_rows))
        @if let Some(comparison) = &facts.comparison {
            (measurement_tables(comparison))
        }
    })
}

/// Returns tables of predictions and measurements.
fn measurement_tables(comparison: &Comparison) -> Markup {
    let [memory, traffic] = comparison.notes();
    html! {
        (number_table(&MEMORY_HEADS, &comparison.memory_rows()))
        p.note { (sentence(memory)) }
        (number_table(&TRAFFIC_HEADS, &comparison.traffic_rows()))
        p.note { (sentence(traffic)) }
    }
}

/// Returns one row per range of consecutive ranks with equal figures.
fn rank_rows(ranks: &[RankCost]) -> Vec<Vec<String>> {
    let equal_ranks = ranks.chunk_by(|left, right| byte_figures(left) == byte_figures(right));
    equal_ranks.take(MAX_ROWS).map(rank_row).collect()
}

fn rank_row(ranks: &[RankCost]) -> Vec<String> {
    let first = &ranks[0];
    let last = &ranks[ranks.len() - 1];
    let name = match ranks.len() {
        1 => first.rank.to_string(),
        _ => format!("{} – {}", first.rank, last.rank),
    };
    let bytes = byte_figures(first).map(|bytes| HumanBytes(bytes).to_string());
    [name].into_iter().chain(bytes).collect()
}

/// Returns the figures of a rank in the order of the columns.
fn byte_figures(rank: &RankCost) -> [u128; 6] {
    [
        rank.param_bytes.into(),
        rank.storage_bytes.into(),
        rank.grad_bytes.into(),
        rank.optimizer_bytes.into(),
        rank.total_bytes(),
        rank.peak_bytes(),
    ]
}

fn batches_section(facts: &RunFacts) -> Markup {
    let content = match &facts.epoch {
        Err(reason) => missing_note(&sentence(reason)),
        Ok(epoch) => html! {
            p { "In the first epoch: " (epoch.report) "." }
            p.note { (sentence(&batching_text(&facts.settings))) }
        },
    };
    section("batches", "Batches", &content)
}

/// Describes the batches of a step.
fn batching_text(settings: &Spec) -> String {
    let inputs = &settings.finetune;
    let max_tokens = count(settings.max_tokens);
    match (inputs.rows, inputs.batch_size) {
        (Rows::Packed, _) => format!(
            "sequences packed into rows of at most {} tokens, at most {max_tokens} tokens per step \
             of all devices",
            count(inputs.context as u64)
        ),
        (_, Some(n)) => format!("at most {} sequences per step of all devices", count(n)),
        (_, None) => format!(
            "sequences of similar length, at most {max_tokens} tokens per step of all devices, \
             padding included"
        ),
    }
}

fn coverage_section(facts: &RunFacts) -> Result<Markup> {
    let content = match &facts.epoch {
        Err(reason) => missing_note(&sentence(reason)),
        Ok(epoch) => html! {
            (read_counts(epoch))
            (rank_shares(epoch, WorldSize::new(facts.session().world_size)?))
        },
    };
    Ok(section("coverage", "Coverage", &content))
}

/// Returns a table of how often sequences are read.
fn read_counts(epoch: &FirstEpoch) -> Markup {
    let Coverage { never, once, more_often } = Coverage::count(epoch);
    let all = never + once + more_often;
    let verdict = if once == all {
        "Every sequence is read exactly once."
    } else {
        "Not every sequence is read exactly once."
    };
    let rows = [
        ("sequences in the text", all),
        ("read once per epoch", once),
        ("read more often", more_often),
        ("left out", never),
    ];
    html! {
        p { "Counted over the batches of the first epoch. " (verdict) }
        (fact_table(&rows.map(|(name, number)| (name, count(number)))))
    }
}

/// Returns a table of the sequences and tokens that each rank reads.
fn rank_shares(epoch: &FirstEpoch, world_size: WorldSize) -> Markup {
    let shares = coverage::shares(epoch, world_size);
    let mut rows = Vec::new();
    for (rank, share) in shares.iter().enumerate().take(MAX_ROWS) {
        rows.push(vec![rank.to_string(), count(share.sequences), count(share.tokens)]);
    }
    html! {
        (number_table(&["rank", "sequences per epoch", "tokens per epoch"], &rows))
        @if shares.len() > MAX_ROWS {
            p.note { "The first " (MAX_ROWS) " of " (shares.len()) " ranks." }
        }
    }
}
