//! The page: a section for everything that a reader may ask of a run.

use candle_distributed::{plan::cost::RankCost, types::WorldSize};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    coverage::{self, Coverage},
    facts::{Facts, Reading, Sharding},
};
use crate::{
    bytes::{binary, grouped},
    commands::{batch::chart, plan::svg},
    error::Result,
    picture,
    train::{curve, data::BUCKET_WIDTH, memory::Memory, run_dir::Session},
};

const STYLE: &str = include_str!("style.css");

/// A table has about so many rows at most.
const MAX_ROWS: usize = 16;

/// The whole page.
pub(super) fn page(facts: &Facts) -> Result<String> {
    let title = format!("run {}", facts.path.display());
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(picture::STYLE.as_str())) }
            }
            body {
                header {
                    h1 { (title) }
                    p.lead { (state(facts)) }
                }
                main {
                    (summary(facts))
                    (settings(facts))
                    (training(facts)?)
                    (plan(facts)?)
                    (batches(facts)?)
                    (read_by(facts)?)
                }
                footer { "candle-distributed " (env!("CARGO_PKG_VERSION")) }
            }
        }
    };
    Ok(page.into_string())
}

/// How far the run is, in a sentence.
fn state(facts: &Facts) -> String {
    let (done, steps) = (grouped(facts.done().into()), grouped(facts.settings.steps.into()));
    let devices = facts.session().map_or_else(String::new, |session| format!(" on {}", devices(session)));
    if facts.is_complete {
        format!("Complete: {steps} steps{devices}.")
    } else {
        format!("{done} of {steps} steps are done{devices}.")
    }
}

fn devices(session: &Session) -> String {
    counted(session.world_size.into(), "device")
}

