//! How a model is built: what its layouts have in common.

use candle_core::Result as CandleResult;
use candle_nn::{Optimizer, VarBuilder};

use std::sync::Arc;

use crate::{
    error::Result,
    model::{
        DistributedModel,
        builder::{Group, ModelBuilder, Source},
        layout::Layout,
        replicated, settings,
        sharded::{self, build::Description},
        slot::{SharedSlot, lock},
    },
    progress::Progress,
    step::{inventory::Inventory, rates::Rates},
    units::Units,
};

/// The parameters, the slots of this process, and the layout of a model.
type BuiltModel<M, O> = (Arc<Inventory>, Vec<SharedSlot<O>>, Layout<M>);

impl<M> ModelBuilder<'_, M> {
    /// Builds the model on every slot, and the optimizers.
    ///
    /// The model's constructor must ask for the same variables each time that it is called; the first
    /// time they are all zeros of no size, and what it makes of them is dropped. A model
    /// [by units](Self::by_units) asks it for no more. Where the mesh spans several processes, all
    /// must set the same options, and begin with the values of the first, or if the model is sharded
    /// with the same ones. If one of them fails, all return at once.
    ///
    /// `optimizer` is called for each slot and group with the variables that this slot updates: parts
    /// of parameters if the model is sharded, and with
    /// [`optimizer_in_backward`](ModelBuilder::optimizer_in_backward) for each unit besides. It is
    /// given the gradients of halves in single precision, as [`AdamW`](crate::AdamW) and
    /// [`Sgd`](crate::Sgd) take them; candle's own optimizers need variables of the gradients' type,
    /// and so no halves.
    ///
    /// A unit that has over half of all parameters is warned of in the log: where it is gathered
    /// little is saved.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`](crate::Error::Setting) if the largest norm is negative or NaN, or variables
    /// are to be checked every 0 steps; [`Error::Model`](crate::Error::Model) with what the
    /// constructor and `optimizer` return, or if variables lie elsewhere;
    /// [`Error::Sharding`](crate::Error::Sharding) if a parameter of a sharded model is in no unit or
    /// is a buffer, or a plan is not for this model and mesh;
    /// [`Error::Training`](crate::Error::Training) if a pattern matches nothing, groups overlap, a
    /// variable has two names, nothing is trained, options exclude each other or are of another
    /// layout, or processes build other models or set other options or weights;
    /// [`Error::Diverged`](crate::Error::Diverged) if they begin with other values of what several
    /// slots store; [`Error::Plan`](crate::Error::Plan) for a pattern that is none or parameters that
    /// cannot be planned; [`Error::Checkpoint`](crate::Error::Checkpoint) and
    /// [`Error::Parameter`](crate::Error::Parameter) if weights cannot be read or are not the
    /// model's; [`Error::OtherProcess`](crate::Error::OtherProcess) with the message of another
    /// process that fails; [`Error::Mesh`](crate::Error::Mesh) if a process does not answer. The
    /// [`variables`](Self::with_variables) may then have the values of the first process, and this
    /// model's new ones.
    pub fn build<O: Optimizer>(
        self,
        optimizer: impl Fn(Group) -> CandleResult<O>,
    ) -> Result<DistributedModel<M, O>> {
        self.mesh.all_ok(self.check())?;
        let (inventory, slots, layout) = self.build_layout(&optimizer)?;
        let Self { mesh, config, .. } = self;
        let groups = &inventory.roles.groups;
        let own: Vec<f64> = {
            let slot = lock(&slots[0]);
            (0..groups.len()).map(|group| slot.learning_rate(group)).collect()
        };
        let bits = settings::of_numbers(own.iter().map(|rate| rate.to_bits()));
        settings::check(mesh, &[("the optimizers' learning rates", bits)])?;
        Ok(DistributedModel {
            mesh: mesh.clone(),
            rates: Rates::new(groups, own, config.options.schedule),
            inventory,
            options: config.options,
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
        self.config.precision.check(self.config.options.allow_non_finite)?;
        self.config.options.check()
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
                let units = Units::by(rules.clone(), declare);
                self.build_replicated(&|vb| Ok(own(units(vb)?)), optimizer)
            }
            Source::Model(model) => self.build_replicated(model, optimizer),
        }
    }

    fn build_replicated<O: Optimizer>(
        &self,
        model: &dyn Fn(VarBuilder<'_>) -> CandleResult<M>,
        optimizer: &dyn Fn(Group) -> CandleResult<O>,
    ) -> Result<BuiltModel<M, O>> {
        let built = replicated::build::build(self.mesh, &self.config, model, optimizer)?;
        let (inventory, slots, layout) = built;
        Ok((Arc::new(inventory), slots, Layout::Replicated(layout)))
    }
}
