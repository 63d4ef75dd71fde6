//! The page: a section for each question that a reader may have about a run.

use candle_distributed::{
    batch::DynamicBatchStrategy,
    finetune::{
        cost::{self, Keep},
        data::{BUCKET_WIDTH, Batching},
        run::{ValidationPoint, best_validation},
        spec::Session,
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
    facts::{Facts, Reading, Sharding},
    markup::{self, count, figure, listed, missing, numbers, section, sentence},
};
use crate::{
    commands::plan::svg,
    error::Result,
    train::{
        curve,
        measured::{Comparison, MEMORY_HEADS, PeakMemory, TRAFFIC_HEADS},
    },
};

/// About the number of rows that a table has at most.
const MAX_ROWS: usize = 16;

/// The whole page about one run.
pub(super) fn page(facts: &Facts) -> Result<String> {
    let sections = html! {
        (summary(facts))
        (settings(facts))
        @if let Some(text) = &facts.sample { (written(text)) }
        (training(facts)?)
        (plan(facts)?)
        (batches(facts))
        (read_by(facts)?)
    };
    Ok(markup::page(&format!("run {}", facts.path.display()), &state(facts), &sections))
}

/// The progress of the run, in a sentence.
fn state(facts: &Facts) -> String {
    let done = count(facts.done());
    let steps = count(facts.settings.steps);
    let devices = devices(facts.session());
    if facts.is_complete {
        format!("Complete: {steps} steps on {devices}.")
    } else {
        format!("{done} of {steps} steps are done on {devices}.")
    }
}

fn devices(session: &Session) -> String {
    HumanCount(session.world_size.into()).with_noun("device")
}

/// The figures that readers look for first.
fn summary(facts: &Facts) -> Markup {
    let Some(figures) = figures(facts) else {
        return section("summary", "Summary", &missing("No step is done yet."));
    };
    html! {
        dl.figures id="summary" {
            @for Figure { name, value, more } in figures {
                div { dt { (name) } dd { (value) } dd.more { (more) } }
            }
        }
    }
}

/// A figure of a run, and what it means.
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) value: String,
    pub(super) more: String,
}

/// The figures of a run of which some step is done.
pub(super) fn figures(facts: &Facts) -> Option<[Figure; 6]> {
    let steps = facts.metrics.steps();
    let (first, last_step) = (steps.first()?, steps.last()?);
    let seconds = facts.metrics.seconds();
    let n_last = (steps.len() / 10).max(1);
    let real = facts.metrics.sum(|step| step.real_tokens);
    let padded = facts.metrics.sum(|step| step.padded_tokens);
    let last = HumanCount(n_last as u128).with_noun("step");
    let figure = |name, value, more: String| Figure { name, value, more };
    Some([
        figure("first loss", format!("{:.3}", first.loss), "nats per token".into()),
        figure(
            "last loss",
            format!("{:.3}", facts.metrics.last_loss(n_last)),
            format!("mean of the last {last}"),
        ),
        figure("speed", format!("{:.0}", real as f64 / seconds), "real tokens per second".into()),
        figure(
            "padding efficiency",
            format!("{:.4}", real as f64 / padded as f64),
            format!("{} of {} tokens are real", count(real), count(padded)),
        ),
        figure("time", duration(seconds), "in training steps".into()),
        figure("sequences", count(facts.metrics.sum(|step| step.sequences)), epochs(last_step)),
    ])
}

fn epochs(last: &StepMetrics) -> String {
    format!("read, {} started", HumanCount(u128::from(last.epoch) + 1).with_noun("epoch"))
}

/// Seconds in the unit that reads best.
fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        120.0..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn settings(facts: &Facts) -> Markup {
    section("settings", "Settings", &listed(&settings_of(facts)))
}

