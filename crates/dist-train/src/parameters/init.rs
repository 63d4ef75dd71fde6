//! Initial values derived from a seed.
//!
//! The distributions are the same as in [`candle_nn::Init`]. candle draws from a generator that
//! cannot be seeded on the CPU, and that gives a shard different numbers than the full tensor. Here
//! item i of a parameter depends only on the seed, the parameter's name and i, as in JAX: the
//! generator has no state except the counter (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", 2011).

use std::{f64::consts::TAU, ops::Range};

use candle_core::{DType, Device, Tensor, WithDType};
use candle_nn::{Init, init::NormalOrUniform};
use core_types::{Fingerprint, Seed};
use rayon::prelude::*;

use crate::{
    error::{Doing, Error, Result},
    parameters::declare::Declared,
};

/// Minimum number of items per task, worth about 100 µs of logarithms and cosines.
const ITEMS_PER_TASK: usize = 4096;

/// Draws items `range` of a parameter, counted in row-major order, as a one-dimensional tensor on
/// `device`.
///
/// # Determinism
///
/// The values depend on `seed` and on the parameter's name, shape, dtype and initializer, and are
/// pinned by tests. They are the same on every device and platform, for any number of ranks and
/// threads; a range has the same values as in the full tensor. Half precision is rounded from f32.
///
/// # Errors
///
/// Returns [`Error::Init`] if the initializer does not define a distribution of such items, and
/// [`Error::Tensor`] if candle fails.
pub(crate) fn seeded(
    seed: Seed,
    declared: &Declared,
    range: Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    debug_assert!(range.end <= declared.shape.elem_count(), "{range:?} of {declared:?}");
    let distribution = Distribution::new(declared)?;
    let stream = ParameterStream::new(seed, &declared.name);
    let items = match declared.dtype {
        DType::F32 => distribution.tensor::<f32>(stream, range),
        DType::F64 => distribution.tensor::<f64>(stream, range),
        // Rounded from f32, because `half` rounds f64 in one or two steps depending on the CPU.
        dtype if dtype.is_float() => {
            distribution.tensor::<f32>(stream, range).and_then(|items| items.to_dtype(dtype))
        }
        dtype => {
            let items = distribution.integers(dtype, range.len());
            items.transpose().ok_or_else(|| unsupported(declared))?
        }
    };
    items.and_then(|items| items.to_device(device)).doing("initializing a parameter")
}

/// The random numbers of one parameter.
#[derive(Clone, Copy, Debug)]
struct ParameterStream(Seed);

impl ParameterStream {
    fn new(seed: Seed, name: &str) -> Self {
        Self(seed.derive(Fingerprint::new().write_bytes(name.as_bytes()).finish()))
    }

    /// Returns a uniform number in [0, 1) with 53 random bits, all of which are exact.
    fn unit(self, counter: u64) -> f64 {
        (self.0.derive(counter).as_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns number `index` of the standard normal distribution, by the Box–Muller transform.
    /// Logarithms and cosines are from `libm`, because systems differ in the last bit;
    /// square roots are always rounded correctly.
    fn normal(self, index: u64) -> f64 {
        // The argument is in (0, 1], so that its logarithm is finite.
        let radius = (-2.0 * libm::log(1.0 - self.unit(2 * index))).sqrt();
        radius * libm::cos(TAU * self.unit(2 * index + 1))
    }
}

/// The distribution of a parameter's items.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Distribution {
    Constant(f64),
    Normal {
        mean: f64,
        stdev: f64,
    },
    /// The interval [low, low + width), up to rounding.
    Uniform {
        low: f64,
        width: f64,
    },
}

impl Distribution {
    /// Returns the distribution of a parameter's initializer for its shape.
    fn new(declared: &Declared) -> Result<Self, Error> {
        let distribution = match declared.init {
            Init::Const(value) => Self::Constant(value),
            Init::Randn { mean, stdev } => Self::Normal { mean, stdev },
            Init::Uniform { lo, up } => Self::Uniform { low: lo, width: up - lo },
            Init::Kaiming { dist, fan, non_linearity } => {
                let stdev = non_linearity.gain() / (fan.for_shape(&declared.shape) as f64).sqrt();
                Self::kaiming(dist, stdev)
            }
        };
        // Without items, the fan may be zero and the distribution infinite, but nothing is drawn.
        if distribution.is_finite() || declared.shape.elem_count() == 0 {
            return Ok(distribution);
        }
        Err(unsupported(declared))
    }

