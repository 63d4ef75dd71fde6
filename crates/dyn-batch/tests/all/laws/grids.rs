//! Laws of grids: every sequence once or counted, no limit broken, equally many cells on every rank,
//! the same plan on every rank, and the same global batches in every world.

use core_types::{Epoch, Placement, Seed};
use dyn_batch::{
    Batch, BatchConfig, Cost, DistributedBatchSampler, DistributedConfig, DynamicBatchSampler,
    DynamicBatchStrategy, Error, GridConfig, Packing, Remainder, Step, StepLayout, Steps,
    Synchronization,
};
use proptest::prelude::*;

use crate::laws::support::cost_of;

const EPOCH: Epoch = Epoch::new(3);

/// An epoch of grids.
#[derive(Clone, Debug)]
struct GridEpoch {
    batches: DynamicBatchSampler<Vec<u64>>,
    config: DistributedConfig,
}

impl GridEpoch {
    fn new(lengths: Vec<u64>, batches: BatchConfig, config: DistributedConfig) -> Self {
        Self { batches: DynamicBatchSampler::new(lengths, batches).unwrap(), config }
    }

    fn order(&self) -> impl Iterator<Item = u64> {
        (0..self.batches.lengths().len() as u64).rev()
    }

    fn sampler(
        &self,
        rank: u64,
        world_size: u64,
    ) -> Result<DistributedBatchSampler<Vec<u64>>, Error> {
        let placement = Placement::new(rank, world_size).unwrap();
        DistributedBatchSampler::new(self.batches.clone(), placement, self.config)
    }

