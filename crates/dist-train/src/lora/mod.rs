//! Low-rank adapters: small trained matrices beside the frozen weights of a model.
//!
//! The weight `W` [outputs, inputs] of a linear layer becomes `W + alpha / rank · B · A` (Hu et
//! al., arXiv 2106.09685). Names, initial values and files follow Hugging Face's PEFT.

mod builders;
pub(crate) mod config;
pub(crate) mod matrices;
pub(crate) mod save;

use std::{ops::Range, path::Path, sync::Arc};

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use dist_checkpoint::{ParameterError, StoredWeights, TensorInfo, support::AllowedNames};

use self::{
    builders::{AdapterComposer, AdapterDeclarer},
    config::AdapterConfig,
    matrices::{FILE, FILE_PREFIX, add_adapter, peft_name},
};
use crate::{
    error::{Error, Result},
    lora::save::{PretrainedFiles, SavedContent},
    parameters::declare::Declared,
};

/// Low-rank adapters for the linear layers of a model with frozen parameters.
///
/// The weight `q_proj.weight` [outputs, inputs] gets the adapter `q_proj.lora_A.weight` [rank,
/// inputs] and `q_proj.lora_B.weight` [outputs, rank], and the layer computes with `weight + alpha
/// / rank · B · A`. B starts at zero and A uniformly within ±1 / √inputs, like in Hugging Face's
/// PEFT. Its `target_modules` are the `targets` here: full names of layers, or their last
/// components. The text part of a model that also sees images has the names `language_model.model.…` of
/// its weight files in a model here, and PEFT's `model.language_model.…` in targets and files of adapters.
///
/// [`adapt`](Self::adapt) declares the adapters of any model, and [`unit`](Self::unit) gives them to
/// its layers where a loss uses them, as with the [`Units`](crate::Units) of
/// [`DataParallel`](crate::DataParallel) or [`FullyShard`](crate::FullyShard). Neither changes the
/// code of the model:
///
/// - **Layers of fused-ops** ([`Linear`](fused_ops::layers::Linear), `Attention`, `SwiGlu`, `Mlp`) multiply by A and then by B,
///   like [`lora_linear`](fused_ops::lora_linear()). No tensor of the weight's size is made, and the
///   base weights may stay in the half precision of their file
///   ([`with_base_dtype`](Self::with_base_dtype)).
/// - **Other layers**, such as candle-nn's, get the sum in place of the weight, with equal results up
///   to rounding. The graph of a unit then contains two more matrices of the size of each weight, and
///   the backward pass computes the gradient of the full sum, so a step takes as long as a step that
///   trains all weights.
///
/// Half-precision models are rejected, because the sum would be rounded to their dtype. Mixed
/// precision works.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, linear};
/// use dist_train::{AdamW, FullyShard, Lora};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let model = |vb: VarBuilder<'_>| Ok((linear(4, 4, vb.pp("0.up"))?, linear(4, 4, vb.pp("1.up"))?));
/// let block = |vb: VarBuilder<'_>, x: &Tensor| linear(4, 4, vb.pp("up"))?.forward(x);
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let lora = Lora::new(["up"], 2, 4.0)?;
/// let mut model = FullyShard::builder(&mesh, lora.adapt(model))
///     .train_only(Lora::PATTERNS) // and `.weights("model").allow_missing(Lora::PATTERNS)`
///     .build(|group| AdamW::new(group.vars, ParamsAdamW { lr: 0.1, ..Default::default() }))?;
/// let block = lora.unit(block);
/// let loss = move |_: &Replica, model: &dist_train::Units, x: Tensor| {
///     let hidden = model.unit("0", &x, block.clone())?;
///     model.unit("1", &hidden, block.clone())?.sqr()?.mean_all()
/// };
/// let x = Tensor::randn(0_f32, 1., (8, 4), &Device::Cpu)?;
/// let first = model.step(x.clone(), loss.clone())?.loss;
/// assert!(model.step(x, loss)?.loss < first);
///
/// model.save_pretrained(folder.join("adapter"), lora.adapters())?; // for PEFT, and `Lora::open`
/// model.save_pretrained(folder.join("merged"), lora.merged())?; // for any reader
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Lora {
    config: AdapterConfig,
    /// The dtype of the base weights; `None` if it is the model's.
    base_dtype: Option<DType>,
    /// The matrices in the folder, if the adapters were opened.
    saved: Option<Arc<StoredWeights>>,
}

