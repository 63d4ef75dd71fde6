//! Batch norm over the rows of all replicas.

use candle_core::{Result, Tensor, Var, bail};
use candle_nn::{BatchNorm, BatchNormConfig, ModuleT, VarBuilder, batch_norm};
use pmap_mesh::{ALL, Replica};

use crate::{agreement, grad::widen};

/// A batch norm that normalizes by the statistics of the whole batch instead of one shard, like
/// PyTorch's `SyncBatchNorm`. It wraps candle's [`BatchNorm`], and its loss on W slots equals the
/// loss on one.
///
/// Its parameters have the same names as candle's, so either layer can load the other's
/// checkpoints.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{BatchNormConfig, Linear, Module, Optimizer, VarBuilder, linear};
/// use dist_train::{DataParallel, Sgd, SyncBatchNorm};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// let layers = |vb: VarBuilder<'_>| {
///     let norm = SyncBatchNorm::new(3, BatchNormConfig::default(), vb.pp("norm"))?;
///     Ok((norm, linear(3, 1, vb.pp("head"))?))
/// };
/// let mesh = DeviceMesh::cpu(2)?;
/// let mut model =
///     DataParallel::builder(&mesh, layers).build(|group| Sgd::new(group.vars, Default::default()))?;
/// let loss = |train| {
///     move |ctx: &Replica, (norm, head): &(SyncBatchNorm, Linear), x: Tensor| {
///         head.forward(&norm.forward_t(ctx, &x, train)?)?.sqr()?.mean_all()
///     }
/// };
/// let x = Tensor::randn(5_f32, 2., (8, 3), &Device::Cpu)?;
/// model.step(x.clone(), loss(true))?;
/// model.evaluate(x, loss(false))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    norm: BatchNorm,
    remove_mean: bool,
}

impl SyncBatchNorm {
    /// Creates a norm over `n_features` features, with the buffers `running_mean` and `running_var`
    /// and, if the configuration is affine, the variables `weight` and `bias`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`candle_nn::batch_norm()`].
    pub fn new(
        n_features: usize,
        config: impl Into<BatchNormConfig>,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let config = config.into();
        Ok(Self { norm: batch_norm(n_features, config, vb)?, remove_mean: config.remove_mean })
    }

    /// Normalizes features. In training it uses the statistics of all replicas' rows and updates
    /// the running statistics; otherwise it uses the running statistics.
    ///
    /// In training every replica must call it, even if its shard is empty. Rows of padding
    /// ([`Replica::valid_len`]) do not count.
    ///
    /// # Shapes
    ///
    /// `x` [rows of the shard, features] or [rows of the shard, features, ...]; the result has the
    /// same shape. Half precision is normalized in single precision.
    ///
    /// # Errors
    ///
    /// Returns an error if the number of rows or features of `x` differs from the shard or the
    /// layer; in training, also if the whole batch has only one item per feature, or if
    /// [`Replica::psum`] fails.
    #[track_caller]
    pub fn forward_t(&self, ctx: &Replica, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train {
            return self.norm.forward_t(x, false);
        }
        let n_features = self.norm.running_mean().dim(0)?;
        if x.rank() < 2 || x.dim(1)? != n_features {
            bail!(
                "batch norm expects {n_features} features in dimension 1, got shape {:?}",
                x.dims()
            )
        }
        let rows = n_real_rows(ctx, x.dim(0)?)?;
        let n_items = count_items(ctx, rows * x.dims()[2..].iter().product::<usize>())?;
        let mut centered = widen(x)?;
        if self.remove_mean {
            let mean = feature_means(ctx, &centered.narrow(0, 0, rows)?, n_items)?;
            update_running(self.norm.running_mean(), &mean, self.norm.momentum())?;
            centered = centered.broadcast_sub(&by_feature(&mean, x)?)?;
        }
        let variance = feature_means(ctx, &centered.narrow(0, 0, rows)?.sqr()?, n_items)?;
        // Like in PyTorch and candle, the running variance is unbiased.
        let unbiased = (&variance * (n_items / (n_items - 1.0)))?;
        update_running(self.norm.running_var(), &unbiased, self.norm.momentum())?;
        let deviation = (variance + self.norm.eps())?.sqrt()?;
        let normed = centered.broadcast_div(&by_feature(&deviation, x)?)?.to_dtype(x.dtype())?;
        match self.norm.weight_and_bias() {
            None => Ok(normed),
            Some((weight, bias)) => {
                normed.broadcast_mul(&by_feature(weight, x)?)?.broadcast_add(&by_feature(bias, x)?)
            }
        }
    }
}

/// Returns the number of rows of a shard that are not padding.
fn n_real_rows(ctx: &Replica, rows: usize) -> Result<usize> {
    let Some(real) = ctx.valid_len().filter(|&real| real != rows) else { return Ok(rows) };
    // `weight` is the number of real rows over the mean size of the shards, and smaller shards are
    // padded to this mean, rounded up.
    let padded = (real as f64 / ctx.weight()).ceil();
    if real == 0 || (rows as f64 - padded).abs() < 0.5 {
        return Ok(real);
    }
    bail!(
        "a batch norm of {rows} rows, where the shard has {real}: dimension 0 must hold the shard's rows"
    )
}

/// Returns the number of items per feature over all replicas, given the number on this replica.
fn count_items(ctx: &Replica, n_local: usize) -> Result<f64> {
    let n_items: f64 = agreement::gather_numbers(ctx, [n_local as f64])?.iter().flatten().sum();
    if n_items > 1.0 {
        return Ok(n_items);
    }
    bail!("batch norm in training needs more than one item of each feature, got {n_items}")
}

/// Returns the mean of each feature over all replicas. Every replica uses the means for its own
/// rows, so `pvary` sums the gradients of all replicas.
#[track_caller]
fn feature_means(ctx: &Replica, x: &Tensor, n_items: f64) -> Result<Tensor> {
    let sum = x.transpose(0, 1)?.flatten_from(1)?.sum(1)?;
    ctx.pvary(&(ctx.psum(&sum, ALL)? / n_items)?, ALL)
}

/// Reshapes one number per feature for broadcasting over `x`.
fn by_feature(numbers: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut dims = vec![1; x.rank()];
    dims[1] = numbers.dim(0)?;
    numbers.reshape(dims)
}

/// Updates a running statistic: `(1 - momentum) * running + momentum * now`.
fn update_running(running: &Tensor, now: &Tensor, momentum: f64) -> Result<()> {
    let now = now.detach().to_dtype(running.dtype())?;
    let updated = ((running.detach() * (1.0 - momentum))? + (now * momentum)?)?;
    Var::from_tensor(running)?.set(&updated)
}
