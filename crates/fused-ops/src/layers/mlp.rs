//! The feed-forward network of two layers.

use candle_core::{Result, Tensor};
use candle_nn::Module;

use super::Linear;
use crate::ops::mlp;

/// The composition down(up(x)) of two layers, loaded under any names. It runs in one step
/// ([`mlp`](crate::mlp())) if `up` has an activation and `down` does not.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::{Activation, layers::{Mlp, linear}};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let up = linear(8, 32, vb.pp("intermediate.dense"))?.with_activation(Activation::Gelu);
/// let down = linear(32, 8, vb.pp("output.dense"))?;
/// let x = Tensor::ones((1, 3, 8), DType::F32, &Device::Cpu)?;
/// assert_eq!(Mlp::new(up, down).forward(&x)?.dims(), [1, 3, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Makes a network of these two layers.
    pub fn new(up: Linear, down: Linear) -> Self {
        Self { up, down }
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Self { up, down } = self;
        let (Some(activation), None) = (up.activation(), down.activation()) else {
            return down.forward(&up.forward(x)?);
        };
        Ok(mlp::apply(x, up.affine(), activation, down.affine())?)
    }
}
