//! The law of all histories: no sample is lost or read twice, and workers change nothing. Histories
//! have random data sets, orders, batches, workers and worlds, with a kill after any batch.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use core_types::{Epoch, Placement, Seed};
use data_loader::{
    BoxError, DataLoader, Dataset, Error, LoaderBuilder, LoaderState, SampleBatch, ShardSource,
    ShardedDataset, concat,
};
use dist_sampler::{
    DistributedSampler, MixtureEnd, MixturePart, Order, Partition, Quota, SamplerConfig, Tail,
};
use dyn_batch::{BatchConfig, Buckets, DynamicBatchStrategy, Packing};

/// A source of random choices.
#[derive(Clone)]
struct Dice {
    seed: Seed,
    n_drawn: u64,
}

impl Dice {
    fn draw_below(&mut self, n: u64) -> u64 {
        self.n_drawn += 1;
        self.seed.derive(self.n_drawn).as_u64() % n
    }

    fn coin(&mut self) -> bool {
        self.draw_below(2) == 0
    }

    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.draw_below(choices.len() as u64)).unwrap()].clone()
    }
}

/// Common properties of all loaders of a history.
struct History {
    n: u64,
    batches: BatchKind,
    epoch: Epoch,
    seed: Seed,
    dataset: u64,
}

enum BatchKind {
    Fixed { size: u64, drops_last: bool, order: OrderKind, tail: Tail },
    Planned { lengths: Vec<u64>, config: BatchConfig },
}

enum OrderKind {
    Permuted(Order),
    Weighted(Vec<f64>),
    Stratified(Vec<u32>),
    /// Shards of seven samples over lanes.
    Sharded {
        lanes: u64,
    },
    /// Parts of the data set, and weights from positions on.
    Mixture {
        parts: Vec<MixturePart>,
        len: u64,
        changes: Vec<(u64, Vec<u64>)>,
    },
}

impl History {
    fn draw(dice: &mut Dice) -> Self {
        let n = 1 + dice.draw_below(300);
        let batches =
            if dice.draw_below(3) == 0 { draw_planned(dice, n) } else { draw_fixed(dice, n) };
        let (epoch, seed) = (Epoch::new(dice.draw_below(3)), Seed::new(dice.draw_below(100)));
        Self { n, batches, epoch, seed, dataset: dice.draw_below(4) }
    }

    fn sampler(&self, order: &OrderKind, tail: Tail, place: Placement) -> DistributedSampler {
        let config = SamplerConfig::default()
            .with_partition(Partition::Strided)
            .with_tail(tail)
            .with_seed(self.seed);
        match order {
            OrderKind::Permuted(order) => {
                DistributedSampler::new(self.n, place, config.with_order(*order))
            }
            OrderKind::Weighted(weights) => {
                DistributedSampler::weighted(weights, self.n, place, config)
            }
            OrderKind::Stratified(labels) => {
                DistributedSampler::stratified(labels, Quota::All, place, config)
            }
            OrderKind::Sharded { lanes } => {
                DistributedSampler::sharded(&Sevens(self.n).shard_lens(), *lanes, place, config)
            }
            OrderKind::Mixture { parts, len, changes } => {
                let end = MixtureEnd::Repeat { len: *len };
                changes.iter().fold(
                    DistributedSampler::mixture(parts, end, place, config),
                    |sampler, (from, weights)| sampler?.with_weights_from(*from, weights),
                )
            }
        }
        .unwrap()
    }

    /// Returns the number of reads of each sample in an epoch.
    fn expected_reads(&self) -> BTreeMap<u64, u64> {
        let mut reads = BTreeMap::new();
        match &self.batches {
            BatchKind::Fixed { order, tail, .. } => {
                let mut sampler = self.sampler(order, *tail, Placement::SINGLE);
                sampler.set_epoch(self.epoch);
                sampler.iter().for_each(|index| *reads.entry(index).or_default() += 1);
            }
            BatchKind::Planned { .. } => reads.extend((0..self.n).map(|index| (index, 1))),
        }
        reads
    }

    fn loader(&self, place: Placement, n_workers: usize, depth: usize) -> Result<Loader, Error> {
        let builder = DataLoader::builder(self.dataset()).num_workers(n_workers);
        let builder = self.with_batches(builder.prefetch_factor(depth), place);
        builder.collate(|samples: SampleBatch<u64>| {
            assert_eq!(samples.items, samples.batch.indices);
            Ok((samples.number, samples.items, samples.is_padding))
        })
    }

