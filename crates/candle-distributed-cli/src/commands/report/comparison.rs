//! The page that compares runs: a column for each.

use maud::{Markup, html};

use super::{
    facts::Facts,
    markup::{self, figure, missing, numbers, section},
    page::{Figure, figures, settings_of},
};
use crate::{error::Result, train::curve};

/// The page about several runs.
pub(super) fn page(runs: &[Facts]) -> Result<String> {
    let names: Vec<String> = runs.iter().map(|facts| facts.path.display().to_string()).collect();
    let heads: Vec<&str> = [""].into_iter().chain(names.iter().map(String::as_str)).collect();
    let sections = html! {
        (section("summary", "Summary", &numbers(&heads, &summary(runs))))
        (section("settings", "Settings that differ", &settings(&heads, runs)))
        (section("training", "Training", &training(&names, runs)?))
        (written(&names, runs))
    };
    let lead = format!("{} runs beside each other.", runs.len());
    Ok(markup::page(&names.join(", "), &lead, &sections))
}

/// A row for each figure.
fn summary(runs: &[Facts]) -> Vec<Vec<String>> {
    let done = runs.iter().map(|facts| {
        format!("{} of {}", markup::count(facts.done()), markup::count(facts.settings.steps))
    });
    let mut rows = vec![row("steps", done)];
    let figures: Vec<Option<[Figure; 6]>> = runs.iter().map(figures).collect();
    let Some(known) = figures.iter().flatten().next() else { return rows };
    rows.extend(known.iter().enumerate().map(|(n, figure)| {
        let value = |figures: &Option<[Figure; 6]>| {
            figures.as_ref().map_or_else(String::new, |figures| figures[n].value.clone())
        };
        row(figure.name, figures.iter().map(value))
    }));
    rows
}

fn row(name: &str, values: impl Iterator<Item = String>) -> Vec<String> {
    [name.to_owned()].into_iter().chain(values).collect()
}

/// The settings that are not the same in all runs.
fn settings(heads: &[&str], runs: &[Facts]) -> Markup {
    let all: Vec<_> = runs.iter().map(settings_of).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in all.iter().flatten() {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let of_run = |settings: &Vec<(&str, String)>, name| {
        let values = settings.iter().filter(|(other, _)| *other == name);
        values.map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("; ")
    };
    let rows = names.into_iter().filter(|name| *name != "folder").filter_map(|name| {
        let values: Vec<String> = all.iter().map(|settings| of_run(settings, name)).collect();
        let differ = values.iter().any(|value| *value != values[0]);
        differ.then(|| row(name, values.into_iter()))
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() { missing("No setting differs.") } else { numbers(heads, &rows) }
}

fn training(names: &[String], runs: &[Facts]) -> Result<Markup> {
    let pairs = names.iter().map(String::as_str).zip(runs.iter().map(|facts| &facts.metrics));
    let curves = curve::compare(&pairs.collect::<Vec<_>>())?;
    Ok(figure(&curves, "The runs step by step, each number as its mean over the steps around it."))
}

/// The texts that the models wrote, if any did.
fn written(names: &[String], runs: &[Facts]) -> Markup {
    let samples = names.iter().zip(runs.iter().map(|facts| &facts.sample));
    let samples: Vec<_> =
        samples.filter_map(|(name, sample)| Some((name, sample.as_ref()?))).collect();
    if samples.is_empty() {
        return html! {};
    }
    let texts = html! {
        @for (name, text) in samples {
            p.note { (name) }
            pre.sample { (text) }
        }
    };
    section("sample", "What the models wrote", &texts)
}
