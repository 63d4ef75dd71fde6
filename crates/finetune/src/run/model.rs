//! The model of a folder or of a run.

use std::path::{Path, PathBuf};

use crate::{
    error::{Result, folder::FolderError, run::RunError},
    generate::generator::Generator,
    run::folder::{adapter_in, product_of},
    spec::Spec,
};

/// Opens the model of a folder or of a finished run, with the adapters of another folder if given.
///
/// # Errors
///
/// The errors of [`Generator::open`], [`RunError::NotEnded`], or [`RunError::Base`].
pub fn open_generator(path: &Path, adapter: Option<&Path>) -> Result<Generator> {
    let Some(spec) = Spec::read(path)? else { return Generator::open(path, adapter) };
    let product = finished_product(path, &spec)?;
    if product != adapter_in(path) {
        return Generator::open(&product, adapter);
    }
    let inputs = &spec.finetune;
    // The run has only adapters, for the model that it started from.
    let folder = inputs
        .open_folder()
        .and_then(|folder| inputs.check_folder(&folder).map(|()| folder))
        .map_err(|cause| RunError::Base { cause: Box::new(cause) })?;
    Generator::from_folder(folder, Some(adapter.unwrap_or(&product)))
}

/// Returns the model folder at `path`, or the model folder of the finished run at `path`.
///
/// # Errors
///
/// [`RunError::NotEnded`], or [`FolderError::AdaptersAlone`] if the run trained only adapters.
pub fn model_folder(path: &Path) -> Result<PathBuf> {
    let Some(spec) = Spec::read(path)? else { return Ok(path.to_owned()) };
    let product = finished_product(path, &spec)?;
    if product == adapter_in(path) {
        return Err(FolderError::AdaptersAlone { path: product }.into());
    }
    Ok(product)
}

/// Returns the folder of a finished run's result: its model, or only its adapters.
fn finished_product(path: &Path, spec: &Spec) -> Result<PathBuf> {
    let product = product_of(path, spec);
    if product.exists() {
        return Ok(product);
    }
    Err(RunError::NotEnded { path: path.into(), product }.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;

    #[test]
    fn runs_without_a_model_are_not_finished() {
        let run = tempfile::tempdir().unwrap();
        assert!(finished_product(run.path(), &spec()).is_err());
        let product = product_of(run.path(), &spec());
        std::fs::create_dir(&product).unwrap();
        assert_eq!(finished_product(run.path(), &spec()).unwrap(), product);
    }
}
