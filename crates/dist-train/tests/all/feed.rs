//! A feed collates batches ahead of time and returns them in order.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
};

use dist_train::{Error, feed};

/// Hashes an item; the running time varies by item.
fn work(item: usize) -> usize {
    (0..item * 37 % 500).fold(item, |hash, round| hash.rotate_left(7) ^ hash.wrapping_mul(round))
}

#[test]
fn feed_equals_map() {
    for threads in 0..4 {
        for depth in 1..5 {
            for n in 0..12 {
                let fed = feed(0..n).threads(threads).depth(depth).collate(work).unwrap();
                assert_eq!(fed.len(), n);
                let expected: Vec<usize> = (0..n).map(work).collect();
                assert_eq!(fed.collect::<Vec<_>>(), expected, "{threads} threads, {depth} ahead");
            }
        }
    }
}

#[test]
fn early_batches_wait_their_turn() {
    let (finished, first_may) = mpsc::channel();
    let first_may = Mutex::new(first_may);
    // The first batch waits until the second is ready.
    let fed = feed(0..2).threads(2).collate(move |item: usize| {
        match item {
            0 => first_may.lock().unwrap().recv().unwrap(),
            _ => finished.send(()).unwrap(),
        }
        item
    });
    assert_eq!(fed.unwrap().collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn depth_limits_requested_batches() {
    for (threads, depth) in [(1, 1), (1, 3), (3, 2), (2, 5)] {
        let asked = AtomicUsize::new(0);
        let batches = (0..20).inspect(|_| _ = asked.fetch_add(1, Ordering::Relaxed));
        let mut fed = feed(batches).threads(threads).depth(depth).collate(work).unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 0, "before the first step");
        for taken in 1..=20 {
            fed.next().unwrap();
            assert_eq!(asked.load(Ordering::Relaxed), (taken + depth).min(20));
        }
        assert_eq!(fed.next(), None);
        assert_eq!(fed.next(), None);
    }
}

#[test]
fn default_depth_is_two_per_thread() {
    for threads in 0..4 {
        let asked = AtomicUsize::new(0);
        let batches = (0..20).inspect(|_| _ = asked.fetch_add(1, Ordering::Relaxed));
        let mut fed = feed(batches).threads(threads).collate(work).unwrap();
        fed.next().unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 1 + 2 * threads);
    }
}

#[test]
fn errors_and_panics_keep_their_order() {
    for threads in 0..3 {
        let fed = feed(0..6).threads(threads).depth(6).collate(|item: usize| match item {
            2 => Err("no such text"),
            4 => panic!("batch {item}"),
            _ => Ok(item),
        });
        let mut fed = fed.unwrap();
        let mut next = || fed.next().unwrap();
        assert_eq!([next(), next(), next(), next()], [Ok(0), Ok(1), Err("no such text"), Ok(3)]);
        let panic = catch_unwind(AssertUnwindSafe(&mut next)).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "batch 4");
        assert_eq!(next(), Ok(5));
    }
}

#[test]
fn dropped_feed_starts_no_batch() {
    let gate = Arc::new(Barrier::new(3));
    let (sender, begun) = mpsc::channel();
    let at_gate = Arc::clone(&gate);
    let fed = feed(0..20).threads(2).depth(6).collate(move |item: usize| {
        sender.send(item).unwrap();
        if item > 0 {
            at_gate.wait();
        }
    });
    let mut fed = fed.unwrap();
    fed.next();
    let mut first = received(&begun, 3);
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2]);
    drop(fed);
    gate.wait();
    // Ends when the last job has dropped the function.
    assert_eq!(begun.iter().count(), 0);
}

fn received(items: &Receiver<usize>, n: usize) -> Vec<usize> {
    items.iter().take(n).collect()
}

#[test]
fn last_batch_drops_the_function() {
    for _ in 0..50 {
        let texts = Arc::new([1, 2, 3]);
        let captured = Arc::clone(&texts);
        let fed = feed(0..3).threads(3).collate(move |item| captured[item]).unwrap();
        assert_eq!(fed.sum::<i32>(), 6);
        assert!(Arc::try_unwrap(texts).is_ok());
    }
}

#[test]
fn zero_depth_is_rejected() {
    let error = feed(0..3).depth(0).collate(work).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "the number of batches that are made ahead is 0, it must be at least 1"
    );
}
