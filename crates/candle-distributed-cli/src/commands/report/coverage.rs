//! How often each sequence is read in an epoch, and by which rank.

use candle_distributed::{
    batch::Batch,
    types::{WorldSize, human::HumanCount, split},
};
use plotters::prelude::*;

use super::facts::Reading;
use crate::{
    error::Result,
    picture::{self, Area, Drawn, FAINT, FONT, HEADING, INK, TEXT, Ticks},
};

const SIZE: (u32, u32) = (900, 330 + HEADING);

/// The number of steps that can be told apart.
const MAX_STEPS: usize = 60;
/// About the number of blocks that are drawn at most.
const MAX_BLOCKS: usize = 4000;

/// How many ranks are named beside the picture.
const MAX_NAMES: usize = 9;

/// How often the sequences are read in the first epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Coverage {
    pub(super) never: u64,
    pub(super) once: u64,
    pub(super) more_often: u64,
}

impl Coverage {
    pub(super) fn of(reading: &Reading) -> Self {
        let mut counts = vec![0_u64; reading.lengths.len()];
        for &index in reading.batches.iter().flat_map(|batch| &batch.indices) {
            counts[in_memory(index)] += 1;
        }
        let how_many =
            |is: fn(u64) -> bool| counts.iter().filter(|&&count| is(count)).count() as u64;
        Self {
            never: how_many(|n| n == 0),
            once: how_many(|n| n == 1),
            more_often: how_many(|n| n > 1),
        }
    }
}

/// What one rank reads in the first epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) sequences: u64,
    pub(super) tokens: u64,
}

/// The shares of all ranks.
pub(super) fn shares(reading: &Reading, world_size: WorldSize) -> Vec<Share> {
    let mut shares = vec![Share::default(); world_size.as_usize()];
    for batch in &reading.batches {
        for (share, indices) in shares.iter_mut().zip(rows(batch, world_size)) {
            share.sequences += indices.len() as u64;
            share.tokens +=
                indices.iter().map(|&index| reading.lengths[in_memory(index)]).sum::<u64>();
        }
    }
    shares
}

/// The index of something that is in memory.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
fn in_memory(index: u64) -> usize {
    usize::try_from(index).expect("what is in memory is counted by a usize")
}

/// The sequences of a batch that each rank reads, split as the mesh splits them: the last ranks may
/// get padding instead.
fn rows(batch: &Batch, world_size: WorldSize) -> impl Iterator<Item = &[u64]> {
    world_size.placements().map(|place| {
        let rows = split::chunk(batch.indices.len() as u64, place);
        &batch.indices[in_memory(rows.start)..in_memory(rows.end)]
    })
}

/// An SVG document: for each of the first steps, which rank reads which sequences of its batch.
pub(super) fn draw(reading: &Reading, world_size: WorldSize) -> Result<String> {
    let steps = &reading.batches[..n_drawn(reading, world_size)];
    // An axis of no extent has no ticks.
    let highest = steps.iter().map(|batch| batch.indices.len()).fold(1, usize::max);
    let shown = HumanCount(steps.len() as u128);
    let all = HumanCount(reading.batches.len() as u128).of("step");
    let title = format!("batches shared by {}", HumanCount(world_size.as_u64().into()).of("rank"));
    let figures = format!("the first {shown} of {all} of an epoch");
    picture::document(SIZE, |area| {
        picture::heading(&area, &title, &figures, FAINT)?;
        let (left, right) = area.margin(HEADING, 0, 0, 0).split_horizontally(790);
        let ticks = Ticks::up_to(steps.len() as f64);
        let mut chart = ChartBuilder::on(&left)
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..steps.len().max(1) as f64, 0..highest)?;
        let mut axes = chart.configure_mesh();
        picture::plain(&mut axes);
        axes.x_desc("steps of the first epoch")
            .y_desc("sequences of the batch")
            .x_labels(steps.len().clamp(1, 10))
            .x_label_formatter(&|value| ticks.label(*value))
            .y_labels(6)
            .draw()?;
        for (step, batch) in steps.iter().enumerate() {
            chart.draw_series(column(step, batch, world_size))?;
        }
        name_ranks(&right, world_size.as_usize())?;
        area.present()
    })
}