impl Lora {
    /// Patterns that match the adapters of every model, for
    /// [`train_only`](crate::ModelBuilder::train_only) and
    /// [`allow_missing`](crate::ModelBuilder::allow_missing).
    pub const PATTERNS: [&'static str; 2] = ["lora_A", "lora_B"];

    /// Creates adapters for the layers in `targets`, with the factor `alpha / rank`.
    ///
    /// Targets should be linear layers. An embedding's weight is a matrix too and can be adapted,
    /// but PEFT expects its adapter under other names. If a head shares the weight, both layers must
    /// run in [`unit`](Self::unit), because [`merged`](Self::merged) adds the adapter for both.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Setting`] if the rank is 0 or `alpha` is not a positive number, and
    /// [`Error::Lora`] without targets.
    pub fn new<S: Into<String>>(
        targets: impl IntoIterator<Item = S>,
        rank: usize,
        alpha: f64,
    ) -> Result<Self> {
        Error::check_positive("the rank of adapters", rank as f64)?;
        Error::check_positive("the alpha of adapters", alpha)?;
        let targets: Arc<[String]> = targets.into_iter().map(Into::into).collect();
        if targets.is_empty() {
            return Err(Error::lora("adapters need at least one target"));
        }
        Ok(Self { config: AdapterConfig { targets, rank, alpha }, base_dtype: None, saved: None })
    }

    /// Opens the adapters in a folder written by [`adapters`](Self::adapters) or PEFT. Building a
    /// model reads their [`values`](Self::values).
    ///
    /// Dropout is ignored: it only affects training, and training resumed from these adapters runs
    /// without dropout.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Checkpoint`] if a file cannot be read, [`Error::Lora`] if the
    /// adapters are of another kind (`DoRA`, biases, ranks by pattern) or belong to base weights
    /// changed at initialization (`PiSSA`, `OLoRA`), and the errors of [`new`](Self::new).
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let AdapterConfig { targets, rank, alpha } = AdapterConfig::read(folder)?;
        let saved = StoredWeights::open(folder.join(FILE))?.without_prefix(FILE_PREFIX);
        Ok(Self { saved: Some(Arc::new(saved)), ..Self::new(targets.to_vec(), rank, alpha)? })
    }

    /// Stores the weights of adapted layers in `dtype`, such as the [`DType::BF16`] of their file,
    /// while the model computes in its own.
    ///
    /// Layers of fused-ops widen such a weight by blocks, forward and backward. So half precision
    /// halves its memory, and a sharded model's traffic, without a change of values. Slots on one
    /// device share it. Other layers widen it whole.
    #[must_use]
    pub fn with_base_dtype(self, dtype: DType) -> Self {
        Self { base_dtype: Some(dtype), ..self }
    }

    /// Returns true if one of the targets names a layer.
    #[doc(hidden)]
    pub fn adapts(&self, layer: &str) -> bool {
        !self.config.targets_of(layer).is_empty()
    }

