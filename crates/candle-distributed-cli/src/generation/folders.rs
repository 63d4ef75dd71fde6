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
    train::{model::Model, run_dir, settings::Settings, transformer::Transformer},
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

fn of_run(path: &Path, settings: &Settings, adapter: Option<&Path>) -> Result<Writer> {
    let product = run_dir::product_of(path, settings);
    if !product.exists() {
        let fault = format!("{} has not ended: there is no {}", path.display(), product.display());
        return Err(Error::usage(fault).hinted(hint::UNFINISHED));
    }
    let Some(finetune) = &settings.finetune else { return of_bytes(product, settings, adapter) };
    if product != run_dir::adapter_in(path) {
        return of_folder(Folder::open(&product)?, adapter);
    }
    let folder = Folder::open(&finetune.folder).map_err(|error| error.hinted(hint::ADAPTER))?;
    finetune.check_folder(&folder).map_err(|error| error.hinted(hint::ADAPTER))?;
    of_folder(folder, Some(adapter.unwrap_or(&product)))
}

fn of_folder(folder: Folder, adapter: Option<&Path>) -> Result<Writer> {
    let llama = folder.llama().clone();
    let model = Model::Llama(match adapters(adapter)? {
        Some(lora) => Llama::with_lora(llama, lora),
        None => llama,
    });
    let files = folder.weights()?;
    Writer::new(model, &files, Some(folder))
}

/// The transformer over bytes, whose file has the effect of adapters that the run trained.
fn of_bytes(file: PathBuf, settings: &Settings, adapter: Option<&Path>) -> Result<Writer> {
    let lora = adapters(adapter)?;
    let model = Model::Bytes(Transformer { config: settings.config(), lora });
    Writer::new(model, &[file], None)
}

fn adapters(path: Option<&Path>) -> Result<Option<Lora>> {
    path.map(|path| Lora::open(path).map_err(|fault| refused(path, fault).hinted(hint::ADAPTER)))
        .transpose()
}
