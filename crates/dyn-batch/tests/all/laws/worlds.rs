//! Laws of epochs that several worlds read in turn: at every step, each sequence is read once.

use std::collections::BTreeSet;

use core_types::{Epoch, Placement, Seed};
use dyn_batch::{
    BatchConfig, BatchState, Buckets, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, Error, GridConfig, Packing, Remainder, StepLayout,
    StepRemainder, Steps,
};
use proptest::prelude::*;

const EPOCH: Epoch = Epoch::new(5);

fn strategies() -> Vec<DynamicBatchStrategy> {
    let sorted = |window, cut| DynamicBatchStrategy::Sorted { window, cut };
    vec![
        DynamicBatchStrategy::PadToMax,
        DynamicBatchStrategy::Dynamic,
        sorted(None, Cut::Optimal),
        sorted(Some(2), Cut::Greedy),
        DynamicBatchStrategy::Bucket(Buckets::Width(4)),
        DynamicBatchStrategy::Pack(Packing::BestFit),
        DynamicBatchStrategy::Pack(Packing::InOrder { open_rows: 2 }),
        DynamicBatchStrategy::Pack(Packing::MinimumSlack),
    ]
}

/// An epoch that several worlds read in turn.
#[derive(Clone, Debug)]
struct SharedEpoch {
    batches: DynamicBatchSampler<Vec<u64>>,
    config: DistributedConfig,
    order: Vec<u64>,
}

impl SharedEpoch {
    /// Returns an epoch, or `None` if the strategy does not support the layout.
    fn new(
        lengths: Vec<u64>,
        order: Vec<u64>,
        config: BatchConfig,
        steps: DistributedConfig,
    ) -> Option<Self> {
        let batches = DynamicBatchSampler::new(lengths, config).unwrap();
        let epoch = Self { batches, config: steps, order };
        match DistributedBatchSampler::new(epoch.batches.clone(), Placement::SINGLE, steps) {
            Err(Error::InvalidConfig { .. }) => None,
            other => other.map(|_| Some(epoch)).unwrap(),
        }
    }

    fn sampler(&self, rank: u64, world_size: u64) -> DistributedBatchSampler<Vec<u64>> {
        let placement = Placement::new(rank, world_size).unwrap();
        DistributedBatchSampler::new(self.batches.clone(), placement, self.config).unwrap()
    }

    /// Returns the steps of each rank after `state`, or of the whole epoch.
    fn steps(
        &self,
        state: Option<&BatchState>,
        world_size: u64,
    ) -> Result<Vec<Steps<Vec<u64>>>, Error> {
        let order = || self.order.iter().copied();
        let steps = |rank| match state {
            Some(state) => self.sampler(rank, world_size).resume(state, order()),
            None => self.sampler(rank, world_size).epoch(EPOCH, order()),
        };
        (0..world_size).map(steps).collect()
    }

    /// Lets worlds read the epoch in turn, the last one to its end. The other worlds read
    /// `n_steps`.
    fn check(&self, worlds: [u64; 3], n_steps: [usize; 2]) {
        let mut unread = self.order.clone();
        let mut state: Option<BatchState> = None;
        let mut repeatable = BTreeSet::new();
        for (world_size, n_steps) in worlds.into_iter().zip([n_steps[0], n_steps[1], usize::MAX]) {
            let is_new_world =
                state.as_ref().is_none_or(|state| state.world_size.as_u64() != world_size);
            let fresh = self.sampler(0, world_size).epoch(EPOCH, unread.iter().copied());
            let mut ranks = match self.steps(state.as_ref(), world_size) {
                Ok(ranks) => ranks,
                Err(error) => {
                    assert!(matches!(error, Error::CannotFillStep { .. }), "{error}");
                    assert_eq!(fresh.unwrap_err(), error);
                    return;
                }
            };
            if is_new_world {
                repeatable.clear();
                let fresh = fresh.unwrap();
                assert_eq!(ranks[0].len(), fresh.len());
                assert!(
                    (0..fresh.len()).all(|nth| ranks[0].all_ranks(nth) == fresh.all_ranks(nth))
                );
            }
            let read: Vec<u64> = ranks
                .iter_mut()
                .flat_map(|steps| steps.by_ref().take(n_steps))
                .flat_map(|step| {
                    step.micro_batches.iter().flat_map(|b| b.indices.clone()).collect::<Vec<_>>()
                })
                .collect();
            self.remove(&mut unread, &mut repeatable, &read);
            assert!(ranks.iter().all(|steps| steps.state() == ranks[0].state()));
            state = Some(ranks[0].state());
            if n_steps == usize::MAX {
                assert_eq!(unread.len() as u64, ranks[0].report().dropped);
            }
        }
        let loses_none = !matches!(self.config.layout, StepLayout::Grid(_))
            && self.config.remainder != StepRemainder::Drop
            && self.batches.config().remainder == Remainder::Keep;
        assert!(unread.is_empty() || !loses_none, "{unread:?} are lost");
    }

