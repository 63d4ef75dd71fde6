//! `batch`: sequences of given lengths, put into batches.

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

pub(crate) use self::args::Args;
use self::{
    args::FormatArg,
    print::{Entry, Line, Made, Share},
};
use crate::{
    commands,
    error::{Error, Result, WithHint},
    hint, input,
    numbers::Lengths,
    output::{self, Lines},
};

#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    let is_lines = args.format == FormatArg::Jsonl;
    let state = if is_lines { print_each(args) } else { print_all(args) }?;
    if let Some(path) = &args.save_state {
        output::json_file(path, &state.expect("clap insists on ranks, which have a state"))?;
    }
    Ok(())
}

/// Prints each batch as soon as it is made.
fn print_each(args: &Args) -> Result<Option<BatchState>> {
    let mut lines = Lines::new(args.is_live());
    let made = make(args, &mut |entry| lines.print(&Line::new(entry)))?;
    lines.finish()?;
    print::warn(&made.left_out);
    Ok(made.state)
}

/// Prints all batches when the last one is made.
fn print_all(args: &Args) -> Result<Option<BatchState>> {
    let mut entries = Vec::new();
    let mut made = make(args, &mut |entry| {
        entries.push(entry);
        ControlFlow::Continue(())
    })?;
    let state = made.state.take();
    print::print(args, entries, made)?;
    Ok(state)
}

/// What is done with a batch: it may be the last that anybody wants.
type Each<'a> = &'a mut dyn FnMut(Entry) -> ControlFlow<()>;

fn make(args: &Args, each: Each<'_>) -> Result<Made> {
    match args.placement()? {
        Some(placement) => of_rank(args, placement, each),
        None if args.is_stream() => of_stream(args, each),
        None => of_all(args, each),
    }
}

/// All batches, of lengths that are read as they are needed.
fn of_stream(args: &Args, each: Each<'_>) -> Result<Made> {
    let config = args.config(None)?;
    let lengths = (0..).zip(args.lengths());
    let sequences = lengths.map(|(index, length)| Ok(Sequence { index, length: length? }));
    let mut batches = Batches::new(sequences, config)?;
    give(args, &mut batches, each)?;
    Ok(Made { left_out: *batches.report(), share: None, state: None })
}

/// All batches, of lengths that are held.
fn of_all(args: &Args, each: Each<'_>) -> Result<Made> {
    let lengths = args.hold_lengths()?;
    let config = args.config(Some(&lengths))?;
    let mut order = args.order(lengths.count(), args.epoch())?;
    let mut batches = Batches::new(order.sequences(&lengths), config)?;
    if let Some(seed) = args.shuffle_seed() {
        batches = batches.shuffled(seed.derive(args.epoch().as_u64()));
    }
    give(args, &mut batches, each)?;
    let left_out = *batches.report();
    drop(batches);
    Ok(Made { left_out, share: None, state: None })
}

/// Gives those batches that are to be printed.
fn give<I>(args: &Args, batches: &mut Batches<I>, each: Each<'_>) -> Result<()>
where
    I: Iterator<Item = Result<Sequence>>,
{
    for n_skipped in 0..args.start {
        if batches.next().transpose()?.is_none() {
            commands::count(args.start, args.count, n_skipped, "batches")?;
        }
    }
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        let Some(batch) = batches.next().transpose()? else { break };
        if each(Entry { batch, step_real_tokens: None }).is_break() {
            break;
        }
    }
    Ok(())
}

/// The batches of one rank.
fn of_rank(args: &Args, placement: Placement, each: Each<'_>) -> Result<Made> {
    let lengths = args.hold_lengths()?;
    let batches = DynamicBatchSampler::new(&lengths, args.config(Some(&lengths))?)?;
    let sampler = DistributedBatchSampler::new(batches, placement, args.distributed())?;
    let mut steps = steps(args, &sampler, &lengths)?;
    let left_out = steps.report();
    let mut state = steps.state();
    let n_batches = commands::count(args.start, args.count, steps.len() as u64, "batches")?;
    let share = Share {
        world_size: placement.world_size().as_u64(),
        rank: placement.rank().as_u64(),
        n_steps: state.n_steps,
    };
    state.step += args.start + n_batches;
    let from_start = steps.by_ref().skip(commands::of_iterator(args.start));
    for step in from_start.take(commands::of_iterator(n_batches)) {
        let entry = Entry { batch: step.batch, step_real_tokens: Some(step.real_tokens) };
        if each(entry).is_break() {
            break;
        }
    }
    drop(steps);
    drop(sampler);
    Ok(Made { left_out, share: Some(share), state: Some(state) })
}

/// The steps of the epoch that are left where an earlier run stopped, or all of them.
fn steps<'a>(
    args: &Args,
    sampler: &'a DistributedBatchSampler<&'a Lengths>,
    lengths: &Lengths,
) -> Result<Steps<'a, &'a Lengths>> {
    let state: Option<BatchState> = match &args.resume {
        Some(path) => {
            Some(input::read_json(path, "the state of batches").with_hint(hint::BATCH_STATE)?)
        }
        None => None,
    };
    let epoch = state.as_ref().map_or(args.epoch(), |state| state.epoch);
    let mut order = args.order(lengths.count(), epoch)?;
    let mut fault: Option<Error> = None;
    // An order ends at the first position that cannot be read, which is then the error.
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
