//! A linear layer with an adapter.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::layers::Linear;

use crate::{
    lora::{
        Lora,
        matrices::{adapter_dtype, declare_matrices},
    },
    parameters::declare::Declared,
};

/// A linear layer with an adapter: `x · Wᵀ + bias + alpha / rank · (x · Aᵀ) · Bᵀ`. Created by
/// [`Lora::linear`].
///
/// A and B are in double precision if the weight is, and in single precision otherwise. For a
/// half-precision weight, their product is computed in single precision, added to the layer's
/// output, and rounded.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    base: Linear,
    a: Linear,
    b: Linear,
    scale: f64,
}

impl LoraLinear {
    /// Wraps the layer `base` with the adapter in `vb`.
    pub(super) fn new(lora: &Lora, base: Linear, vb: &VarBuilder<'_>) -> Result<Self> {
        let weight = base.weight();
        let (n_out, n_in) = weight.dims2()?;
        let matrices =
            declare_matrices("", lora.rank(), [n_out, n_in], adapter_dtype(weight.dtype()));
        let [a, b] = matrices.map(|Declared { name, shape, init, dtype }| {
            vb.get_with_hints_dtype(shape, &name, init, dtype)
        });
        let [a, b] = [Linear::new(a?, None), Linear::new(b?, None)];
        Ok(Self { base, a, b, scale: lora.config.scale() })
    }
}

impl Module for LoraLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let dtype = self.a.weight().dtype();
        let adapted = self.b.forward(&self.a.forward(&x.to_dtype(dtype)?)?)?;
        let y = self.base.forward(x)?;
        // The sum is rounded only once.
        (y.to_dtype(dtype)? + (adapted * self.scale)?)?.to_dtype(y.dtype())
    }
}
