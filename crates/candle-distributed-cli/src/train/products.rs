//! What a run makes of a model from a folder: a folder with the same files.

use std::path::Path;

use candle_core::DType;
use candle_distributed::{
    finetune::{Folder, spec::Spec},
    train::{Lora, PretrainedFiles},
};
use serde_json::{Value, json};

use crate::{
    error::{Error, Result},
    output,
    train::distributed::Distributed,
};

/// The sizes and properties of a model.
const CONFIG: &str = "config.json";

/// The folders that a run makes of a model from a folder. Every process calls each method, and the
/// first one writes.
#[derive(Debug)]
pub(crate) struct Products<'a> {
    pub(crate) settings: &'a Spec,
    /// Where the model comes from.
    pub(crate) folder: &'a Folder,
    pub(crate) is_first: bool,
}

impl Products<'_> {
    /// Writes a folder of the model as it is now, or of its adapters if these alone were asked for.
    pub(crate) fn save(&self, model: &Distributed, to: &Path) -> Result<()> {
        let dtype = self.settings.recipe.precision().dtype();
        match model.model.lora() {
            Some(lora) if !self.merges() => return self.save_adapters(model, lora, to),
            Some(lora) => self.write(model, lora.merged().dtype(dtype), to)?,
            None => self.write(model, PretrainedFiles::default().dtype(dtype), to)?,
        }
        if self.is_first {
            output::file(&to.join(CONFIG), &config(self.folder, dtype)?)?;
        }
        self.copy_texts(to)
    }

    /// Writes a folder of adapters, as PEFT does.
    pub(crate) fn save_adapters(&self, model: &Distributed, lora: &Lora, to: &Path) -> Result<()> {
        self.write(model, lora.adapters(), to)?;
        self.copy_texts(to)
    }

    /// Whether the model has the effect of its adapters, if it has some.
    pub(crate) fn merges(&self) -> bool {
        self.settings.finetune.merge
    }

    fn write(&self, model: &Distributed, files: PretrainedFiles, to: &Path) -> Result<()> {
        let is_allowed = self.settings.allow_non_finite;
        let files = if is_allowed { files.allow_non_finite() } else { files };
        Ok(model.trained.save_pretrained(to, files)?)
    }

    /// Writes what the folder of the model has beside its weights to read texts with.
    fn copy_texts(&self, to: &Path) -> Result<()> {
        if !self.is_first {
            return Ok(());
        }
        for (name, content) in self.folder.tokenizer().files() {
            output::file(&to.join(name), content)?;
        }
        Ok(())
    }
}

/// The `config.json` of a model of this type: that of its folder, if it is the same.
fn config(folder: &Folder, dtype: DType) -> Result<Vec<u8>> {
    if folder.llama().config().dtype == dtype {
        return Ok(folder.config_json().as_bytes().to_vec());
    }
    let mut config = folder.config()?;
    let name = match dtype {
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    if let Value::Object(fields) = &mut config {
        let is_new = fields.contains_key("dtype") || !fields.contains_key("torch_dtype");
        // Both layouts may be there, and must say the same.
        for (field, is_there) in
            [("dtype", is_new), ("torch_dtype", fields.contains_key("torch_dtype"))]
        {
            if is_there {
                fields.insert(field.to_owned(), json!(name));
            }
        }
    }
    serde_json::to_vec_pretty(&config)
        .map_err(|source| Error::write(folder.path().join(CONFIG), source.into()))
}
