//! Units that are gathered ahead of their use, in the order in which a batch before has used them.

use std::{collections::VecDeque, mem, sync::Arc};

/// The units that a batch gathers one after the other, through the forward and the backward pass.
pub(crate) type Order = Arc<[String]>;

/// How far one replica has gathered the units of a batch. `P` is a gathering under way.
///
/// (DeepSpeed's ZeRO stage 3 traces the first step likewise; PyTorch's FSDP takes the order of the
/// forward pass for the next one, and its reverse for the backward pass.)
#[derive(Debug)]
pub(crate) struct Prefetcher<P> {
    /// How many units are gathered ahead of the one in use.
    depth: usize,
    /// What an earlier batch has gathered; nothing if there was none, or this one does otherwise.
    expected: Order,
    /// How many of those that are expected were begun.
    n_begun: usize,
    under_way: VecDeque<P>,
    /// What this batch has gathered.
    gathered: Vec<String>,
}

/// What is to be done before a unit is waited for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PrefetchStep<P> {
    /// Its gathering, if it is under way already.
    pub(crate) begun: Option<P>,
    /// Those that the batch turns out not to need now: started is started, so they are waited for.
    pub(crate) dropped: Vec<P>,
    /// The units whose gathering is to begin, after that of this one.
    pub(crate) next: Vec<String>,
}

impl<P> Prefetcher<P> {
    pub(crate) fn new(depth: usize, expected: Order) -> Self {
        // Not with room for `depth` units, which may be more than there are.
        let under_way = VecDeque::new();
        Self { depth, expected, n_begun: 0, under_way, gathered: Vec::new() }
    }

    /// Whether units are gathered ahead at all.
    pub(crate) fn is_on(&self) -> bool {
        self.depth > 0
    }

    /// Notes that a unit is gathered. All slots of a shard group gather the same units in the same
    /// order, so all of them begin the same ones.
    pub(crate) fn turn(&mut self, unit: &str) -> PrefetchStep<P> {
        let position = self.gathered.len();
        self.gathered.push(unit.to_owned());
        let mut dropped = Vec::new();
        if self.expected.get(position).is_none_or(|expected| expected != unit) {
            self.expected = Order::default();
            dropped = self.rest();
        }
        let begun = self.under_way.pop_front();
        let from = self.n_begun.max(position + 1).min(self.expected.len());
        let to = (position + 1).saturating_add(self.depth).min(self.expected.len());
        self.n_begun = to;
        PrefetchStep { begun, dropped, next: self.expected[from..to].to_vec() }
    }

    /// Notes that the gathering of the next unit has begun.
    pub(crate) fn begin(&mut self, under_way: P) {
        self.under_way.push_back(under_way);
    }

    /// What is under way and was not used.
    pub(crate) fn rest(&mut self) -> Vec<P> {
        mem::take(&mut self.under_way).into()
    }

    /// What this batch has gathered.
    pub(crate) fn order(&self) -> Order {
        self.gathered.as_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gathers units as a replica does, each under way as its own name, and writes down what happens.
    fn run(ahead: &mut Prefetcher<String>, units: &[&str]) -> Vec<String> {
        let step = |unit: &&str| {
            let PrefetchStep { begun, dropped, next } = ahead.turn(unit);
            assert!(begun.is_none_or(|begun| begun == *unit));
            let text = format!("{unit}: -{} +{}", dropped.join(" "), next.join(" "));
            for unit in next {
                ahead.begin(unit);
            }
            assert!(ahead.under_way.len() <= ahead.depth);
            text
        };
        units.iter().map(step).collect()
    }

    fn order(units: &[&str]) -> Order {
        units.iter().map(|&unit| unit.to_owned()).collect()
    }

    const BOTH: [&str; 6] = ["a", "b", "c", "c", "b", "a"];

    #[test]
    fn the_next_units_of_a_known_order_begin_early_and_each_once() {
        let mut first = Prefetcher::new(2, Order::default());
        assert!(run(&mut first, &BOTH).iter().all(|turn| turn.ends_with(": - +")));
        let known = first.order();
        let mut one = Prefetcher::new(1, Arc::clone(&known));
        let expected = ["a: - +b", "b: - +c", "c: - +c", "c: - +b", "b: - +a", "a: - +"];
        assert_eq!(run(&mut one, &BOTH), expected);
        let mut two = Prefetcher::new(2, known);
        let expected = ["a: - +b c", "b: - +c", "c: - +b", "c: - +a", "b: - +", "a: - +"];
        assert_eq!(run(&mut two, &BOTH), expected);
        assert!(one.rest().is_empty() && two.rest().is_empty());
    }

    #[test]
    fn another_order_drops_what_is_under_way_and_is_noted() {
        let mut other = Prefetcher::new(2, order(&BOTH));
        let expected = ["a: - +b c", "c: -b c +", "c: - +", "a: - +"];
        assert_eq!(run(&mut other, &["a", "c", "c", "a"]), expected);
        assert_eq!(other.order(), order(&["a", "c", "c", "a"]));
        let mut shorter = Prefetcher::new(1, order(&BOTH));
        run(&mut shorter, &["a", "b"]);
        assert_eq!(shorter.rest(), ["c"]);
        let mut longer = Prefetcher::new(1, order(&["a"]));
        assert_eq!(run(&mut longer, &["a", "b"]), ["a: - +", "b: - +"]);
    }

    #[test]
    fn any_number_of_units_may_be_ahead() {
        let mut all = Prefetcher::new(usize::MAX, order(&BOTH));
        let expected = ["a: - +b c c b a", "b: - +", "c: - +", "c: - +", "b: - +", "a: - +"];
        assert_eq!(run(&mut all, &BOTH), expected);
    }

    #[test]
    fn nothing_is_ahead_unless_it_is_asked_for() {
        let mut off = Prefetcher::new(0, order(&BOTH));
        assert!(!off.is_on());
        assert!(run(&mut off, &BOTH).iter().all(|turn| turn.ends_with(": - +")));
    }
}
