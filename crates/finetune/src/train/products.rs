//! The model folders that a run writes.

use std::path::Path;

use candle_core::DType;
use dist_train::{Lora, PretrainedFiles};
use serde_json::{Value, json};

use crate::{
    error::{Error, Result},
    files::CONFIG,
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
        self.save_files(model, files.with_file(CONFIG, config(self.folder, dtype)?), to)
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
        let is_new = fields.contains_key("dtype") || !fields.contains_key("torch_dtype");
        // A file may have both names, and they must agree.
        for (field, is_there) in
            [("dtype", is_new), ("torch_dtype", fields.contains_key("torch_dtype"))]
        {
            if is_there {
                fields.insert(field.to_owned(), json!(name));
            }
        }
    }
    serde_json::to_vec_pretty(&config)
        .map_err(|cause| Error::write(folder.path().join(CONFIG), cause.into()))
}
