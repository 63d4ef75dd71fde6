//! Cross-entropy of logits and class indices.

use candle_core::{DType, Device, Shape, Tensor};

use crate::{
    autograd::{CpuSlice, record_unary},
    composed,
    error::{Error, Result},
    kernels::{
        cross_entropy::{self as kernel, LogitMap, LossRule, RowTarget},
        float::Float,
    },
    ops::embedding::{check_index, read_integers},
    route::{check_positive, check_shape, is_half, last_dim, route},
};

const OP: &str = "cross_entropy";

/// The weights of rows and classes, and the label smoothing.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CrossEntropyConfig {
    /// The target of rows to ignore. Default: `None`.
    pub ignore_index: Option<i64>,
    /// The part of each target that is spread over all classes, from 0 to 1. Default: 0.
    ///
    /// Szegedy et al., "Rethinking the Inception Architecture", arXiv 1512.00567.
    pub label_smoothing: f64,
    /// The weight of each row's loss, in the shape of the targets. Default: `None`, all 1.
    ///
    /// A row of weight 0 is ignored, even with NaN logits.
    pub row_weights: Option<Tensor>,
    /// The weight of each class's loss \[classes\], like PyTorch's `weight`. Default: `None`,
    /// all 1.
    pub class_weights: Option<Tensor>,
    /// The factor of the logits before the loss. Default: `None`, 1.
    pub logit_scale: Option<f64>,
    /// The bound c of a scaled logit l, which becomes c·tanh(l / c) before the loss. Default: `None`.
    ///
    /// Gemma Team, "Gemma 2", arXiv 2408.00118.
    pub softcap: Option<f64>,
}

impl CrossEntropyConfig {
    /// Ignores rows with this target.
    #[must_use]
    pub fn with_ignore_index(mut self, index: i64) -> Self {
        self.ignore_index = Some(index);
        self
    }

    /// Spreads a part of each target over all classes.
    #[must_use]
    pub fn with_label_smoothing(mut self, part: f64) -> Self {
        self.label_smoothing = part;
        self
    }

    /// Multiplies the loss of each row by its weight.
    #[must_use]
    pub fn with_row_weights(mut self, weights: Tensor) -> Self {
        self.row_weights = Some(weights);
        self
    }

    /// Multiplies the loss of each class by its weight.
    #[must_use]
    pub fn with_class_weights(mut self, weights: Tensor) -> Self {
        self.class_weights = Some(weights);
        self
    }

    /// Multiplies the logits by a factor before the loss, such as 1 / `logits_scaling` of Granite.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fused_ops::{CrossEntropyConfig, cross_entropy};
    ///
    /// let logits = Tensor::new(&[[1000.0_f64, 0.0]], &Device::Cpu)?;
    /// let target = Tensor::new(&[1_u32], &Device::Cpu)?;
    /// let loss = |config| cross_entropy(&logits, &target, &config)?.sum.to_scalar::<f64>();
    /// let scaled = loss(CrossEntropyConfig::default().with_logit_scale(0.001))?;
    /// assert!((scaled - (1.0 + 1.0_f64.exp()).ln()).abs() < 1e-12);
    /// let capped = loss(CrossEntropyConfig::default().with_softcap(1.0))?;
    /// assert!((scaled - capped).abs() < 1e-12); // tanh(1000) is 1
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_logit_scale(mut self, scale: f64) -> Self {
        self.logit_scale = Some(scale);
        self
    }

    /// Bounds the scaled logits: see [`softcap`](Self::softcap).
    #[must_use]
    pub fn with_softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }
}

/// The sum of the cross-entropies of rows, and the sum of their weights.
///
/// Both can be added over devices and micro-batches before the division, so that the mean does not
/// depend on the distribution of the rows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CrossEntropy {
    /// The sum of the rows' losses, each multiplied by its weight: a scalar with a gradient.
    pub sum: Tensor,
    /// The sum of the weights of all rows that are not ignored: the number of these rows, if no
    /// weights are given.
    pub weight: f64,
}

