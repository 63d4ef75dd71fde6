//! The variables of a model that is not trained, from the files of its weights.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_distributed::train::{Declared, Lora, UnitRules, Units, declare};
use candle_nn::VarBuilder;

use crate::{error::Result, hf::folder::refused, hint};

/// The variables that `build` asks for, in single precision: those of the files, and of the adapters
/// that were opened. `is_passed_over` names tensors that need not be asked for.
///
/// # Errors
///
/// If a file cannot be read, if a tensor is missing or left over, or has another shape.
pub(crate) fn load(
    files: &[PathBuf],
    lora: Option<&Lora>,
    rules: UnitRules,
    is_passed_over: impl Fn(&str) -> bool,
    build: impl Fn(&VarBuilder<'_>) -> candle_core::Result<()>,
) -> Result<Units> {
    let declared = declare(|vb| build(&vb), DType::F32, &Device::Cpu)?;
    let mut tensors = BTreeMap::new();
    for file in files {
        tensors.extend(read(file)?);
    }
    if let Some(lora) = lora {
        add_adapters(lora, &declared, &mut tensors)?;
    }
    check(files, &declared, &tensors, is_passed_over)?;
    let tensors = tensors.into_iter().collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Ok(Units::by(rules, |vb| build(&vb))(vb)?)
}

fn read(file: &Path) -> Result<impl Iterator<Item = (String, Tensor)>> {
    let tensors = safetensors::load(file, &Device::Cpu);
    Ok(tensors.map_err(|fault| refused(file, fault))?.into_iter())
}

/// Adds the values of adapters under the names that the model has for them.
fn add_adapters(
    lora: &Lora,
    declared: &[Declared],
    tensors: &mut BTreeMap<String, Tensor>,
) -> Result<()> {
    let values = lora.values();
    let is_of_adapter = |name: &str| name.split('.').any(|part| Lora::PATTERNS.contains(&part));
    for adapter in declared.iter().filter(|declared| is_of_adapter(&declared.name)) {
        let items = values(adapter, 0..adapter.shape.elem_count())?;
        tensors.insert(adapter.name.clone(), items.reshape(&adapter.shape)?);
    }
    Ok(())
}

/// Checks that the model has all of its tensors, and no others.
fn check(
    files: &[PathBuf],
    declared: &[Declared],
    tensors: &BTreeMap<String, Tensor>,
    is_passed_over: impl Fn(&str) -> bool,
) -> Result<()> {
    let place = files.first().and_then(|file| file.parent()).unwrap_or(Path::new("."));
    let mut left: BTreeMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    for Declared { name, shape, .. } in declared {
        let Some(tensor) = left.remove(name.as_str()) else {
            return Err(
                refused(place, format!("no weights have {name}")).hinted(hint::NOT_ITS_WEIGHTS)
            );
        };
        if tensor.shape() != shape {
            let fault = format!(
                "{name} has shape {:?}, and the model's is {:?}",
                tensor.dims(),
                shape.dims()
            );
            return Err(refused(place, fault).hinted(hint::NOT_ITS_WEIGHTS));
        }
    }
    match left.into_keys().find(|name| !is_passed_over(name)) {
        None => Ok(()),
        Some(name) => {
            let fault = format!("the model has no {name}, which the weights have");
            Err(refused(place, fault).hinted(hint::NOT_ITS_WEIGHTS))
        }
    }
}
