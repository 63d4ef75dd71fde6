//! The named parameters of a model: one set, read by the replicas of all devices.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, backprop::GradStore, bail};
use candle_distributed::types::Seed;
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};

/// The parameters of a model, by name.
#[derive(Clone, Debug)]
pub(crate) struct Parameters(BTreeMap<String, Var>);

impl Parameters {
    /// The parameters that `build` asks for, initialized from `seed`.
    ///
    /// Matrices are uniform with variance 1 / fan-in, drawn here because candle's own generator takes no seed on a
    /// processor; everything else keeps the value that `build` gave it.
    pub(crate) fn new<M>(seed: Seed, device: &Device, build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> Result<Self> {
        let map = VarMap::new();
        build(VarBuilder::from_varmap(&map, DType::F32, device))?;
        let Ok(vars) = map.data().lock() else { bail!("the parameters are locked by a thread that panicked") };
        let vars: BTreeMap<String, Var> = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        for (var, seed) in vars.values().zip((0..).map(|index| seed.derive(index))) {
            if let &[_, fan_in] = var.dims() {
                var.set(&uniform(seed, var.shape(), (3.0 / fan_in as f32).sqrt(), device)?)?;
            }
        }
        Ok(Self(vars))
    }

    /// A builder of a model that reads these parameters on `device`.
    pub(crate) fn builder(&self, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, device.clone())
    }

    /// Names and values, in the order of the names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.0.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// The variables, in the order of their names.
    pub(crate) fn vars(&self) -> Vec<Var> {
        self.0.values().cloned().collect()
    }

    /// The gradient of every parameter, in the order of the names; zero for one that was not used.
    pub(crate) fn gradients(&self, store: &GradStore) -> Result<Vec<Tensor>> {
        self.0
            .values()
            .map(|var| store.get(var).map_or_else(|| var.zeros_like(), |gradient| Ok(gradient.clone())))
            .collect()
    }

    /// The inverse of [`gradients`](Self::gradients), for an optimizer.
    pub(crate) fn grad_store(&self, gradients: Vec<Tensor>) -> GradStore {
        let mut store = GradStore::default();
        for (var, gradient) in self.0.values().zip(gradients) {
            store.insert(var, gradient);
        }
        store
    }
}

impl SimpleBackend for Parameters {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            bail!("parameter {name} has shape {:?}, {shape:?} was asked for", tensor.shape());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.0.get(name) {
            Some(var) => var.to_device(device)?.to_dtype(dtype),
            None => bail!("no parameter is named {name}"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// Numbers from −`bound` to `bound` that depend on `seed` and their place alone.
fn uniform(seed: Seed, shape: &Shape, bound: f32, device: &Device) -> Result<Tensor> {
    // The upper 24 bits are exact in an f32.
    let unit = |index| (seed.derive(index).as_u64() >> 40) as f32 / (1_u32 << 24) as f32;
    let values: Vec<f32> = (0..shape.elem_count() as u64).map(|index| bound * (2.0 * unit(index) - 1.0)).collect();
    Tensor::from_vec(values, shape, device)
}
