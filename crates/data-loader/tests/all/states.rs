//! A state stands behind the last batch that was returned, and resumes on any world.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex},
};

use core_types::{Epoch, Placement, Seed};
use data_loader::{
    BoxError, DataLoader, Dataset, Error, LoaderBuilder, LoaderState, OnError, SampleBatch,
};
use dyn_batch::{BatchConfig, DistributedConfig, GridConfig, Remainder, StepLayout};

#[expect(clippy::unnecessary_wraps, reason = "the signature of a collate function")]
fn items(samples: SampleBatch<u64>) -> Result<Vec<u64>, BoxError> {
    Ok(samples.items)
}

fn builder(n: u64) -> LoaderBuilder<Vec<u64>> {
    let numbers = DataLoader::builder((0..n).collect::<Vec<_>>());
    numbers.batch_size(5).shuffle(Seed::new(3)).prefetch_factor(3)
}

fn world(world_size: u64) -> impl Iterator<Item = Placement> {
    (0..world_size).map(move |rank| Placement::new(rank, world_size).unwrap())
}

fn through_json(state: &LoaderState) -> LoaderState {
    let json = serde_json::to_string(state).unwrap();
    let read: LoaderState = serde_json::from_str(&json).unwrap();
    assert_eq!(read, *state);
    read
}

/// Numbers that count how many were read.
#[derive(Clone)]
struct Counting {
    n: u64,
    n_read: Arc<(Mutex<u64>, Condvar)>,
}

impl Dataset for Counting {
    type Item = u64;

    fn len(&self) -> u64 {
        self.n
    }

    fn read(&self, index: u64) -> Result<u64, BoxError> {
        *self.n_read.0.lock().unwrap() += 1;
        self.n_read.1.notify_all();
        Ok(index)
    }
}

#[test]
fn state_is_behind_the_returned_batch() {
    let dataset = Counting { n: 200, n_read: Arc::default() };
    let builder = DataLoader::builder(dataset.clone()).batch_size(5).num_workers(2);
    let mut threaded = builder.prefetch_factor(4).collate(items).unwrap();
    let mut serial = DataLoader::builder(dataset.clone()).batch_size(5).collate(items).unwrap();
    assert_eq!(threaded.state_dict(), serial.state_dict());
    for epoch in 0..2 {
        threaded.set_epoch(Epoch::new(epoch)).unwrap();
        serial.set_epoch(Epoch::new(epoch)).unwrap();
        for _ in 0..10 {
            assert_eq!(threaded.next().unwrap().unwrap(), serial.next().unwrap().unwrap());
            assert_eq!(threaded.state_dict(), serial.state_dict());
        }
        // 10 batches were returned to each loader, and the workers are 8 ahead.
        let n_expected = (epoch + 1) * (10 + 18) * 5;
        let (n_read, changed) = &*dataset.n_read;
        drop(changed.wait_while(n_read.lock().unwrap(), |n| *n < n_expected).unwrap());
        assert_eq!(through_json(&threaded.state_dict()), serial.state_dict());
    }
}

fn count(seen: &mut BTreeMap<u64, u32>, batch: Vec<u64>) {
    for index in batch {
        *seen.entry(index).or_default() += 1;
    }
}

#[test]
fn batches_continue_with_their_numbers() {
    let numbered = |samples: SampleBatch<u64>| Ok((samples.number, samples.items));
    let mut whole = builder(103).collate(numbered).unwrap();
    whole.set_epoch(Epoch::new(4)).unwrap();
    let whole: Vec<_> = whole.map(Result::unwrap).collect();
    let mut rest = builder(103).collate(numbered).unwrap();
    for n in [0, 7, 20, 21] {
        let mut loader = builder(103).collate(numbered).unwrap();
        loader.set_epoch(Epoch::new(4)).unwrap();
        assert_eq!(loader.by_ref().take(n).count(), n);
        rest.load_state_dict(&through_json(&loader.state_dict())).unwrap();
        assert_eq!(rest.len(), whole.len() - n);
        assert_eq!(rest.epoch(), Some(Epoch::new(4)));
        assert_eq!(rest.by_ref().map(Result::unwrap).collect::<Vec<_>>(), whole[n..]);
    }
    // The end of an epoch is a position, after which the next epoch follows.
    rest.set_epoch(Epoch::new(5)).unwrap();
    assert_eq!(rest.len(), 21);
}

