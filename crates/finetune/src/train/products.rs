//! The model folders that a run writes.

use std::path::Path;

use candle_core::DType;
use dist_train::{Lora, PretrainedFiles};
use serde_json::{Map, Value, json};

use crate::{
    error::{Error, Result},
    files::{self, CONFIG},
    folder::Folder,
    spec::Spec,
    train::model::TrainedModel,
};

/// The model folders that a run writes, with the files of the folder that its model is from. Every
/// process calls each method, and the first one writes.
#[derive(Debug)]
pub(super) struct Products<'a> {
    pub(super) spec: &'a Spec,
    /// Folder that the model is from.
    pub(super) folder: &'a Folder,
}

impl Products<'_> {
    /// Writes a folder of the model, or of its adapters alone if they are not merged.
    pub(super) fn save(&self, model: &TrainedModel, to: &Path) -> Result<()> {
        let dtype = self.spec.recipe.precision().dtype();
        let files = match model.model.lora() {
            Some(lora) if !self.merges() => return self.save_adapters(model, lora, to),
            Some(lora) => lora.merged().dtype(dtype),
            None => PretrainedFiles::default().dtype(dtype),
        };
        let files = files.with_file(CONFIG, config(self.folder, dtype)?);
        self.save_files(model, self.with_other_parts(files)?, to)
    }

    /// Adds the weights and files of the parts that see images, if the model has such parts.
    fn with_other_parts(&self, files: PretrainedFiles) -> Result<PretrainedFiles> {
        /// How images are read.
        const PROCESSOR: [&str; 3] =
            ["preprocessor_config.json", "processor_config.json", "chat_template.json"];
        let parts = self.folder.decoder().other_parts();
        if parts.is_empty() || self.spec.finetune.weights.is_none() {
            return Ok(files);
        }
        let path = self.folder.path();
        let mut files = files.with_tensors_of(path, parts.iter().copied());
        for name in PROCESSOR {
            if let Some(content) = files::read_if_there(&path.join(name))? {
                files = files.with_file(name, content);
            }
        }
        Ok(files)
    }

    /// Writes a folder of adapters, as PEFT does.
    pub(super) fn save_adapters(&self, model: &TrainedModel, lora: &Lora, to: &Path) -> Result<()> {
        self.save_files(model, lora.adapters(), to)
    }

    /// Returns true if adapters are merged into the model.
    pub(super) fn merges(&self) -> bool {
        self.spec.finetune.merge
    }

    /// Writes the weights, and the files of the tokenizer.
    fn save_files(&self, model: &TrainedModel, files: PretrainedFiles, to: &Path) -> Result<()> {
        let mut files = files;
        for (name, content) in self.folder.tokenizer().files() {
            files = files.with_file(name, content.clone());
        }
        let files = if self.spec.allow_non_finite { files.allow_non_finite() } else { files };
        Ok(model.trained.save_pretrained(to, files)?)
    }
}

/// Returns the `config.json` of a folder for weights of a type, unchanged if it names that type.
fn config(folder: &Folder, dtype: DType) -> Result<Vec<u8>> {
    if folder.decoder().config().dtype == dtype {
        return Ok(folder.config_json().as_bytes().to_vec());
    }
    let mut config = folder.config()?;
    let name = match dtype {
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    if let Value::Object(fields) = &mut config {
        // A file may have both names, and they must agree.
        let names = ["dtype", "torch_dtype"];
        if !names.iter().any(|name| fields.contains_key(*name)) {
            fields.insert("dtype".to_owned(), json!(name));
        }
        set_dtype(fields, &names, name);
        // The type of the text part must agree as well.
        if let Some(Value::Object(text)) = fields.get_mut("text_config") {
            set_dtype(text, &names, name);
        }
    }
    serde_json::to_vec_pretty(&config)
        .map_err(|cause| Error::write(folder.path().join(CONFIG), cause.into()))
}

/// Replaces the values of the fields that are there.
fn set_dtype(fields: &mut Map<String, Value>, names: &[&str], dtype: &str) {
    for name in names {
        if let Some(value) = fields.get_mut(*name) {
            *value = json!(dtype);
        }
    }
}
