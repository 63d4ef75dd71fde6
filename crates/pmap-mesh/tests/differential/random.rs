//! Choices that depend only on a seed.

use core_types::Seed;

/// A stream of choices.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    seed: Seed,
    next: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed: Seed::new(seed), next: 0 }
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.next += 1;
        self.seed.derive(self.next).as_u64()
    }

    /// Returns a number below `end`.
    pub(crate) fn less_than(&mut self, end: usize) -> usize {
        usize::try_from(self.word() % end as u64).unwrap()
    }

    /// Returns a number from `start` to `end`, both included.
    pub(crate) fn between(&mut self, start: usize, end: usize) -> usize {
        start + self.less_than(end - start + 1)
    }

    /// Returns true once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.less_than(n) == 0
    }

    pub(crate) fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.less_than(choices.len())].clone()
    }

    /// Returns a number from -1 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// Returns the items in a random order.
    pub(crate) fn shuffled<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
        for n in 1..items.len() {
            items.swap(n, self.less_than(n + 1));
        }
        items
    }
}
