//! Loads the variables of a model for generation.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use dist_checkpoint::{ParameterError, TensorInfo, support::AllowedNames};
use dist_train::{Lora, declare};
use fsdp_plan::Pattern;

use crate::{
    error::{Result, folder::FolderError},
    folder::Folder,
    models::Decoder,
};

/// Loads the variables of a model in single precision, from the weights of its folder. Adapters, if
/// it has any, are merged into the weights.
///
/// # Errors
///
/// [`FolderError::Weights`] or [`FolderError::TensorMismatch`] if the weights are damaged or belong to
/// another model, [`FolderError::AdapterMismatch`] if the adapters belong to another model.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
pub(super) fn load(folder: &Folder, decoder: &Decoder) -> Result<VarBuilder<'static>> {
    // Only a layer named by adapters can be missing: all other layers follow from the configuration.
    let declared = declare(|vb| decoder.declare(&vb), DType::F32, &Device::Cpu)
        .map_err(|cause| FolderError::AdapterMismatch { cause })?;
    let mut infos = Vec::with_capacity(declared.len());
    for parameter in &declared {
        let name = parameter.name.clone();
        let shape = parameter.shape.dims().to_vec();
        infos.push(TensorInfo { name, shape, dtype: DType::F32 });
    }
    let weights = folder.weights()?;
    folder.check_tied_head(&weights)?;
    let to_folder_error = |error| weights_error(folder, error);
    let adapter_names = patterns(&Lora::PATTERNS);
    let unexpected_names = patterns(&decoder.unexpected_weights());
    let allowed = AllowedNames {
        missing: if decoder.lora().is_some() { &adapter_names[..] } else { &[] },
        unexpected: &unexpected_names,
    };
    weights.check_fits(&infos, allowed).map_err(to_folder_error)?;
    let read_adapter = decoder.lora().map(Lora::values);
    let mut tensors = BTreeMap::new();
    for (parameter, info) in declared.iter().zip(&infos) {
        let all = 0..parameter.shape.elem_count();
        let weight = weights.items(info, all.clone(), &Device::Cpu).map_err(to_folder_error)?;
        let items = if let Some(items) = weight {
            items
        } else {
            let read_adapter = read_adapter.as_ref().expect("only adapters may be missing");
            read_adapter(parameter, all)?
        };
        tensors.insert(info.name.clone(), items.reshape(&parameter.shape)?);
    }
    if let Some(lora) = decoder.lora() {
        merge_adapters(&mut tensors, lora)?;
    }
    Ok(VarBuilder::from_tensors(tensors.into_iter().collect(), DType::F32, &Device::Cpu))
}

/// Adds the product of each adapter's matrices to the weight of its layer, and drops the matrices.
#[expect(clippy::expect_used, reason = "the messages say why they cannot fail")]
fn merge_adapters(tensors: &mut BTreeMap<String, Tensor>, lora: &Lora) -> candle_core::Result<()> {
    let names: Vec<String> = tensors.keys().cloned().collect();
    for layer in names.iter().filter_map(|name| name.strip_suffix("lora_A.weight")) {
        let [a, b] = ["A", "B"].map(|matrix| {
            let matrix = tensors.remove(&format!("{layer}lora_{matrix}.weight"));
            matrix.expect("an adapter declares both matrices")
        });
        let weight = tensors.get_mut(&format!("{layer}weight"));
        let weight = weight.expect("an adapter is declared beside its weight");
        *weight = lora.merge_weight(weight, &a, &b)?;
    }
    Ok(())
}

#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn patterns(names: &[&str]) -> Vec<Pattern> {
    names.iter().map(|name| name.parse().expect("a name is a pattern")).collect()
}

/// Converts an error of the weights. An error that names only a tensor gets the path of the folder.
fn weights_error(folder: &Folder, error: dist_checkpoint::Error) -> FolderError {
    match error {
        dist_checkpoint::Error::Parameter(
            cause @ (ParameterError::Shape { .. }
            | ParameterError::Conversion { .. }
            | ParameterError::UnknownDtype { .. }),
        ) => FolderError::TensorMismatch { path: folder.path().into(), cause },
        error => FolderError::from(Box::new(error)),
    }
}
