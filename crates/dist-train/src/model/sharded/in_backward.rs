//! Updates of a slot's shards inside the backward pass.

use std::{collections::BTreeMap, sync::Mutex};

use candle_core::{Result, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::Replica;

use crate::{
    agreement,
    model::slot::{Slot, lock},
    step::{rules::Rules, update::norm},
    units::backward::{ReadyGrads, UpdatesInBackward},
};

impl<O: Optimizer + Send> UpdatesInBackward for Mutex<Slot<O>> {
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        known: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()> {
        let mut slot = lock(self);
        let own = slot.agreed_sums(ctx, rules, known, sums)?;
        slot.is_half_updated = true;
        slot.update(own, 1.0)
    }

    fn finish(&self) -> Result<()> {
        lock(self).step_remaining()
    }
}

impl<O: Optimizer> Slot<O> {
    /// Returns the sums for this slot's shards of the parameters, after all slots have agreed to
    /// update them.
    fn agreed_sums(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        known: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<Vec<(usize, Tensor)>> {
        let used = agreement::any(ctx, &known.used)?;
        // Parameters that are not final yet count as used, so that they are not reported as unused.
        let mut has_gradient = vec![true; self.squares.len()];
        known.trained.iter().zip(used).for_each(|(&trained, used)| has_gradient[trained] = used);
        rules.check_used(&has_gradient)?;
        let own = self.vars_of(&known.trained);
        let own = own.into_iter().filter_map(|(var, trained)| {
            let sum = sums.remove(&var)?;
            has_gradient[trained].then_some((var, sum))
        });
        let own: Vec<(usize, Tensor)> = own.collect();
        self.agree_on_squares(ctx, rules, &known.trained, &own)?;
        Ok(own)
    }

    /// Exchanges the squares of these parameters' sums, and rejects non-finite values.
    fn agree_on_squares(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        trained: &[usize],
        own: &[(usize, Tensor)],
    ) -> Result<()> {
        let here = self.local_squares(own)?;
        let here: Vec<f64> = trained.iter().map(|&trained| here[trained]).collect();
        let mut of_these = vec![0.0; self.squares.len()];
        for (&trained, squares) in trained.iter().zip(agreement::sums(ctx, &here)?) {
            of_these[trained] = squares;
            self.squares[trained] = squares;
        }
        norm(rules, &of_these, 1.0).map(drop)
    }
}
