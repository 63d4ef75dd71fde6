//! The first values of a run's parameters, which follow from its seed.

use std::{collections::BTreeMap, ops::Range};

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_distributed::{train::Declared, types::Seed};

/// The first values of the parameters of these names, in their order.
///
/// Matrices are uniform with variance 1 / fan-in; everything else, the weights of norms, is one.
/// Item i of a parameter is a function of the seed, the parameter's place among the names and i, so
/// a part has the values that it has in the whole. They are numbers of `dtype`, whatever type they
/// are asked for in.
pub(crate) fn initial_values(
    seed: Seed,
    names: Vec<String>,
    dtype: DType,
) -> impl Fn(&Declared, Range<usize>) -> Result<Tensor> + Send + Sync + 'static {
    let seeds: BTreeMap<String, Seed> =
        names.into_iter().zip((0..).map(|index| seed.derive(index))).collect();
    move |declared, items| {
        let values = match (declared.shape.dims(), seeds.get(&declared.name)) {
            (&[_, fan_in], Some(seed)) => uniform(*seed, items, (3.0 / fan_in as f32).sqrt())?,
            (_, Some(_)) => Tensor::ones(items.len(), dtype, &Device::Cpu)?,
            (_, None) => bail!("parameter {} has no first value", declared.name),
        };
        values.to_dtype(dtype)?.to_dtype(declared.dtype)
    }
}

/// Numbers from −`bound` to `bound` that depend only on `seed` and their position.
fn uniform(seed: Seed, items: Range<usize>, bound: f32) -> Result<Tensor> {
    // The upper 24 bits are exact in an f32.
    let unit = |index| (seed.derive(index).as_u64() >> 40) as f32 / (1_u32 << 24) as f32;
    let values: Vec<f32> = items.map(|index| bound * (2.0 * unit(index as u64) - 1.0)).collect();
    Tensor::new(values, &Device::Cpu)
}
