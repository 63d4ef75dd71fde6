//! A small run to save and resume: two parameters with the state of an optimizer.

use std::{collections::BTreeMap, path::Path};

use candle_core::{DType, Device, Tensor};
use dist_checkpoint::{Checkpoint, Checkpoints, Result, StateDict, TensorKey};
use pmap_mesh::DeviceMesh;

/// The parameters and their shapes, which the slots own in turns.
pub(crate) const PARAMETERS: [(&str, &[usize]); 2] = [("weight", &[2, 3]), ("bias", &[2])];

/// Values that change in each step.
pub(crate) struct Run {
    pub(crate) mesh: DeviceMesh,
    pub(crate) values: BTreeMap<&'static str, Tensor>,
    steps: i64,
}

impl Run {
    pub(crate) fn cpu(slots: usize) -> Self {
        let mut values = BTreeMap::new();
        for (name, shape) in PARAMETERS {
            let len = shape.iter().product::<usize>() as f32;
            let items = Tensor::arange(0_f32, len, &Device::Cpu).unwrap();
            values.insert(name, items.affine(0.1, 0.3).unwrap().reshape(shape).unwrap());
        }
        Self { mesh: DeviceMesh::cpu(slots).unwrap(), values, steps: 0 }
    }

    pub(crate) fn steps(&mut self, steps: std::ops::Range<u64>) {
        for step in steps {
            for value in self.values.values_mut() {
                *value = value.affine(0.9, (step as f64).sin()).unwrap();
            }
            self.steps += 1;
        }
    }

    pub(crate) fn shapes() -> BTreeMap<String, Vec<usize>> {
        PARAMETERS.map(|(name, shape)| (name.to_owned(), shape.to_vec())).into()
    }

    pub(crate) fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new(&self.mesh, Self::shapes());
        for (n, (name, _)) in PARAMETERS.into_iter().enumerate() {
            let slot = n % self.mesh.len();
            let key = TensorKey::model(name, 0);
            let value = &self.values[name];
            let steps = Tensor::new(self.steps, &Device::Cpu).unwrap();
            let mean = Tensor::full(self.steps as f32, value.shape(), &Device::Cpu).unwrap();
            state.add(slot, key, value.clone()).unwrap();
            state.add(slot, TensorKey { kind: "mean", ..key }, mean).unwrap();
            state.add(slot, TensorKey { kind: "step", ..key }, steps).unwrap();
        }
        state
    }

    pub(crate) fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check_fits(&self.mesh, &Self::shapes())?;
        let zero = Tensor::new(0_i64, &Device::Cpu).unwrap();
        for (name, value) in &mut self.values {
            let key = TensorKey::model(name, 0);
            *value = checkpoint.like(key, value)?;
            checkpoint.like(TensorKey { kind: "mean", ..key }, value)?;
            let steps = checkpoint.like(TensorKey { kind: "step", ..key }, &zero)?;
            self.steps = steps.to_scalar().unwrap();
        }
        Ok(())
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        let values = self.values.values().map(|value| value.flatten_all().unwrap());
        values.flat_map(|value| value.to_vec1::<f32>().unwrap()).collect()
    }
}

pub(crate) fn saved(folder: &Path, run: &Run, step: u64) -> Checkpoint {
    let checkpoints = Checkpoints::new(folder);
    checkpoints.save(&run.mesh, step, &run.state_dict(), &("seed", step)).unwrap();
    checkpoints.latest().unwrap().unwrap()
}

pub(crate) fn zeros(len: usize, dtype: DType) -> Tensor {
    Tensor::zeros(len, dtype, &Device::Cpu).unwrap()
}

/// Returns the bits of the values, so that NaN equals itself and 0 differs from -0.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().copied().map(f32::to_bits).collect()
}
