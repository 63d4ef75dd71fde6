//! The variables of a model that is not trained, from the files of its weights.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_distributed::train::{Declared, Lora, Units, declare};
use candle_nn::VarBuilder;

use crate::{
    error::{Error, Result},
    hf::files::refused,
    hint,
    train::model::{Model, is_of_adapter},
};

/// The variables of a model, in single precision: those of the files, and of its adapters.
///
/// # Errors
///
/// If a file cannot be read, if a tensor is missing or left over, is in two files, or has another
/// shape.
pub(crate) fn load(model: &Model, files: &[PathBuf]) -> Result<Units> {
    // Only adapters can be of another model here: it is that of its own configuration.
    let declared = declare(|vb| model.declare(&vb), DType::F32, &Device::Cpu)
        .map_err(|fault| Error::usage(fault.to_string()).hinted(hint::NOT_ITS_ADAPTERS))?;
    let mut tensors = BTreeMap::new();
    for file in files {
        let read = safetensors::load(file, &Device::Cpu)
            .map_err(|fault| refused(file, fault).hinted(hint::NOT_WHOLE))?;
        for (name, tensor) in read {
            if tensors.contains_key(&name) {
                let twice = format!("{name} is in another file of the weights too");
                return Err(refused(file, twice).hinted(hint::NOT_WHOLE));
            }
            tensors.insert(name, tensor);
        }
    }
    if let Some(lora) = model.lora() {
        add_adapters(lora, &declared, &mut tensors)?;
    }
    check(model, files, &declared, &tensors)?;
    let tensors = tensors.into_iter().collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Ok(Units::by(model.units(), |vb| model.declare(&vb))(vb)?)
}

/// Adds the values of adapters under the names that the model has for them.
fn add_adapters(
    lora: &Lora,
    declared: &[Declared],
    tensors: &mut BTreeMap<String, Tensor>,
) -> Result<()> {
    let values = lora.values();
    for adapter in declared.iter().filter(|declared| is_of_adapter(&declared.name)) {
        let items = values(adapter, 0..adapter.shape.elem_count())?;
        tensors.insert(adapter.name.clone(), items.reshape(&adapter.shape)?);
    }
    Ok(())
}

/// Checks that the files have all tensors of the model, and no others.
fn check(
    model: &Model,
    files: &[PathBuf],
    declared: &[Declared],
    tensors: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let wrong = |fault: String| {
        // Several files are shards of one folder.
        let place = match files {
            [file] => Some(file.as_path()),
            _ => files.first().and_then(|file| file.parent()),
        };
        refused(place.unwrap_or(Path::new(".")), fault).hinted(hint::NOT_ITS_WEIGHTS)
    };
    let mut left: BTreeMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    for Declared { name, shape, .. } in declared {
        let Some(tensor) = left.remove(name.as_str()) else {
            return Err(wrong(format!("no weights have {name}")));
        };
        if tensor.shape() != shape {
            let (found, expected) = (tensor.dims(), shape.dims());
            let fault = format!("{name} has shape {found:?}, and the model's is {expected:?}");
            return Err(wrong(fault));
        }
    }
    match left.into_keys().find(|name| !is_passed_over(model, name)) {
        None => Ok(()),
        Some(name) => Err(wrong(format!("the model has no {name}, which the weights have"))),
    }
}

/// Whether weights may have a tensor that the model does not ask for.
fn is_passed_over(model: &Model, name: &str) -> bool {
    name.split('.').any(|part| model.passed_over().contains(&part))
}
