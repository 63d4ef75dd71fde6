//! A small training run to save and resume.

use std::ops::Range;

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear, loss::mse};
use dist_train::{AdamW, DataParallel, Declared, DistributedModel};
use pmap_mesh::{DeviceMesh, Uneven};

/// A model in training.
pub(crate) struct Run {
    pub(crate) mesh: DeviceMesh,
    pub(crate) model: DistributedModel<Linear, AdamW>,
}

impl Run {
    pub(crate) fn new(mesh: DeviceMesh, share: bool) -> Self {
        let values = |declared: &Declared, items: Range<usize>| {
            let offset = if declared.name == "weight" { -0.2 } else { 0.3 };
            Tensor::arange(items.start as f32, items.end as f32, &Device::Cpu)?.affine(0.1, offset)
        };
        let params = ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() };
        let builder = DataParallel::builder(&mesh, |vb| linear(3, 2, vb));
        let builder = builder.init_with(values).uneven(Uneven::Balanced);
        let builder = if share { builder } else { builder.replicated() };
        let model = builder.build(|group| AdamW::new(group.vars, params.clone())).unwrap();
        Self { mesh, model }
    }

    pub(crate) fn cpu(slots: usize) -> Self {
        Self::new(DeviceMesh::cpu(slots).unwrap(), true)
    }

    pub(crate) fn steps(&mut self, steps: Range<u64>) -> f64 {
        let mut loss = f64::NAN;
        for step in steps {
            let x = Tensor::arange(0_f32, 36., &Device::Cpu)
                .unwrap()
                .affine(0.05, -(step as f64) / 7.0)
                .unwrap();
            let x = x.reshape((12, 3)).unwrap();
            let y = x.narrow(1, 0, 2).unwrap().sqr().unwrap();
            let step = self.model.step((x, y), |_, model, (x, y)| mse(&model.forward(&x)?, &y));
            loss = step.unwrap().loss;
        }
        loss
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        let value = |name| self.model.parameter(name).unwrap().flatten_all().unwrap();
        ["weight", "bias"].map(|name| value(name).to_vec1::<f32>().unwrap()).concat()
    }
}