impl CrossEntropy {
    /// Returns the weighted mean over all rows that are not ignored.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`](Error::OutOfRange) if all rows are ignored.
    pub fn mean(&self) -> Result<Tensor> {
        if self.weight == 0.0 {
            let name = "the weight of all rows";
            return Err(Error::out_of_range(OP, name, &0, "more than 0 for a mean"));
        }
        Ok((&self.sum / self.weight)?)
    }
}

/// Returns the cross-entropy of softmax(`logits`) and `targets`, in nats.
///
/// For the backward pass, only one number per row is stored, no probabilities.
///
/// # Shapes
///
/// `logits` [.., classes], `targets` [..] of type u8, u32 or i64; the sum is a scalar, of type f32
/// for logits of f16 and bf16: a sum of f16 overflows after some 14,000 rows of 100 classes, and one
/// of bf16 has three digits.
///
/// # Determinism
///
/// The same bits for any number of threads. Rows are added up in f64, in blocks of a size that
/// depends only on the number of classes, and the sum is rounded once.
///
/// # Errors
///
/// [`OutOfRange`](Error::OutOfRange) if a target is not a class, [`Shape`](Error::Shape) if the shapes do not
/// fit, [`OutOfRange`](Error::OutOfRange) if the smoothing is not in [0, 1], or if a scale or soft cap is
/// not a finite number above 0,
/// [`Gradient`](Error::Gradient) if weights depend on a variable, [`DType`](Error::DType) if
/// targets are not integers or logits have no floating type.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fused_ops::{CrossEntropyConfig, cross_entropy};
///
/// let logits = Tensor::new(&[[0.0_f64, 0.0], [0.0, 0.0], [5.0, 1.0]], &Device::Cpu)?;
/// let targets = Tensor::new(&[0_i64, 1, -100], &Device::Cpu)?;
/// let config = CrossEntropyConfig::default().with_ignore_index(-100);
/// let loss = cross_entropy(&logits, &targets, &config)?;
/// assert_eq!(loss.weight, 2.0);
/// assert!((loss.mean()?.to_scalar::<f64>()? - 2.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    config: &CrossEntropyConfig,
) -> Result<CrossEntropy> {
    let classes = last_dim(OP, "logits", logits)?;
    check_shape(OP, "targets", targets, &logits.dims()[..logits.rank() - 1])?;
    let targets = WeightedTargets::read(OP, targets, config, classes)?;
    let weight = targets.total_weight();
    let logits =
        &if is_half(logits.dtype()) { logits.to_dtype(DType::F32)? } else { logits.clone() };
    let sum =
        route!("cross_entropy", [logits], fused(logits, targets), targets.composed_loss(logits),)?;
    Ok(CrossEntropy { sum, weight })
}

/// The targets of all rows, with the settings of the loss.
pub(crate) struct WeightedTargets {
    pub(crate) rows: Vec<RowTarget>,
    class_weights: Option<Vec<f64>>,
    smoothing: f64,
    map: LogitMap<f64>,
}

impl WeightedTargets {
    /// Checks the targets and their settings, and reads them.
    pub(crate) fn read(
        op: &'static str,
        targets: &Tensor,
        config: &CrossEntropyConfig,
        classes: usize,
    ) -> Result<Self> {
        check(op, config, targets, classes)?;
        Ok(Self {
            class_weights: read_floats(config.class_weights.as_ref())?,
            rows: row_targets(op, targets, config, classes)?,
            smoothing: config.label_smoothing,
            map: LogitMap { scale: config.logit_scale, softcap: config.softcap },
        })
    }

    /// Returns the sum of the weights of all rows.
    pub(crate) fn total_weight(&self) -> f64 {
        let weight = |target: &RowTarget| match &self.class_weights {
            None => target.weight,
            Some(weights) => target.weight * weights[target.class],
        };
        self.rows.iter().map(weight).sum()
    }

