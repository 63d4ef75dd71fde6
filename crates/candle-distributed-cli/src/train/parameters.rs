//! The named parameters of a model: initialized from a seed, and listed in the order of their
//! names.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_distributed::types::Seed;
use candle_nn::{VarBuilder, VarMap};

/// The parameters that `build` asks for, initialized from `seed`.
///
/// Matrices are uniform with variance 1 / fan-in, drawn here because candle's own generator takes
/// no seed on a processor; everything else keeps the value that `build` gave it.
pub(crate) fn initialized<M>(
    seed: Seed,
    device: &Device,
    build: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> Result<VarMap> {
    let vars = VarMap::new();
    build(VarBuilder::from_varmap(&vars, DType::F32, device))?;
    for (var, seed) in by_name(&vars)?.values().zip((0..).map(|index| seed.derive(index))) {
        if let &[_, fan_in] = var.dims() {
            var.set(&uniform(seed, var.shape(), (3.0 / fan_in as f32).sqrt(), device)?)?;
        }
    }
    Ok(vars)
}

/// Names and values, in the order of the names.
pub(crate) fn by_name(vars: &VarMap) -> Result<BTreeMap<String, Var>> {
    let Ok(vars) = vars.data().lock() else {
        bail!("the parameters are locked by a thread that panicked")
    };
    Ok(vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect())
}

/// Numbers from −`bound` to `bound` that depend only on `seed` and their position.
fn uniform(seed: Seed, shape: &Shape, bound: f32, device: &Device) -> Result<Tensor> {
    // The upper 24 bits are exact in an f32.
    let unit = |index| (seed.derive(index).as_u64() >> 40) as f32 / (1_u32 << 24) as f32;
    let values: Vec<f32> =
        (0..shape.elem_count() as u64).map(|index| bound * (2.0 * unit(index) - 1.0)).collect();
    Tensor::from_vec(values, shape, device)
}
