//! Batches are equal for any number of workers, and faults stay in their batch.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use core_types::{Epoch, Placement, Seed};
use data_loader::{
    BoxError, DataLoader, Dataset, Error, LoaderBuilder, OnError, SampleBatch, concat,
};
use dist_sampler::{
    DistributedSampler, MixtureEnd, MixturePart, Order, Partition, SamplerConfig, Tail,
};
use dyn_batch::{BatchConfig, Overlong};

type Batches = Vec<Vec<u64>>;

fn numbers(n: u64) -> LoaderBuilder<Vec<u64>> {
    DataLoader::builder((0..n).collect::<Vec<_>>())
}

#[expect(clippy::unnecessary_wraps, reason = "the signature of a collate function")]
fn items<T>(samples: SampleBatch<T>) -> Result<Vec<T>, BoxError> {
    Ok(samples.items)
}

fn epoch_of<D: Dataset<Item = u64> + 'static>(builder: LoaderBuilder<D>, epoch: u64) -> Batches {
    let mut loader = builder.collate(items).unwrap();
    loader.set_epoch(Epoch::new(epoch)).unwrap();
    let n_batches = loader.len();
    let batches: Batches = loader.collect::<Result<_, _>>().unwrap();
    assert_eq!(batches.len(), n_batches);
    batches
}

#[test]
fn mixtures_of_other_lengths_are_rejected() {
    let end = MixtureEnd::Repeat { len: 20 };
    for (lens, is_right) in [([30, 20], true), ([30, 10], false), ([30, 21], false)] {
        let parts = lens.map(|len| MixturePart::new(len, 1));
        let config = SamplerConfig::default();
        let mixture = DistributedSampler::mixture(&parts, end, Placement::SINGLE, config).unwrap();
        let loader = numbers(50).batch_size(2).sampler(mixture).collate(items);
        assert_eq!(loader.is_ok(), is_right, "{lens:?}");
        assert!(matches!(loader, Ok(_) | Err(Error::LengthMismatch { expected: 50, .. })));
    }
}

#[test]
fn epochs_have_different_orders() {
    let mut loader =
        numbers(50).batch_size(8).shuffle(Seed::new(1)).num_workers(2).collate(items).unwrap();
    assert!(matches!(loader.next(), Some(Err(Error::NoEpoch))), "before the first epoch");
    assert!(loader.next().is_none());
    assert_eq!(loader.epoch(), None);
    let mut epoch = |n| {
        loader.set_epoch(Epoch::new(n)).unwrap();
        // Nothing happens at the current epoch.
        loader.set_epoch(Epoch::new(n)).unwrap();
        loader.by_ref().map(Result::unwrap).collect::<Batches>().concat()
    };
    let (first, second, again) = (epoch(0), epoch(1), epoch(0));
    assert_ne!(first, second);
    assert_eq!(first, again);
    let mut sorted = second;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..50).collect::<Vec<_>>());
}

/// Sample 13 cannot be read, and 40 panics.
#[derive(Clone)]
struct Faulty;

impl Dataset for Faulty {
    type Item = u64;

    fn len(&self) -> u64 {
        50
    }

    fn read(&self, index: u64) -> Result<u64, BoxError> {
        match index {
            13 => Err("a truncated line".into()),
            40 => panic!("a bug"),
            _ => Ok(index),
        }
    }
}

#[test]
fn faults_stay_in_their_batch() {
    for n_workers in [0, 1, 3] {
        let builder = DataLoader::builder(Faulty).batch_size(5).num_workers(n_workers);
        let mut loader = builder.collate(items).unwrap();
        loader.set_epoch(Epoch::ZERO).unwrap();
        let batches: Vec<_> = loader.by_ref().take(8).collect();
        assert!(matches!(batches[2], Err(Error::Sample { index: 13, .. })));
        assert!(batches.iter().enumerate().all(|(n, batch)| n == 2 || batch.is_ok()));
        let panic = catch_unwind(AssertUnwindSafe(|| loader.next()));
        assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "a bug");
        assert_eq!(loader.next().unwrap().unwrap(), [45, 46, 47, 48, 49]);
        assert!(loader.next().is_none());
    }
}

