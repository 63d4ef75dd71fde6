//! Random models, batches and options, with a reference on one device that does not use the crate.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, VarMap, linear, linear_no_bias};
use core_types::Seed;
use dist_train::{DataParallel, Keep, Loss, ModelBuilder, ParamsSgd, Sgd, UnitRules, Units};
use pmap_mesh::{DeviceMesh, Replica, Uneven};

const WIDTH: usize = 4;
const RATE: f64 = 0.2;
const MOMENTUM: f64 = 0.5;
/// A layer that the loss does not use.
const UNUSED: &str = "layers.9";
/// A parameter without elements.
const EMPTY: &str = "empty";

/// Returns the name of a layer, which is the name of its unit.
fn layer_name(name: usize) -> String {
    format!("layers.{name}")
}

/// A sequence of random numbers.
struct RandomDraws(Seed, u64);

impl RandomDraws {
    fn below(&mut self, n: u64) -> u64 {
        self.1 += 1;
        self.0.derive(self.1).as_u64() % n
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    fn items(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.below(2001) as f64 / 1000.0 - 1.0).collect()
    }
}

/// A random model with its options and batches.
pub(crate) struct Case {
    dtype: DType,
    /// The name of each layer; layers with the same name are tied.
    layers: Vec<usize>,
    form: LayerForm,
    has_unused: bool,
    /// Whether each slot has separate variables.
    has_own: bool,
    frozen: Option<usize>,
    weighted: bool,
    uneven: Uneven,
    max_norm: Option<f64>,
    pub(crate) keep: Keep,
    /// The batches of each update; all but the last are accumulated.
    updates: Vec<Vec<WeightedBatch>>,
}

/// The form of all layers of a model.
#[derive(Clone, Copy)]
struct LayerForm {
    has_bias: bool,
    has_residual: bool,
    /// Whether each layer also has a parameter without elements.
    has_empty: bool,
}

impl LayerForm {
    fn layer(self, vb: VarBuilder<'_>) -> Result<Linear> {
        if self.has_empty {
            vb.get((0, WIDTH), EMPTY)?;
        }
        if self.has_bias { linear(WIDTH, WIDTH, vb) } else { linear_no_bias(WIDTH, WIDTH, vb) }
    }

    /// Returns the result of a layer, with its residual connection.
    fn forward(self, layer: &Linear, x: &Tensor) -> Result<Tensor> {
        let y = layer.forward(x)?.tanh()?;
        if self.has_residual { x + y } else { Ok(y) }
    }
}

/// Rows with their weights.
struct WeightedBatch {
    x: Tensor,
    weights: Tensor,
}

impl Case {
    /// Draws a case for a number of slots.
    pub(crate) fn new(seed: u64, slots: usize, dtype: DType) -> Self {
        let mut draw = RandomDraws(Seed::new(seed), 0);
        let depth = 1 + draw.below(4);
        let layers: Vec<usize> = (0..depth).map(|_| draw.below(3) as usize).collect();
        let frozen = layers.iter().copied().find(|_| draw.below(4) == 0);
        // At least one layer must be trained.
        let frozen = frozen.filter(|frozen| layers.iter().any(|layer| layer != frozen));
        let uneven = if draw.coin() { Uneven::Pad } else { Uneven::Balanced };
        let n_updates = 1 + draw.below(3);
        let updates = (0..n_updates).map(|_| {
            let n_batches = 1 + draw.below(3);
            (0..n_batches).map(|_| WeightedBatch::new(&mut draw, slots, uneven, dtype)).collect()
        });
        let updates = updates.collect();
        Self {
            dtype,
            layers,
            form: LayerForm {
                has_bias: draw.coin(),
                has_residual: draw.coin(),
                has_empty: draw.coin(),
            },
            frozen,
            uneven,
            updates,
            has_unused: draw.coin(),
            has_own: draw.coin(),
            weighted: draw.coin(),
            keep: [Keep::Inputs, Keep::Graph, Keep::Gathered][draw.below(3) as usize],
            max_norm: draw.coin().then(|| 0.01 + draw.below(100) as f64 / 100.0),
        }
    }

    fn model(&self, vb: VarBuilder<'_>) -> Result<Vec<Linear>> {
        if self.has_unused {
            linear(2, 3, vb.pp(UNUSED))?;
        }
        self.layers.iter().map(|&name| self.form.layer(vb.pp(layer_name(name)))).collect()
    }

    /// Returns the loss of each row.
    fn row_losses(&self, model: &[Linear], x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in model {
            x = self.form.forward(layer, &x)?;
        }
        (x - 0.3)?.sqr()?.sum(1)
    }

