//! Which model a folder holds: one in Hugging Face's form, or that of a run.

use std::path::{Path, PathBuf};

use candle_distributed::{models::Llama, train::Lora};

use crate::{
    error::{Error, Result},
    generation::writer::Writer,
    hf::{
        files::{CONFIG, refused},
        folder::Folder,
    },
    hint,
    train::{model::Model, run_dir, settings::Settings},
};

/// How PEFT describes adapters, in their folder.
const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The model of a folder, with the adapters of another folder if there is one.
///
/// # Errors
///
/// If the folder holds no model, or not all of one; if the weights, or the adapters, are not those of
/// the model.
pub(crate) fn open(path: &Path, adapter: Option<&Path>) -> Result<Writer> {
    if let Some(settings) = Settings::read(path)? {
        return of_run(path, &settings, adapter);
    }
    if path.join(ADAPTER_CONFIG).exists() && !path.join(CONFIG).exists() {
        let fault = format!("{} holds adapters, and not their model", path.display());
        return Err(Error::usage(fault).hinted(hint::ADAPTER));
    }
    of_folder(Folder::open(path)?, adapter)
}

/// Returns the folder of the model at `path`, which is in Hugging Face's form or of a run that has
/// ended.
///
/// # Errors
///
/// If the run has not ended, or has trained adapters alone.
pub(crate) fn model_folder(path: &Path) -> Result<PathBuf> {
    let Some(settings) = Settings::read(path)? else { return Ok(path.to_owned()) };
    let product = product(path, &settings)?;
    if product == run_dir::adapter_in(path) {
        let fault = format!("{} holds adapters, and not their model", product.display());
        return Err(Error::usage(fault).hinted(hint::ADAPTER));
    }
    Ok(product)
}

fn product(path: &Path, settings: &Settings) -> Result<PathBuf> {
    let product = run_dir::product_of(path, settings);
    if product.exists() {
        return Ok(product);
    }
    let fault = format!("{} has not ended: there is no {}", path.display(), product.display());
    Err(Error::usage(fault).hinted(hint::UNFINISHED))
}

fn of_run(path: &Path, settings: &Settings, adapter: Option<&Path>) -> Result<Writer> {
    let product = product(path, settings)?;
    if product != run_dir::adapter_in(path) {
        return of_folder(Folder::open(&product)?, adapter);
    }
    let finetune = &settings.finetune;
    let folder = finetune.open_folder().map_err(|error| error.hinted(hint::ADAPTER))?;
    finetune.check_folder(&folder).map_err(|error| error.hinted(hint::ADAPTER))?;
    of_folder(folder, Some(adapter.unwrap_or(&product)))
}

fn of_folder(folder: Folder, adapter: Option<&Path>) -> Result<Writer> {
    let llama = folder.llama().clone();
    let model = Model(match adapters(adapter)? {
        Some(lora) => Llama::with_lora(llama, lora),
        None => llama,
    });
    let files = folder.weights()?;
    Writer::new(model, &files, folder)
}

fn adapters(path: Option<&Path>) -> Result<Option<Lora>> {
    path.map(|path| Lora::open(path).map_err(|fault| refused(path, fault).hinted(hint::ADAPTER)))
        .transpose()
}