#[test]
fn collate_errors_name_their_batch() {
    let mut loader = numbers(10)
        .batch_size(5)
        .collate(|samples| if samples.number == 1 { Err("too large".into()) } else { Ok(()) })
        .unwrap();
    loader.set_epoch(Epoch::new(7)).unwrap();
    assert!(loader.next().unwrap().is_ok());
    let error = loader.next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "failed to collate batch 1 of epoch 7: too large");
}

/// Fails for odd samples from 20 on.
fn odd_samples_fail() -> impl Dataset<Item = u64> {
    (0..40_u64).collect::<Vec<_>>().map(|n| {
        if n >= 20 && n % 2 == 1 { Err(format!("sample {n} is odd").into()) } else { Ok(n) }
    })
}

#[test]
fn skipped_samples_are_counted_when_taken() {
    for n_workers in [0, 2] {
        let mut loader = DataLoader::builder(odd_samples_fail())
            .batch_size(10)
            .num_workers(n_workers)
            .on_error(OnError::Skip { at_most: 6 })
            .collate(Ok)
            .unwrap();
        loader.set_epoch(Epoch::ZERO).unwrap();
        let (first, second) = (loader.next().unwrap().unwrap(), loader.next().unwrap().unwrap());
        assert_eq!((first.items.len(), second.items.len()), (10, 10));
        assert_eq!(loader.skipped().count, 0, "workers may have seen the faults already");
        let third = loader.next().unwrap().unwrap();
        assert_eq!(third.items, [20, 22, 24, 26, 28]);
        assert_eq!(third.batch.indices, third.items);
        assert_eq!((third.batch.rows, third.batch.real_tokens), (10, 5));
        assert_eq!(loader.skipped().count, 5);
        let sample = &loader.skipped().samples[1];
        assert_eq!((sample.index, sample.error.to_string()), (23, "sample 23 is odd".to_owned()));
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::TooManySkipped { at_most: 6, index: 39, .. }), "{error:?}");
        assert_eq!(loader.skipped().count, 10);
    }
}

#[test]
fn batch_without_samples_is_an_error() {
    let mut loader = DataLoader::builder(odd_samples_fail())
        .sampler(
            sampler(40, Order::Sequential, Tail::Drop)
                .with_placement(Placement::new(1, 2).unwrap())
                .unwrap(),
        )
        .batch_size(5)
        .on_error(OnError::Skip { at_most: 100 })
        .collate(items)
        .unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    let batches: Vec<_> = loader.by_ref().collect();
    assert!(batches[0].is_ok() && batches[1].is_ok());
    assert!(matches!(batches[2], Err(Error::Collate { batch: 2, .. })));
    assert_eq!(loader.skipped().count, 10);
}

fn sampler(n: u64, order: Order, tail: Tail) -> DistributedSampler {
    let config = SamplerConfig::default()
        .with_order(order)
        .with_partition(Partition::Strided)
        .with_tail(tail);
    DistributedSampler::new(n, Placement::SINGLE, config).unwrap()
}

#[test]
fn padding_of_a_tail_is_marked() {
    let marks = |rank| {
        let mut loader = numbers(5)
            .sampler(sampler(5, Order::Sequential, Tail::Pad))
            .placement(Placement::new(rank, 3).unwrap())
            .batch_size(2)
            .collate(|samples| Ok((samples.items, samples.is_padding)))
            .unwrap();
        loader.set_epoch(Epoch::ZERO).unwrap();
        loader.next().unwrap().unwrap()
    };
    assert_eq!(marks(1), (vec![1, 4], vec![false, false]));
    assert_eq!(marks(2), (vec![2, 0], vec![false, true]));
}

struct CountingReads(Arc<AtomicU64>);

impl Dataset for CountingReads {
    type Item = ();

    fn len(&self) -> u64 {
        100_000
    }

    fn read(&self, _: u64) -> Result<(), BoxError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn dropped_loader_leaves_nothing() {
    let n_read = Arc::new(AtomicU64::new(0));
    let collated = Arc::new(());
    let guard = Arc::clone(&collated);
    let builder = DataLoader::builder(CountingReads(Arc::clone(&n_read))).batch_size(10);
    let mut loader = builder.num_workers(4).collate(move |_| Ok(Arc::clone(&guard))).unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    loader.next().unwrap().unwrap();
    drop(loader);
    assert_eq!(Arc::strong_count(&n_read), 1, "the data set is gone");
    assert_eq!(Arc::strong_count(&collated), 1, "and so are the batches");
    assert!(n_read.load(Ordering::Relaxed) <= 10 * (4 * 2 + 1));
}

/// Sample 7 is read when the test says so.
struct Hanging {
    release: Mutex<mpsc::Receiver<()>>,
}

impl Dataset for Hanging {
    type Item = u64;