/// A row for each setting.
pub(super) fn settings_of(facts: &Facts) -> Vec<(&'static str, String)> {
    let settings = &facts.settings;
    let data = settings.data.as_ref().map_or_else(
        || String::from("short stories of the program"),
        |data| data.display().to_string(),
    );
    let mut rows = vec![
        ("folder", facts.path.display().to_string()),
        ("steps", count(settings.steps)),
        ("seed", settings.seed.to_string()),
        ("text", format!("{data}, fingerprint {}", settings.text)),
        (
            "batches",
            format!(
                "sequences of similar length ({BUCKET_WIDTH} lengths share a bucket), at most {} \
                 tokens per batch of all devices, padding included",
                count(settings.max_tokens)
            ),
        ),
    ];
    let folder = settings.finetune.folder.as_ref();
    rows.extend(folder.map(|folder| ("began with", folder.display().to_string())));
    let recipe = settings.recipe.options().into_iter();
    rows.extend(recipe.filter_map(|(name, value)| Some((name, value?))));
    rows.extend(settings.sessions.iter().map(|session| ("ran on", of_session(session))));
    let checkpoints: Vec<String> = facts.checkpoints.iter().map(|&step| count(step)).collect();
    let checkpoints = if checkpoints.is_empty() {
        String::from("none")
    } else {
        format!("steps {}", checkpoints.join(", "))
    };
    rows.push(("checkpoints", checkpoints));
    rows.push(("model", String::from(if facts.is_complete { "saved" } else { "not yet" })));
    rows
}

/// A text by the model.
fn written(text: &str) -> Markup {
    section("sample", "What the model wrote", &html! { pre.sample { (text) } })
}

fn of_session(session: &Session) -> String {
    let peak = session.peak_bytes.map_or_else(String::new, |bytes| {
        format!(", peak memory of the process {}", HumanBytes(bytes.into()))
    });
    let sharded = session.sharding.as_ref().map_or_else(String::new, how_sharded);
    let first = count(u128::from(session.first_step) + 1);
    format!("{}{sharded} from step {first} on{peak}", devices(session))
}

/// How a session was sharded, after its devices.
fn how_sharded(sharding: &cost::Sharding) -> String {
    let keep = match sharding.keep {
        Keep::Inputs => "inputs",
        Keep::Graph => "graphs",
        Keep::Gathered => "parameters",
    };
    let strategy = sharding.strategy.name();
    let of_copies = match sharding.replicas {
        1 => String::new(),
        replicas => format!(", in {replicas} copies"),
    };
    let ahead = match sharding.prefetch {
        0 => String::new(),
        units => format!(", with {units} units gathered ahead"),
    };
    let in_backward = if sharding.optimizer_in_backward {
        ", with the optimizer inside the backward pass"
    } else {
        ""
    };
    format!(
        ", sharded by {strategy}, where units keep their {keep}{of_copies}{ahead}{in_backward},"
    )
}

fn training(facts: &Facts) -> Result<Markup> {
    let steps = facts.metrics.steps();
    let content = if steps.is_empty() {
        missing("No step is done yet.")
    } else {
        let strange = steps.iter().find(|step| !step.loss.is_finite()).map(|step| step.step + 1);
        let means = "The numbers of every step, and their means over the steps around it.";
        let is_resumed = facts.metrics.timed().any(|step| step.is_resumed);
        let line =
            if is_resumed { " A vertical line marks where the run was resumed." } else { "" };
        html! {
            (figure(
                &curve::draw(&facts.metrics, &facts.held_out)?,
                &format!("{means}{line}{}", least_of_held_out(facts)),
            ))
            @if let Some(step) = strange {
                (missing(&format!("The loss is not a number at step {}.", count(step))))
            }
        }
    };
    Ok(section("training", "Training", &content))
}

/// Where the loss of the examples that were held out was least, if some were.
fn least_of_held_out(facts: &Facts) -> String {
    best_validation(&facts.held_out).map_or(String::new(), |least| {
        let ValidationPoint { step, loss, .. } = least;
        format!(" Of the examples that were held out it was least after step {step}: {loss:.3}.")
    })
}

fn plan(facts: &Facts) -> Result<Markup> {
    Ok(section("plan", "Sharding plan", &sharded(facts)?))
}

