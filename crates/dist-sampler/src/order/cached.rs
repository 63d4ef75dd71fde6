//! Orders cached in memory, generated on the first read.
//!
//! Resuming programs create a sampler and then set its epoch, as in PyTorch. Generating the order
//! at creation would do the work twice.

use std::{
    mem,
    sync::{Mutex, OnceLock, PoisonError},
};

use core_types::{Epoch, Seed};

use super::{exact, spdl::SpdlDraws, stratified::ClassStrata, table, torch};
use crate::error::Result;

/// The order of one epoch, one sample per position.
#[derive(Debug)]
pub(crate) struct CachedOrder {
    rule: OrderRule,
    len: u64,
    seed: Seed,
    epoch: Epoch,
    samples: OnceLock<Vec<u32>>,
    /// Buffer for `samples`, so that an allocation fails in `new` and not during a run. The lock is
    /// held only to take the buffer.
    spare: Mutex<Vec<u32>>,
}

/// The rule that generates the order.
#[derive(Clone, Debug)]
pub(crate) enum OrderRule {
    Exact,
    Torch,
    Stratified(Box<ClassStrata>),
    Spdl(Box<SpdlDraws>),
}

impl OrderRule {
    /// Returns the memory for generating `len` samples, in samples.
    fn capacity(&self, len: u64) -> u64 {
        match self {
            Self::Spdl(draws) => draws.capacity(),
            Self::Exact | Self::Torch | Self::Stratified(_) => len,
        }
    }
}

impl CachedOrder {
    /// Reserves memory for the order of `len` samples.
    pub(super) fn new(rule: OrderRule, len: u64, seed: Seed, epoch: Epoch) -> Result<Self> {
        if let OrderRule::Stratified(strata) = &rule {
            strata.check_memory()?;
        }
        let spare = Mutex::new(table::allocate(rule.capacity(len))?);
        Ok(Self { rule, len, seed, epoch, samples: OnceLock::new(), spare })
    }

    /// Switches to the order of another epoch, reusing the memory.
    pub(super) fn reseed(&mut self, seed: Seed, epoch: Epoch) {
        self.seed = seed;
        self.epoch = epoch;
        if let OrderRule::Spdl(draws) = &self.rule {
            self.len = draws.rounded_draws();
        }
        self.discard_samples();
    }

    /// Switches to the order of `len` draws, which another world has read, if the rule permits.
    pub(super) fn redraw(&mut self, len: u64) {
        if self.accepts_len(len) && len != self.len {
            self.len = len;
            self.discard_samples();
        }
    }

    /// Returns true if the rule can generate `len` samples.
    pub(super) fn accepts_len(&self, len: u64) -> bool {
        match &self.rule {
            OrderRule::Spdl(draws) => (1..=draws.draws()).contains(&len),
            _ => len == self.len,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn discard_samples(&mut self) {
        if let Some(samples) = self.samples.take() {
            self.spare = Mutex::new(samples);
        }
    }

    /// Returns the samples in order. The first thread to call it generates them, and other threads
    /// wait.
    pub(super) fn samples(&self) -> &[u32] {
        self.samples.get_or_init(|| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let mut samples = mem::take(&mut *spare);
            drop(spare);
            self.generate(&mut samples);
            samples
        })
    }

    /// Generates the order into `samples`.
    fn generate(&self, samples: &mut Vec<u32>) {
        let epoch_seed = self.seed.derive(self.epoch.as_u64());
        // PyTorch and SPDL's users add the epoch, or replace the seed by it.
        let sum = self.seed.as_u64().wrapping_add(self.epoch.as_u64());
        match &self.rule {
            OrderRule::Exact => exact::shuffle(samples, self.len, epoch_seed),
            OrderRule::Stratified(strata) => strata.fill(samples, epoch_seed),
            OrderRule::Torch => torch::shuffle(samples, self.len, sum),
            OrderRule::Spdl(draws) => draws.fill(samples, self.len, sum),
        }
    }

    /// Returns a hash of the classes or draws; 0 for orders without them.
    pub(super) fn fingerprint(&self) -> u64 {
        match &self.rule {
            OrderRule::Stratified(strata) => strata.fingerprint(),
            OrderRule::Spdl(draws) => draws.fingerprint(),
            OrderRule::Exact | OrderRule::Torch => 0,
        }
    }
}

/// If the order is not generated yet, the clone reserves separate memory and generates it again.
impl Clone for CachedOrder {
    fn clone(&self) -> Self {
        let samples = self.samples.clone();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the original has memory for as many samples"
        )]
        let spare_len =
            if samples.get().is_some() { 0 } else { self.rule.capacity(self.len) as usize };
        Self {
            rule: self.rule.clone(),
            len: self.len,
            seed: self.seed,
            epoch: self.epoch,
            samples,
            spare: Mutex::new(Vec::with_capacity(spare_len)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn new_order(rule: OrderRule, epoch: u64) -> CachedOrder {
        CachedOrder::new(rule, 1000, Seed::new(7), Epoch::new(epoch)).unwrap()
    }

    /// Returns the address of the samples or of their buffer.
    fn address(order: &CachedOrder) -> *const u32 {
        match order.samples.get() {
            Some(samples) => samples.as_ptr(),
            None => order.spare.lock().unwrap().as_ptr(),
        }
    }

    #[test]
    fn order_is_generated_once_on_first_read() {
        let mut order = new_order(OrderRule::Exact, 0);
        let memory = address(&order);
        for epoch in 1..4 {
            order.reseed(Seed::new(7), Epoch::new(epoch));
            assert!(order.samples.get().is_none(), "unread orders are not generated");
            assert_eq!(order.samples(), new_order(OrderRule::Exact, epoch).samples());
            assert!(std::ptr::eq(order.samples(), order.samples()));
            assert_eq!(address(&order), memory, "epochs reuse the memory");
        }
    }

    #[test]
    fn clone_keeps_the_order() {
        for rule in [OrderRule::Exact, OrderRule::Torch] {
            let order = new_order(rule, 3);
            let early_clone = order.clone();
            assert!(early_clone.spare.lock().unwrap().capacity() >= 1000);
            assert_eq!(early_clone.samples(), order.samples());
            let late_clone = order.clone();
            assert!(late_clone.samples.get().is_some(), "a generated order is copied");
            assert_eq!(late_clone.samples(), order.samples());
        }
    }

    #[test]
    fn concurrent_threads_see_one_order() {
        let order = new_order(OrderRule::Torch, 1);
        let expected = new_order(OrderRule::Torch, 1);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(order.samples(), expected.samples()));
            }
        });
    }
}