    fn len(&self) -> u64 {
        20
    }

    fn read(&self, index: u64) -> Result<u64, BoxError> {
        if index == 7 {
            // Ends when the test drops the sender.
            let _ = self.release.lock().unwrap().recv();
        }
        Ok(index)
    }
}

#[test]
fn hanging_reader_is_a_timeout() {
    let (sender, release) = mpsc::channel();
    let dataset = Hanging { release: Mutex::new(release) };
    let mut loader = DataLoader::builder(dataset)
        .batch_size(4)
        .num_workers(2)
        .timeout(Duration::from_secs(1))
        .collate(items)
        .unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    assert_eq!(loader.next().unwrap().unwrap(), [0, 1, 2, 3]);
    let error = loader.next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Timeout { batch: 1, at, .. } if at == "sample 7"), "{error}");
    let rest: Batches = loader.by_ref().map(Result::unwrap).collect();
    assert_eq!(rest.concat(), (8..20).collect::<Vec<_>>());
    drop(loader); // although a thread hangs
    drop(sender);
}

#[test]
fn cancelled_batches_end_after_a_sample() {
    let (sender, release) = mpsc::channel();
    let (begun, has_begun) = mpsc::channel();
    let release = Mutex::new(release);
    let dataset = (0..100_u64).collect::<Vec<_>>().map(move |n| {
        begun.send(n)?;
        release.lock().unwrap().recv()?;
        Ok(n)
    });
    let builder = DataLoader::builder(dataset).batch_size(50).num_workers(1);
    let mut loader = builder.collate(items).unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    let release = |n: usize| (0..n).for_each(|_| sender.send(()).unwrap());
    release(50);
    loader.next().unwrap().unwrap();
    // The worker is at the first sample of the second batch, which is never taken.
    assert_eq!(has_begun.iter().take(51).last(), Some(50));
    loader.set_epoch(Epoch::new(1)).unwrap();
    release(100);
    drop(loader);
    assert_eq!(has_begun.iter().count(), 0);
}

#[test]
fn uneven_ranks_must_be_allowed() {
    let rank = |rank| Placement::new(rank, 4).unwrap();
    let spread = || numbers(9).sampler(sampler(9, Order::Sequential, Tail::Spread));
    let error = spread().placement(rank(0)).collate(items).unwrap_err();
    assert!(matches!(error, Error::UnevenBatches { fewest: 2, most: 3 }), "{error}");
    // 9 samples are 3 batches of 1 on the first rank and 2 on the others.
    let n_batches = [0, 1, 2, 3].map(|n| epoch_of(numbers(9).uneven().placement(rank(n)), 0).len());
    assert_eq!(n_batches, [3, 2, 2, 2]);
    // Batches of 3 are equally many.
    assert_eq!(epoch_of(spread().placement(rank(0)).batch_size(3), 0).len(), 1);
}

#[test]
fn epochs_without_batches_are_rejected() {
    let rank = Placement::new(0, 4).unwrap();
    let error = numbers(3).placement(rank).collate(items).unwrap_err();
    assert!(matches!(error, Error::NoBatches { samples: 3, .. }), "{error}");
    let error = numbers(3).batch_size(4).drop_last(true).collate(items).unwrap_err();
    assert!(matches!(error, Error::NoBatches { batch_size: 4, .. }), "{error}");
    // An empty rank is allowed in an evaluation, and an empty data set never.
    let last = Placement::new(3, 4).unwrap();
    assert_eq!(epoch_of(numbers(3).uneven().placement(last), 0).len(), 0);
    let error = numbers(0).uneven().collate(items).unwrap_err();
    assert!(matches!(error, Error::Sampler(dist_sampler::Error::EmptyDataSet)), "{error}");
}

