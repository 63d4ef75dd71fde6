//! The page that compares runs, with one column per run.

use maud::{Markup, html};

use super::{
    facts::RunFacts,
    markup::{self, figure, missing_note, number_table, section},
    page::{SummaryFigure, setting_rows, summary_figures},
};
use crate::{error::Result, train::curve};

/// Returns the page about several runs.
pub(super) fn page(runs: &[RunFacts]) -> Result<String> {
    let names: Vec<String> = runs.iter().map(|facts| facts.path.display().to_string()).collect();
    let heads: Vec<&str> = [""].into_iter().chain(names.iter().map(String::as_str)).collect();
    let sections = html! {
        (section("summary", "Summary", &number_table(&heads, &summary_rows(runs))))
        (section("settings", "Settings that differ", &settings_table(&heads, runs)))
        (section("training", "Training", &training_figure(&names, runs)?))
        (samples_section(&names, runs))
    };
    let lead = format!("{} runs side by side.", runs.len());
    Ok(markup::page(&names.join(", "), &lead, &sections))
}

/// Returns one row per figure, with a column per run.
fn summary_rows(runs: &[RunFacts]) -> Vec<Vec<String>> {
    let done = runs.iter().map(|facts| {
        format!("{} of {}", markup::count(facts.n_done()), markup::count(facts.settings.steps))
    });
    let mut rows = vec![table_row("steps", done)];
    let by_run: Vec<Option<[SummaryFigure; 6]>> = runs.iter().map(summary_figures).collect();
    // All runs with a completed step have the same figures in the same order.
    let Some(first) = by_run.iter().flatten().next() else { return rows };
    for (n, SummaryFigure { name, .. }) in first.iter().enumerate() {
        let values = by_run.iter().map(|figures| match figures {
            Some(figures) => figures[n].value.clone(),
            None => String::new(),
        });
        rows.push(table_row(name, values));
    }
    rows
}

fn table_row(name: &str, values: impl Iterator<Item = String>) -> Vec<String> {
    [name.to_owned()].into_iter().chain(values).collect()
}

/// Returns a table of the settings that differ between runs.
fn settings_table(heads: &[&str], runs: &[RunFacts]) -> Markup {
    let all: Vec<_> = runs.iter().map(setting_rows).collect();
    let mut names: Vec<&str> = Vec::new();
    for &(name, _) in all.iter().flatten() {
        // The folder of each run is the head of its column.
        if name != "folder" && !names.contains(&name) {
            names.push(name);
        }
    }
    let mut rows = Vec::new();
    for name in names {
        let values: Vec<String> =
            all.iter().map(|settings| joined_values(settings, name)).collect();
        if values.iter().any(|value| *value != values[0]) {
            rows.push(table_row(name, values.into_iter()));
        }
    }
    if rows.is_empty() { missing_note("No setting differs.") } else { number_table(heads, &rows) }
}

/// Joins all values of a setting, which may have several rows.
fn joined_values(settings: &[(&str, String)], name: &str) -> String {
    let values = settings.iter().filter(|(other, _)| *other == name);
    values.map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("; ")
}

fn training_figure(names: &[String], runs: &[RunFacts]) -> Result<Markup> {
    let pairs = names.iter().map(String::as_str).zip(runs.iter().map(|facts| &facts.metrics));
    let curves = curve::compare(&pairs.collect::<Vec<_>>())?;
    Ok(figure(&curves, "The runs step by step; each number is a mean over the steps around it."))
}

/// Returns a section with the generated texts of the runs, if there are any.
fn samples_section(names: &[String], runs: &[RunFacts]) -> Markup {
    let mut samples = Vec::new();
    for (name, facts) in names.iter().zip(runs) {
        samples.extend(facts.sample.as_ref().map(|text| (name, text)));
    }
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