    /// Returns the distribution of He et al., "Delving Deep into Rectifiers", 2015.
    fn kaiming(dist: NormalOrUniform, stdev: f64) -> Self {
        // A uniform distribution is √12 standard deviations wide.
        let bound = 3_f64.sqrt() * stdev;
        match dist {
            NormalOrUniform::Normal => Self::Normal { mean: 0.0, stdev },
            NormalOrUniform::Uniform => Self::Uniform { low: -bound, width: 2.0 * bound },
        }
    }

    fn is_finite(self) -> bool {
        match self {
            Self::Constant(value) => value.is_finite(),
            Self::Normal { mean: center, stdev: width } | Self::Uniform { low: center, width } => {
                center.is_finite() && (0.0..f64::INFINITY).contains(&width)
            }
        }
    }

    /// Returns item `index`.
    fn item(self, stream: ParameterStream, index: u64) -> f64 {
        match self {
            Self::Constant(value) => value,
            Self::Normal { mean, stdev } => mean + stdev * stream.normal(index),
            Self::Uniform { low, width } => low + width * stream.unit(2 * index),
        }
    }

    /// Draws floating-point items.
    fn tensor<T: WithDType>(
        self,
        stream: ParameterStream,
        range: Range<usize>,
    ) -> candle_core::Result<Tensor> {
        let len = range.len();
        let items: Vec<T> = range
            .into_par_iter()
            .with_min_len(ITEMS_PER_TASK)
            .map(|index| T::from_f64(self.item(stream, index as u64)))
            .collect();
        Tensor::from_vec(items, len, &Device::Cpu)
    }

