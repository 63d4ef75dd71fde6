//! A model of a supported family for training, with or without adapters.

use candle_core::{DType, Device, Result as CandleResult};
use candle_nn::VarBuilder;
use dist_checkpoint::support::elem_of;
use dist_train::{Declared, Lora, Loss, UnitRules, Units, declare};
use fsdp_plan::ParameterInfo;

use crate::{
    data::dataset::{BatchTensors, RowPacking},
    error::{Result, spec::SpecError},
    models::{Decoder, Tokens},
};

/// A model that is trained on [`BatchTensors`].
///
/// One training loop serves all models: model folders and byte-level models, with or without adapters.
/// A second loop would have to repeat locks, checkpoints, agreement between processes and recovery.
#[derive(Clone, Debug)]
pub(crate) struct Model(pub(crate) Decoder);

/// The sizes of a model that determine the memory per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelSizes {
    /// Number of blocks.
    pub(crate) layers: usize,
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Width of the queries of all heads.
    pub(crate) queries: usize,
    /// Width of the keys of all heads, and of the values.
    pub(crate) keys: usize,
    /// Width of the feed-forward network.
    pub(crate) feed_forward: usize,
    /// Numbers that a block keeps beside those of a Llama.
    pub(crate) unfused: usize,
    /// Size of the vocabulary.
    pub(crate) vocabulary: usize,
}

impl Model {
    /// Requests all parameters.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::declare`].
    pub(crate) fn declare(&self, vb: &VarBuilder<'_>) -> CandleResult<()> {
        self.0.declare(vb)
    }

    /// Returns the rules that assign parameters to units.
    pub(crate) fn units(&self) -> UnitRules {
        self.0.units()
    }

    /// Returns the loss of a batch.
    ///
    /// # Errors
    ///
    /// The errors of [`Decoder::loss`].
    pub(crate) fn loss(&self, units: &Units, batch: BatchTensors) -> CandleResult<Loss> {
        let BatchTensors { ids, targets: labels, packing } = batch;
        let tokens = match packing {
            None => Tokens::rows(ids),
            Some(RowPacking { segment_ids, position_ids }) => {
                Tokens::packed(ids, segment_ids, position_ids)
            }
        };
        self.0.loss(units, &tokens, &labels)
    }

    /// Returns the trained adapters, or `None` if the model itself is trained.
    pub(crate) fn lora(&self) -> Option<&Lora> {
        self.0.lora()
    }

    /// Returns the patterns of parameters without weight decay.
    pub(crate) fn undecayed(&self) -> Vec<&'static str> {
        // Adapters are matrices, which decay, and the other parameters are then not trained.
        if self.lora().is_some() {
            return Vec::new();
        }
        self.0.undecayed()
    }

    /// Returns patterns of tensors that weight files may contain although the model has no such
    /// parameters.
    pub(crate) fn unexpected_weights(&self) -> Vec<&'static str> {
        self.0.unexpected_weights()
    }

    /// Returns the parameters in the order of their names, without allocating them.
    ///
    /// # Errors
    ///
    /// [`SpecError::UnknownLayer`] if an adapter names a layer that the model does not have.
    pub(crate) fn parameters(&self) -> Result<Vec<ParameterInfo>> {
        let with_unit = |info: ParameterInfo| {
            let unit = unit_name(info.name(), self.0.config().name_prefix);
            info.with_unit(unit)
        };
        Ok(self.plain_parameters(DType::F32)?.into_iter().map(with_unit).collect())
    }

    /// Returns the parameters in the order of their names, with the units that their names have.
    ///
    /// # Errors
    ///
    /// The errors of [`parameters`](Self::parameters).
    #[expect(clippy::expect_used, reason = "models have floating-point parameters only")]
    pub(crate) fn plain_parameters(&self, dtype: DType) -> Result<Vec<ParameterInfo>> {
        let mut declared = self.declared(dtype)?;
        declared.sort_by(|left, right| left.name.cmp(&right.name));
        let mut parameters = Vec::with_capacity(declared.len());
        for Declared { name, shape, dtype, .. } in declared {
            let is_trained = self.lora().is_none() || is_adapter_parameter(&name);
            let dims: Vec<u64> = shape.dims().iter().map(|&size| size as u64).collect();
            let elem = elem_of(dtype).expect("the planner knows all floating-point dtypes");
            let info = ParameterInfo::new(name, dims, elem)?;
            parameters.push(info.with_requires_grad(is_trained));
        }
        Ok(parameters)
    }

    /// Returns the names of the weights with adapters.
    ///
    /// # Errors
    ///
    /// The errors of [`parameters`](Self::parameters).
    pub(crate) fn adapted_weights(&self) -> Result<Vec<String>> {
        let declared = self.declared(DType::F32)?;
        let layers = declared.iter().filter_map(|found| found.name.strip_suffix(".lora_A.weight"));
        Ok(layers.map(|layer| format!("{layer}.weight")).collect())
    }

    fn declared(&self, dtype: DType) -> Result<Vec<Declared>> {
        // Only a layer named by adapters can be missing: all other layers follow from the
        // configuration.
        let declared = declare(|vb| self.declare(&vb), dtype, &Device::Cpu);
        Ok(declared.map_err(|cause| SpecError::UnknownLayer { cause })?)
    }

    /// Returns the sizes that determine the memory per token.
    pub(crate) fn sizes(&self) -> ModelSizes {
        let config = self.0.config();
        ModelSizes {
            layers: config.layers.len(),
            hidden: config.hidden_size,
            queries: config.query_width(),
            keys: config.key_width(),
            feed_forward: config.active_width(),
            unfused: config.unfused_width(),
            vocabulary: config.vocab_size,
        }
    }
}

/// Returns the unit of a parameter of a model with a prefix of all names.
fn unit_name(name: &str, prefix: &str) -> String {
    match name.strip_prefix(prefix).unwrap_or(name).split('.').collect::<Vec<_>>()[..] {
        ["model", "layers", layer, ..] => format!("{prefix}model.layers.{layer}"),
        ["model", "embed_tokens", ..] => "embed".to_owned(),
        _ => "head".to_owned(),
    }
}

/// Returns true if a parameter belongs to an adapter.
fn is_adapter_parameter(name: &str) -> bool {
    name.split('.').any(|part| Lora::PATTERNS.contains(&part))
}
