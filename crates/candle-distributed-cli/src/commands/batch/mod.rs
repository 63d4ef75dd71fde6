//! `batch`: groups sequences of given lengths into batches.

mod args;
mod order;
mod print;

use std::ops::ControlFlow;

use candle_distributed::{
    batch::{
        BatchState, Batches, DistributedBatchSampler, DynamicBatchSampler, Sequence,
        SequenceLengths, Steps,
    },
    types::Placement,
};

pub(crate) use self::args::BatchArgs;
use self::{
    args::FormatArg,
    print::{BatchEntry, BatchTotals, JsonLine, RankShare},
};
use crate::{
    commands,
    error::{Error, Result, WithHint},
    hint, input,
    output::{self, JsonLines},
};

#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
pub(crate) fn run(args: &BatchArgs) -> Result<()> {
    args.check()?;
    let state = match args.format {
        FormatArg::Jsonl => print_each(args)?,
        FormatArg::Text | FormatArg::Json => print_all(args)?,
    };
    if let Some(path) = &args.save_state {
        output::json_file(
            path,
            &state.expect("--save-state requires ranks, and ranks have a state"),
        )?;
    }
    Ok(())
}

/// Prints each batch as soon as it is complete.
fn print_each(args: &BatchArgs) -> Result<Option<BatchState>> {
    let mut lines = JsonLines::new(args.is_live());
    let totals = make_batches(args, &mut |entry| lines.print(&JsonLine::new(entry)))?;
    lines.finish()?;
    print::warn_left_out(&totals.left_out);
    Ok(totals.state)
}

/// Prints all batches after the last is complete.
fn print_all(args: &BatchArgs) -> Result<Option<BatchState>> {
    let mut entries = Vec::new();
    let mut totals = make_batches(args, &mut |entry| {
        entries.push(entry);
        ControlFlow::Continue(())
    })?;
    let state = totals.state.take();
    print::print(args, entries, totals)?;
    Ok(state)
}

/// A callback for each batch. Returns `Break` if no further batch is needed.
type BatchCallback<'a> = &'a mut dyn FnMut(BatchEntry) -> ControlFlow<()>;

/// Passes each batch to `on_batch`, as soon as the options allow.
fn make_batches(args: &BatchArgs, on_batch: BatchCallback<'_>) -> Result<BatchTotals> {
    match args.placement()? {
        Some(placement) => make_for_rank(args, placement, on_batch),
        None if args.is_stream() => make_from_stream(args, on_batch),
        None => make_all(args, on_batch),
    }
}

/// Makes all batches, reading lengths lazily.
fn make_from_stream(args: &BatchArgs, on_batch: BatchCallback<'_>) -> Result<BatchTotals> {
    let config = args.config(None)?;
    let lengths = (0..).zip(args.lengths());
    let sequences = lengths.map(|(index, length)| Ok(Sequence { index, length: length? }));
    let mut batches = Batches::new(sequences, config)?;
    pass_selected(args, &mut batches, on_batch)?;
    Ok(BatchTotals { left_out: *batches.report(), share: None, state: None, grid: None })
}

/// Makes all batches after loading all lengths.
fn make_all(args: &BatchArgs, on_batch: BatchCallback<'_>) -> Result<BatchTotals> {
    let lengths = args.load_lengths()?;
    let config = args.config(Some(&lengths))?;
    let mut order = args.reading_order(lengths.count(), args.epoch())?;
    let mut batches = Batches::new(order.sequences(&lengths), config)?;
    if let Some(seed) = args.shuffle_seed() {
        batches = batches.shuffled(seed.derive(args.epoch().as_u64()));
    }
    pass_selected(args, &mut batches, on_batch)?;
    let left_out = *batches.report();
    drop(batches);
    Ok(BatchTotals { left_out, share: None, state: None, grid: None })
}

/// Passes the batches selected by `--start` and `--count` to `on_batch`.
fn pass_selected<I>(
    args: &BatchArgs,
    batches: &mut Batches<I>,
    on_batch: BatchCallback<'_>,
) -> Result<()>
where
    I: Iterator<Item = Result<Sequence>>,
{
    for n_skipped in 0..args.start {
        if batches.next().transpose()?.is_none() {
            // All batches are skipped, so this returns an error.
            commands::n_to_print(args.start, args.count, n_skipped, "batches")?;
        }
    }
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        let Some(batch) = batches.next().transpose()? else { break };
        if on_batch(BatchEntry { batch, step_real_tokens: None }).is_break() {
            break;
        }
    }
    Ok(())
}

/// Makes the batches of one rank.
fn make_for_rank(
    args: &BatchArgs,
    placement: Placement,
    on_batch: BatchCallback<'_>,
) -> Result<BatchTotals> {
    let lengths = args.load_lengths()?;
    let batches = DynamicBatchSampler::new(&lengths[..], args.config(Some(&lengths))?)?;
    let sampler = DistributedBatchSampler::new(batches, placement, args.distributed_config())?;
    let mut steps = remaining_steps(args, &sampler, &lengths)?;
    let left_out = steps.report();
    let mut state = steps.state();
    let n_batches = commands::n_to_print(args.start, args.count, steps.len() as u64, "batches")?;
    let share = RankShare {
        world_size: placement.world_size().as_u64(),
        rank: placement.rank().as_u64(),
        n_steps: state.n_steps,
    };
    let grid = steps.grid_report();
    if !args.prints_batches() {
        return Ok(BatchTotals { left_out, share: None, state: Some(state), grid });
    }
    // The saved state follows the last printed step.
    state.step += args.start + n_batches;
    let n_skipped = commands::iterator_count(args.start);
    'steps: for step in steps.by_ref().skip(n_skipped).take(commands::iterator_count(n_batches)) {
        let step_real_tokens = Some(step.real_tokens);
        for batch in step.micro_batches {
            if on_batch(BatchEntry { batch, step_real_tokens }).is_break() {
                break 'steps;
            }
        }
    }
    Ok(BatchTotals { left_out, share: Some(share), state: Some(state), grid })
}

/// Returns the steps of the epoch: those after the state in `--resume`, or all.
fn remaining_steps<'a>(
    args: &BatchArgs,
    sampler: &DistributedBatchSampler<&'a [u64]>,
    lengths: &[u64],
) -> Result<Steps<&'a [u64]>> {
    let state: Option<BatchState> = match &args.resume {
        Some(path) => {
            Some(input::read_json(path, "the state of batches").with_hint(hint::BATCH_STATE)?)
        }
        None => None,
    };
    let epoch = state.as_ref().map_or(args.epoch(), |state| state.epoch);
    let mut order = args.reading_order(lengths.count(), epoch)?;
    let mut fault: Option<Error> = None;
    // The iterator ends at the first unreadable position, and its error is returned below.
    let indices = order.sequences(lengths).map_while(|sequence| match sequence {
        Ok(sequence) => Some(sequence.index),
        Err(error) => {
            fault = Some(error);
            None
        }
    });
    let steps = match &state {
        Some(state) => sampler.resume(state, indices),
        None => sampler.epoch(epoch, indices),
    };
    match fault {
        Some(fault) => Err(fault),
        None => Ok(steps?),
    }
}
