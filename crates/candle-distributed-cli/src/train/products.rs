//! What a run makes of a model from a folder: a folder with the same files.

use std::path::Path;

use candle_core::DType;
use candle_distributed::train::{Lora, PretrainedFiles};
use serde_json::{Value, json};

use crate::{
    error::{Error, Result},
    hf::{files::CONFIG, folder::Folder},
    output,
    train::{distributed::Distributed, finetune, trainer::Job},
};

/// Writes a folder of the model as it is now, or of its adapters if these alone were asked for.
/// Every process calls it, and the first one writes.
pub(crate) fn save(job: &Job<'_>, model: &Distributed, folder: &Folder, to: &Path) -> Result<()> {
    let merge = job.settings.finetune.as_ref().is_some_and(|finetune| finetune.merge);
    let dtype = job.settings.recipe.precision().dtype();
    match model.adapters() {
        Some(lora) if !merge => return save_adapters(job, model, lora, folder, to),
        Some(lora) => write(job, model, lora.merged().dtype(dtype), to)?,
        None => write(job, model, PretrainedFiles::default().dtype(dtype), to)?,
    }
    if is_first(job) {
        output::file(&to.join(CONFIG), &config(folder, dtype)?)?;
    }
    copy_texts(job, folder, to)
}

/// Writes a folder of adapters, as PEFT does. Every process calls it, and the first one writes.
pub(crate) fn save_adapters(
    job: &Job<'_>,
    model: &Distributed,
    lora: &Lora,
    folder: &Folder,
    to: &Path,
) -> Result<()> {
    write(job, model, lora.adapters(), to)?;
    copy_texts(job, folder, to)
}

fn write(job: &Job<'_>, model: &Distributed, files: PretrainedFiles, to: &Path) -> Result<()> {
    let files = if job.settings.allow_non_finite { files.allow_non_finite() } else { files };
    model.save_pretrained(to, files)
}

/// Writes what the folder of the model has beside its weights to read texts with.
fn copy_texts(job: &Job<'_>, folder: &Folder, to: &Path) -> Result<()> {
    if !is_first(job) {
        return Ok(());
    }
    for (name, content) in folder.tokenizer().files() {
        output::file(&to.join(name), content)?;
    }
    Ok(())
}

fn is_first(job: &Job<'_>) -> bool {
    job.mesh.local_slots().start == 0
}

/// The `config.json` of a model of this type: that of its folder, if it is the same.
fn config(folder: &Folder, dtype: DType) -> Result<Vec<u8>> {
    if folder.llama().config().dtype == dtype {
        return Ok(folder.config_json().as_bytes().to_vec());
    }
    let mut config = finetune::config_of(folder)?;
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
