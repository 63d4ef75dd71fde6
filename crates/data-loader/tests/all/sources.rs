//! Adaptors and shards give each sample once, to any number of threads.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use core_types::Seed;
use data_loader::{BoxError, Dataset, Error, ShardSource, ShardedDataset, concat, measure};

fn all<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    dataset.samples().map(Result::unwrap).collect()
}

#[test]
fn adaptors_equal_iterators() {
    let numbers: Vec<u64> = (0..10).collect();
    let shared = Arc::new(numbers.clone());
    let boxed: Box<dyn Dataset<Item = u64>> = Box::new(numbers.clone());
    assert_eq!(all(&shared), numbers);
    assert_eq!(all(&&numbers), numbers);
    assert_eq!(all(&boxed), numbers);
    assert_eq!(all(&boxed.map(|n| Ok(n * 2)).subset(vec![3, 3, 9])), [6, 6, 18]);
    let parts = concat([numbers.clone(), Vec::new(), vec![100]]);
    assert_eq!(all(&parts)[9..], [9, 100]);
    for error in [parts.read(11), numbers.read(10), numbers.clone().subset(vec![10]).read(0)] {
        let error = error.unwrap_err().downcast::<Error>().unwrap();
        assert!(matches!(*error, Error::IndexOutOfRange { .. }), "{error}");
    }
    assert!(concat::<Vec<u64>>([]).is_empty());
}

#[test]
fn splits_are_disjoint_and_random() {
    let split = |seed| {
        let numbers: Vec<u64> = (0..1000).collect();
        let parts = numbers.random_split(&[0.7, 0.2, 0.1], Seed::new(seed)).unwrap();
        parts.iter().map(all).collect::<Vec<_>>()
    };
    let parts = split(1);
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [700, 200, 100]);
    assert!(parts.iter().all(|part| part.is_sorted()));
    let mut whole = parts.concat();
    whole.sort_unstable();
    assert_eq!(whole, (0..1000).collect::<Vec<_>>());
    assert_eq!(split(1), parts);
    assert_ne!(split(2), parts);
    assert!(matches!(vec![1].random_split(&[0.9, 0.2], Seed::new(1)), Err(Error::Setting { .. })));
}

#[test]
fn measured_lengths_keep_their_order() {
    let texts: Vec<String> = (0..100).map(|n| "x".repeat(n)).collect();
    let expected: Vec<u32> = (0..100).collect();
    for threads in 1..5 {
        assert_eq!(measure(&texts, threads, |text| text.len() as u64).unwrap(), expected);
    }
    let failing =
        texts.clone().map(|text| if text.len() > 50 { Err("long".into()) } else { Ok(0) });
    let error = measure(&failing, 3, |n| *n).unwrap_err();
    assert!(matches!(error, Error::Sample { index: 51, .. }), "{error}");
    assert!(matches!(measure(&texts, 0, |_| 1), Err(Error::Setting { .. })));
    assert!(matches!(measure(&texts, 1, |_| 1 << 32), Err(Error::Sample { index: 0, .. })));
}

#[test]
fn fingerprints_tell_contents_apart() {
    struct Named(u64);
    impl Dataset for Named {
        type Item = u64;

        fn len(&self) -> u64 {
            3
        }

        fn read(&self, index: u64) -> Result<u64, BoxError> {
            Ok(index)
        }

        fn fingerprint(&self) -> Option<u64> {
            Some(self.0)
        }
    }
    let subset = |indices| Named(1).subset(indices).fingerprint();
    assert_eq!(subset(vec![0, 1]), subset(vec![0, 1]));
    assert_ne!(subset(vec![0, 1]), subset(vec![1, 0]));
    let both = |a, b| concat([Named(a), Named(b)]).fingerprint();
    assert_ne!(both(1, 2), both(2, 1));
    assert_eq!(Named(5).map(Ok).fingerprint(), Some(5));
    assert_eq!(concat([vec![1]]).fingerprint(), None);
}

/// Counts the shards that are open and the times that each was opened.
#[derive(Default)]
struct CountedShards {
    n_open: Arc<AtomicUsize>,
    most_open: AtomicUsize,
    openings: Mutex<Vec<usize>>,
}

