//! What adapters are, and the file beside saved ones that says so, in the form of PEFT's.

use std::{fs, path::Path, sync::Arc};

use serde_json::{Map, Value, json};

use crate::{
    checkpoint::disk::At,
    error::{Result, lora::LoraError},
};

/// The name of the file.
pub(crate) const CONFIG: &str = "adapter_config.json";

/// The fields with which adapters would be something else. They may be there and say nothing.
const OTHERS: [&str; 22] = [
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
    "lora_dropout",
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

/// Which layers have adapters, and which ones.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub(crate) targets: Arc<[String]>,
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
}

impl Config {
    /// Reads the file of a folder.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::CheckpointError::Io), and [`LoraError::Config`].
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let text = fs::read_to_string(&path).at(&path)?;
        let refused = |field: &str, found: &str, expected| LoraError::Config {
            path: path.clone(),
            field: field.to_owned(),
            found: found.to_owned(),
            expected,
        };
        let fields: Map<String, Value> = serde_json::from_str(&text)
            .map_err(|error| refused("the file", &error.to_string(), "a JSON object"))?;
        Self::of(&fields).map_err(|Refused { field, expected }| {
            let found = fields.get(field).unwrap_or(&Value::Null);
            refused(field, &found.to_string(), expected).into()
        })
    }

    fn of(fields: &Map<String, Value>) -> Result<Self, Refused> {
        let refuse = |field, expected| Refused { field, expected };
        let field = |name: &str| fields.get(name).unwrap_or(&Value::Null);
        if field("peft_type") != "LORA" {
            return Err(refuse("peft_type", "\"LORA\""));
        }
        if !is_silent(field("bias")) && field("bias") != "none" {
            return Err(refuse("bias", "\"none\""));
        }
        if let Some(other) = OTHERS.into_iter().find(|other| !is_silent(field(other))) {
            return Err(refuse(other, "nothing"));
        }
        let rank = field("r").as_u64().and_then(|rank| usize::try_from(rank).ok());
        let targets = field("target_modules").as_array().map(|targets| {
            targets.iter().map(|target| target.as_str().map(str::to_owned)).collect()
        });
        Ok(Self {
            targets: targets
                .flatten()
                .ok_or_else(|| refuse("target_modules", "a list of names of layers"))?,
            rank: rank.ok_or_else(|| refuse("r", "a whole number"))?,
            alpha: field("lora_alpha").as_f64().ok_or_else(|| refuse("lora_alpha", "a number"))?,
        })
    }

    /// The factor of `B · A`.
    pub(crate) fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The content of the file.
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

/// A field that does not say what it should.
struct Refused {
    field: &'static str,
    expected: &'static str,
}

/// Whether a field says no more than if it were not there.
fn is_silent(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}
