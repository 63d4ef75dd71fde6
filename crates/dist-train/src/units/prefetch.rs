//! Prefetching of units, in the order of an earlier batch.

use std::{collections::VecDeque, mem, sync::Arc};

/// The units that a batch gathers, in order, through the forward and the backward pass.
pub(crate) type Order = Arc<[String]>;

/// The prefetch state of one replica during a batch. `P` is an all-gather in flight.
///
/// (DeepSpeed's ZeRO stage 3 also traces the first step; PyTorch's FSDP repeats the order of the
/// forward pass, and reverses it for the backward pass.)
#[derive(Debug)]
pub(crate) struct Prefetcher<P> {
    /// Number of units to prefetch.
    depth: usize,
    /// The order of an earlier batch; empty if there was no earlier batch, or if this batch
    /// deviates from the order.
    expected: Order,
    /// Number of units in `expected` whose all-gathers were started.
    n_started: usize,
    /// All-gathers of prefetched units, in the order of the units.
    in_flight: VecDeque<P>,
    /// Units gathered by this batch so far.
    gathered: Vec<String>,
}

/// The actions to take when a unit is entered, before waiting for its all-gather.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PrefetchStep<P> {
    /// The unit's all-gather, if it was prefetched.
    pub(crate) prefetched: Option<P>,
    /// Prefetched units that this batch does not need now. Their all-gathers must still be
    /// finished.
    pub(crate) unneeded: Vec<P>,
    /// Units to prefetch, after the all-gather of this unit is started.
    pub(crate) next: Vec<String>,
}

impl<P> Prefetcher<P> {
    pub(crate) fn new(depth: usize, expected: Order) -> Self {
        // Without capacity for `depth` units, because `depth` may be far more than the number of
        // units.
        let in_flight = VecDeque::new();
        Self { depth, expected, n_started: 0, in_flight, gathered: Vec::new() }
    }

    /// Returns true if any units are prefetched.
    pub(crate) fn is_on(&self) -> bool {
        self.depth > 0
    }

    /// Records that a unit is gathered, and returns the actions for it. All slots of a shard group
    /// gather the same units in the same order, so they also prefetch the same units.
    pub(crate) fn enter_unit(&mut self, unit: &str) -> PrefetchStep<P> {
        let position = self.gathered.len();
        self.gathered.push(unit.to_owned());
        let mut unneeded = Vec::new();
        if self.expected.get(position).is_none_or(|expected| expected != unit) {
            self.expected = Order::default();
            unneeded = self.take_in_flight();
        }
        let prefetched = self.in_flight.pop_front();
        let from = self.n_started.max(position + 1).min(self.expected.len());
        let to = (position + 1).saturating_add(self.depth).min(self.expected.len());
        self.n_started = to;
        PrefetchStep { prefetched, unneeded, next: self.expected[from..to].to_vec() }
    }

    /// Adds the all-gather of the next prefetched unit.
    pub(crate) fn push_in_flight(&mut self, in_flight: P) {
        self.in_flight.push_back(in_flight);
    }

    /// Removes and returns the unused all-gathers in flight.
    pub(crate) fn take_in_flight(&mut self) -> Vec<P> {
        mem::take(&mut self.in_flight).into()
    }

    /// Returns the gather order of this batch.
    pub(crate) fn order(&self) -> Order {
        self.gathered.as_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gathers units like a replica, with names as all-gathers, and returns a log.
    fn run(prefetcher: &mut Prefetcher<String>, units: &[&str]) -> Vec<String> {
        let mut log = Vec::new();
        for unit in units {
            let PrefetchStep { prefetched, unneeded, next } = prefetcher.enter_unit(unit);
            assert!(prefetched.is_none_or(|prefetched| prefetched == *unit));
            let text = format!("{unit}: -{} +{}", unneeded.join(" "), next.join(" "));
            for unit in next {
                prefetcher.push_in_flight(unit);
            }
            assert!(prefetcher.in_flight.len() <= prefetcher.depth);
            log.push(text);
        }
        log
    }

    fn order(units: &[&str]) -> Order {
        units.iter().map(|&unit| unit.to_owned()).collect()
    }

    const BOTH: [&str; 6] = ["a", "b", "c", "c", "b", "a"];

    #[test]
    fn known_orders_are_prefetched_once() {
        let mut first = Prefetcher::new(2, Order::default());
        assert!(run(&mut first, &BOTH).iter().all(|turn| turn.ends_with(": - +")));
        let known = first.order();
        let mut one = Prefetcher::new(1, Arc::clone(&known));
        let expected = ["a: - +b", "b: - +c", "c: - +c", "c: - +b", "b: - +a", "a: - +"];
        assert_eq!(run(&mut one, &BOTH), expected);
        let mut two = Prefetcher::new(2, known);
        let expected = ["a: - +b c", "b: - +c", "c: - +b", "c: - +a", "b: - +", "a: - +"];
        assert_eq!(run(&mut two, &BOTH), expected);
        assert!(one.take_in_flight().is_empty() && two.take_in_flight().is_empty());
    }

    #[test]
    fn other_orders_drop_prefetched_units() {
        let mut other = Prefetcher::new(2, order(&BOTH));
        let expected = ["a: - +b c", "c: -b c +", "c: - +", "a: - +"];
        assert_eq!(run(&mut other, &["a", "c", "c", "a"]), expected);
        assert_eq!(other.order(), order(&["a", "c", "c", "a"]));
        let mut shorter = Prefetcher::new(1, order(&BOTH));
        run(&mut shorter, &["a", "b"]);
        assert_eq!(shorter.take_in_flight(), ["c"]);
        let mut longer = Prefetcher::new(1, order(&["a"]));
        assert_eq!(run(&mut longer, &["a", "b"]), ["a: - +", "b: - +"]);
    }

    #[test]
    fn depth_may_exceed_the_units() {
        let mut all = Prefetcher::new(usize::MAX, order(&BOTH));
        let expected = ["a: - +b c c b a", "b: - +", "c: - +", "c: - +", "b: - +", "a: - +"];
        assert_eq!(run(&mut all, &BOTH), expected);
    }

    #[test]
    fn depth_zero_prefetches_nothing() {
        let mut off = Prefetcher::new(0, order(&BOTH));
        assert!(!off.is_on());
        assert!(run(&mut off, &BOTH).iter().all(|turn| turn.ends_with(": - +")));
    }
}
