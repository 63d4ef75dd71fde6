//! A small training run to save and resume.

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarMap, linear, loss::mse};
use dist_train::{AdamW, DataParallel, DistributedModel};
use pmap_mesh::{DeviceMesh, Uneven};

/// A model in training, and its variables.
pub(crate) struct Run {
    pub(crate) mesh: DeviceMesh,
    pub(crate) vars: VarMap,
    pub(crate) model: DistributedModel<Linear, AdamW>,
}

impl Run {
    pub(crate) fn new(mesh: DeviceMesh, share: bool) -> Self {
        let vars = VarMap::new();
        let start = |shape: &[usize], offset: f64| {
            let len: usize = shape.iter().product();
            Tensor::arange(0_f32, len as f32, &Device::Cpu)
                .unwrap()
                .affine(0.1, offset)
                .unwrap()
                .reshape(shape)
                .unwrap()
        };
        for (name, tensor) in [("weight", start(&[2, 3], -0.2)), ("bias", start(&[2], 0.3))] {
            let var = candle_core::Var::from_tensor(&tensor).unwrap();
            vars.data().lock().unwrap().insert(name.to_owned(), var);
        }
        let params = ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() };
        let builder = DataParallel::builder(&mesh, |vb| linear(3, 2, vb));
        let builder = builder.with_variables(&vars).uneven(Uneven::Balanced);
        let builder = if share { builder } else { builder.replicated() };
        let model = builder.build(|group| AdamW::new(group.vars, params.clone())).unwrap();
        Self { mesh, vars, model }
    }

    pub(crate) fn cpu(slots: usize) -> Self {
        Self::new(DeviceMesh::cpu(slots).unwrap(), true)
    }

    pub(crate) fn steps(&mut self, steps: std::ops::Range<u64>) -> f64 {
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
        let vars = self.vars.data().lock().unwrap();
        let all = ["weight", "bias"]
            .map(|name| vars[name].flatten_all().unwrap().to_vec1::<f32>().unwrap());
        all.concat()
    }
}
