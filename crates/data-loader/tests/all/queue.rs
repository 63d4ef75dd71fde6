//! Prefetched results are in order and end with their iterator.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Sender},
    },
    thread,
};

use data_loader::{Error, prefetch};

/// Hashes an item; the running time varies by item.
fn work(item: usize) -> usize {
    (0..item * 37 % 500).fold(item, |hash, round| hash.rotate_left(7) ^ hash.wrapping_mul(round))
}

#[test]
fn prefetch_equals_map() {
    for threads in 0..4 {
        for depth in 1..5 {
            for n in 0..12 {
                let results = prefetch(0..n).threads(threads).depth(depth).map(work).unwrap();
                assert_eq!(results.size_hint(), (n, Some(n)));
                let expected: Vec<usize> = (0..n).map(work).collect();
                assert_eq!(results.collect::<Vec<_>>(), expected, "{threads} threads, {depth}");
            }
        }
    }
}

#[test]
fn early_results_wait_their_turn() {
    let (finished, first_may) = mpsc::channel();
    let first_may = Mutex::new(first_may);
    // The first result waits until the second is ready.
    let results = prefetch(0..2).threads(2).map(move |item: usize| {
        match item {
            0 => first_may.lock().unwrap().recv().unwrap(),
            _ => finished.send(()).unwrap(),
        }
        item
    });
    assert_eq!(results.unwrap().collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn depth_limits_started_results() {
    // By default, two for each thread.
    for (threads, given, depth) in [
        (1, Some(1), 1),
        (1, Some(3), 3),
        (3, Some(2), 2),
        (2, Some(5), 5),
        (0, None, 0),
        (3, None, 6),
    ] {
        let asked = AtomicUsize::new(0);
        let items = (0..20).inspect(|_| _ = asked.fetch_add(1, Ordering::Relaxed));
        let results = prefetch(items).threads(threads);
        let results = if let Some(depth) = given { results.depth(depth) } else { results };
        let mut results = results.map(work).unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 0, "before the first result");
        for taken in 1..=20 {
            results.next().unwrap();
            assert_eq!(asked.load(Ordering::Relaxed), (taken + depth).min(20));
        }
        assert_eq!(results.next(), None);
        assert_eq!(results.next(), None);
    }
}

#[test]
fn errors_and_panics_keep_their_order() {
    for threads in 0..3 {
        let results = prefetch(0..6).threads(threads).depth(6).map(|item: usize| match item {
            2 => Err("no such text"),
            4 => panic!("result {item}"),
            _ => Ok(item),
        });
        let mut results = results.unwrap();
        let mut next = || results.next().unwrap();
        assert_eq!([next(), next(), next(), next()], [Ok(0), Ok(1), Err("no such text"), Ok(3)]);
        let panic = catch_unwind(AssertUnwindSafe(&mut next)).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "result 4");
        assert_eq!(next(), Ok(5));
    }
}

/// An item that reports when it is dropped.
struct Reported(usize, Sender<usize>);

impl Drop for Reported {
    fn drop(&mut self) {
        self.1.send(self.0).unwrap();
    }
}

#[test]
fn dropped_prefetch_starts_nothing() {
    let gate = Arc::new(Barrier::new(3));
    let (begins, begun) = mpsc::channel();
    let (ends, ended) = mpsc::channel();
    let at_gate = Arc::clone(&gate);
    let items = (0..20).map(move |n| Reported(n, ends.clone()));
    let results = prefetch(items).threads(2).depth(6).map(move |item: Reported| {
        begins.send(item.0).unwrap();
        if item.0 > 0 {
            at_gate.wait();
        }
    });
    let mut results = results.unwrap();
    results.next();
    let mut first: Vec<usize> = begun.iter().take(3).collect();
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2]);
    // Dropping cancels the results that have not begun, and waits for the others.
    let dropping = thread::spawn(|| drop(results));
    assert_eq!(ended.iter().take(5).collect::<Vec<_>>(), [0, 3, 4, 5, 6]);
    gate.wait();
    dropping.join().unwrap();
    assert_eq!(begun.iter().count(), 0);
}

#[test]
fn last_result_drops_the_function() {
    for _ in 0..50 {
        let texts = Arc::new([1, 2, 3]);
        let captured = Arc::clone(&texts);
        let mut results = prefetch(0..3).threads(3).map(move |item| captured[item]).unwrap();
        assert_eq!(results.by_ref().sum::<i32>(), 6);
        assert_eq!(Arc::strong_count(&texts), 2, "the iterator has the function, no worker");
        drop(results);
        assert!(Arc::try_unwrap(texts).is_ok());
    }
}

#[test]
fn zero_depth_is_rejected() {
    let error = prefetch(0..3).depth(0).map(work).err().unwrap();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    assert_eq!(error.to_string(), "the number of prefetched results is 0, it must be at least 1");
}
