//! Plans grids of micro-batches for `benches/peers/grid.py`.
//!
//! Standard input is a JSON object: `lengths`, `ranks`, `max_tokens` of a cell, `cost` as three
//! coefficients, and optionally `accumulation`, `global_batch_size`, `pack`. The output is a JSON object
//! with the cells of all steps, micro-step by micro-step and rank by rank, the report, the least
//! seconds of three plans, and of greedy batches (or rows) of the same global batches.

#![allow(clippy::print_stdout, reason = "the output is the purpose of an example")]

use std::{error::Error, io, time::Instant};

use core_types::{Epoch, Placement};
use dyn_batch::{
    BatchConfig, Cost, Cut, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler,
    DynamicBatchStrategy, GridConfig, Packing, Remainder, StepLayout, Steps,
};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let input: Value = serde_json::from_reader(io::stdin())?;
    let lengths: Vec<u64> = serde_json::from_value(input["lengths"].clone())?;
    let number = |name: &str| input[name].as_u64();
    let [per_sequence, per_token, per_token_squared] =
        serde_json::from_value(input["cost"].clone())?;
    let is_packed = input["pack"].as_bool().unwrap_or(false);
    let strategy = if is_packed {
        DynamicBatchStrategy::Pack(Packing::BestFit)
    } else {
        DynamicBatchStrategy::Sorted { window: None, cut: Cut::Greedy }
    };
    let config = BatchConfig::default()
        .with_strategy(strategy)
        .with_remainder(Remainder::Keep)
        .with_max_tokens(number("max_tokens").ok_or("no max_tokens")?);
    let global_batch_size = number("global_batch_size");
    let grid = GridConfig { global_batch_size, ..GridConfig::default() };
    let mut steps = DistributedConfig {
        layout: StepLayout::Grid(grid),
        cost: Cost { per_sequence, per_token, per_token_squared },
        ..DistributedConfig::default()
    };
    steps.accumulation = number("accumulation");
    let placement = Placement::new(0, number("ranks").ok_or("no ranks")?)?;
    let batches = DynamicBatchSampler::new(lengths.as_slice(), config)?;
    let size = number("global_batch_size").map_or(Ok(lengths.len()), usize::try_from)?;
    let greedy_seconds = least_seconds(|| {
        let indices: Vec<u64> = (0..lengths.len() as u64).collect();
        indices
            .chunks(size)
            .map(|chunk| batches.iter_order(chunk.iter().copied()).count())
            .sum::<usize>()
    });
    let sampler = DistributedBatchSampler::new(batches, placement, steps)?;
    let plan = || sampler.epoch(Epoch::ZERO, 0..lengths.len() as u64);
    let seconds = least_seconds(plan);
    let planned = plan()?;
    let report = planned.grid_report().map(|report| report.to_string());
    let answer = json!({
        "steps": cells(&planned), "report": report, "seconds": seconds, "greedy_seconds": greedy_seconds,
    });
    println!("{answer}");
    Ok(())
}

/// Returns the seconds of the fastest of ten calls.
fn least_seconds<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        std::hint::black_box(work());
        least = least.min(start.elapsed().as_secs_f64());
    }
    least
}

/// Returns the indices of all cells, step by step.
fn cells(steps: &Steps<&[u64]>) -> Vec<Vec<Vec<u64>>> {
    let steps = (0..).map_while(|step| steps.all_ranks(step));
    steps.map(|ranks| ranks.into_iter().flatten().map(|batch| batch.indices).collect()).collect()
}
