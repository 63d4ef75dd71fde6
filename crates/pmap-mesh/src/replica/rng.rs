//! Random numbers that depend on seed, step and replica alone.

use candle_core::{DType, Device, Result, Shape, Tensor};
use core_types::Seed;

/// A stream of random tensors; made by [`Replica::rng`](crate::Replica::rng).
///
/// # Determinism
///
/// The n-th number of a stream is a hash of the stream's seed and n, so it depends on nothing else:
/// not on threads, nor on the device, on which tensors arrive after they were made on the
/// processor. The first values are pinned by a test.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pmap_mesh::DeviceMesh;
///
/// let dropout = DeviceMesh::cpu(2)?.pmap(|ctx, x: Tensor| {
///     let keep = ctx.rng().bernoulli(0.9, x.shape())?.to_dtype(x.dtype())?;
///     (x * keep)? / 0.9
/// });
/// let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
/// let first: Vec<Vec<f32>> = dropout.call_at(7, x.clone())?.to_vec2()?;
/// assert_eq!(dropout.call_at(7, x)?.to_vec2::<f32>()?, first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReplicaRng {
    seed: Seed,
    next: u64,
    device: Device,
}

impl ReplicaRng {
    pub(crate) fn new(seed: Seed, device: Device) -> Self {
        Self { seed, next: 0, device }
    }

    /// Numbers uniform in [0, 1), of 24 bits, as an f32 tensor.
    ///
    /// # Errors
    ///
    /// Those of making a tensor on the device.
    pub fn uniform(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let values: Vec<f32> = (0..shape.elem_count()).map(|_| self.unit()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(&self.device)
    }

    /// Numbers from the standard normal distribution, by Box and Muller's transform, as an f32
    /// tensor.
    ///
    /// # Errors
    ///
    /// Those of making a tensor on the device.
    pub fn normal(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let draw = |_| {
            // From (0, 1], so that its logarithm is finite.
            let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
            radius * (std::f32::consts::TAU * self.unit()).cos()
        };
        let values: Vec<f32> = (0..shape.elem_count()).map(draw).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(&self.device)
    }

    /// Ones with probability `p`, zeros otherwise, as a u8 tensor: a mask for dropout.
    ///
    /// # Errors
    ///
    /// Those of making a tensor on the device.
    pub fn bernoulli(&mut self, p: f32, shape: impl Into<Shape>) -> Result<Tensor> {
        self.uniform(shape)?.lt(f64::from(p))?.to_dtype(DType::U8)
    }

    /// A seed for a generator of another kind, another one each time: the key of
    /// `fused_ops::dropout`, which then keeps no mask, is
    /// `DropoutKey { seed: rng.next_seed().as_u64(), call: 0 }`.
    pub fn next_seed(&mut self) -> Seed {
        let seed = self.seed.derive(self.next);
        self.next += 1;
        seed
    }

    fn unit(&mut self) -> f32 {
        let word = self.next_seed().as_u64();
        // The upper 24 bits are exact in an f32.
        (word >> 40) as f32 / (1_u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_numbers_are_drawn_from_one_stream() {
        let mut rng = ReplicaRng::new(Seed::new(5), Device::Cpu);
        assert_eq!(rng.next_seed(), Seed::new(5).derive(0));
        rng.uniform(3).unwrap();
        assert_eq!(rng.next_seed(), Seed::new(5).derive(4));
    }
}
