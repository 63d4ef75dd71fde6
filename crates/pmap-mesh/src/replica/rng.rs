//! Random numbers that depend only on seed, step and replica, and random numbers for the rows of a
//! full batch.

use candle_core::{Device, Result, Shape, Tensor, bail};
use core_types::Seed;

use crate::spec::cut::RealRows;

/// A stream of random tensors, created by [`Replica::rng`](crate::Replica::rng).
///
/// # Determinism
///
/// The n-th number of a stream is a hash of the stream's seed and n. It does not depend on threads
/// or on the device: tensors are generated on the CPU and then moved to the device. A test pins the
/// first values.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pmap_mesh::DeviceMesh;
///
/// let dropout = DeviceMesh::cpu(2)?.pmap(|ctx, x: Tensor| {
///     let keep = ctx.rng().uniform(x.shape())?.lt(0.9)?.to_dtype(x.dtype())?;
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
    /// The index of the next number.
    next: u64,
    device: Device,
}

impl ReplicaRng {
    pub(crate) fn new(seed: Seed, device: Device) -> Self {
        Self { seed, next: 0, device }
    }

    /// Returns numbers uniform in [0, 1), of 24 bits, as an f32 tensor.
    ///
    /// For dropout that is the same on any number of devices, use [`BatchKeys`].
    ///
    /// # Errors
    ///
    /// The errors of creating a tensor on the device.
    pub fn uniform(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let values: Vec<f32> = (0..shape.elem_count()).map(|_| self.unit()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(&self.device)
    }

    /// Returns numbers from the standard normal distribution, by the Box-Muller transform, as an
    /// f32 tensor.
    ///
    /// # Errors
    ///
    /// The errors of creating a tensor on the device.
    pub fn normal(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let values: Vec<f32> = (0..shape.elem_count())
            .map(|_| {
                // Use a number in (0, 1], so that the logarithm is finite.
                let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
                radius * (std::f32::consts::TAU * self.unit()).cos()
            })
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_device(&self.device)
    }

    fn next_seed(&mut self) -> Seed {
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

/// Keys for counter-based generators over the elements of a batch, created by
/// [`Replica::batch_keys`](crate::Replica::batch_keys).
///
/// Seed a counter-based generator with the key's `seed`, and skip its first `offset` numbers. The
/// generator then draws the same numbers for the rows of a shard as it draws for these rows in the
/// full batch. So a loss with dropout is the same on any number of devices, up to the rounding of
/// sums, even if the batch is cut unevenly.
///
/// # Determinism
///
/// The n-th key depends on the function's seed, the step of the call, n, and the rows of the shard.
/// A test pins the first seeds.
///
/// # Examples
///
/// With `fused_ops::dropout`, whose `DropoutKey` takes the offset:
///
/// ```text
/// let mut keys = ctx.batch_keys();
/// …
/// let BatchKey { seed, offset, .. } = keys.next_key(&x)?;
/// let x = dropout(&x, 0.1, DropoutKey { seed: seed.as_u64(), call: 0, offset })?;
/// ```
///
/// With another generator, the same numbers on one device and on three:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use pmap_mesh::{DeviceMesh, Uneven};
///
/// let draw = |devices| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
///     let draw = DeviceMesh::cpu(devices)?.pmap(|ctx, x: Tensor| {
///         let key = ctx.batch_keys().next_key(&x)?;
///         let number = |n| key.seed.derive(key.offset + n).as_u64() as u32;
///         let numbers: Vec<u32> = (0..x.elem_count() as u64).map(number).collect();
///         Tensor::from_vec(numbers, x.shape(), x.device())
///     });
///     let x = Tensor::zeros(7, DType::F32, &Device::Cpu)?;
///     Ok(draw.uneven(Uneven::Balanced).call(x)?.to_vec1()?)
/// };
/// assert_eq!(draw(1)?, draw(3)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct BatchKeys {
    seed: Seed,
    /// The index of the next key.
    next: u64,
    /// The rows of this replica's shard, if an argument was cut.
    rows: Option<RealRows>,
}

/// The start of a generator for one tensor, created by [`BatchKeys::next_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BatchKey {
    /// The seed: the same on all replicas, different for each key.
    pub seed: Seed,
    /// The index of the shard's first element in the full batch's tensor.
    pub offset: u64,
}

impl BatchKeys {
    pub(crate) fn new(seed: Seed, rows: Option<RealRows>) -> Self {
        Self { seed, next: 0, rows }
    }

    /// Returns a new key for the elements of `x`.
    ///
    /// All replicas must request the same keys in the same order; otherwise their numbers differ.
    ///
    /// # Shapes
    ///
    /// `x` [rows, ...], with the rows of the shard, including its padding or
    /// [without](crate::Replica::valid_len) it; any shape if no argument is cut.
    ///
    /// # Errors
    ///
    /// If the batch is not cut in dimension 0, or if `x` does not have as many rows as the shard:
    /// the offset is undefined then. The batch is the first argument that is cut.
    pub fn next_key(&mut self, x: &Tensor) -> Result<BatchKey> {
        let offset = self.offset(x)?;
        let seed = self.seed.derive(self.next);
        self.next += 1;
        Ok(BatchKey { seed, offset })
    }

    fn offset(&self, x: &Tensor) -> Result<u64> {
        let Some(RealRows { dim, start, len, padded_len, .. }) = self.rows else { return Ok(0) };
        if dim != 0 {
            bail!(
                "a batch key needs a batch that is cut in dimension 0, but it is cut in dimension {dim}"
            );
        }
        if ![padded_len, len].contains(&x.dim(0)?) {
            bail!(
                "a batch key needs a tensor with the {padded_len} rows of the shard, but it has shape {:?}",
                x.dims()
            );
        }
        let row_elements: usize = x.dims()[1..].iter().product();
        Ok(start as u64 * row_elements as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_numbers_share_a_stream() {
        let mut rng = ReplicaRng::new(Seed::new(5), Device::Cpu);
        assert_eq!(rng.next_seed(), Seed::new(5).derive(0));
        rng.uniform(3).unwrap();
        assert_eq!(rng.next_seed(), Seed::new(5).derive(4));
    }

    #[test]
    fn normal_numbers_are_pinned() {
        let mut rng = ReplicaRng::new(Seed::new(5), Device::Cpu);
        let drawn: Vec<f32> = rng.normal(4).unwrap().to_vec1().unwrap();
        let pinned = [-0.782_466, -0.207_448_4, -1.299_551_5, -0.460_909_5];
        // Systems round logarithms and cosines differently in the last bit.
        assert!(drawn.iter().zip(&pinned).all(|(a, b)| (a - b).abs() < 1e-6), "{drawn:?}");
    }
}
