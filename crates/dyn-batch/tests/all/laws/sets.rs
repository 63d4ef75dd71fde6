//! Laws of sorted, packed and distributed batches: each sequence once, every limit kept, and the
//! same number of steps on every rank.

use std::collections::BTreeSet;

use core_types::{Epoch, Placement, Seed};
use dyn_batch::{
    Batch, BatchConfig, Buckets, Cost, Cut, DistributedBatchSampler, DistributedConfig,
    DynamicBatchSampler, DynamicBatchStrategy, Error, Packing, PaddingReport, Remainder,
    StepLayout, StepRemainder,
};
use proptest::prelude::*;

use crate::laws::support::{all_lengths, cost_of};

fn strategies() -> Vec<DynamicBatchStrategy> {
    let mut strategies: Vec<_> = [Packing::BestFit, Packing::MinimumSlack]
        .into_iter()
        .chain([1, 2, 3].map(|open_rows| Packing::InOrder { open_rows }))
        .map(DynamicBatchStrategy::Pack)
        .collect();
    for cut in [Cut::Greedy, Cut::Optimal] {
        strategies.extend(
            [None, Some(1), Some(2)].map(|window| DynamicBatchStrategy::Sorted { window, cut }),
        );
    }
    strategies.push(DynamicBatchStrategy::Bucket(Buckets::Boundaries(vec![1, 4, 9])));
    strategies
}

fn is_packing(config: &BatchConfig) -> bool {
    matches!(config.strategy, DynamicBatchStrategy::Pack(_))
}

/// Checks every limit of one batch.
fn check_batch(batch: &Batch, lengths: &[u64], config: &BatchConfig) {
    let own = batch.indices.iter().map(|&index| lengths[usize::try_from(index).unwrap()]);
    let longest = own.clone().max().unwrap();
    assert_eq!(batch.real_tokens, own.sum::<u64>());
    assert!(
        batch.padded_tokens() <= config.max_tokens.unwrap_or(u64::MAX),
        "{batch:?} with {config:?}"
    );
    assert!(
        batch.len() as u64 <= config.max_batch_size.unwrap_or(u64::MAX),
        "{batch:?} with {config:?}"
    );
    if is_packing(config) {
        assert_eq!((batch.rows, Some(batch.padded_length)), (1, config.max_tokens));
        return;
    }
    let padded_length = match (&config.strategy, config.fixed_shapes) {
        (DynamicBatchStrategy::Bucket(Buckets::Boundaries(all)), true) => {
            *all.iter().find(|&&b| longest <= b).unwrap()
        }
        _ => longest,
    };
    assert_eq!(batch.padded_length, padded_length.next_multiple_of(config.length_multiple));
    assert_eq!(batch.rows, batch.len() as u64);
    let cost = cost_of(batch.padded_length, config.cost).checked_mul(batch.rows);
    assert!(
        config.max_cost.is_none_or(|max| cost.is_some_and(|cost| cost <= max)),
        "{batch:?} with {config:?}"
    );
}

fn is_misfit(error: &Error) -> bool {
    matches!(error, Error::SequenceOverBudget { .. } | Error::SequenceMisfit { .. })
}

/// Returns the batches of a single rank, planned all at once, and their report.
fn single_rank_batches(
    sampler: &DynamicBatchSampler<&[u64]>,
) -> Result<(Vec<Batch>, PaddingReport), Error> {
    let config = DistributedConfig::default();
    let single = DistributedBatchSampler::new(sampler.clone(), Placement::SINGLE, config)?;
    let steps = single.epoch(Epoch::ZERO, 0..sampler.lengths().len() as u64)?;
    let report = steps.report();
    Ok((steps.flat_map(|step| step.micro_batches).collect(), report))
}