struct CountedShard {
    start: u64,
    n_open: Arc<AtomicUsize>,
}

const SHARD_LEN: u64 = 10;

struct SharedShards(Arc<CountedShards>);

impl ShardSource for SharedShards {
    type Shard = CountedShard;

    fn shard_lens(&self) -> Vec<u64> {
        vec![SHARD_LEN; 20]
    }

    fn open(&self, shard: usize) -> Result<CountedShard, BoxError> {
        self.0.openings.lock().unwrap().push(shard);
        if shard == 13 {
            return Err("shard 13 is missing".into());
        }
        let n_open = self.0.n_open.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most_open.fetch_max(n_open, Ordering::SeqCst);
        Ok(CountedShard { start: shard as u64 * SHARD_LEN, n_open: Arc::clone(&self.0.n_open) })
    }
}

impl Dataset for CountedShard {
    type Item = u64;

    fn len(&self) -> u64 {
        SHARD_LEN
    }

    fn read(&self, index: u64) -> Result<u64, BoxError> {
        Ok(self.start + index)
    }
}

impl Drop for CountedShard {
    fn drop(&mut self) {
        self.n_open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the shards that were opened since the last call.
fn openings(counts: &CountedShards) -> Vec<usize> {
    std::mem::take(&mut counts.openings.lock().unwrap())
}

#[test]
fn least_recently_used_shard_is_closed() {
    let counts = Arc::new(CountedShards::default());
    let dataset = ShardedDataset::new(SharedShards(Arc::clone(&counts)), 3).unwrap();
    assert_eq!(dataset.len(), 200);
    for shard in [0, 1, 2, 0, 3, 0, 2, 1] {
        assert_eq!(dataset.read(shard * 10 + 4).unwrap(), shard * 10 + 4);
    }
    // 3 closes 1, and 1 closes 3.
    assert_eq!(openings(&counts), [0, 1, 2, 3, 1]);
    assert_eq!(counts.most_open.load(Ordering::SeqCst), 3);
    dataset.prefetch(&[41, 42, 59, 0, 131]);
    assert_eq!(openings(&counts), [4, 5], "0 is open, and 13 is the fourth");
    for _ in 0..2 {
        assert_eq!(dataset.read(130).unwrap_err().to_string(), "shard 13 is missing");
    }
    assert_eq!(openings(&counts), [13, 13]);
    drop(dataset);
    assert_eq!(counts.n_open.load(Ordering::SeqCst), 0);
}

#[test]
fn one_thread_opens_a_shard() {
    let counts = Arc::new(CountedShards::default());
    let dataset = ShardedDataset::new(SharedShards(Arc::clone(&counts)), 4).unwrap();
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (dataset, barrier) = (&dataset, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for n in 0..40 {
                    assert_eq!(dataset.read(n).unwrap(), n, "thread {thread}");
                }
            });
        }
    });
    let mut opened = openings(&counts);
    opened.sort_unstable();
    assert_eq!(opened, [0, 1, 2, 3]);
}

#[test]
fn panic_while_opening_is_no_end() {
    struct PanicsOnce(AtomicU64);
    impl ShardSource for PanicsOnce {
        type Shard = Vec<u64>;

        fn shard_lens(&self) -> Vec<u64> {
            vec![2, 3]
        }

        fn open(&self, shard: usize) -> Result<Vec<u64>, BoxError> {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) > 0, "the first opening");
            Ok(vec![9; 2 + shard * 5])
        }
    }
    let dataset = ShardedDataset::new(PanicsOnce(AtomicU64::new(0)), 1).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| dataset.read(0))).is_err());
    assert_eq!(dataset.read(0).unwrap(), 9);
    let error = dataset.read(2).unwrap_err().downcast::<Error>().unwrap();
    assert!(matches!(*error, Error::LengthMismatch { found: 7, expected: 3, .. }), "{error}");
    assert!(matches!(
        ShardedDataset::new(PanicsOnce(AtomicU64::new(0)), 0),
        Err(Error::Setting { .. })
    ));
}