    /// Returns the steps of each rank, or `None` if a global batch does not fit the grid.
    fn ranks(&self, world_size: u64) -> Option<Vec<Steps<Vec<u64>>>> {
        let steps = |rank| self.sampler(rank, world_size)?.epoch(EPOCH, self.order());
        match (0..world_size).map(steps).collect() {
            Ok(ranks) => Some(ranks),
            Err(Error::GridMisfit { .. } | Error::InvalidConfig { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn check_batch(&self, batch: &Batch) {
        let config = self.batches.config();
        let lengths = self.batches.lengths();
        let length = |&index: &u64| lengths[usize::try_from(index).unwrap()];
        assert!(!batch.is_empty(), "an empty cell");
        assert_eq!(batch.real_tokens, batch.indices.iter().map(length).sum::<u64>());
        assert!(batch.padded_tokens() <= config.max_tokens.unwrap());
        let is_packed = matches!(config.strategy, DynamicBatchStrategy::Pack(_));
        let cost = if is_packed {
            assert_eq!(batch.rows, 1);
            batch.indices.iter().map(|index| cost_of(length(index), config.cost)).sum()
        } else {
            let longest = batch.indices.iter().map(length).max().unwrap();
            assert_eq!(batch.padded_length, longest.next_multiple_of(config.length_multiple));
            cost_of(batch.padded_length, config.cost) * batch.len() as u64
        };
        assert!(cost <= config.max_cost.unwrap_or(u64::MAX));
    }

    /// Reads all steps of a world, and returns the sequences of each step.
    fn check_world(&self, ranks: Vec<Steps<Vec<u64>>>) -> Vec<Vec<u64>> {
        let report = ranks[0].report();
        assert!(ranks.iter().all(|steps| steps.state() == ranks[0].state()));
        assert!(ranks.iter().all(|steps| steps.grid_report() == ranks[0].grid_report()));
        let by_rank: Vec<Vec<Step>> = ranks.into_iter().map(Iterator::collect).collect();
        let mut all_steps = Vec::new();
        for nth in 0..by_rank[0].len() {
            let step: Vec<&Step> = by_rank.iter().map(|steps| &steps[nth]).collect();
            let n_micro_steps = step[0].micro_batches.len();
            let mut indices = Vec::new();
            let mut tokens = 0;
            for rank in &step {
                assert_eq!(rank.micro_batches.len(), n_micro_steps);
                for batch in &rank.micro_batches {
                    self.check_batch(batch);
                    indices.extend(batch.indices.iter().copied());
                    tokens += batch.real_tokens;
                }
            }
            assert!(step.iter().all(|rank| rank.real_tokens == tokens));
            if let Some(given) = self.config.accumulation {
                assert!(n_micro_steps as u64 <= given);
            }
            all_steps.push(indices);
        }
        let n_read = all_steps.iter().map(Vec::len).sum::<usize>() as u64;
        assert!(by_rank.iter().all(|steps| steps.len() == all_steps.len()));
        assert_eq!(report.sequences, n_read);
        all_steps
    }

    /// Reads `n_steps` in one world and the rest in another.
    fn check(&self, worlds: [u64; 2], n_steps: usize) {
        let Some(mut first) = self.ranks(worlds[0]) else { return };
        let mut read = Vec::new();
        for steps in &mut first {
            for step in steps.by_ref().take(n_steps) {
                read.extend(step.micro_batches.iter().flat_map(|batch| batch.indices.clone()));
            }
        }
        let state = first[0].state();
        let resumed = |rank| self.sampler(rank, worlds[1])?.resume(&state, self.order());
        let resumed: Result<Vec<_>, Error> = (0..worlds[1]).map(resumed).collect();
        let Ok(resumed) = resumed else { return };
        let dropped = resumed[0].report().dropped;
        let rest = if worlds[0] == worlds[1] {
            resumed.into_iter().flatten().flat_map(|step| indices_of(&step)).collect()
        } else {
            self.check_world(resumed).concat()
        };
        read.extend(rest);
        read.sort_unstable();
        let mut once = read.clone();
        once.dedup();
        assert_eq!(once, read, "a sequence is read twice");
        assert_eq!(read.len() as u64 + dropped, self.batches.lengths().len() as u64);
    }
}

fn indices_of(step: &Step) -> Vec<u64> {
    step.micro_batches.iter().flat_map(|batch| batch.indices.clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn grids_read_each_sequence_once(
        lengths in prop::collection::vec(0_u64..=20, 0..90),
        worlds in prop::array::uniform2(1_u64..=5),
        n_steps in 0_usize..5,
        is_packed in any::<bool>(),
        max_cost in prop::option::of(Just(900_u64)),
        multiples in (1_u64..=2, 1_u64..=3),
        remainder in prop::sample::select(vec![Remainder::Keep, Remainder::Drop]),
        accumulation in prop::option::of(1_u64..=4),
        global_batch_size in prop::option::of(4_u64..=24),
        waits_once in any::<bool>(),
        seed in prop::option::of(any::<u64>()),
    ) {
        let mut batches = BatchConfig::default().with_max_tokens(48).with_remainder(remainder);
        if let Some(max_cost) = max_cost {
            batches = batches.with_max_cost(max_cost, Cost::ATTENTION);
        }
        let batches = if is_packed {
            batches.with_strategy(DynamicBatchStrategy::Pack(Packing::BestFit))
        } else {
            batches.with_batch_size_multiple(multiples.0).with_length_multiple(multiples.1)
        };
        let synchronization =
            if waits_once { Synchronization::Step } else { Synchronization::MicroStep };
        let grid = GridConfig { global_batch_size, synchronization };
        let config = DistributedConfig {
            shuffle: seed.map(Seed::new),
            layout: StepLayout::Grid(grid),
            cost: Cost { per_sequence: 1, per_token: 2, per_token_squared: 3 },
            accumulation,
            ..DistributedConfig::default()
        };
        let epoch = GridEpoch::new(lengths, batches, config);
        if let Some(ranks) = epoch.ranks(worlds[0]) {
            epoch.check_world(ranks);
        }
        epoch.check(worlds, n_steps);
    }
}

fn grids(grid: GridConfig) -> DistributedConfig {
    DistributedConfig { layout: StepLayout::Grid(grid), ..DistributedConfig::default() }
}

#[test]
fn global_batches_are_equal_in_every_world() {
    let lengths: Vec<u64> = (0..100).map(|n| 1 + n * 37 % 61).collect();
    let batches = BatchConfig::default().with_max_tokens(400).with_remainder(Remainder::Keep);
    let grid = GridConfig { global_batch_size: Some(24), ..GridConfig::default() };
    let config = grids(grid);
    let epoch = GridEpoch::new(lengths, batches, config);
    let order: Vec<u64> = epoch.order().collect();
    for world_size in 1..=4 {
        let mut steps = epoch.check_world(epoch.ranks(world_size).unwrap());
        for step in &mut steps {
            step.sort_unstable_by(|a, b| b.cmp(a));
        }
        assert!(order.chunks(24).eq(steps.iter().map(Vec::as_slice)), "{world_size} ranks");
    }
}

#[test]
fn accumulation_is_the_fewest_within_limits() {
    let config = grids(GridConfig { global_batch_size: Some(8), ..GridConfig::default() });
    let batches = BatchConfig::default().with_max_tokens(20);
    let epoch = GridEpoch::new([vec![10; 8], vec![5; 8]].concat(), batches, config);
    let steps = epoch.sampler(0, 2).unwrap().epoch(EPOCH, 0..16).unwrap();
    let counts: Vec<usize> = steps.map(|step| step.micro_batches.len()).collect();
    assert_eq!(counts, [2, 1]);
}

#[test]
fn longest_prefix_fills_each_grid() {
    // Cells of 30 tokens hold three tens; a grid of two ranks holds six, in the order of the epoch.
    let config = grids(GridConfig::default());
    for strategy in [DynamicBatchStrategy::PadToMax, DynamicBatchStrategy::Pack(Packing::BestFit)] {
        let batches = BatchConfig::default().with_strategy(strategy).with_max_tokens(30);
        let epoch = GridEpoch::new(vec![10; 15], batches.with_remainder(Remainder::Keep), config);
        let steps = epoch.check_world(epoch.ranks(2).unwrap());
        assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [6, 6, 3]);
    }
}

#[test]
fn grids_that_cannot_be_filled_are_errors() {
    let grid = |size| {
        StepLayout::Grid(GridConfig { global_batch_size: Some(size), ..GridConfig::default() })
    };
    let epoch = |layout, accumulation| {
        let accumulation = Some(accumulation);
        let config = DistributedConfig { layout, accumulation, ..DistributedConfig::default() };
        GridEpoch::new(vec![10; 16], BatchConfig::default().with_max_tokens(20), config)
    };
    let error = epoch(grid(8), 5).sampler(0, 2).unwrap_err();
    assert_eq!(error.to_string(), "8 sequences in groups of 1 cannot fill 10 micro-batches");
    let error = epoch(grid(8), 1).sampler(0, 2).unwrap().epoch(EPOCH, 0..16).unwrap_err();
    assert_eq!(error.to_string(), "8 sequences need 4 micro-batches, above the 2 of a step");
    let error = epoch(StepLayout::Dealt, 2).sampler(0, 2).unwrap_err();
    assert!(error.to_string().starts_with("accumulation cannot be used with dealt steps"));
    let error = epoch(grid(8), 0).sampler(0, 2).unwrap_err();
    assert_eq!(error, Error::Zero { setting: "accumulation" });
    assert!(epoch(grid(8), 4).sampler(0, 2).unwrap().epoch(EPOCH, 0..7).unwrap().next().is_none());
}