/// Checks all laws of one configuration; returns the number of batches, or `None` if a sequence
/// fits in no batch.
fn check(lengths: &[u64], config: &BatchConfig) -> Option<usize> {
    let sampler = DynamicBatchSampler::new(lengths, config.clone()).unwrap();
    let mut stream = sampler.iter();
    let batches = match stream.by_ref().collect::<Result<Vec<Batch>, _>>() {
        Ok(batches) => batches,
        Err(error) => {
            assert!(is_misfit(&error), "{error}");
            assert_eq!(single_rank_batches(&sampler).unwrap_err(), error);
            return None;
        }
    };
    for batch in &batches {
        check_batch(batch, lengths, config);
    }
    let mut indices: Vec<u64> = batches.iter().flat_map(|batch| batch.indices.clone()).collect();
    indices.sort_unstable();
    assert!(indices.is_sorted_by(|a, b| a < b), "a sequence occurs twice with {config:?}");
    let dropped = stream.report().dropped;
    assert_eq!(indices.len() as u64 + dropped, lengths.len() as u64);
    assert!(config.remainder == Remainder::Drop && config.batch_size_multiple > 1 || dropped == 0);

    let single = single_rank_batches(&sampler);
    assert_eq!(single, Ok((batches.clone(), *stream.report())), "{config:?}");
    let mut shuffled: Vec<Batch> =
        sampler.iter().shuffled(Seed::new(1)).map(Result::unwrap).collect();
    assert_eq!(PaddingReport::from_iter(&shuffled), PaddingReport::from_iter(&batches));
    shuffled.sort_by_key(|batch| batches.iter().position(|other| other == batch));
    assert_eq!(shuffled, batches);
    Some(batches.len())
}

fn configs(strategy: &DynamicBatchStrategy) -> Vec<BatchConfig> {
    let config = BatchConfig::default().with_strategy(strategy.clone()).with_max_tokens(9);
    if let DynamicBatchStrategy::Pack(_) = strategy {
        return vec![config.clone(), config.with_max_batch_size(2)];
    }
    let mut configs = vec![
        config.clone().with_max_batch_size(3),
        config.clone().with_batch_size_multiple(2),
        config.clone().with_batch_size_multiple(2).with_remainder(Remainder::Keep),
        config.clone().with_length_multiple(4),
        config.clone().with_max_cost(20, Cost::ATTENTION),
        config,
    ];
    if let DynamicBatchStrategy::Bucket(_) = strategy {
        configs.push(configs[0].clone().with_fixed_shapes(true));
    }
    configs
}

#[test]
fn laws_hold_on_small_inputs() {
    for lengths in all_lengths(&[0, 1, 3, 4, 9], 5) {
        for strategy in strategies() {
            for config in configs(&strategy) {
                check(&lengths, &config);
            }
        }
    }
}

#[test]
fn minimum_slack_never_exceeds_best_fit() {
    for lengths in all_lengths(&[2, 3, 4, 5, 7], 5) {
        let rows = |packing| {
            let config = BatchConfig::default()
                .with_strategy(DynamicBatchStrategy::Pack(packing))
                .with_max_tokens(9);
            check(&lengths, &config).unwrap()
        };
        assert!(rows(Packing::MinimumSlack) <= rows(Packing::BestFit), "{lengths:?}");
    }
}