#[test]
fn state_of_other_loaders_is_rejected() {
    let state = |builder: LoaderBuilder<Vec<u64>>| {
        let mut loader = builder.collate(items).unwrap();
        loader.set_epoch(Epoch::new(1)).unwrap();
        loader.next().unwrap().unwrap();
        loader.state_dict()
    };
    let mut loader = builder(100).collate(items).unwrap();
    loader.set_epoch(Epoch::ZERO).unwrap();
    let planned = BatchConfig::default().with_max_tokens(9);
    let planned = DataLoader::builder(vec![0; 100]).batches(planned, vec![1_u64; 100]);
    for (other, expected) in [
        (state(builder(101)), "sampler state has data set length 101, the sampler has 100"),
        (state(builder(100).batch_size(6)), "loader state has batch size 6, the loader has 5"),
        (
            state(planned),
            "loader state has batches planned by lengths, the loader has of a fixed size",
        ),
        (
            state(builder(100).shuffle(Seed::new(4))),
            "loader state has another seed of `shuffle`, the loader has seed 3",
        ),
    ] {
        let error = loader.load_state_dict(&other).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    assert_eq!((loader.epoch(), loader.len()), (Some(Epoch::ZERO), 20), "it is unchanged");

    let json = serde_json::to_value(loader.state_dict()).unwrap();
    let mut newer = json.clone();
    newer["format_version"] = 2.into();
    let newer: LoaderState = serde_json::from_value(newer).unwrap();
    let error = loader.load_state_dict(&newer).unwrap_err();
    assert!(matches!(error, Error::StateMismatch { what: "format version", .. }), "{error}");
    let mut unknown = json;
    unknown["place"] = 1.into();
    assert!(serde_json::from_value::<LoaderState>(unknown).is_err());
}

#[test]
fn other_contents_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let loader = |content: &str| {
        let path = folder.path().join("text");
        std::fs::write(&path, content).unwrap();
        let text = data_loader::TextDataset::open(&path).unwrap();
        DataLoader::builder(text).collate(|samples| Ok(samples.items)).unwrap()
    };
    let mut first = loader("a\nb\nc");
    first.set_epoch(Epoch::ZERO).unwrap();
    let state = first.state_dict();
    assert!(loader("a\nb\nc").load_state_dict(&state).is_ok(), "of a copy with another time");
    let error = loader("a\nb\nd").load_state_dict(&state).unwrap_err();
    assert!(matches!(error, Error::StateMismatch { .. }), "{error}");
}

#[test]
fn state_before_the_first_epoch() {
    let mut loader = builder(100).collate(items).unwrap();
    let state = through_json(&loader.state_dict());
    loader.set_epoch(Epoch::new(3)).unwrap();
    loader.next().unwrap().unwrap();
    loader.load_state_dict(&state).unwrap();
    assert!(matches!(loader.next(), Some(Err(Error::NoEpoch))) && loader.epoch().is_none());
    assert!(loader.next().is_none());
    loader.load_state_dict(&state).unwrap();
    assert!(matches!(loader.next(), Some(Err(Error::NoEpoch))), "after each state");
    loader.set_epoch(Epoch::new(3)).unwrap();
    assert_eq!(loader.count(), 20);
}

#[test]
fn skipped_samples_count_after_a_resume() {
    let loader = || {
        let dataset = (0..40_u64).collect::<Vec<_>>();
        let failing = dataset.map(|n| if n % 10 == 0 { Err("corrupt".into()) } else { Ok(n) });
        let builder = DataLoader::builder(failing).batch_size(10).num_workers(2);
        builder.on_error(OnError::Skip { at_most: 3 }).collate(items).unwrap()
    };
    let mut first = loader();
    first.set_epoch(Epoch::ZERO).unwrap();
    assert!(first.by_ref().take(2).all(|batch| batch.is_ok()));
    let mut second = loader();
    second.load_state_dict(&through_json(&first.state_dict())).unwrap();
    assert_eq!((second.skipped().count, second.skipped().samples.len()), (2, 0));
    assert!(second.next().unwrap().is_ok());
    let error = second.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::TooManySkipped { skipped: 4, at_most: 3, index: 30, .. }));
}

#[test]
fn finished_epochs_start_again() {
    let ten =
        |batch_size| DataLoader::builder((0..10).collect::<Vec<u64>>()).batch_size(batch_size);
    let planned = DataLoader::builder((0..10).collect::<Vec<u64>>())
        .batches(BatchConfig::default().with_max_tokens(4), vec![1_u64; 10]);
    for builder in [ten(4), ten(4).shuffle(Seed::new(1)), ten(4).num_workers(2), planned] {
        let mut loader = builder.collate(items).unwrap();
        loader.set_epoch(Epoch::new(5)).unwrap();
        let whole: Vec<Vec<u64>> = loader.by_ref().map(Result::unwrap).collect();
        assert_eq!(whole.concat().len(), 10);
        assert!(
            matches!(loader.next(), Some(Err(Error::NoEpoch))),
            "of a loop without `set_epoch`"
        );
        for n_taken in [0, 1] {
            // A resumed position does not move the start.
            let state = loader.state_dict();
            loader.set_epoch(Epoch::new(5)).unwrap();
            assert!(loader.by_ref().map(Result::unwrap).eq(whole.iter().cloned()), "{n_taken}");
            loader.load_state_dict(&state).unwrap();
            loader.set_epoch(Epoch::new(5)).unwrap();
            assert_eq!(loader.by_ref().count(), 0, "the state of a finished epoch stays");
            loader.set_epoch(Epoch::new(5)).unwrap();
            // Batches that are counted, instead of read to `None`.
            for expected in &whole {
                assert_eq!(&loader.next().unwrap().unwrap(), expected);
            }
        }
    }
}