    fn with_batches(
        &self,
        builder: LoaderBuilder<Box<dyn Dataset<Item = u64>>>,
        place: Placement,
    ) -> LoaderBuilder<Box<dyn Dataset<Item = u64>>> {
        match &self.batches {
            BatchKind::Fixed { size, drops_last, order, tail } => builder
                .batch_size(*size)
                .drop_last(*drops_last)
                .sampler(self.sampler(order, *tail, place)),
            BatchKind::Planned { lengths, config } => {
                builder.batches(config.clone(), lengths.clone()).shuffle(self.seed).placement(place)
            }
        }
    }

    /// Returns a data set of samples that equal their indices.
    fn dataset(&self) -> Box<dyn Dataset<Item = u64>> {
        let n = self.n;
        match self.dataset {
            0 => Box::new((0..n).collect::<Vec<u64>>()),
            1 => Box::new(concat([(0..n / 3).collect::<Vec<u64>>(), (n / 3..n).collect()])),
            2 => Box::new(
                (0..n)
                    .rev()
                    .collect::<Vec<u64>>()
                    .map(move |index| Ok(n - 1 - index))
                    .subset((0..n).rev().collect())
                    .map(move |index| Ok(n - 1 - index)),
            ),
            _ => Box::new(ShardedDataset::new(Sevens(n), 3).unwrap()),
        }
    }
}

/// Shards of seven numbers.
struct Sevens(u64);

impl ShardSource for Sevens {
    type Shard = Vec<u64>;

    fn shard_lens(&self) -> Vec<u64> {
        (0..self.0).step_by(7).map(|start| 7.min(self.0 - start)).collect()
    }

    fn open(&self, shard: usize) -> Result<Vec<u64>, BoxError> {
        let start = shard as u64 * 7;
        Ok((start..self.0.min(start + 7)).collect())
    }
}

fn draw_fixed(dice: &mut Dice, n: u64) -> BatchKind {
    let order = match dice.draw_below(8) {
        0 => OrderKind::Weighted((0..n).map(|n| (n % 7) as f64 + 0.5).collect()),
        1 => OrderKind::Stratified((0..n).map(|n| u32::try_from(n % 3).unwrap()).collect()),
        2 => OrderKind::Permuted(Order::Sequential),
        3 => OrderKind::Permuted(Order::Exact),
        4 => OrderKind::Sharded { lanes: 1 + dice.draw_below(9) },
        5 | 6 if n >= 3 => draw_mixture(dice, n),
        _ => OrderKind::Permuted(Order::Streaming),
    };
    let (size, drops_last) = (1 + dice.draw_below(20), dice.coin());
    BatchKind::Fixed { size, drops_last, order, tail: dice.pick(&[Tail::Drop, Tail::Pad]) }
}

fn draw_mixture(dice: &mut Dice, n: u64) -> OrderKind {
    let lens = [n / 3, n / 3, n - 2 * (n / 3)];
    let parts = lens.map(|len| MixturePart::new(len, 1 + dice.draw_below(5))).to_vec();
    let len = 1 + dice.draw_below(400);
    let mut changes = Vec::new();
    let mut from = 0;
    for _ in 0..dice.draw_below(3) {
        from += dice.draw_below(200);
        changes.push((from, vec![dice.draw_below(4), 1 + dice.draw_below(4), dice.draw_below(4)]));
    }
    OrderKind::Mixture { parts, len, changes }
}

fn draw_planned(dice: &mut Dice, n: u64) -> BatchKind {
    let strategy = dice.pick(&[
        DynamicBatchStrategy::Dynamic,
        DynamicBatchStrategy::Bucket(Buckets::Width(8)),
        DynamicBatchStrategy::Pack(Packing::BestFit),
    ]);
    let lengths = (0..n).map(|_| 1 + dice.draw_below(40)).collect();
    let config = BatchConfig::default().with_max_tokens(64 + dice.draw_below(200));
    BatchKind::Planned { lengths, config: config.with_strategy(strategy) }
}

type Loader = DataLoader<(u64, Vec<u64>, Vec<bool>)>;

/// Samples that the loaders of a history have read.
struct Reads {
    expected: BTreeMap<u64, u64>,
    seen: BTreeMap<u64, u64>,
}