/// Checks all laws of the steps of one world.
fn check_steps(lengths: &[u64], batch_config: &BatchConfig, world: u64, config: DistributedConfig) {
    let batches = DynamicBatchSampler::new(lengths, batch_config.clone()).unwrap();
    let order = || 0..lengths.len() as u64;
    let mut samplers = Vec::new();
    for rank in 0..world {
        let place = Placement::new(rank, world).unwrap();
        samplers.push(DistributedBatchSampler::new(batches.clone(), place, config).unwrap());
    }
    let mut ranks =
        match samplers.iter().map(|sampler| sampler.epoch(Epoch::new(2), order())).collect() {
            Ok::<Vec<_>, Error>(ranks) => ranks,
            Err(error) => {
                let is_too_few = matches!(error, Error::CannotFillStep { .. });
                assert!(
                    is_too_few && config.remainder == StepRemainder::Split || is_misfit(&error),
                    "{error}"
                );
                return;
            }
        };
    let n_steps = ranks[0].len();
    let report = ranks[0].report();
    let mut seen = Vec::new();
    let mut kept = BTreeSet::new();
    for nth in 0..n_steps {
        let batches = ranks[0].all_ranks(nth).unwrap().concat();
        let state = ranks[0].state();
        let resumed = samplers[0].resume(&state, order()).unwrap();
        assert_eq!((resumed.len(), resumed.state()), (n_steps - nth, state.clone()));
        let mut weights = 0.0;
        for (rank, batch) in ranks.iter_mut().zip(&batches) {
            let step = rank.next().unwrap();
            let own = &step.micro_batches[..];
            assert_eq!(
                own,
                std::slice::from_ref(batch),
                "every rank knows the batches of all ranks"
            );
            assert_eq!(
                step.real_tokens,
                batches.iter().map(|batch| batch.real_tokens).sum::<u64>()
            );
            weights += step.loss_weight();
            check_batch(batch, lengths, batch_config);
            seen.extend(batch.indices.clone());
            kept.extend(batch.indices.clone());
        }
        assert!(
            (weights - world as f64).abs() < 1e-9
                || batches.iter().all(|batch| batch.real_tokens == 0)
        );
    }
    assert!(ranks.iter_mut().all(|rank| rank.next().is_none()));
    let repeats = seen.len() - kept.len();
    assert!(repeats == 0 || config.remainder == StepRemainder::Repeat);
    let is_whole = config.remainder != StepRemainder::Drop && batch_config.batch_size_multiple == 1;
    assert!(!is_whole || kept.len() == lengths.len(), "{lengths:?} {batch_config:?} {config:?}");
    assert_eq!(kept.len() as u64 + report.dropped, lengths.len() as u64);
}

fn distributed_configs(can_deal: bool) -> Vec<DistributedConfig> {
    let config = DistributedConfig { cost: Cost::ATTENTION, ..DistributedConfig::default() };
    let layouts = [StepLayout::Grouped, StepLayout::Dealt];
    let layouts = layouts.into_iter().filter(|&layout| can_deal || layout == StepLayout::Grouped);
    let remainders = [StepRemainder::Split, StepRemainder::Drop, StepRemainder::Repeat];
    let all = layouts.flat_map(|layout| {
        remainders.map(|remainder| DistributedConfig { layout, remainder, ..config })
    });
    all.flat_map(|config| [config, DistributedConfig { shuffle: Some(Seed::new(7)), ..config }])
        .collect()
}

fn can_deal(strategy: &DynamicBatchStrategy) -> bool {
    !matches!(strategy, DynamicBatchStrategy::Bucket(_) | DynamicBatchStrategy::Pack(_))
}

#[test]
fn steps_agree_on_every_rank() {
    let mut strategies = strategies();
    strategies.extend([DynamicBatchStrategy::PadToMax, DynamicBatchStrategy::Dynamic]);
    for n in 0..40_u64 {
        let lengths: Vec<u64> = (0..n).map(|i| Seed::new(n).derive(i).as_u64() % 10).collect();
        for strategy in &strategies {
            for config in distributed_configs(can_deal(strategy)) {
                for world in [1, 2, 3] {
                    let batch_config =
                        BatchConfig::default().with_strategy(strategy.clone()).with_max_tokens(30);
                    check_steps(&lengths, &batch_config, world, config);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn laws_hold_on_random_inputs(
        lengths in prop::collection::vec(0_u64..300, 0..120),
        nth in 0_usize..12,
        max_tokens in 300_u64..5000,
        max_batch_size in prop::option::of(1_u64..20),
        seed in any::<u64>(),
        world in 1_u64..9,
    ) {
        let mut strategy = strategies().swap_remove(nth);
        if let DynamicBatchStrategy::Bucket(buckets) = &mut strategy {
            let with_longest = [lengths.as_slice(), &[300]].concat();
            *buckets = Buckets::optimal(with_longest, 1 + seed % 9).unwrap();
        }
        let mut config =
            BatchConfig::default().with_strategy(strategy.clone()).with_max_tokens(max_tokens);
        config.max_batch_size = max_batch_size;
        check(&lengths, &config);
        for steps in distributed_configs(can_deal(&strategy)) {
            check_steps(&lengths, &config, world, steps);
        }
    }
}