    /// Returns the loss of a shard from the losses of its rows.
    fn loss(&self, ctx: &Replica, row_losses: Tensor, weights: &Tensor) -> Result<Loss> {
        if self.weighted {
            return Ok(Loss::sum((row_losses * weights)?.sum_all()?, weights.sum_all()?));
        }
        Ok(Loss::mean(row_losses.narrow(0, 0, ctx.valid_len().unwrap())?.mean_all()?))
    }

    /// Trains on a mesh; returns the loss, norm and weight of each update, and the final variables.
    pub(crate) fn on_mesh(&self, mesh: &DeviceMesh) -> Vec<f64> {
        let builder = self.configure(DataParallel::builder(mesh, |vb| self.model(vb)));
        let builder = if self.has_own { builder.replicated() } else { builder };
        self.train(builder, |ctx, model: &Vec<Linear>, (x, weights)| {
            self.loss(ctx, self.row_losses(model, &x)?, &weights)
        })
    }

    /// Like `on_mesh`, with a unit for each layer, which may be sharded.
    pub(crate) fn by_units(&self, mesh: &DeviceMesh, is_sharded: bool) -> Vec<f64> {
        let model = |vb: VarBuilder<'_>| self.model(vb);
        let builder = DataParallel::builder(mesh, model).by_units(UnitRules::new());
        let builder = if is_sharded { builder.fully_shard().keep(self.keep) } else { builder };
        self.train(self.configure(builder), |ctx, model: &Units, (x, weights)| {
            let (form, mut x) = (self.form, x);
            for &name in &self.layers {
                let unit = layer_name(name);
                x = model.unit(&unit, &x, move |vb, x| form.forward(&form.layer(vb)?, x))?;
            }
            self.loss(ctx, (x - 0.3)?.sqr()?.sum(1)?, &weights)
        })
    }

    /// Removes what makes a sharded model equal to a replicated one only up to rounding.
    pub(crate) fn with_equal_bits(mut self) -> Self {
        self.layers.sort_unstable();
        self.layers.dedup();
        self.max_norm = None;
        self.updates.iter_mut().for_each(|batches| batches.truncate(1));
        self
    }

    /// Returns true if the sharded model has the bits of the replicated one: no layer is used
    /// twice, gradients are not clipped, and no batch is accumulated.
    pub(crate) fn has_equal_bits(&self) -> bool {
        let mut layers = self.layers.clone();
        layers.sort_unstable();
        layers.dedup();
        let is_accumulated = self.updates.iter().any(|batches| batches.len() > 1);
        layers.len() == self.layers.len() && self.max_norm.is_none() && !is_accumulated
    }

    /// Returns the bits of what `on_mesh` returns, without the norms, which are sums in another order
    /// if the model is sharded.
    pub(crate) fn bits_without_norms(&self, found: &[f64]) -> Vec<u64> {
        let norms = (0..self.updates.len()).map(|update| 3 * update + 1);
        let is_norm = |index| norms.clone().any(|norm| norm == index);
        let others = found.iter().enumerate().filter(|(index, _)| !is_norm(*index));
        others.map(|(_, item)| item.to_bits()).collect()
    }

