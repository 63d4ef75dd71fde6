//! Hostile sizes: batches, steps and reports are results or errors, never panics.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Instant;

use core_types::{Epoch, Placement, Seed};
use dyn_batch::{
    BatchConfig, BatchState, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, Overlong, Packing, PaddingReport, Remainder,
    StepLayout, StepRemainder,
};

/// A sequence of random numbers, small, large or extreme.
struct Draws(Seed, u64);

impl Draws {
    fn below(&mut self, n: u64) -> u64 {
        self.1 += 1;
        self.0.derive(self.1).as_u64() % n
    }

    fn size(&mut self) -> u64 {
        let bits = self.below(64);
        match self.below(10) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << bits,
            3 => (1 << bits) - 1,
            4 => 1,
            _ => self.below(1 << (bits / 4)),
        }
    }

    fn choose<T: Clone>(&mut self, values: &[T]) -> T {
        values[usize::try_from(self.below(values.len() as u64)).unwrap()].clone()
    }

    fn strategy(&mut self, lengths: &[u64]) -> DynamicBatchStrategy {
        let n_buckets = self.size();
        let buckets = match self.below(3) {
            0 => Buckets::optimal(lengths, n_buckets).unwrap_or(Buckets::Width(n_buckets)),
            1 => Buckets::Width(self.size()),
            _ => Buckets::Boundaries((0..self.below(4)).map(|_| self.size()).collect()),
        };
        let window = self.choose(&[None, Some(0), Some(1), Some(3), Some(u64::MAX)]);
        let cut = self.choose(&[Cut::Greedy, Cut::Optimal]);
        let open_rows = usize::try_from(self.size()).unwrap();
        let packing = [Packing::BestFit, Packing::MinimumSlack, Packing::InOrder { open_rows }];
        match self.below(5) {
            0 => DynamicBatchStrategy::PadToMax,
            1 => DynamicBatchStrategy::Bucket(buckets),
            2 => DynamicBatchStrategy::Dynamic,
            3 => DynamicBatchStrategy::Sorted { window, cut },
            _ => DynamicBatchStrategy::Pack(self.choose(&packing)),
        }
    }

    fn cost(&mut self) -> Cost {
        Cost { per_sequence: self.size(), per_token: self.size(), per_token_squared: self.size() }
    }

    fn config(&mut self, lengths: &[u64]) -> BatchConfig {
        let mut config = BatchConfig::default().with_strategy(self.strategy(lengths));
        if self.below(2) == 0 {
            config = config.with_max_batch_size(self.size());
        }
        if self.below(2) == 0 {
            config = config.with_max_tokens(self.size());
        }
        if self.below(4) == 0 {
            config = config.with_max_cost(self.size(), self.cost());
        }
        if self.below(2) == 0 {
            config = config.with_max_sequence_length(self.size());
        }
        if self.below(3) == 0 {
            config = config.with_batch_size_multiple(self.size());
        }
        if self.below(3) == 0 {
            config = config.with_length_multiple(self.size());
        }
        config
            .with_overlong(self.choose(&[Overlong::Error, Overlong::Truncate, Overlong::Skip]))
            .with_remainder(self.choose(&[Remainder::Drop, Remainder::Keep]))
            .with_fixed_shapes(self.below(3) == 0)
    }
}

fn use_sampler(sampler: &DynamicBatchSampler<Vec<u64>>, draw: &mut Draws) -> u64 {
    let order: Vec<u64> = (0..sampler.lengths().len() as u64).collect();
    let mut report = PaddingReport::default();
    for batch in sampler.iter_order(order.clone()).map_while(Result::ok) {
        report.add(&batch);
        assert!(sampler.config().max_tokens.is_none_or(|max| batch.padded_tokens() <= max));
    }
    let _ = (report.efficiency(), report.to_string());
    let _ = sampler.iter().shuffled(Seed::new(1)).count();
    let config = DistributedConfig {
        layout: draw.choose(&[StepLayout::Grouped, StepLayout::Dealt]),
        remainder: draw.choose(&[StepRemainder::Split, StepRemainder::Drop, StepRemainder::Repeat]),
        cost: draw.cost(),
        ..DistributedConfig::default()
    };
    let mut states: Vec<BatchState> = Vec::new();
    let mut n_steps = 0;
    for _ in 0..3 {
        let world = draw.choose(&[1, 2, 3, 64, 1 << 20]);
        let placement = Placement::new(world - 1, world).unwrap();
        let Ok(sampler) = DistributedBatchSampler::new(sampler.clone(), placement, config) else {
            continue;
        };
        let steps = match states.last() {
            None => sampler.epoch(Epoch::new(draw.size()), order.clone()),
            Some(state) => sampler.resume(state, order.clone()),
        };
        let Ok(mut steps) = steps else { continue };
        let _ = steps.report().to_string();
        for _ in 0..draw.below(4) {
            n_steps += u64::from(steps.next().is_some_and(|step| step.loss_weight() >= 0.));
        }
        let mut state = steps.state();
        if draw.below(8) == 0 {
            state.step = draw.size();
        }
        states.push(state);
    }
    n_steps
}

#[test]
fn hostile_sizes_never_panic() {
    let seed = std::env::var("HUNT").ok().and_then(|seed| seed.parse().ok());
    let n_cases: u64 = std::env::var("CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let (mut n_samplers, mut n_steps) = (0, 0);
    for case in 0..n_cases {
        let started = Instant::now();
        let mut draw = Draws(Seed::new(seed.unwrap_or(0)).derive(case), 0);
        let n_lengths = draw.below(60);
        let lengths: Vec<u64> = (0..n_lengths).map(|_| draw.size()).collect();
        let config = draw.config(&lengths);
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let Ok(sampler) = DynamicBatchSampler::new(lengths.clone(), config.clone()) else {
                return;
            };
            n_samplers += 1;
            n_steps += use_sampler(&sampler, &mut draw);
        }));
        let seconds = started.elapsed().as_secs_f64();
        if found.is_err() || seconds > 2. {
            println!("case {case}, {seconds:.1} s: {config:?} {lengths:?}");
        }
        assert!(found.is_ok());
    }
    println!("{n_samplers} samplers, {n_steps} steps");
}