    /// Returns integer items, or `None` if the distribution is not an integer constant.
    #[expect(clippy::float_cmp, reason = "the conversion is exact or has another value")]
    fn integers(self, dtype: DType, len: usize) -> candle_core::Result<Option<Tensor>> {
        let Self::Constant(value) = self else { return Ok(None) };
        let item = Tensor::new(value, &Device::Cpu)?.to_dtype(dtype)?;
        if item.to_dtype(DType::F64)?.to_scalar::<f64>()? != value {
            return Ok(None);
        }
        item.broadcast_as(len)?.contiguous().map(Some)
    }
}

fn unsupported(declared: &Declared) -> Error {
    Error::Init {
        name: declared.name.clone(),
        init: format!("{:?}", declared.init),
        dtype: declared.dtype.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Shape;
    use candle_nn::init::{FanInOut, NonLinearity};
    use half::{bf16, f16};

    use super::*;

    const NORMAL: Init = Init::Randn { mean: 0.0, stdev: 1.0 };
    const UNIFORM: Init = Init::Uniform { lo: -1.0, up: 1.0 };

    fn declared(shape: impl Into<Shape>, dtype: DType, init: Init) -> Declared {
        Declared { name: "blocks.3.up.weight".into(), shape: shape.into(), dtype, init }
    }

    fn whole(seed: u64, declared: &Declared) -> Result<Tensor> {
        seeded(Seed::new(seed), declared, 0..declared.shape.elem_count(), &Device::Cpu)
    }

    fn values(shape: impl Into<Shape>, init: Init) -> Vec<f64> {
        whole(7, &declared(shape, DType::F64, init)).unwrap().to_vec1().unwrap()
    }

    /// The values were verified by a second implementation in Python.
    #[test]
    fn first_values_are_pinned() {
        let first = |dtype, init| whole(42, &declared(4, dtype, init)).unwrap();
        assert_eq!(
            first(DType::F64, NORMAL).to_vec1::<f64>().unwrap(),
            [
                -0.368_955_452_651_405_6,
                0.770_386_310_298_748_6,
                0.903_556_105_936_006_5,
                -0.661_338_230_626_950_2
            ]
        );
        assert_eq!(
            first(DType::F32, NORMAL).to_vec1::<f32>().unwrap(),
            [-0.368_955_46, 0.770_386_34, 0.903_556_1, -0.661_338_2]
        );
        assert_eq!(
            first(DType::F64, UNIFORM).to_vec1::<f64>().unwrap(),
            [
                -0.836_035_636_400_310_8,
                0.823_436_550_251_713_8,
                -0.329_115_091_177_091_9,
                -0.604_970_613_790_936_5
            ]
        );
        assert_eq!(
            first(DType::F32, UNIFORM).to_vec1::<f32>().unwrap(),
            [-0.836_035_6, 0.823_436_56, -0.329_115_1, -0.604_970_63]
        );
        let bits = |items: Vec<bf16>| items.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
        assert_eq!(
            bits(first(DType::BF16, NORMAL).to_vec1().unwrap()),
            [48_829, 16_197, 16_231, 48_937]
        );
        let bits = |items: Vec<f16>| items.into_iter().map(f16::to_bits).collect::<Vec<_>>();
        assert_eq!(
            bits(first(DType::F16, NORMAL).to_vec1().unwrap()),
            [46_567, 14_890, 15_162, 47_434]
        );
    }

    #[test]
    fn ranges_match_the_full_tensor() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let declared = declared((3, 5), dtype, NORMAL);
            let values =
                |items: Tensor| items.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            let all = values(whole(1, &declared).unwrap());
            for start in 0..=15 {
                for end in start..=15 {
                    let part = seeded(Seed::new(1), &declared, start..end, &Device::Cpu).unwrap();
                    assert_eq!(values(part), all[start..end], "{dtype:?} {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn thread_count_does_not_matter() {
        let declared = declared(3 * ITEMS_PER_TASK + 1, DType::F32, NORMAL);
        let values = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| whole(1, &declared).unwrap().to_vec1::<f32>().unwrap())
        };
        assert_eq!(values(1), values(3));
    }

    #[test]
    fn seeds_and_names_have_independent_streams() {
        let original = declared(100, DType::F64, UNIFORM);
        let renamed = Declared { name: "blocks.3.up.bias".into(), ..original.clone() };
        let mut streams: Vec<Vec<f64>> = [(1, &original), (2, &original), (1, &renamed)]
            .map(|(seed, declared)| whole(seed, declared).unwrap().to_vec1().unwrap())
            .into();
        // A shifted stream must not correlate with another stream either.
        streams.push(streams[0][1..].to_vec());
        for (position, stream) in streams.iter().enumerate() {
            for other in &streams[..position] {
                let products = stream.iter().zip(other).map(|(left, right)| left * right);
                // The products have variance 1/9, so their mean has a standard deviation of 1/30.
                let correlation = products.sum::<f64>() / stream.len() as f64;
                assert!(correlation.abs() < 4.0 / 30.0, "{correlation}");
            }
        }
    }

    const DRAWS: usize = 1 << 20;

    /// Returns the mean of a power of the values.
    fn moment(values: &[f64], power: i32) -> f64 {
        values.iter().map(|value| value.powi(power)).sum::<f64>() / values.len() as f64
    }

    /// Asserts the mean of [`DRAWS`] values with this standard deviation.
    fn assert_mean(found: f64, expected: f64, stdev: f64) {
        let allowed = 4.0 * stdev / (DRAWS as f64).sqrt();
        assert!((found - expected).abs() < allowed, "{found} instead of {expected} ± {allowed}");
    }

    #[test]
    fn normal_numbers_have_right_moments() {
        let values = values(DRAWS, NORMAL);
        // The variance of power k is (2k - 1)!! minus the square of its mean.
        for (power, expected, variance) in [(1, 0., 1.), (2, 1., 2.), (3, 0., 15.), (4, 3., 96.)] {
            assert_mean(moment(&values, power), expected, f64::sqrt(variance));
        }
        // Limits in standard deviations, with the probability beyond each.
        for (limit, expected) in [
            (0.5, 0.308_537_539),
            (1., 0.158_655_254),
            (2., 0.022_750_132),
            (3., 1.349_898e-3),
            (4., 3.167_124e-5),
        ] {
            for sign in [-1.0, 1.0] {
                let beyond = values.iter().filter(|&&value| sign * value > limit).count();
                assert_mean(beyond as f64 / DRAWS as f64, expected, f64::sqrt(expected));
            }
        }
        let neighbors: f64 = values.windows(2).map(|pair| pair[0] * pair[1]).sum();
        assert_mean(neighbors / DRAWS as f64, 0.0, 1.0);
    }

    #[test]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the values are 0 to 63"
    )]
    fn uniform_numbers_are_even() {
        let values = values(DRAWS, Init::Uniform { lo: -3.0, up: 5.0 });
        assert!(values.iter().all(|value| (-3.0..5.0).contains(value)));
        let mut counts = [0_u32; 64];
        for value in &values {
            counts[((value + 3.0) * 8.0) as usize] += 1;
        }
        let expected = DRAWS as f64 / 64.0;
        let chi_square: f64 =
            counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        // One in a million on each side, for 63 degrees of freedom.
        assert!((20.0..130.0).contains(&chi_square), "{chi_square}");
    }

