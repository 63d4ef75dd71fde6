//! Random numbers that depend on seed, step and replica alone, and those of a whole batch.

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use core_types::Seed;

use crate::spec::cut::Valid;

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

    /// Returns ones with probability `p` and zeros otherwise, as a u8 tensor: a mask for dropout.
    ///
    /// A dropout that is the same on any number of devices takes its numbers from [`BatchKeys`].
    ///
    /// # Errors
    ///
    /// Those of making a tensor on the device.
    pub fn bernoulli(&mut self, p: f32, shape: impl Into<Shape>) -> Result<Tensor> {
        self.uniform(shape)?.lt(f64::from(p))?.to_dtype(DType::U8)
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

/// Keys for generators that number the elements of a tensor; made by
/// [`Replica::batch_keys`](crate::Replica::batch_keys).
///
/// A generator that is given a key's seed, and begins at the key's offset, draws for the rows of a
/// shard what it would draw for them in the whole batch. So a loss with dropout is the same on any
/// number of devices, up to the rounding of sums, however unevenly the batch is cut.
///
/// # Determinism
///
/// The n-th key is a function of the function's seed, the number of the call, n, and the rows of
/// the shard. The first seeds are pinned by a test.
///
/// # Examples
///
/// With `fused_ops::dropout`, whose key says where the numbers begin:
///
/// ```text
/// let mut keys = ctx.batch_keys();
/// …
/// let BatchKey { seed, offset, .. } = keys.next_key(&x)?;
/// let x = dropout(&x, 0.1, DropoutKey { seed: seed.as_u64(), call: 0, offset })?;
/// ```
///
/// With a generator of one's own, the same numbers on one device and on three:
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
    next: u64,
    /// The rows of the shard, if an argument was cut.
    rows: Option<Valid>,
}

/// Where a generator begins; made by [`BatchKeys::next_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct BatchKey {
    /// The same on all replicas, another one for each key.
    pub seed: Seed,
    /// The index, among the elements of the whole batch's tensor, of the shard's first.
    pub offset: u64,
}

impl BatchKeys {
    pub(crate) fn new(seed: Seed, rows: Option<Valid>) -> Self {
        Self { seed, next: 0, rows }
    }

    /// The key for the elements of `x`, another one each time.
    ///
    /// All replicas ask for the same keys in the same order.
    ///
    /// # Shapes
    ///
    /// `x` [rows, ...], the rows being those of the shard, with its padding or
    /// [without](crate::Replica::valid_len); any if no argument is cut.
    ///
    /// # Errors
    ///
    /// If the first argument that is cut is not cut in dimension 0 first, or `x` has another number
    /// of rows than the shard: then no offset says where its elements stand.
    pub fn next_key(&mut self, x: &Tensor) -> Result<BatchKey> {
        let offset = self.offset(x)?;
        let seed = self.seed.derive(self.next);
        self.next += 1;
        Ok(BatchKey { seed, offset })
    }

    fn offset(&self, x: &Tensor) -> Result<u64> {
        let Some(Valid { dim, start, len, padded, .. }) = self.rows else { return Ok(0) };
        if dim != 0 {
            bail!("keys of a batch number its rows in dimension 0, and it is cut in {dim}");
        }
        if ![padded, len].contains(&x.dim(0)?) {
            bail!("a key for a tensor of shape {:?}: the shard has {padded} rows", x.dims());
        }
        let elements_of_row: usize = x.dims()[1..].iter().product();
        Ok(start as u64 * elements_of_row as u64)
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

    #[test]
    fn normal_numbers_are_pinned() {
        let mut rng = ReplicaRng::new(Seed::new(5), Device::Cpu);
        let drawn: Vec<f32> = rng.normal(4).unwrap().to_vec1().unwrap();
        let pinned = [-0.782_466, -0.207_448_4, -1.299_551_5, -0.460_909_5];
        // Systems round logarithms and cosines differently in the last bit.
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
        assert!(drawn.iter().zip(&pinned).all(is_close), "{drawn:?}");
    }
}
