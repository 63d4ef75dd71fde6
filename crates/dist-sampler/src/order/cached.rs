//! An order cached in memory, generated on its first read.
//!
//! PyTorch's idiom on resuming is to make a sampler and then to set its epoch. An order made at
//! once would then be made twice, and the first one for nothing.

use std::{
    mem,
    sync::{Mutex, OnceLock, PoisonError},
};

use core_types::{Epoch, Seed};

use super::{exact, stratified::Strata, table, torch};
use crate::error::Result;

/// The order of one epoch, one sample for each position.
#[derive(Debug)]
pub(crate) struct CachedOrder {
    rule: Rule,
    len: u64,
    seed: Seed,
    epoch: Epoch,
    samples: OnceLock<Vec<u32>>,
    /// Buffer for `samples`, so that an allocation fails in `new`
    /// and not in the middle of a run. The lock is held only to take the buffer.
    spare: Mutex<Vec<u32>>,
}

/// Which order it is.
#[derive(Clone, Debug)]
pub(crate) enum Rule {
    Exact,
    Torch,
    Stratified(Box<Strata>),
}

impl CachedOrder {
    /// The order of an epoch of `len` samples.
    pub(super) fn new(rule: Rule, len: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        if let Rule::Stratified(strata) = &rule {
            strata.check_memory()?;
        }
        let spare = Mutex::new(table::allocate(len)?);
        Ok(Self { rule, len, seed, epoch, samples: OnceLock::new(), spare })
    }

    /// Turns this into the order of another epoch, in the memory it has.
    pub(super) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        self.seed = seed;
        self.epoch = epoch;
        if let Some(samples) = self.samples.take() {
            self.spare = Mutex::new(samples);
        }
    }

    /// The samples in order. The first of several threads that ask makes them, and the others wait.
    pub(super) fn samples(&self) -> &[u32] {
        self.samples.get_or_init(|| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let mut samples = mem::take(&mut *spare);
            drop(spare);
            self.generate(&mut samples);
            samples
        })
    }

    fn generate(&self, samples: &mut Vec<u32>) {
        let epoch_seed = self.seed.derive(self.epoch.as_u64());
        match &self.rule {
            Rule::Exact => exact::shuffle(samples, self.len, epoch_seed),
            Rule::Stratified(strata) => strata.fill(samples, epoch_seed),
            Rule::Torch => {
                torch::shuffle(
                    samples,
                    self.len,
                    self.seed.as_u64().wrapping_add(self.epoch.as_u64()),
                );
            }
        }
    }

    /// Tells the classes of one data set from those of another; 0 for orders that have none.
    pub(super) fn fingerprint(&self) -> u64 {
        match &self.rule {
            Rule::Stratified(strata) => strata.fingerprint(),
            Rule::Exact | Rule::Torch => 0,
        }
    }
}

/// A copy of an order that is not made yet has memory of its own, and makes it again.
impl Clone for CachedOrder {
    fn clone(&self) -> Self {
        let samples = self.samples.clone();
        #[expect(clippy::cast_possible_truncation, reason = "the original has memory for so many")]
        let missing = if samples.get().is_some() { 0 } else { self.len as usize };
        Self {
            rule: self.rule.clone(),
            len: self.len,
            seed: self.seed,
            epoch: self.epoch,
            samples,
            spare: Mutex::new(Vec::with_capacity(missing)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn held(rule: Rule, epoch: u64) -> CachedOrder {
        CachedOrder::new(rule, 1000, Seed::new(7), Epoch::new(epoch)).unwrap()
    }

    /// Where the samples are, or will be.
    fn place(held: &CachedOrder) -> *const u32 {
        match held.samples.get() {
            Some(samples) => samples.as_ptr(),
            None => held.spare.lock().unwrap().as_ptr(),
        }
    }

    #[test]
    fn an_order_is_made_when_it_is_read_and_once() {
        let mut order = held(Rule::Exact, 0);
        let memory = place(&order);
        for epoch in 1..4 {
            order.reseed(Seed::new(7), Epoch::new(epoch));
            assert!(order.samples.get().is_none(), "nothing is made that nobody reads");
            assert_eq!(order.samples(), held(Rule::Exact, epoch).samples());
            assert!(std::ptr::eq(order.samples(), order.samples()));
            assert_eq!(place(&order), memory, "each epoch is made in the memory of the last");
        }
    }

    #[test]
    fn copies_have_the_same_order_whether_it_is_made_or_not() {
        for rule in [Rule::Exact, Rule::Torch] {
            let order = held(rule, 3);
            let before = order.clone();
            assert!(before.spare.lock().unwrap().capacity() >= 1000);
            assert_eq!(before.samples(), order.samples());
            let after = order.clone();
            assert!(after.samples.get().is_some(), "what is made is copied");
            assert_eq!(after.samples(), order.samples());
        }
    }

    #[test]
    fn threads_that_read_at_once_see_one_order() {
        let order = held(Rule::Torch, 1);
        let expected = held(Rule::Torch, 1);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(order.samples(), expected.samples()));
            }
        });
    }
}