    #[test]
    fn mean_and_deviation_are_used() {
        let values = values(DRAWS, Init::Randn { mean: 2.0, stdev: 0.02 });
        assert_mean(moment(&values, 1), 2.0, 0.02);
        let squares: Vec<f64> = values.iter().map(|value| (value - 2.0).powi(2)).collect();
        assert_mean(moment(&squares, 1), 0.0004, 0.0004 * f64::sqrt(2.0));
    }

    #[test]
    fn kaiming_variance_follows_gain_and_fan() {
        // A convolution from 64 to 256 channels, with kernels of 4 by 16.
        let shape = (256, 64, 4, 16);
        for (fan, n) in [(FanInOut::FanIn, 64. * 64.), (FanInOut::FanOut, 256. * 64.)] {
            for (non_linearity, gain) in [
                (NonLinearity::ReLU, 2_f64.sqrt()),
                (NonLinearity::Tanh, 5. / 3.),
                (NonLinearity::ExplicitGain(0.5), 0.5),
            ] {
                let variance = gain * gain / n;
                // The variance of the squares, in squared variances: 2 for normal and 9/5 - 1 for
                // uniform numbers.
                for (dist, spread) in
                    [(NormalOrUniform::Normal, 2.0), (NormalOrUniform::Uniform, 0.8)]
                {
                    let values = values(shape, Init::Kaiming { dist, fan, non_linearity });
                    assert_mean(moment(&values, 1), 0.0, variance.sqrt());
                    assert_mean(moment(&values, 2), variance, variance * f64::sqrt(spread));
                }
            }
        }
    }

    #[test]
    fn constants_work_for_every_dtype() {
        use DType::{BF16, F16, F32, F64, I64, U8, U32};
        for dtype in [BF16, F16, F32, F64, I64, U8, U32] {
            let items = whole(0, &declared((2, 3), dtype, Init::Const(3.0))).unwrap();
            assert_eq!(items.dtype(), dtype);
            assert_eq!(items.to_dtype(F64).unwrap().to_vec1::<f64>().unwrap(), [3.0; 6]);
        }
    }

    #[test]
    fn invalid_initializers_are_rejected() {
        for (dtype, init) in [
            (DType::F32, Init::Const(f64::NAN)),
            (DType::F32, Init::Randn { mean: 0.0, stdev: -1.0 }),
            (DType::F32, Init::Randn { mean: 0.0, stdev: f64::NAN }),
            (DType::F32, Init::Uniform { lo: 1.0, up: 0.0 }),
            (DType::F32, Init::Uniform { lo: f64::NEG_INFINITY, up: 0.0 }),
            (DType::U32, UNIFORM),
            (DType::U32, Init::Const(0.5)),
            (DType::U8, Init::Const(256.0)),
        ] {
            let error = whole(0, &declared(3, dtype, init)).unwrap_err();
            assert!(matches!(error, Error::Init { .. }), "{dtype:?} {init:?}: {error}");
        }
    }

    #[test]
    fn empty_parameters_can_be_initialized() {
        let empty = declared((3, 0), DType::F32, candle_nn::init::DEFAULT_KAIMING_NORMAL);
        assert_eq!(whole(0, &empty).unwrap().dims(), [0]);
    }
}