    /// Removes the sequences that a world has read, which only this world may repeat.
    fn remove(&self, unread: &mut Vec<u64>, repeatable: &mut BTreeSet<u64>, read: &[u64]) {
        for &index in read {
            match unread.iter().position(|&other| other == index) {
                Some(position) => {
                    unread.remove(position);
                    repeatable.insert(index);
                }
                None => assert!(
                    self.config.remainder == StepRemainder::Repeat && repeatable.contains(&index),
                    "sequence {index} is read twice"
                ),
            }
        }
    }
}

fn all_configs() -> impl Iterator<Item = DistributedConfig> {
    let grid = StepLayout::Grid(GridConfig::default());
    let layouts = [
        (StepLayout::Grouped, None),
        (StepLayout::Grouped, Some(2)),
        (StepLayout::Dealt, None),
        (grid, None),
        (grid, Some(2)),
    ];
    let remainders = [StepRemainder::Split, StepRemainder::Drop, StepRemainder::Repeat];
    let config = DistributedConfig { shuffle: Some(Seed::new(2)), ..DistributedConfig::default() };
    layouts.into_iter().flat_map(move |(layout, accumulation)| {
        remainders.map(|remainder| DistributedConfig { layout, accumulation, remainder, ..config })
    })
}

#[test]
fn worlds_read_each_sequence_once() {
    let lengths: Vec<u64> = (0..14).map(|n| 1 + n * 7 % 9).collect();
    let triples = (0..27).map(|n| [1 + n % 3, 1 + n / 3 % 3, 1 + n / 9]);
    for strategy in strategies() {
        let config = BatchConfig::default().with_max_tokens(18).with_strategy(strategy);
        for steps in all_configs() {
            let order = (0..14).rev().collect();
            let epoch = SharedEpoch::new(lengths.clone(), order, config.clone(), steps);
            let Some(epoch) = epoch else { continue };
            for worlds in triples.clone() {
                for n_steps in 0..16 {
                    epoch.check(worlds, [n_steps % 4, n_steps / 4]);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_worlds_read_each_sequence_once(
        lengths in prop::collection::vec(1_u64..=12, 1..80),
        worlds in prop::array::uniform3(1_u64..=5),
        n_steps in prop::array::uniform2(0_usize..8),
        strategy in prop::sample::select(strategies()),
        config in prop::sample::select(all_configs().collect::<Vec<_>>()),
        multiple in 1_u64..=2,
        is_repeating in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut order: Vec<u64> = (0..lengths.len() as u64).collect();
        if is_repeating && config.remainder != StepRemainder::Repeat {
            order.extend(0..lengths.len() as u64 / 2);
        }
        let batches = BatchConfig::default().with_max_tokens(24).with_remainder(Remainder::Keep);
        let batches = match strategy {
            DynamicBatchStrategy::Pack(_) => batches,
            _ => batches.with_batch_size_multiple(multiple),
        };
        let config = DistributedConfig { shuffle: Some(Seed::new(seed)), ..config };
        let epoch = SharedEpoch::new(lengths, order, batches.with_strategy(strategy), config);
        if let Some(epoch) = epoch {
            epoch.check(worlds, n_steps);
        }
    }
}