    /// Returns the weight of a layer with the adapter of `a` and `b` added, in the dtype of all three:
    /// `weight + alpha / rank · b · a`.
    ///
    /// # Errors
    ///
    /// Returns an error if the shapes or dtypes do not fit.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use dist_train::Lora;
    ///
    /// let lora = Lora::new(["up"], 1, 2.0)?;
    /// let weight = Tensor::new(&[[1.0, 1.0]], &Device::Cpu)?;
    /// let a = Tensor::new(&[[3.0, 5.0]], &Device::Cpu)?;
    /// let b = Tensor::new(&[[1.0]], &Device::Cpu)?;
    /// let merged = lora.merge_weight(&weight, &a, &b)?;
    /// assert_eq!(merged.to_vec2::<f64>()?, [[7.0, 11.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn merge_weight(&self, weight: &Tensor, a: &Tensor, b: &Tensor) -> CandleResult<Tensor> {
        add_adapter(weight, a, b, self.config.scale())
    }

    /// Wraps the constructor of a model to declare adapters too: for
    /// [`FullyShard::builder`](crate::FullyShard::builder), or for
    /// [`DataParallel::builder`](crate::DataParallel::builder) with
    /// [`by_units`](crate::ModelBuilder::by_units).
    ///
    /// The constructor returns no model, because a model with fixed sums would not follow training:
    /// [`unit`](Self::unit) rebuilds the layers on each use.
    ///
    /// # Errors
    ///
    /// The returned function returns the errors of `build`, and, wrapped in candle's error,
    /// [`Error::Lora`] for a target that names no layer, and for a weight that is not a matrix or has
    /// half precision. For [opened](Self::open) adapters that do not match the model it
    /// also returns [`ParameterError::Weights`] and [`ParameterError::Shape`].
    pub fn adapt<M>(
        &self,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M>,
    ) -> impl Fn(VarBuilder<'_>) -> CandleResult<()> {
        let lora = self.clone();
        move |vb| {
            let declaring = AdapterDeclarer::new(&lora, vb);
            build(declaring.builder())?;
            let adapters = declaring.into_adapters()?;
            match &lora.saved {
                Some(saved) => {
                    let adapters: Vec<TensorInfo> = adapters.iter().map(saved_info).collect();
                    Ok(saved.check_fits(&adapters, AllowedNames::default()).map_err(Error::from)?)
                }
                None => Ok(()),
            }
        }
    }

    /// Wraps a function for [`Units::unit`](crate::Units::unit) so that its layers get their
    /// adapters: see [`Lora`].
    pub fn unit<X, R, F>(
        &self,
        f: F,
    ) -> impl Fn(VarBuilder<'_>, &X) -> CandleResult<R> + Clone + Send + Sync + use<X, R, F>
    where
        F: Fn(VarBuilder<'_>, &X) -> CandleResult<R> + Clone + Send + Sync,
    {
        let lora = self.clone();
        move |vb, x| f(AdapterComposer::builder(&lora, vb), x)
    }

    /// Returns the values of [opened](Self::open) adapters, for
    /// [`init_with`](crate::ModelBuilder::init_with); all other parameters must come from
    /// [`weights`](crate::ModelBuilder::weights).
    ///
    /// # Errors
    ///
    /// The returned function returns [`ParameterError::Missing`] for a parameter outside the
    /// adapters, and an error if the file cannot be read.
    pub fn values(
        &self,
    ) -> impl Fn(&Declared, Range<usize>) -> CandleResult<Tensor> + Send + Sync + 'static {
        let saved = self.saved.clone();
        move |declared, range| {
            let items = match &saved {
                Some(saved) => {
                    saved.items(&saved_info(declared), range, &Device::Cpu).map_err(Error::from)?
                }
                None => None,
            };
            items.ok_or_else(|| {
                Error::from(ParameterError::Missing { name: declared.name.clone() }).into()
            })
        }
    }

    /// Returns the files of the adapters alone, in PEFT's format, for
    /// [`save_pretrained`](crate::DistributedModel::save_pretrained): `adapter_model.safetensors`
    /// and `adapter_config.json`. Saving fails if the model's adapters differ in layers or rank;
    /// `alpha` must be the value used in training.
    #[must_use]
    pub fn adapters(&self) -> PretrainedFiles {
        PretrainedFiles::new(SavedContent::Adapters(self.config.clone()))
    }

    /// Returns the files of the model with adapters merged into its weights, with the names and
    /// shapes of the model without adapters (PEFT's `merge_and_unload`). Half-precision weights are
    /// merged in single precision. Saving rejects the same models as for
    /// [`adapters`](Self::adapters).
    #[must_use]
    pub fn merged(&self) -> PretrainedFiles {
        PretrainedFiles::new(SavedContent::Merged(self.config.clone()))
    }
}

/// Describes a matrix of an adapter in a file, after the prefix of all names.
fn saved_info(declared: &Declared) -> TensorInfo {
    let info = declared.info();
    TensorInfo { name: peft_name(&info.name), ..info }
}
