//! Checks of the pictures on the crate page.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use dyn_batch::{
    Batch, BatchConfig, Buckets, Cut, DynamicBatchSampler, DynamicBatchStrategy, Packing,
    PaddingReport,
};

const LENGTHS: [usize; 8] = [2, 1, 2, 6, 5, 1, 6, 2];

/// Renders a column of the picture: title, batches row by row, and the fraction of real tokens.
fn column(title: &str, config: BatchConfig) -> Vec<String> {
    let sampler = DynamicBatchSampler::new(LENGTHS, config).unwrap();
    let batches: Vec<Batch> = sampler.iter().collect::<Result<_, _>>().unwrap();
    let report = PaddingReport::from_iter(&batches);
    let mut lines = vec![title.to_owned(), String::new()];
    for batch in &batches {
        lines.extend(rows(batch));
        lines.push(String::new());
    }
    lines.resize(14, String::new());
    lines.push(format!("{} of {} tokens are real", report.real_tokens, report.padded_tokens));
    lines
}

/// Renders a line per row; a row with several sequences shows their numbers.
fn rows(batch: &Batch) -> Vec<String> {
    let width = usize::try_from(batch.padded_length).unwrap();
    let length = |index: u64| LENGTHS[usize::try_from(index).unwrap()];
    if batch.rows < batch.len() as u64 {
        let row: String =
            batch.indices.iter().map(|&index| index.to_string().repeat(length(index))).collect();
        return vec![format!("{row:.<width$}")];
    }
    let mut rows = Vec::new();
    for &index in &batch.indices {
        rows.push(format!("{index} {real:.<width$}", real = "#".repeat(length(index))));
    }
    rows
}

/// Checks that the page has these columns next to each other.
fn check_picture(columns: &[Vec<String>; 3]) {
    let [left, middle, right] = columns;
    let mut lines = Vec::new();
    for ((left, middle), right) in left.iter().zip(middle).zip(right) {
        lines.push(format!("{left:28}{middle:32}{right}").trim_end().to_owned());
    }
    let picture = lines.join("\n");
    let page = include_str!("../../README.md").replace('\r', "");
    assert!(page.contains(&picture), "the crate page must show\n{picture}");
}

#[test]
fn pictures_match_the_code() {
    let config = |strategy| BatchConfig::default().with_strategy(strategy);
    let columns = [
        column(
            "pad to max, 4 a batch",
            config(DynamicBatchStrategy::PadToMax).with_max_batch_size(4),
        ),
        column(
            "bucket of width 4, 4 a batch",
            config(DynamicBatchStrategy::Bucket(Buckets::Width(4))).with_max_batch_size(4),
        ),
        column(
            "dynamic, 12 tokens a batch",
            config(DynamicBatchStrategy::Dynamic).with_max_tokens(12),
        ),
    ];
    check_picture(&columns);
    let sorted = DynamicBatchStrategy::Sorted { window: None, cut: Cut::Optimal };
    let buckets = DynamicBatchStrategy::Bucket(Buckets::optimal(LENGTHS, 2).unwrap());
    let columns = [
        column("sorted, 12 tokens a batch", config(sorted).with_max_tokens(12)),
        column(
            "2 shapes, 12 tokens a batch",
            config(buckets).with_max_tokens(12).with_fixed_shapes(true),
        ),
        column(
            "packed, rows of 9",
            config(DynamicBatchStrategy::Pack(Packing::BestFit)).with_max_tokens(9),
        ),
    ];
    check_picture(&columns);
}