fn sharded(facts: &Facts) -> Result<Markup> {
    let Sharding { parameters, plan, cost, needs } = &facts.sharding;
    let memory = PeakMemory::new(facts.session(), *needs);
    let heads = ["ranks", "owned", "stored", "gradients", "optimizer", "total", "peak"];
    let of_parameters: Vec<Vec<String>> = parameters
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
                "Each rank holds its part of the model; activations are not counted."
            } @else {
                "The run keeps the whole model on every device. The plan shows what each rank \
                 would hold if the model were sharded over that many ranks; activations are not \
                 counted."
            }
        }
        (numbers(&heads, &rank_rows(&cost.ranks)))
        @if let Some(memory) = memory { p { (sentence(&memory.to_string())) } }
        (figure(
            &svg::draw(plan, cost, None)?,
            "What a rank holds under this plan: at its peak, and between two steps."
        ))
        (numbers(&["parameter", "shape", "type", "elements"], &of_parameters))
        @if let Some(comparison) = &facts.comparison {
            (measured(comparison))
        }
    })
}

/// What was predicted, beside what was measured.
fn measured(comparison: &Comparison) -> Markup {
    let [memory, traffic] = comparison.notes();
    html! {
        (numbers(&MEMORY_HEADS, &comparison.memory_rows()))
        p.note { (sentence(memory)) }
        (numbers(&TRAFFIC_HEADS, &comparison.traffic_rows()))
        p.note { (sentence(traffic)) }
    }
}

/// A row for each run of ranks that hold the same.
fn rank_rows(ranks: &[RankCost]) -> Vec<Vec<String>> {
    let alike = ranks.chunk_by(|left, right| bytes_of(left) == bytes_of(right));
    alike.take(MAX_ROWS).map(rank_row).collect()
}

fn rank_row(ranks: &[RankCost]) -> Vec<String> {
    let first = &ranks[0];
    let last = &ranks[ranks.len() - 1];
    let name = match ranks.len() {
        1 => first.rank.to_string(),
        _ => format!("{} – {}", first.rank, last.rank),
    };
    let bytes = bytes_of(first).map(|bytes| HumanBytes(bytes).to_string());
    [name].into_iter().chain(bytes).collect()
}

/// The figures of a rank, in the order of the columns.
fn bytes_of(rank: &RankCost) -> [u128; 6] {
    [
        rank.param_bytes.into(),
        rank.storage_bytes.into(),
        rank.grad_bytes.into(),
        rank.optimizer_bytes.into(),
        rank.total_bytes(),
        rank.peak_bytes(),
    ]
}

fn batches(facts: &Facts) -> Markup {
    let content = match &facts.reading {
        Err(why) => missing(&sentence(why)),
        Ok(reading) => html! {
            p { "In the first epoch: " (reading.report) "." }
            p.note { (how_batched(&facts.settings.batching())) }
        },
    };
    section("batches", "Batches", &content)
}

/// Which sequences share a batch, in a sentence.
fn how_batched(batching: &Batching) -> String {
    let how = match batching.strategy {
        DynamicBatchStrategy::Bucket(_) => "Sequences of similar length",
        DynamicBatchStrategy::Pack(_) => "Sequences packed into rows",
        _ => "Sequences as they come",
    };
    format!("{how}, at most {} tokens.", count(batching.max_tokens))
}

fn read_by(facts: &Facts) -> Result<Markup> {
    let content = match &facts.reading {
        Err(why) => missing(&sentence(why)),
        Ok(reading) => html! {
            (covered(reading))
            (shared(reading, WorldSize::new(facts.session().world_size)?))
        },
    };
    Ok(section("coverage", "Coverage", &content))
}

/// How often the sequences are read.
fn covered(reading: &Reading) -> Markup {
    let Coverage { never, once, more_often } = Coverage::of(reading);
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
        (listed(&rows.map(|(name, number)| (name, count(number)))))
    }
}

/// Which rank reads what.
fn shared(reading: &Reading, world_size: WorldSize) -> Markup {
    let shares = coverage::shares(reading, world_size);
    let row = |(rank, share): (usize, &coverage::Share)| {
        vec![rank.to_string(), count(share.sequences), count(share.tokens)]
    };
    let rows: Vec<_> = shares.iter().enumerate().take(MAX_ROWS).map(row).collect();
    html! {
        (numbers(&["rank", "sequences per epoch", "tokens per epoch"], &rows))
        @if shares.len() > MAX_ROWS {
            p.note { "The first " (MAX_ROWS) " of " (shares.len()) " ranks." }
        }
    }
}