fn counted(number: u128, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// A section with its heading.
fn section(id: &str, heading: &str, content: &Markup) -> Markup {
    html! {
        section id=(id) {
            h2 { (heading) }
            (content)
        }
    }
}

fn figure(picture: &str, caption: &str) -> Markup {
    html! {
        figure {
            (PreEscaped(picture::inline(picture)))
            figcaption { (caption) }
        }
    }
}

/// What cannot be told, and why.
fn missing(why: &str) -> Markup {
    html! { p.missing { (why) } }
}

/// A table of names and values.
fn listed(rows: &[(&str, String)]) -> Markup {
    html! {
        table.facts {
            tbody {
                @for (name, value) in rows {
                    tr { th scope="row" { (name) } td { (value) } }
                }
            }
        }
    }
}

/// A table of numbers, the first column of which are names.
fn numbers(heads: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        div.scroll {
            table {
                thead { tr { @for head in heads { th scope="col" { (head) } } } }
                tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// The figures that are looked for first.
fn summary(facts: &Facts) -> Markup {
    let steps = facts.metrics.steps();
    let [first, ..] = steps else {
        return section("summary", "Summary", &missing("No step is done yet."));
    };
    let (seconds, n_last) = (facts.metrics.seconds(), (steps.len() / 10).max(1));
    let (real, padded) = (facts.metrics.sum(|step| step.real_tokens), facts.metrics.sum(|step| step.padded_tokens));
    let last = counted(n_last as u128, "step");
    let figures = [
        ("first loss", format!("{:.3}", first.loss), String::from("nats a byte")),
        ("last loss", format!("{:.3}", facts.metrics.last_loss(n_last)), format!("mean of the last {last}")),
        ("speed", picture::tick(&(real as f64 / seconds).round()), String::from("real tokens a second")),
        (
            "padding efficiency",
            format!("{:.4}", real as f64 / padded as f64),
            format!("{} of {} tokens are real", grouped(real), grouped(padded)),
        ),
        ("time", duration(seconds), String::from("in training steps")),
        ("sequences", grouped(facts.metrics.sum(|step| step.sequences)), epochs(facts)),
    ];
    html! {
        dl.figures id="summary" {
            @for (name, value, more) in figures {
                div { dt { (name) } dd { (value) } dd.more { (more) } }
            }
        }
    }
}

fn epochs(facts: &Facts) -> String {
    let epoch = facts.metrics.steps().last().map_or(0, |step| step.epoch);
    format!("read, {} begun", counted(u128::from(epoch) + 1, "epoch"))
}

/// Seconds in the unit that people would take.
fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        120.0..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn settings(facts: &Facts) -> Markup {
    let settings = &facts.settings;
    let data = settings
        .data
        .as_ref()
        .map_or_else(|| String::from("this program's own sources"), |data| data.display().to_string());
    let mut rows = vec![
        ("folder", facts.path.display().to_string()),
        ("steps", grouped(settings.steps.into())),
        ("seed", settings.seed.to_string()),
        ("text", format!("{data}, fingerprint {}", settings.text)),
        (
            "batches",
            format!(
                "sequences of similar length ({BUCKET_WIDTH} lengths share a bucket), at most {} tokens of all devices, padding included",
                grouped(settings.max_tokens.into())
            ),
        ),
    ];
    if let Some(model) = settings.model {
        let [layers, heads, hidden, vocabulary, context] =
            [model.layers, model.heads, model.hidden, model.vocabulary, model.context]
                .map(|size| grouped(size as u128));
        rows.push(("model", format!("transformer of {layers} layers, width {hidden}, {heads} heads, {vocabulary} tokens, context of {context}")));
    }
    rows.extend(settings.sessions.iter().map(|session| ("ran on", of_session(session))));
    let checkpoints: Vec<String> = facts.checkpoints.iter().map(|&step| grouped(step.into())).collect();
    let checkpoints =
        if checkpoints.is_empty() { String::from("none") } else { format!("after steps {}", checkpoints.join(", ")) };
    rows.push(("checkpoints there", checkpoints));
    rows.push(("model.safetensors", String::from(if facts.is_complete { "is there" } else { "not yet" })));
    section("settings", "Settings", &listed(&rows))
}

fn of_session(session: &Session) -> String {
    let peak = session
        .peak_bytes
        .map_or_else(String::new, |bytes| format!(", peak memory of the process {}", binary(bytes.into())));
    format!("{} from step {} on{peak}", devices(session), grouped(u128::from(session.first_step) + 1))
}

fn training(facts: &Facts) -> Result<Markup> {
    let steps = facts.metrics.steps();
    let content = if steps.is_empty() {
        missing("No step is done yet.")
    } else {
        let strange = steps.iter().find(|step| !step.loss.is_finite()).map(|step| step.step + 1);
        let means = "Loss and speed of every step, and their means over the steps around it.";
        let is_resumed = facts.metrics.timed().any(|step| step.is_resumed);
        let line = if is_resumed { " A vertical line is where the run was gone on with." } else { "" };
        html! {
            (figure(&curve::draw(&facts.metrics)?, &format!("{means}{line}")))
            @if let Some(step) = strange {
                (missing(&format!("The loss is no number at step {}.", grouped(step.into()))))
            }
        }
    };
    Ok(section("training", "Training", &content))
}

fn plan(facts: &Facts) -> Result<Markup> {
    let content = match &facts.sharding {
        Some(sharding) => sharded(facts, sharding)?,
        None => {
            missing("This run is of an earlier version, which did not tell its model and on how many devices it ran.")
        }
    };
    Ok(section("plan", "Sharding plan", &content))
}

fn sharded(facts: &Facts, Sharding { parameters, plan, cost, needs }: &Sharding) -> Result<Markup> {
    let memory = facts.session().and_then(|session| Memory::of(session, *needs));
    let heads = ["ranks", "owned", "stored", "gradients", "optimizer", "total", "peak"];
    let of_parameters: Vec<Vec<String>> = parameters
        .iter()
        .take(4 * MAX_ROWS)
        .map(|info| {
            vec![
                info.name().to_owned(),
                format!("{:?}", info.shape()),
                info.dtype().to_string(),
                grouped(info.numel().into()),
            ]
        })
        .collect();
    Ok(html! {
        p.note {
            "The run keeps the whole model on every device. The plan tells what each rank would hold if the model were sharded over as many ranks; activations are not in it."
        }
        (numbers(&heads, &rank_rows(&cost.ranks)))
        @if let Some(memory) = memory { p { (sentence(&memory.to_string())) } }
        (figure(&svg::draw(plan, cost, None)?, "What each rank would hold: at its peak, and between two steps."))
        (numbers(&["parameter", "shape", "type", "elements"], &of_parameters))
    })
}

/// A row for all neighbors that hold the same.
fn rank_rows(ranks: &[RankCost]) -> Vec<Vec<String>> {
    let held = |rank: &RankCost| [rank.param_bytes, rank.storage_bytes, rank.grad_bytes, rank.optimizer_bytes];
    let alike = ranks.chunk_by(|left, right| held(left) == held(right) && left.peak_bytes() == right.peak_bytes());
    let row = |ranks: &[RankCost]| {
        let (first, last) = (&ranks[0], &ranks[ranks.len() - 1]);
        let name = if ranks.len() == 1 { first.rank.to_string() } else { format!("{} – {}", first.rank, last.rank) };
        let bytes = held(first).map(u128::from).into_iter().chain([first.total_bytes(), first.peak_bytes()]);
        [name].into_iter().chain(bytes.map(binary)).collect()
    };
    alike.take(MAX_ROWS).map(row).collect()
}

/// The same, begun with a capital and ended with a full stop.
fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}

fn batches(facts: &Facts) -> Result<Markup> {
    let content = match &facts.reading {
        Err(why) => missing(&sentence(why)),
        Ok(Reading { lengths, batches, report }) => html! {
            p { "In the first epoch: " (report) "." }
            (figure(&chart::svg(lengths, &batches.iter().collect::<Vec<_>>(), report)?, "How long the sequences are, and where the batches of the first epoch have their padding."))
        },
    };
    Ok(section("batches", "Batches", &content))
}

fn read_by(facts: &Facts) -> Result<Markup> {
    let content = match &facts.reading {
        Err(why) => missing(&sentence(why)),
        Ok(reading) => html! {
            (covered(reading))
            @if let Some(session) = facts.session() { (shared(reading, WorldSize::new(session.world_size)?)?) }
        },
    };
    Ok(section("coverage", "Coverage", &content))
}

/// How often the sequences are read.
fn covered(reading: &Reading) -> Markup {
    let Coverage { never, once, more_often } = Coverage::of(reading);
    let all = never + once + more_often;
    let verdict =
        if once == all { "Every sequence is read exactly once." } else { "Not every sequence is read exactly once." };
    let rows = [
        ("sequences in the text", all),
        ("read once an epoch", once),
        ("read more often", more_often),
        ("left out", never),
    ];
    html! {
        p { "Counted over the batches of the first epoch. " (verdict) }
        (listed(&rows.map(|(name, number)| (name, grouped(number.into())))))
    }
}

/// Which rank reads what.
fn shared(reading: &Reading, world_size: WorldSize) -> Result<Markup> {
    let shares = coverage::shares(reading, world_size);
    let row = |(rank, share): (usize, &coverage::Share)| {
        vec![rank.to_string(), grouped(share.sequences.into()), grouped(share.tokens.into())]
    };
    let rows: Vec<_> = shares.iter().enumerate().take(MAX_ROWS).map(row).collect();
    let n_drawn = coverage::n_drawn(reading, world_size);
    let caption = format!(
        "Which rank reads which sequences of a batch, in the first {n_drawn} of {}.",
        counted(reading.batches.len() as u128, "step")
    );
    Ok(html! {
        (numbers(&["rank", "sequences an epoch", "tokens an epoch"], &rows))
        @if shares.len() > MAX_ROWS { p.note { "The first " (MAX_ROWS) " of " (shares.len()) " ranks." } }
        (figure(&coverage::draw(reading, world_size)?, &caption))
    })
}
