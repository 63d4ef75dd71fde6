//! The configuration of adapters, and its file next to saved adapters in PEFT's format.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc};

use core_types::human::Printable;
use dist_checkpoint::{TensorInfo, support::Listed};
use serde_json::{Map, Value, json};

use crate::{
    error::{AtPath, Error, Result},
    lora::matrices::{adapted_by, peft_name},
};

/// The name of the file.
pub(crate) const CONFIG: &str = "adapter_config.json";

/// Fields that would change the meaning of the adapters; each must be missing or empty.
const UNSUPPORTED_FIELDS: [&str; 21] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "exclude_modules",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
    "megatron_config",
];

/// Initializations that leave the weights of the model unchanged. With any other initialization
/// (`pissa`, `olora`, `corda`, `loftq`) the adapters belong to modified weights.
const UNCHANGED_WEIGHTS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// The target layers, rank and scale of adapters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AdapterConfig {
    pub(crate) targets: Arc<[String]>,
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
}

impl AdapterConfig {
    /// Reads the file of a folder.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::Io`](crate::CheckpointError::Io) or [`Error::Lora`].
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let text = fs::read_to_string(&path).at(&path)?;
        let config_error = |field: &str, found: &str, expected: &str| {
            let (path, field, found) =
                (Printable(path.display()), Printable(field), Printable(found));
            Error::lora(format!("{path}: {field} is {found}, {expected} was expected"))
        };
        let fields: Map<String, Value> = serde_json::from_str(&text)
            .map_err(|error| config_error("the file", &error.to_string(), "a JSON object"))?;
        Self::from_fields(&fields).map_err(|UnsupportedField { field, expected }| {
            let found = fields.get(field).unwrap_or(&Value::Null);
            config_error(field, &found.to_string(), expected)
        })
    }

    fn from_fields(fields: &Map<String, Value>) -> Result<Self, UnsupportedField> {
        let unsupported = |field, expected| UnsupportedField { field, expected };
        let field = |name: &str| fields.get(name).unwrap_or(&Value::Null);
        if field("peft_type") != "LORA" {
            return Err(unsupported("peft_type", "\"LORA\""));
        }
        if !is_unset(field("bias")) && field("bias") != "none" {
            return Err(unsupported("bias", "\"none\""));
        }
        if let Some(name) = UNSUPPORTED_FIELDS.into_iter().find(|name| !is_unset(field(name))) {
            return Err(unsupported(name, "nothing"));
        }
        if !keeps_weights(field("init_lora_weights")) {
            return Err(unsupported(
                "init_lora_weights",
                "a way that leaves the weights as they are",
            ));
        }
        let rank = field("r").as_u64().and_then(|rank| usize::try_from(rank).ok());
        let targets = field("target_modules").as_array().map(|targets| {
            targets.iter().map(|target| target.as_str().map(str::to_owned)).collect()
        });
        Ok(Self {
            targets: targets
                .flatten()
                .ok_or_else(|| unsupported("target_modules", "a list of names of layers"))?,
            rank: rank.ok_or_else(|| unsupported("r", "a whole number"))?,
            alpha: field("lora_alpha")
                .as_f64()
                .ok_or_else(|| unsupported("lora_alpha", "a number"))?,
        })
    }

    /// Returns the targets that match a layer, by PEFT's names.
    pub(crate) fn targets_of(&self, layer: &str) -> Vec<&String> {
        let layer = peft_name(layer);
        let mut matched = Vec::new();
        for target in &*self.targets {
            let Some(rest) = layer.strip_suffix(target.as_str()) else { continue };
            if rest.is_empty() || rest.ends_with('.') {
                matched.push(target);
            }
        }
        matched
    }

    /// Checks that every target has matched a layer.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Lora`] otherwise.
    pub(crate) fn check_all_matched(&self, matched: &BTreeSet<String>) -> Result<()> {
        let unmatched: Vec<String> =
            self.targets.iter().filter(|target| !matched.contains(*target)).cloned().collect();
        if unmatched.is_empty() {
            return Ok(());
        }
        Err(Error::lora(format!("no linear layer of the model is named {}", Listed(&unmatched))))
    }

    /// Checks that the matrices of a model all belong to these adapters.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Lora`] otherwise.
    #[expect(clippy::expect_used, reason = "the callers pass adapter matrices only")]
    pub(crate) fn check_matrices(&self, matrices: &[&TensorInfo]) -> Result<()> {
        let mut matched = BTreeSet::new();
        for matrix in matrices {
            let (layer, rank_dim) =
                adapted_by(&matrix.name).expect("the name ends like an adapter matrix");
            let targets = self.targets_of(layer);
            if targets.is_empty() {
                let reason = format!("{} has an adapter, and no target names it", Printable(layer));
                return Err(Error::lora(reason));
            }
            if matrix.shape.get(rank_dim) != Some(&self.rank) {
                return Err(Error::lora(format!(
                    "{} has the shape {:?}, which does not fit adapters of LoRA rank {}",
                    Printable(&matrix.name),
                    matrix.shape,
                    self.rank
                )));
            }
            matched.extend(targets.into_iter().cloned());
        }
        self.check_all_matched(&matched)
    }

    /// Returns the factor of `B · A`.
    pub(crate) fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Names each of the layers with these matrices, if the model also has parts that see images: shorter
    /// targets would match layers of those parts too.
    #[must_use]
    pub(crate) fn with_full_targets(self, matrices: &[&TensorInfo]) -> Self {
        let layers = matrices.iter().filter_map(|matrix| Some(adapted_by(&matrix.name)?.0));
        let layers: BTreeSet<&str> = layers.collect();
        if layers.iter().all(|layer| peft_name(layer) == **layer) {
            return self;
        }
        Self { targets: layers.into_iter().map(peft_name).collect(), ..self }
    }

    /// Returns the content of the file.
    pub(crate) fn json(&self) -> String {
        let config = json!({
            "base_model_name_or_path": null,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": &*self.targets,
            "task_type": null,
        });
        format!("{config:#}\n")
    }
}

/// An unsupported value of a field.
struct UnsupportedField {
    field: &'static str,
    expected: &'static str,
}

/// Returns true if adapters with this initialization belong to the model's original weights.
fn keeps_weights(initialization: &Value) -> bool {
    match initialization {
        Value::Null | Value::Bool(_) => true,
        Value::String(name) => UNCHANGED_WEIGHTS.contains(&name.as_str()),
        Value::Number(_) | Value::Array(_) | Value::Object(_) => false,
    }
}

/// Returns true if a field means the same as a missing field.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}
