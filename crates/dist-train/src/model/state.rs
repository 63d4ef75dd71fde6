//! Saving and loading a model in training.

use dist_checkpoint::{Checkpoint, StateDict};

use crate::{
    error::Result,
    model::{DistributedModel, slot::lock},
    optim::StatefulOptimizer,
    progress::{Progress, TrainerState},
};

impl<M, O: StatefulOptimizer> DistributedModel<M, O> {
    /// Returns the parameters, optimizer state and progress of training, for
    /// [`Checkpoints::save`](crate::Checkpoints::save), where each slot of the mesh writes its part
    /// in its own process. Accumulated gradients are not included.
    ///
    /// Runs [`check_in_sync`](Self::check_in_sync) first, so every process of the mesh must call
    /// this.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer cannot return its
    /// state, [`CheckpointError::Kind`](crate::CheckpointError::Kind) if its state has an invalid
    /// name, [`Error::OtherProcess`](crate::Error::OtherProcess) if another process fails, and the
    /// errors of [`check_in_sync`](Self::check_in_sync).
    pub fn state_dict(&self) -> Result<StateDict> {
        self.check_in_sync()?;
        self.mesh.all_ok(self.local_state())
    }

    /// Returns the state of this process's slots.
    fn local_state(&self) -> Result<StateDict> {
        let mut state = StateDict::new(&self.mesh, self.inventory.saved_shapes())
            .with_trainer(&self.rates.state(self.progress))?;
        for (local_slot, slot) in self.slots.iter().enumerate() {
            lock(slot).save(&self.inventory, local_slot, &mut state)?;
        }
        Ok(state)
    }

    /// Loads all parameters and optimizer state from a checkpoint, which may be written with any
    /// number of slots and either layout. Resumes the checkpoint's step count, random numbers and
    /// learning rates. Accumulated gradients are dropped. Each slot reads its own items. Every
    /// process of the mesh must call this with the same checkpoint.
    ///
    /// # Errors
    ///
    /// - [`Error::Parameter`](crate::Error::Parameter) if the checkpoint has other parameters than
    ///   the model or lacks some of their items;
    /// - [`Error::Checkpoint`](crate::Error::Checkpoint) if a file is damaged or cannot be read, or
    ///   if another process loads another checkpoint;
    /// - [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer rejects its state, or lacks
    ///   a state that the checkpoint has, as after a change of optimizer;
    /// - [`Error::Tensor`](crate::Error::Tensor) if candle fails;
    /// - [`Error::OtherProcess`](crate::Error::OtherProcess) if another process fails.
    ///
    /// Names, shapes, dtypes and kinds of state are compared before anything changes. After a later
    /// error some parameters may be changed, and the model rejects everything except
    /// another `load` ([`TrainingError::HalfUpdated`](crate::TrainingError::HalfUpdated)).
    #[doc(alias = "load_state_dict")]
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &self.inventory.saved_shapes())?;
        let trainer = checkpoint.trainer::<TrainerState>()?;
        let rates = match &trainer {
            Some(state) => self.rates.with_state(state)?,
            None => self.rates.clone(),
        };
        let fits =
            self.slots.iter().try_for_each(|slot| lock(slot).check(&self.inventory, checkpoint));
        self.mesh.all_ok(fits)?;
        self.mesh.all_ok(self.load_slots(checkpoint))?;
        self.slots.iter().for_each(|slot| lock(slot).is_half_updated = false);
        self.rates = rates;
        self.progress = if let Some(state) = trainer {
            state.progress
        } else {
            let steps = checkpoint.step();
            Progress { steps, batches: steps, ..self.progress }
        };
        Ok(())
    }

    fn load_slots(&self, checkpoint: &Checkpoint) -> Result<()> {
        // Discards accumulated gradients on all slots before any slot is loaded, because a load may
        // fail after some slots. Such a load leaves the model partially updated.
        self.layout.discard_accumulated();
        for slot in &self.slots {
            let mut slot = lock(slot);
            slot.totals = None;
            slot.is_half_updated = true;
        }
        self.slots.iter().try_for_each(|slot| lock(slot).load(&self.inventory, checkpoint))
    }
}
