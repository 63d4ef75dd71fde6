//! Updates of a slot's shards inside the backward pass.

use std::{collections::BTreeMap, sync::Mutex};

use candle_core::{Result, Tensor};
use candle_nn::Optimizer;
use pmap_mesh::Replica;

use crate::{
    agreement,
    model::slot::{Slot, lock},
    step::{rules::Rules, update::global_norm},
    units::backward::{ReadyGrads, UpdatesInBackward},
};

impl<O: Optimizer + Send> UpdatesInBackward for Mutex<Slot<O>> {
    fn update(
        &self,
        ctx: &Replica,
        rules: &Rules,
        ready: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<()> {
        let mut slot = lock(self);
        let own = slot.take_agreed_sums(ctx, rules, ready, sums)?;
        slot.is_half_updated = true;
        slot.update(own, 1.0)
    }

    fn finish(&self) -> Result<()> {
        lock(self).step_remaining()
    }
}

impl<O: Optimizer> Slot<O> {
    /// Agrees with all slots to update the `ready` parameters, and takes the sums of this slot's
    /// shards of these parameters.
    fn take_agreed_sums(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        ready: &ReadyGrads,
        sums: &mut BTreeMap<usize, Tensor>,
    ) -> Result<Vec<(usize, Tensor)>> {
        let used = agreement::any(ctx, &ready.used)?;
        // Parameters that are not final yet count as used, so that they are not reported as unused.
        let mut has_gradient = vec![true; self.squared_norms.len()];
        ready.trained.iter().zip(used).for_each(|(&trained, used)| has_gradient[trained] = used);
        rules.check_used(&has_gradient)?;
        let mut own_sums = Vec::new();
        for (var, trained) in self.vars_of(&ready.trained) {
            if let Some(sum) = sums.remove(&var)
                && has_gradient[trained]
            {
                own_sums.push((var, sum));
            }
        }
        self.agree_on_norms(ctx, rules, &ready.trained, &own_sums)?;
        Ok(own_sums)
    }

    /// Records the squared norms of the gradients of the parameters `trained`, the same on all
    /// slots, and rejects non-finite norms. `own_sums` are the sums of this slot's shards.
    fn agree_on_norms(
        &mut self,
        ctx: &Replica,
        rules: &Rules,
        trained: &[usize],
        own_sums: &[(usize, Tensor)],
    ) -> Result<()> {
        let all_local = self.local_squared_norms(own_sums)?;
        let local: Vec<f64> = trained.iter().map(|&trained| all_local[trained]).collect();
        let agreed = agreement::sum_in_rank_order(ctx, &local)?;
        let mut squared_norms = vec![0.0; self.squared_norms.len()];
        for (&trained, squared_norm) in trained.iter().zip(agreed) {
            squared_norms[trained] = squared_norm;
            self.squared_norms[trained] = squared_norm;
        }
        global_norm(rules, &squared_norms, 1.0).map(drop)
    }
}
