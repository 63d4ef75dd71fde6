//! Steps of building a model that both layouts share.

use candle_core::Result as CandleResult;
use candle_nn::{Optimizer, VarBuilder};

use std::sync::Arc;

use crate::{
    error::Result,
    model::{
        DistributedModel,
        builder::{Group, ModelBuilder, Source},
        layout::Layout,
        replicated::{self, build::TypedConstructor},
        settings,
        sharded::{self, build::Description},
        slot::{SharedSlot, lock},
    },
    progress::Progress,
    step::{inventory::Inventory, rates::Rates},
    units::Units,
};

/// The parameters, this process's slots, and the layout of a model.
type BuiltModel<M, O> = (Arc<Inventory>, Vec<SharedSlot<O>>, Layout<M>);

impl<M> ModelBuilder<'_, M> {
    /// Builds the model on every slot, and its optimizers.
    ///
    /// The model's constructor must request the same variables on each call. On the first call, all
    /// variables are zeros without memory, and the resulting model is dropped. For a model [by
    /// units](Self::by_units) this is the only call. If the mesh spans several processes, all
    /// processes must set the same options. A replicated model starts with the values of rank 0 on
    /// all processes; for a sharded model, all processes must initialize the same values. If one
    /// process fails, all processes return together.
    ///
    /// `optimizer` is called for each slot and group with the variables that this slot updates:
    /// shards of parameters if the model is sharded, and with
    /// [`optimizer_in_backward`](ModelBuilder::optimizer_in_backward) separately for each unit.
    /// Gradients of half-precision variables are in single precision, like [`AdamW`](crate::AdamW)
    /// and [`Sgd`](crate::Sgd) expect; candle's own optimizers need gradients of the variable's
    /// dtype, and so do not work with half precision.
    ///
    /// Logs a warning if one unit has more than half of all parameters, because sharding then saves
    /// little memory while it is gathered.
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`](crate::Error::Setting) if the maximum norm is negative or NaN, or the
    ///   schedule is invalid;
    /// - [`Error::Model`](crate::Error::Model) if the constructor or `optimizer` fails, or if
    ///   variables are on another device;
    /// - [`Error::Sharding`](crate::Error::Sharding) if a parameter of a sharded model is in no
    ///   unit or is a buffer, or if a plan does not fit this model and mesh;
    /// - [`Error::Training`](crate::Error::Training) if a pattern matches nothing, groups overlap,
    ///   nothing is trained, or options exclude each other or belong to
    ///   the other layout; also if processes have different models, options or weights;
    /// - [`Error::Diverged`](crate::Error::Diverged) if processes start with different values of
    ///   replicated variables;
    /// - [`Error::Plan`](crate::Error::Plan) for an invalid pattern or parameters that cannot be
    ///   planned;
    /// - [`Error::Checkpoint`](crate::Error::Checkpoint) and
    ///   [`Error::Parameter`](crate::Error::Parameter) if weights cannot be read or do not match
    ///   the model;
    /// - [`Error::OtherProcess`](crate::Error::OtherProcess) with the message of another process
    ///   that fails;
    /// - [`Error::Mesh`](crate::Error::Mesh) if a process does not respond.
    pub fn build<O: Optimizer>(
        self,
        optimizer: impl Fn(Group) -> CandleResult<O>,
    ) -> Result<DistributedModel<M, O>> {
        self.mesh.all_ok(self.check())?;
        let (inventory, slots, layout) = self.build_layout(&optimizer)?;
        let Self { mesh, config, .. } = self;
        let groups = &inventory.roles.groups;
        let rates: Vec<f64> = {
            let slot = lock(&slots[0]);
            (0..groups.len()).map(|group| slot.learning_rate(group)).collect()
        };
        let fingerprint = settings::number_fingerprint(rates.iter().map(|rate| rate.to_bits()));
        settings::check(mesh, &[("the optimizers' learning rates", fingerprint)])?;
        Ok(DistributedModel {
            mesh: mesh.clone(),
            rates: Rates::new(groups, rates, config.step_options.schedule),
            inventory,
            options: config.step_options,
            precision: config.precision,
            progress: Progress { steps: 0, batches: 0, seed: config.rng_seed },
            slots,
            layout,
        })
    }

    /// Rejects options that cannot be set together.
    fn check(&self) -> Result<()> {
        if self.is_sharded {
            self.config.check_sharded()?;
        } else {
            self.sharding.check_replicated()?;
        }
        self.config.precision.check(self.config.step_options.allow_non_finite)?;
        self.config.step_options.check()
    }

    fn build_layout<O: Optimizer>(
        &self,
        optimizer: &dyn Fn(Group) -> CandleResult<O>,
    ) -> Result<BuiltModel<M, O>> {
        let Self { mesh, source, config, is_sharded, sharding } = self;
        match source {
            Source::Units { declare, rules, lend, .. } if *is_sharded => {
                let declare = &**declare;
                let description = Description { mesh, config, sharding, rules, declare };
                let (slots, layout) = sharded::build::build(&description, optimizer)?;
                let inventory = Arc::clone(&layout.model.inventory);
                Ok((inventory, slots, Layout::Sharded(layout, *lend)))
            }
            Source::Units { declare, rules, own, .. } => {
                let units = |vb: VarBuilder<'_>, dtype| {
                    Units::replicated(rules, declare, dtype, &vb).map(own)
                };
                self.build_replicated(&units, optimizer)
            }
            Source::Model(model) => self.build_replicated(&|vb, _| model(vb), optimizer),
        }
    }

    fn build_replicated<O: Optimizer>(
        &self,
        model: &TypedConstructor<'_, M>,
        optimizer: &dyn Fn(Group) -> CandleResult<O>,
    ) -> Result<BuiltModel<M, O>> {
        let built = replicated::build::build(self.mesh, &self.config, model, optimizer)?;
        let (inventory, slots, layout) = built;
        Ok((Arc::new(inventory), slots, Layout::Replicated(layout)))
    }
}