    /// Returns the parameters that all rows share, for the kernels.
    pub(crate) fn rule<T: Float>(&self, classes: usize) -> LossRule<T> {
        let round = |weights: &Vec<f64>| weights.iter().map(|&w| T::round_from_f64(w)).collect();
        let class_weights = self.class_weights.as_ref().map(round);
        LossRule { classes, smoothing: self.smoothing, class_weights, map: self.map.round() }
    }

    /// Returns the loss in candle's operations.
    pub(crate) fn composed_loss(&self, logits: &Tensor) -> Result<Tensor> {
        let class_weights = self.class_weights.as_deref();
        let LogitMap { scale, softcap } = self.map;
        let logits = scale.map_or(Ok(logits.clone()), |scale| logits * scale)?;
        composed::cross_entropy(&logits, &self.rows, self.smoothing, class_weights, softcap)
    }
}

fn check(
    op: &'static str,
    config: &CrossEntropyConfig,
    targets: &Tensor,
    classes: usize,
) -> Result<()> {
    let smoothing = config.label_smoothing;
    if !(0.0..=1.0).contains(&smoothing) {
        return Err(Error::out_of_range(op, "label smoothing", &smoothing, "from 0 to 1"));
    }
    if let Some(scale) = config.logit_scale {
        check_positive(op, "the scale of logits", scale)?;
    }
    if let Some(cap) = config.softcap {
        check_positive(op, "the soft cap", cap)?;
    }
    check_weights(op, "row_weights", config.row_weights.as_ref(), targets.dims())?;
    check_weights(op, "class_weights", config.class_weights.as_ref(), &[classes])
}

fn check_weights(
    op: &'static str,
    input: &'static str,
    weights: Option<&Tensor>,
    shape: &[usize],
) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    if weights.track_op() {
        return Err(Error::gradient(op, input));
    }
    check_shape(op, input, weights, shape)
}

/// Returns the numbers of a tensor, in order.
fn read_floats(tensor: Option<&Tensor>) -> Result<Option<Vec<f64>>> {
    let Some(tensor) = tensor else { return Ok(None) };
    // Copy to the processor before the conversion, because Metal has no f64.
    let host = tensor.flatten_all()?.to_device(&Device::Cpu)?;
    Ok(Some(host.to_dtype(DType::F64)?.to_vec1()?))
}

fn row_targets(
    op: &'static str,
    targets: &Tensor,
    config: &CrossEntropyConfig,
    classes: usize,
) -> Result<Vec<RowTarget>> {
    let weights = read_floats(config.row_weights.as_ref())?;
    let mut row_targets = Vec::new();
    for (row, index) in read_integers(op, "targets", targets)?.into_iter().enumerate() {
        row_targets.push(if Some(index) == config.ignore_index {
            RowTarget { class: 0, weight: 0.0 }
        } else {
            let weight = weights.as_ref().map_or(1.0, |weights| weights[row]);
            RowTarget { class: check_index(op, index, row, classes)?, weight }
        });
    }
    Ok(row_targets)
}

fn fused<T: Float>(logits: &Tensor, targets: WeightedTargets) -> Result<Tensor> {
    let logits = &logits.contiguous()?;
    let rule = targets.rule(logits.dims()[logits.rank() - 1]);
    let mapped = rule.map_logits(CpuSlice::new(logits).as_slice()?);
    let (sum, log_sums) = {
        let logits = CpuSlice::new(logits);
        kernel::forward(mapped.as_deref().unwrap_or(logits.as_slice()?), &targets.rows, &rule)
    };
    record_unary(logits, vec![T::round_from_f64(sum)], Shape::from(()), move |x, _, grad| {
        let x = mapped.as_deref().unwrap_or(x);
        Ok(kernel::backward(x, &targets.rows, &log_sums, &rule, grad[0].to_f64()))
    })
}
