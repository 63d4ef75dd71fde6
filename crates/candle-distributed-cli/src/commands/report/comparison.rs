//! The page that compares runs, with one column per run.

use maud::{Markup, html};

use super::{
    facts::RunFacts,
    markup::{self, figure, missing, numbers, section},
    page::{SummaryFigure, figures, setting_rows},
};
use crate::{error::Result, train::curve};

/// Returns the page about several runs.
pub(super) fn page(runs: &[RunFacts]) -> Result<String> {
    let names: Vec<String> = runs.iter().map(|facts| facts.path.display().to_string()).collect();
    let heads: Vec<&str> = [""].into_iter().chain(names.iter().map(String::as_str)).collect();
    let sections = html! {
        (section("summary", "Summary", &numbers(&heads, &summary(runs))))
        (section("settings", "Settings that differ", &settings(&heads, runs)))
        (section("training", "Training", &training(&names, runs)?))
        (written(&names, runs))
    };
    let lead = format!("{} runs side by side.", runs.len());
    Ok(markup::page(&names.join(", "), &lead, &sections))
}

/// Returns one row per figure.
fn summary(runs: &[RunFacts]) -> Vec<Vec<String>> {
    let done = runs.iter().map(|facts| {
        format!("{} of {}", markup::count(facts.done()), markup::count(facts.settings.steps))
    });
    let mut rows = vec![row("steps", done)];
    let figures: Vec<Option<[SummaryFigure; 6]>> = runs.iter().map(figures).collect();
    let Some(known) = figures.iter().flatten().next() else { return rows };
    for (n, figure) in known.iter().enumerate() {
        let values = figures.iter().map(|figures| {
            figures.as_ref().map_or_else(String::new, |figures| figures[n].value.clone())
        });
        rows.push(row(figure.name, values));
    }
    rows
}

fn row(name: &str, values: impl Iterator<Item = String>) -> Vec<String> {
    [name.to_owned()].into_iter().chain(values).collect()
}

/// Returns a table of the settings that differ between runs.
fn settings(heads: &[&str], runs: &[RunFacts]) -> Markup {
    let all: Vec<_> = runs.iter().map(setting_rows).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in all.iter().flatten() {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let mut rows = Vec::new();
    for name in names {
        if name == "folder" {
            continue;
        }
        let values: Vec<String> =
            all.iter().map(|settings| joined_values(settings, name)).collect();
        if values.iter().any(|value| *value != values[0]) {
            rows.push(row(name, values.into_iter()));
        }
    }
    if rows.is_empty() { missing("No setting differs.") } else { numbers(heads, &rows) }
}

/// Joins all values of a setting, which may have several rows.
fn joined_values(settings: &[(&str, String)], name: &str) -> String {
    let values = settings.iter().filter(|(other, _)| *other == name);
    values.map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("; ")
}

fn training(names: &[String], runs: &[RunFacts]) -> Result<Markup> {
    let pairs = names.iter().map(String::as_str).zip(runs.iter().map(|facts| &facts.metrics));
    let curves = curve::compare(&pairs.collect::<Vec<_>>())?;
    Ok(figure(&curves, "The runs step by step; each number is a mean over the steps around it."))
}

/// Returns a section with the generated texts of the runs, if there are any.
fn written(names: &[String], runs: &[RunFacts]) -> Markup {
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
    section("sample", "Generated texts", &texts)
}
