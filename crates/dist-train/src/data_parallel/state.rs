//! Saving and loading a model in training.

use candle_core::{Tensor, Var};
use dist_checkpoint::{Checkpoint, StateDict, TensorKey};

use crate::{
    data_parallel::{DataParallel, slot::lock},
    device::moved,
    error::{Doing, Result},
    optim::{StatefulOptimizer, add_state, load_state},
    progress::{Progress, TrainerState},
};

impl<M, O: StatefulOptimizer> DataParallel<M, O> {
    /// The variables, what the optimizers keep for them, and how far training is, for
    /// [`Checkpoints::save`](crate::Checkpoints::save): each slot of the mesh, in whatever process,
    /// writes its part. Accumulated gradients are not among them.
    ///
    /// It begins with [`check_in_sync`](Self::check_in_sync), so every process of the mesh calls
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer cannot tell its state,
    /// [`CheckpointError::Kind`](crate::CheckpointError::Kind) if its state has a name that cannot
    /// be written, and those of [`check_in_sync`](Self::check_in_sync).
    pub fn state_dict(&self) -> Result<StateDict> {
        self.check_in_sync()?;
        self.mesh.all_ok(self.state_of_slots())
    }

    /// What the slots of this process keep.
    fn state_of_slots(&self) -> Result<StateDict> {
        let mut state = StateDict::new(&self.mesh, self.inventory.saved_shapes())
            .with_trainer(&self.rates.state(self.progress))?;
        for (local_slot, worker) in self.workers.iter().enumerate() {
            let slot = lock(&worker.slot);
            for &var in &slot.saved {
                let key = TensorKey::model(self.inventory.name(var), 0);
                state.add(local_slot, key, slot.vars[var].as_detached_tensor())?;
                if let Some((optimizer, position)) = slot.optimizer_of(var) {
                    add_state(&mut state, local_slot, key, optimizer, position)?;
                }
            }
        }
        Ok(state)
    }

    /// Gives all variables and optimizers the values of a checkpoint, whatever number of devices
    /// wrote it, and resumes its count of steps, random numbers and learning rates; accumulated
    /// gradients are dropped. Every process of the mesh calls this, with the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`](crate::Error::Parameter) if the checkpoint has other parameters than
    /// the model or lacks some of their items, [`Error::Checkpoint`](crate::Error::Checkpoint) if a
    /// file is damaged or cannot be read, or another process loads another checkpoint,
    /// [`Error::Optimizer`](crate::Error::Optimizer) if an optimizer refuses its state,
    /// [`Error::Tensor`](crate::Error::Tensor) if candle fails,
    /// [`Error::OtherProcess`](crate::Error::OtherProcess) if another process fails. Some variables
    /// may then be changed.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &self.inventory.saved_shapes())?;
        let trainer = checkpoint.trainer::<TrainerState>()?;
        let rates = match &trainer {
            Some(state) => self.rates.resumed(state)?,
            None => self.rates.clone(),
        };
        self.mesh.all_ok(self.load_slots(checkpoint))?;
        self.rates = rates;
        self.resume(checkpoint.step(), trainer);
        Ok(())
    }

    /// Gives the variables and optimizers of this process their values.
    fn load_slots(&self, checkpoint: &Checkpoint) -> Result<()> {
        // On all slots before the first is read: some would go on with what the others have dropped.
        self.workers.iter().for_each(|worker| lock(&worker.slot).forget());
        for worker in &self.workers {
            let slot = &mut *lock(&worker.slot);
            for &var in &slot.loaded {
                let key = TensorKey::model(self.inventory.name(var), 0);
                let value = checkpoint.like(key, &slot.vars[var])?;
                assign(&slot.vars[var], &value).doing("loading a variable")?;
            }
            for group in &mut slot.optimizers {
                for (position, &var) in group.vars.iter().enumerate() {
                    let key = TensorKey::model(self.inventory.name(var), 0);
                    load_state(checkpoint, key, &mut group.optimizer, position)?;
                }
            }
        }
        Ok(())
    }

    /// Resumes the count of steps and of random numbers.
    fn resume(&mut self, step: u64, trainer: Option<TrainerState>) {
        self.progress = match trainer {
            Some(state) => state.progress,
            None => Progress { steps: step, batches: step, ..self.progress },
        };
    }
}

fn assign(var: &Var, value: &Tensor) -> candle_core::Result<()> {
    var.set(&moved(value, var.device())?)
}
