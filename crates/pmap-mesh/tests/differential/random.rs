//! Choices that depend on a seed alone.

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

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.word() % end as u64).unwrap()
    }

    /// A number from `start` to `end`, both included.
    pub(crate) fn within(&mut self, start: usize, end: usize) -> usize {
        start + self.below(end - start + 1)
    }

    /// Whether something that happens once in `n` times happens.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Clone>(&mut self, among: &[T]) -> T {
        among[self.below(among.len())].clone()
    }

    /// From -1 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// The items in another order.
    pub(crate) fn shuffled<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
        for n in 1..items.len() {
            items.swap(n, self.below(n + 1));
        }
        items
    }
}
