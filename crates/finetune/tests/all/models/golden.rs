//! Results of transformers; see `tests/golden/README.md`.

use std::{collections::BTreeMap, fs, path::PathBuf};

use candle_core::{DType, Device, Tensor, Var, safetensors};
use candle_nn::VarBuilder;
use dist_train::Units;
use finetune::models::{Decoder, DecoderConfig};
use serde_json::Value;

pub(crate) use self::names::{FAMILIES, MODELS};

#[path = "../../golden/models.rs"]
mod names;

/// A model with its expected results.
pub(crate) struct Golden {
    pub(crate) folder: PathBuf,
    pub(crate) decoder: Decoder,
    pub(crate) expected: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Golden {
    pub(crate) fn open(model: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model);
        let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        let config = DecoderConfig::from_json(&text("config.json")).unwrap();
        // Ministral 3 has no layout of transformers 4.
        if model != "ministral3" {
            let alternative = DecoderConfig::from_json(&text("config.alt.json")).unwrap();
            assert_eq!(config, alternative, "{model}: both layouts describe the same model");
        }
        let tensors = safetensors::load(folder.join("expected.safetensors"), &Device::Cpu).unwrap();
        Self {
            decoder: Decoder::from_config(config).unwrap(),
            expected: serde_json::from_str(&text("expected.json")).unwrap(),
            tensors: tensors.into_iter().collect(),
            folder,
        }
    }

    /// Loads the weights of the folder.
    pub(crate) fn variables(&self) -> BTreeMap<String, Var> {
        let mut variables = BTreeMap::new();
        for entry in fs::read_dir(&self.folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !(name.starts_with("model") && name.ends_with(".safetensors")) {
                continue;
            }
            for (name, tensor) in safetensors::load(&path, &Device::Cpu).unwrap() {
                variables.insert(name, Var::from_tensor(&tensor).unwrap());
            }
        }
        variables
    }

    /// Builds the model with these weights, in plain candle.
    pub(crate) fn units(&self, variables: &BTreeMap<String, Var>) -> Units {
        let named = variables.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        let vb = VarBuilder::from_tensors(named.collect(), DType::F32, &Device::Cpu);
        Units::constructor(self.decoder.units(), |vb| self.decoder.declare(&vb))(vb).unwrap()
    }

    /// Returns the model for texts of this many tokens. With LongRoPE, transformers decides by the width of
    /// each batch which frequencies it takes.
    pub(crate) fn decoder_for(&self, length: usize) -> Decoder {
        self.decoder.clone().with_context(length)
    }

    /// Reads rows of token ids or labels.
    pub(crate) fn rows(value: &Value) -> Vec<Vec<i64>> {
        let rows = value.as_array().unwrap().iter().map(|row| row.as_array().unwrap());
        rows.map(|row| row.iter().map(|id| id.as_i64().unwrap()).collect()).collect()
    }

    pub(crate) fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }
}

/// Converts rows of token ids to a tensor.
pub(crate) fn ids(rows: &[Vec<i64>]) -> Tensor {
    labels(rows).to_dtype(DType::U32).unwrap()
}

/// Converts rows of labels to a tensor.
pub(crate) fn labels(rows: &[Vec<i64>]) -> Tensor {
    let flat: Vec<i64> = rows.concat();
    Tensor::from_vec(flat, (rows.len(), rows[0].len()), &Device::Cpu).unwrap()
}

/// Returns the greatest difference between two tensors.
pub(crate) fn distance(left: &Tensor, right: &Tensor) -> f64 {
    let difference = (left - right).unwrap().abs().unwrap().flatten_all().unwrap();
    f64::from(difference.max(0).unwrap().to_scalar::<f32>().unwrap())
}