#[test]
fn contradictory_settings_are_rejected() {
    let lengths = || vec![3_u64; 10];
    let config = || BatchConfig::default().with_max_tokens(12);
    let ordered = sampler(10, Order::Sequential, Tail::Drop);
    let invalid: [(&str, LoaderBuilder<Vec<u64>>); 8] = [
        ("the batch size", numbers(10).batch_size(0)),
        ("the prefetch factor", numbers(10).num_workers(1).prefetch_factor(0)),
        ("the batch size", numbers(10).batch_size(2).batches(config(), lengths())),
        ("`drop_last`", numbers(10).drop_last(true).batches(config(), lengths())),
        ("`steps`", numbers(10).steps(dyn_batch::DistributedConfig::default())),
        ("`shuffle`", numbers(10).sampler(ordered).shuffle(Seed::new(1))),
        ("`timeout`", numbers(10).timeout(Duration::from_secs(1))),
        ("`timeout`", numbers(10).timeout(Duration::from_secs(1)).num_workers(0)),
    ];
    for (expected, builder) in invalid {
        match builder.collate(items).unwrap_err() {
            Error::Setting { name, .. } => assert_eq!(name, expected),
            error => panic!("{error}"),
        }
    }
    let error = numbers(9).batches(config(), lengths()).collate(items).unwrap_err();
    assert!(matches!(error, Error::LengthMismatch { found: 10, expected: 9, .. }), "{error}");
}

#[test]
fn skipped_samples_shrink_planned_batches() {
    let lengths: Vec<u64> = (1..=8).collect();
    let config = || BatchConfig::default().with_max_batch_size(4);
    let truncated = config().with_max_sequence_length(2).with_overlong(Overlong::Truncate);
    for (config, length, tokens) in [(config(), 4, 7), (truncated, 2, 1 + 2 + 2)] {
        let dataset = lengths.clone().map(|n| if n == 3 { Err("corrupt".into()) } else { Ok(n) });
        let mut loader = DataLoader::builder(dataset)
            .batches(config, lengths.clone())
            .on_error(OnError::Skip { at_most: 1 })
            .collate(|samples| Ok((samples.with_lengths(|n| *n)?, samples.batch)))
            .unwrap();
        loader.set_epoch(Epoch::ZERO).unwrap();
        let (positions, batch) = loader.next().unwrap().unwrap();
        assert_eq!((batch.indices, batch.rows), (vec![0, 1, 3], 4));
        assert_eq!((batch.padded_length, batch.real_tokens), (length, tokens));
        assert_eq!((positions.indices, positions.rows), (vec![0, 1, 2], 4));
    }
}

#[test]
fn random_changes_do_not_depend_on_workers() {
    let noisy = |dataset: Vec<u64>| {
        dataset
            .map_seeded(|n, seed| Ok(n ^ seed.as_u64()))
            .map_seeded(|n, seed| Ok(n ^ seed.as_u64()))
    };
    let batches = |n_workers, epoch| {
        let dataset = concat([noisy((0..30).collect()), noisy((30..60).collect())]);
        let builder = DataLoader::builder(dataset).batch_size(7).shuffle(Seed::new(2));
        epoch_of(builder.num_workers(n_workers), epoch)
    };
    assert_eq!(batches(0, 1), batches(3, 1));
    assert_ne!(batches(0, 1), batches(0, 2));
    // The streams of nested changes differ, or they would cancel each other.
    assert!(batches(0, 1).concat().iter().all(|n| *n > 60));
}

#[test]
fn mixtures_need_a_weight_for_each_data_set() {
    let data = concat([vec![0_u8; 3], vec![1; 5]]);
    let mixture = |weights: &[u64]| data.mixture(weights, MixtureEnd::FirstExhausted, Seed::new(1));
    let found = mixture(&[1, 2]).unwrap();
    let parts = [MixturePart::new(3, 1), MixturePart::new(5, 2)];
    let config = SamplerConfig::default().with_seed(Seed::new(1)).with_tail(Tail::Drop);
    let end = MixtureEnd::FirstExhausted;
    let expected = DistributedSampler::mixture(&parts, end, Placement::SINGLE, config).unwrap();
    assert!(found.iter().eq(expected.iter()));
    let lens = (0..5)
        .map(|rank| found.clone().with_placement(Placement::new(rank, 5).unwrap()).unwrap().len());
    assert!(lens.eq([expected.len() / 5; 5]), "{} of all ranks", expected.len());
    for weights in [&[1][..], &[1, 2, 3]] {
        assert!(matches!(mixture(weights), Err(Error::Setting { .. })), "{weights:?}");
    }
    assert!(matches!(mixture(&[0, 0]), Err(Error::Sampler(_))));
}