    fn configure<'a, M>(&self, builder: ModelBuilder<'a, M>) -> ModelBuilder<'a, M> {
        let unused = self.has_unused.then_some(UNUSED);
        let builder = builder
            .dtype(self.dtype)
            .uneven(self.uneven)
            .allow_unused(unused.into_iter().chain(self.form.has_empty.then_some(EMPTY)))
            .freeze(self.frozen.map(layer_name));
        match self.max_norm {
            Some(max_norm) => builder.clip_grad_norm(max_norm),
            None => builder,
        }
    }

    fn train<M: Send>(
        &self,
        builder: ModelBuilder<'_, M>,
        loss: impl Fn(&Replica, &M, (Tensor, Tensor)) -> Result<Loss> + Send + Sync,
    ) -> Vec<f64> {
        let params = ParamsSgd { lr: RATE, momentum: MOMENTUM, ..ParamsSgd::default() };
        let mut model = builder.build(|group| Sgd::new(group.vars, params.clone())).unwrap();
        let mut all = Vec::new();
        for batches in &self.updates {
            let (last, accumulated) = batches.split_last().unwrap();
            for WeightedBatch { x, weights } in accumulated {
                model.accumulate((x.clone(), weights.clone()), &loss).unwrap();
            }
            let step = model.step((last.x.clone(), last.weights.clone()), &loss).unwrap();
            all.extend([step.loss, step.grad_norm, step.weight]);
        }
        model.check_in_sync().unwrap();
        model.parameters().unwrap().values().for_each(|variable| all.extend(items(variable)));
        all
    }

    /// Like `on_mesh`, in double precision on one device with candle alone.
    pub(crate) fn on_one_device(&self) -> Vec<f64> {
        let mesh = DeviceMesh::cpu(1).unwrap();
        let initial = DataParallel::builder(&mesh, |vb: VarBuilder<'_>| self.model(vb))
            .dtype(self.dtype)
            .build(|group| Sgd::new(group.vars, ParamsSgd::default()))
            .unwrap()
            .parameters()
            .unwrap();
        let map = VarMap::new();
        for (name, value) in &initial {
            let var = Var::from_tensor(&value.to_dtype(DType::F64).unwrap()).unwrap();
            map.data().lock().unwrap().insert(name.clone(), var);
        }
        let model = self.model(VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu)).unwrap();
        let named = map.data().lock().unwrap();
        let is_frozen = |name: &str| {
            self.frozen.is_some_and(|frozen| name.starts_with(&format!("{}.", layer_name(frozen))))
        };
        let trained = initial.keys().filter(|name| !is_frozen(name)).map(|name| &named[name]);
        let mut moved: Vec<(&Var, Option<Tensor>)> = trained.map(|var| (var, None)).collect();
        let mut all = Vec::new();
        for batches in &self.updates {
            let (loss, weight, grads) = self.mean_loss(&model, batches).unwrap();
            let norm = self.descend(&mut moved, &grads).unwrap();
            all.extend([loss, norm, weight]);
        }
        for name in initial.keys() {
            all.extend(items(&named[name]));
        }
        all
    }

    fn mean_loss(
        &self,
        model: &[Linear],
        batches: &[WeightedBatch],
    ) -> Result<(f64, f64, GradStore)> {
        let (mut sum, mut weight) = (Tensor::zeros((), DType::F64, &Device::Cpu)?, 0.0);
        for WeightedBatch { x, weights } in batches {
            let (x, weights) = (x.to_dtype(DType::F64)?, weights.to_dtype(DType::F64)?);
            let weights = if self.weighted { weights } else { weights.ones_like()? };
            sum = (sum + (self.row_losses(model, &x)? * &weights)?.sum_all()?)?;
            weight += weights.sum_all()?.to_scalar::<f64>()?;
        }
        let mean = (sum / weight)?;
        Ok((mean.to_scalar()?, weight, mean.backward()?))
    }

    /// Makes a step of SGD with momentum and clipping; returns the norm before clipping.
    fn descend(&self, vars: &mut [(&Var, Option<Tensor>)], grads: &GradStore) -> Result<f64> {
        let squares = vars.iter().filter_map(|(var, _)| grads.get(var)).flat_map(items);
        let norm = squares.map(|item| item * item).sum::<f64>().sqrt();
        let factor = self.max_norm.map_or(1.0, |max_norm| (max_norm / (norm + 1e-6)).min(1.0));
        for (var, velocity) in vars {
            let Some(grad) = grads.get(var) else { continue };
            let grad = (grad * factor)?;
            let now = match velocity.take() {
                Some(before) => ((before * MOMENTUM)? + grad)?,
                None => grad,
            };
            var.set(&(var.as_tensor() - (&now * RATE)?)?.detach())?;
            *velocity = Some(now.detach());
        }
        Ok(norm)
    }
}

impl WeightedBatch {
    fn new(draw: &mut RandomDraws, slots: usize, uneven: Uneven, dtype: DType) -> Self {
        // With padding, slots may be empty.
        let least = if uneven == Uneven::Pad { 1 } else { slots };
        let rows = least + draw.below(9) as usize;
        let x = Tensor::from_vec(draw.items(rows * WIDTH), (rows, WIDTH), &Device::Cpu).unwrap();
        // Rows except the first may have no weight.
        let weights = (0..rows).map(|row| (draw.below(4) + u64::from(row == 0)) as f64 / 2.0);
        let weights = Tensor::from_iter(weights, &Device::Cpu).unwrap();
        Self { x: x.to_dtype(dtype).unwrap(), weights: weights.to_dtype(dtype).unwrap() }
    }
}

fn items(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Asserts that numbers are equal up to rounding.
pub(crate) fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, case: &str) {
    assert_eq!(found.len(), expected.len(), "{case}");
    for (found, expected) in found.iter().zip(expected) {
        let off = (found - expected).abs();
        assert!(off <= tolerance * (1.0 + expected.abs()), "{case}: {found} for {expected}");
    }
}