impl Reads {
    fn add(&mut self, indices: &[u64], is_padding: &[bool]) {
        for (&index, &is_padding) in indices.iter().zip(is_padding) {
            if is_padding {
                continue;
            }
            let times = self.seen.entry(index).or_default();
            *times += 1;
            assert!(
                *times <= self.expected.get(&index).copied().unwrap_or(0),
                "{index} is read again"
            );
        }
    }

    fn n_left(&self) -> u64 {
        self.expected.values().sum::<u64>() - self.seen.values().sum::<u64>()
    }
}

/// Runs one history, and checks the law.
pub(crate) fn check_history(number: u64) {
    let mut dice = Dice { seed: Seed::new(number), n_drawn: 0 };
    let history = History::draw(&mut dice);
    let mut reads = Reads { expected: history.expected_reads(), seen: BTreeMap::new() };
    let mut state: Option<LoaderState> = None;
    let n_worlds = 1 + dice.draw_below(4);
    for world in 1..=n_worlds {
        let world_size = 1 + dice.draw_below(5);
        let n_left = reads.n_left();
        let taken = if world == n_worlds { u64::MAX } else { dice.draw_below(8) };
        match run_world(&history, &mut dice, world_size, state.as_ref(), taken, &mut reads) {
            Some(next) => state = Some(next),
            // Too few samples are left for a batch on each rank.
            None => return,
        }
        if world == n_worlds {
            check_end(&history, world_size, n_left, reads.n_left());
        }
    }
}

/// Reads `taken` batches on each rank of a world, and returns the state of any rank, or `None` if
/// the world cannot read the epoch.
fn run_world(
    history: &History,
    dice: &mut Dice,
    world_size: u64,
    state: Option<&LoaderState>,
    taken: u64,
    reads: &mut Reads,
) -> Option<LoaderState> {
    let mut states = Vec::new();
    for rank in 0..world_size {
        let place = Placement::new(rank, world_size).unwrap();
        let (n_workers, depth) = (dice.draw_below(5), 1 + dice.draw_below(3));
        let (n_workers, depth) =
            (usize::try_from(n_workers).unwrap(), usize::try_from(depth).unwrap());
        let mut loader = start(history, place, n_workers, depth, state)?;
        let mut serial = start(history, place, 0, 1, state)?;
        assert_eq!(loader.len(), serial.len());
        for _ in 0..taken.min(loader.len() as u64) {
            let batch = loader.next().unwrap().unwrap();
            assert_eq!(batch, serial.next().unwrap().unwrap(), "{n_workers} workers");
            reads.add(&batch.1, &batch.2);
        }
        assert_eq!(loader.state_dict(), serial.state_dict());
        states.push(serde_json::to_string(&loader.state_dict()).unwrap());
    }
    assert!(states.iter().all(|state| *state == states[0]), "ranks have equal states");
    Some(serde_json::from_str(&dice.pick(&states)).unwrap())
}

fn start(
    history: &History,
    place: Placement,
    n_workers: usize,
    depth: usize,
    state: Option<&LoaderState>,
) -> Option<Loader> {
    let mut loader = match history.loader(place, n_workers, depth) {
        Err(Error::NoBatches { .. }) => return None,
        loader => loader.unwrap(),
    };
    let started = match state {
        // A loop that sets its first epoch does not begin it anew.
        Some(state) => loader.load_state_dict(state).and_then(|()| loader.set_epoch(history.epoch)),
        None => loader.set_epoch(history.epoch),
    };
    match started {
        Err(Error::Batch(dyn_batch::Error::CannotFillStep { .. })) => None,
        started => {
            started.unwrap();
            Some(loader)
        }
    }
}

/// Checks how many samples the last world has left unread of `n_left`.
fn check_end(history: &History, world_size: u64, n_left: u64, n_unread: u64) {
    let expected = match &history.batches {
        BatchKind::Fixed { size, drops_last, tail: Tail::Drop, .. } => {
            let share = n_left / world_size;
            n_left - world_size * if *drops_last { share / size * size } else { share }
        }
        // Padding may be among the samples that are dropped.
        BatchKind::Fixed { size, drops_last: true, .. } => {
            assert!(n_unread < size * world_size);
            return;
        }
        BatchKind::Fixed { .. } | BatchKind::Planned { .. } => 0,
    };
    assert_eq!(n_unread, expected);
}

#[test]
fn histories_keep_every_sample() {
    for number in 0..300 {
        check_history(number);
    }
}