#[test]
fn uneven_ranks_have_equal_states_after_the_epoch() {
    for (n, drops_last) in [(94, true), (94, false), (2, false)] {
        let states = world(3).map(|place| {
            let numbers = DataLoader::builder((0..n).collect::<Vec<u64>>()).batch_size(4);
            let builder = numbers.drop_last(drops_last).uneven().placement(place);
            let mut loader = builder.collate(items).unwrap();
            loader.set_epoch(Epoch::ZERO).unwrap();
            assert!(loader.by_ref().all(|batch| batch.is_ok()));
            loader.state_dict()
        });
        let states: Vec<LoaderState> = states.collect();
        assert!(states.iter().all(|state| *state == states[0]), "{n}: {states:?}");
    }
}

#[test]
fn micro_batches_of_all_steps_are_read() {
    let steps = DistributedConfig::default;
    let grid = |config| DistributedConfig { layout: StepLayout::Grid(config), ..steps() };
    for (name, steps, micro_steps) in [
        ("grouped", DistributedConfig { accumulation: Some(2), ..steps() }, 2),
        ("grid", DistributedConfig { accumulation: Some(4), ..grid(GridConfig::default()) }, 4),
        (
            "global batch",
            grid(GridConfig { global_batch_size: Some(64), ..GridConfig::default() }),
            4,
        ),
    ] {
        let loader = |place, n_workers| {
            let config =
                BatchConfig::default().with_max_tokens(160).with_remainder(Remainder::Keep);
            DataLoader::builder((0..660).collect::<Vec<u64>>())
                .batches(config, vec![20_u32; 660])
                .steps(steps)
                .placement(place)
                .num_workers(n_workers)
                .collate(|samples: SampleBatch<u64>| Ok((samples.ends_step, samples.items)))
                .unwrap()
        };
        let mut seen = BTreeMap::new();
        for place in world(2) {
            let mut whole = loader(place, 2);
            whole.set_epoch(Epoch::ZERO).unwrap();
            let batches: Vec<_> = whole.by_ref().map(Result::unwrap).collect();
            for (_, items) in &batches {
                count(&mut seen, items.clone());
            }
            assert!(batches[micro_steps - 1].0 && !batches[micro_steps - 2].0, "{name}");
            assert!(batches.last().unwrap().0, "{name}");
            // A state within the second step is that after the first.
            for n_taken in micro_steps..2 * micro_steps {
                let mut first = loader(place, 0);
                first.set_epoch(Epoch::ZERO).unwrap();
                assert_eq!(
                    (first.len(), first.by_ref().take(n_taken).count()),
                    (batches.len(), n_taken)
                );
                let mut second = loader(place, 0);
                second.load_state_dict(&through_json(&first.state_dict())).unwrap();
                assert_eq!(second.len(), batches.len() - micro_steps, "{name}");
                assert_eq!(second.map(Result::unwrap).collect::<Vec<_>>(), batches[micro_steps..]);
            }
        }
        assert!(seen.len() == 660 && seen.values().all(|&times| times == 1), "{name}");
    }
}

/// States after three batches, of five samples and planned by lengths, as checkpoints have them.
const FIXED: &str = concat!(
    r#"{"format_version":1,"position":{"fixed":{"batch_size":5,"sampler":{"format_version":1,"#,
    r#""order":"shuffled","len":100,"fingerprint":0,"seed":10478045481179633872,"epoch":7,"#,
    r#""stages":[{"world_size":1,"rule":{"strided":"drop"},"consumed":15}]}}},"#,
    r#""fingerprint":null,"skipped":0}"#
);
const PLANNED: &str = concat!(
    r#"{"format_version":1,"position":{"dynamic":{"format_version":1,"epoch":7,"step":3,"#,
    r#""n_steps":20,"world_size":2,"fingerprint":4668230097970634995,"cut":[],"#,
    r#""earlier_worlds":[]}},"fingerprint":null,"skipped":0}"#
);

#[test]
fn states_of_version_1_resume() {
    let planned = DataLoader::builder((0..100).collect::<Vec<u64>>())
        .batches(
            BatchConfig::default().with_max_tokens(24),
            (0..100).map(|n| 1 + n * 7 % 9).collect::<Vec<u64>>(),
        )
        .steps(DistributedConfig { shuffle: Some(Seed::new(5)), ..DistributedConfig::default() });
    for (builder, json, next) in [
        (builder(100), FIXED, vec![7, 18, 73, 54, 86]),
        (planned.placement(Placement::new(1, 2).unwrap()), PLANNED, vec![49, 50]),
    ] {
        let mut loader = builder.collate(items).unwrap();
        loader.set_epoch(Epoch::new(7)).unwrap();
        assert!(loader.by_ref().take(3).all(|batch| batch.is_ok()));
        let found = serde_json::to_string(&loader.state_dict()).unwrap();
        let following = loader.next().unwrap().unwrap();
        assert_eq!((found.as_str(), &following), (json, &next));
        loader.load_state_dict(&serde_json::from_str(json).unwrap()).unwrap();
        assert_eq!(loader.next().unwrap().unwrap(), next);
    }
}
