//! Adapters of low rank: small matrices that are trained beside the frozen weights of a model.
//!
//! The weight `W` [outputs, inputs] of a linear layer is used as `W + alpha / rank · B · A` (Hu and
//! others, arXiv 2106.09685). Names, initial values and files are those of Hugging Face's PEFT.

mod builders;
pub(crate) mod config;
pub(crate) mod linear;
pub(crate) mod matrices;
pub(crate) mod save;

use std::{ops::Range, path::Path, sync::Arc};

use candle_core::{Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use dist_checkpoint::{ParameterError, StoredWeights, TensorInfo, support::AllowedNames};

use self::{
    builders::{Composing, Declaring},
    config::Config,
    linear::LoraLinear,
    matrices::{FILE, FILE_PREFIX},
};
use crate::{
    error::{Error, Result, lora::LoraError},
    lora::save::{Content, PretrainedFiles},
    parameters::declare::Declared,
};

/// Adapters of low rank for the linear layers of a model, whose own parameters stay as they are.
///
/// Beside the weight `q_proj.weight` [outputs, inputs] stand `q_proj.lora_A.weight` [rank, inputs]
/// and `q_proj.lora_B.weight` [outputs, rank]; the layer computes with
/// `weight + alpha / rank · B · A`. B begins with zeros, and A uniformly within ±1 / √inputs, as in
/// Hugging Face's PEFT, whose `target_modules` are the `targets` here: names of layers, whole or from
/// some dot on to the end.
///
/// There are two ways, of the same results up to rounding:
///
/// - **Any model**, without a change of its code: it is made where a loss uses it, as the
///   [`Units`](crate::Units) of [`DataParallel`](crate::DataParallel) or
///   [`FullyShard`](crate::FullyShard). [`adapt`](Self::adapt) declares the adapters,
///   [`unit`](Self::unit) lets layers find the sum in place of the weight. While the graph of a unit
///   is there it has two matrices more of the size of each weight, and the backward pass makes the
///   gradient of the whole sum: a step takes the time of one that trains all weights. Weights of half
///   precision are refused, since the sum would be rounded to their type.
/// - **A model of one's own** with the layer [`linear`](Self::linear), which multiplies by A and then
///   by B. It has two tensors more of the size of its result, and no gradient as large as the
///   weight. With four layers of 1024 inputs and outputs on one core a step on 128 tokens takes 46 ms
///   instead of 81, and on 2048 tokens 0.61 s instead of 0.72.
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
/// model.save_pretrained(folder.join("merged"), lora.merged())?; // for everybody
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Lora {
    config: Config,
    /// The matrices that a folder has.
    saved: Option<Arc<StoredWeights>>,
}

impl Lora {
    /// What adapters are named in every model: patterns for
    /// [`train_only`](crate::ModelBuilder::train_only) and
    /// [`allow_missing`](crate::ModelBuilder::allow_missing).
    pub const PATTERNS: [&'static str; 2] = ["lora_A", "lora_B"];

    /// Adapters of the layers that `targets` name, with the factor `alpha / rank`.
    ///
    /// Only linear layers are to be named. The weight of an embedding is a matrix too, and is adapted
    /// like one, but PEFT looks for its adapter under other names.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a rank of 0 and for an `alpha` that is not a positive number,
    /// [`LoraError::NoTargets`] without targets.
    pub fn new<S: Into<String>>(
        targets: impl IntoIterator<Item = S>,
        rank: usize,
        alpha: f64,
    ) -> Result<Self> {
        Error::check_positive("the rank of adapters", rank as f64)?;
        Error::check_positive("the alpha of adapters", alpha)?;
        let targets: Arc<[String]> = targets.into_iter().map(Into::into).collect();
        if targets.is_empty() {
            return Err(LoraError::NoTargets.into());
        }
        Ok(Self { config: Config { targets, rank, alpha }, saved: None })
    }

    /// The adapters in a folder, as [`adapters`](Self::adapters) or PEFT saves them. Their
    /// [`values`](Self::values) are read when a model is built.
    ///
    /// Dropout, which has no effect but in training, is left out: training that resumes from these
    /// adapters goes without.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a file cannot be read, [`LoraError::Config`]
    /// if the adapters are none of this kind (`DoRA`, biases, ranks by pattern) or belong to a base
    /// whose weights were changed when they began (`PiSSA`, `OLoRA`), and those of
    /// [`new`](Self::new).
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let Config { targets, rank, alpha } = Config::read(folder)?;
        let saved = StoredWeights::open(folder.join(FILE))?.without_prefix(FILE_PREFIX);
        Ok(Self { saved: Some(Arc::new(saved)), ..Self::new(targets.to_vec(), rank, alpha)? })
    }

    /// The names of the layers that have adapters.
    pub fn targets(&self) -> &[String] {
        &self.config.targets
    }

    /// The rank of the adapters: the rows of A, and the columns of B.
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// The `alpha` of the factor `alpha / rank`.
    pub fn alpha(&self) -> f64 {
        self.config.alpha
    }

    /// The constructor of a model with adapters, of the constructor of the model: for
    /// [`FullyShard::builder`](crate::FullyShard::builder), or for
    /// [`DataParallel::builder`](crate::DataParallel::builder) with
    /// [`by_units`](crate::ModelBuilder::by_units).
    ///
    /// It makes no model, since the sum in it would not follow what is trained: [`unit`](Self::unit)
    /// makes it anew wherever it is used.
    ///
    /// # Errors
    ///
    /// In the returned function, those of `build`, and wrapped in candle's error
    /// [`LoraError::Unmatched`], [`LoraError::NoMatrix`], and [`LoraError::Rounded`] for weights of
    /// half precision; of adapters that were
    /// [opened](Self::open) also [`ParameterError::Weights`] and [`ParameterError::Shape`], if they are
    /// not those of the model.
    pub fn adapt<M>(
        &self,
        build: impl Fn(VarBuilder<'_>) -> CandleResult<M>,
    ) -> impl Fn(VarBuilder<'_>) -> CandleResult<()> {
        let lora = self.clone();
        move |vb| {
            let declaring = Declaring::new(&lora, vb);
            build(declaring.builder())?;
            let adapters = declaring.into_adapters()?;
            match &lora.saved {
                Some(saved) => {
                    let adapters: Vec<TensorInfo> = adapters.iter().map(Declared::info).collect();
                    Ok(saved.check_fits(&adapters, AllowedNames::default()).map_err(Error::from)?)
                }
                None => Ok(()),
            }
        }
    }

    /// A function for [`Units::unit`](crate::Units::unit) whose layers find the sum of weight and
    /// adapter where `f` asks for the weight.
    pub fn unit<X, R, F>(
        &self,
        f: F,
    ) -> impl Fn(VarBuilder<'_>, &X) -> CandleResult<R> + Clone + Send + Sync + use<X, R, F>
    where
        F: Fn(VarBuilder<'_>, &X) -> CandleResult<R> + Clone + Send + Sync,
    {
        let (rank, scale) = (self.rank(), self.config.scale());
        move |vb, x| f(Composing::builder(vb, rank, scale), x)
    }

    /// A linear layer of weight, bias and adapter, for models of one's own: whatever its name, it has
    /// an adapter, but files of [`adapters`](Self::adapters) want it among the targets.
    ///
    /// Its weight and bias have the type of `vb`, A and B that of `vb` or single precision, whichever
    /// is the more precise: what an update adds to a half would often be nothing.
    ///
    /// # Errors
    ///
    /// If the parameters cannot be loaded.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use dist_train::{Lora, declare};
    ///
    /// let lora = Lora::new(["up"], 2, 4.0)?;
    /// let parameters = declare(|vb| lora.linear(8, 3, vb.pp("up")), DType::F32, &Device::Cpu)?;
    /// let names: Vec<&str> = parameters.iter().map(|declared| declared.name.as_str()).collect();
    /// assert_eq!(names, ["up.weight", "up.bias", "up.lora_A.weight", "up.lora_B.weight"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[expect(clippy::needless_pass_by_value, reason = "as candle's layers are made")]
    pub fn linear(
        &self,
        in_dim: usize,
        out_dim: usize,
        vb: VarBuilder<'_>,
    ) -> CandleResult<LoraLinear> {
        let base = fused_ops::layers::linear(in_dim, out_dim, vb.clone())?;
        LoraLinear::new(self, base, &vb)
    }

    /// [`linear`](Self::linear) without a bias.
    ///
    /// # Errors
    ///
    /// If the parameters cannot be loaded.
    #[expect(clippy::needless_pass_by_value, reason = "as candle's layers are made")]
    pub fn linear_no_bias(
        &self,
        in_dim: usize,
        out_dim: usize,
        vb: VarBuilder<'_>,
    ) -> CandleResult<LoraLinear> {
        let base = fused_ops::layers::linear_no_bias(in_dim, out_dim, vb.clone())?;
        LoraLinear::new(self, base, &vb)
    }

    /// The values of adapters that were [opened](Self::open), for
    /// [`init_with`](crate::ModelBuilder::init_with); all else is to come from
    /// [`weights`](crate::ModelBuilder::weights).
    ///
    /// # Errors
    ///
    /// In the returned function [`ParameterError::Missing`] for a parameter that is none of theirs,
    /// and if the file cannot be read.
    pub fn values(
        &self,
    ) -> impl Fn(&Declared, Range<usize>) -> CandleResult<Tensor> + Send + Sync + 'static {
        let saved = self.saved.clone();
        move |declared, range| {
            let items = match &saved {
                Some(saved) => {
                    saved.items(&declared.info(), range, &Device::Cpu).map_err(Error::from)?
                }
                None => None,
            };
            let name = || declared.name.clone();
            items.ok_or_else(|| Error::from(ParameterError::Missing { name: name() }).into())
        }
    }

    /// Returns the files of the adapters alone, which PEFT reads, for
    /// [`save_pretrained`](crate::DistributedModel::save_pretrained): `adapter_model.safetensors` and
    /// `adapter_config.json`. Saving fails if the model's adapters are of other layers or another
    /// rank; `alpha` must be the one of the training.
    #[must_use]
    pub fn adapters(&self) -> PretrainedFiles {
        PretrainedFiles::of(Content::Adapters(self.config.clone()))
    }

    /// The files of a model whose weights are the sums, with the names and shapes of one without
    /// adapters (PEFT's `merge_and_unload`). Halves are added up in single precision. The same models
    /// are refused as for [`adapters`](Self::adapters).
    #[must_use]
    pub fn merged(&self) -> PretrainedFiles {
        PretrainedFiles::of(Content::Merged(self.config.clone()))
    }
}