/// The number of steps that are drawn.
pub(super) fn n_drawn(reading: &Reading, world_size: WorldSize) -> usize {
    (MAX_BLOCKS / world_size.as_usize()).clamp(1, MAX_STEPS).min(reading.batches.len())
}

/// The blocks of one step, from the first rank up.
fn column(
    step: usize,
    batch: &Batch,
    world_size: WorldSize,
) -> impl Iterator<Item = Rectangle<(f64, usize)>> {
    let mut from = 0;
    rows(batch, world_size).enumerate().filter(|(_, rows)| !rows.is_empty()).map(
        move |(rank, rows)| {
            let corners = [(step as f64 + 0.06, from), (step as f64 + 0.94, from + rows.len())];
            from += rows.len();
            Rectangle::new(corners, picture::ramp(rank, world_size.as_usize()).filled())
        },
    )
}

/// Names the colors, the last rank above; of many ranks, the first and the last ones.
fn name_ranks(area: &Area<'_>, n_ranks: usize) -> Drawn {
    let named: Vec<Option<usize>> = if n_ranks <= MAX_NAMES {
        (0..n_ranks).rev().map(Some).collect()
    } else {
        [Some(n_ranks - 1), Some(n_ranks - 2), None, Some(1), Some(0)].into()
    };
    for (y, rank) in (20..).step_by(26).zip(named) {
        let text = rank.map_or_else(|| String::from("…"), |rank| format!("rank {rank}"));
        if let Some(rank) = rank {
            let corners = [(4, y), (19, y + 15)];
            area.draw(&Rectangle::new(corners, picture::ramp(rank, n_ranks).filled()))?;
        }
        area.draw(&Text::new(text, (27, y + 1), TextStyle::from((FONT, TEXT)).color(&INK)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_distributed::{
        batch::{BatchConfig, DynamicBatchSampler, PaddingReport},
        types::Placement,
    };

    use super::*;

    fn reading(n_sequences: u64) -> Reading {
        let lengths: Vec<u64> = (1..=n_sequences).collect();
        let sampler =
            DynamicBatchSampler::new(&lengths, BatchConfig::default().with_max_batch_size(5))
                .unwrap();
        let batches: Vec<Batch> = sampler.iter().map(Result::unwrap).collect();
        let report = PaddingReport::from_iter(&batches);
        Reading { lengths, steps: vec![batches.clone()], batches, report }
    }

    #[test]
    fn ranks_share_all_that_is_read() {
        for (n_sequences, world_size) in [(0, 1), (1, 2), (12, 1), (12, 2), (12, 4), (13, 9)] {
            let reading = reading(n_sequences);
            let shares = shares(&reading, WorldSize::new(world_size).unwrap());
            assert_eq!(shares.iter().map(|share| share.sequences).sum::<u64>(), n_sequences);
            assert_eq!(
                shares.iter().map(|share| share.tokens).sum::<u64>(),
                n_sequences * (n_sequences + 1) / 2
            );
            assert_eq!(
                Coverage::of(&reading),
                Coverage { never: 0, once: n_sequences, more_often: 0 }
            );
        }
    }

    #[test]
    fn coverage_counts_what_is_missing_and_what_comes_again() {
        let mut reading = reading(10);
        reading.batches.remove(1);
        let again = reading.batches[0].clone();
        reading.batches.push(again);
        assert_eq!(Coverage::of(&reading), Coverage { never: 5, once: 0, more_often: 5 });
    }

    #[test]
    fn a_batch_is_dealt_as_the_mesh_deals_it() {
        let reading = reading(5);
        let parts: Vec<usize> =
            rows(&reading.batches[0], WorldSize::new(4).unwrap()).map(<[u64]>::len).collect();
        assert_eq!(parts, [2, 2, 1, 0]);
        assert_eq!(split::chunk(5, Placement::new(2, 4).unwrap()), 4..5);
    }

    #[test]
    fn every_world_can_be_drawn() {
        for world_size in [1, 2, 12, 1024] {
            let svg = draw(&reading(400), WorldSize::new(world_size).unwrap()).unwrap();
            assert!(svg.contains("\nrank 0\n") && svg.len() < 2_000_000, "{world_size}");
        }
        draw(&reading(0), WorldSize::ONE).unwrap();
    }
}
