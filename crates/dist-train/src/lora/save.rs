//! Writing a model's parameters, its adapters, or both merged, as pretrained weights.

use std::{collections::BTreeMap, path::Path};

use candle_core::{DType, Tensor};
use dist_checkpoint::{TensorInfo, support::ModelFolder};
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Doing, Error, Result},
    lora::{
        config::{AdapterConfig, CONFIG},
        matrices::{self, FILE, FILE_PREFIX},
    },
};

/// The contents and layout of the files that
/// [`save_pretrained`](crate::DistributedModel::save_pretrained) writes.
///
/// # Examples
///
/// ```
/// let files = dist_train::PretrainedFiles::default().max_bytes(2_000_000_000);
/// assert_ne!(files, dist_train::PretrainedFiles::default());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PretrainedFiles {
    content: SavedContent,
    max_bytes: u64,
    allows_non_finite: bool,
    /// The dtype of all parameters in the files; `None` for each parameter's own dtype.
    dtype: Option<DType>,
    /// The contents of other files, by name.
    files_beside: BTreeMap<String, Vec<u8>>,
}

/// The parameters to write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SavedContent {
    /// All parameters of the model.
    All,
    /// The matrices of the adapters only.
    Adapters(AdapterConfig),
    /// The parameters of the model without adapters, with the adapters merged.
    Merged(AdapterConfig),
}

impl Default for PretrainedFiles {
    /// Returns files of at most 5 GB, like Hugging Face's, with finite numbers only.
    fn default() -> Self {
        Self::new(SavedContent::All)
    }
}

impl PretrainedFiles {
    pub(crate) fn new(content: SavedContent) -> Self {
        let files_beside = BTreeMap::new();
        Self {
            content,
            max_bytes: 5_000_000_000,
            allows_non_finite: false,
            dtype: None,
            files_beside,
        }
    }

    /// Sets the maximum bytes of parameters per file, 5 GB by default; a larger parameter gets its
    /// own file. A smaller model is one file, `model.safetensors`; a larger model is several files
    /// and an index, `model.safetensors.index.json`. Adapters are always one file.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes, ..self }
    }

    /// Writes all parameters in one dtype instead of each parameter's own dtype.
    ///
    /// A mixed-precision model is stored in single precision, but can be saved in the half
    /// precision that it computes in.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Also writes a file beside the weights, such as `config.json` or `tokenizer.json`, with its
    /// checksum in the metadata of the weights.
    #[must_use]
    pub fn with_file(mut self, name: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        self.files_beside.insert(name.into(), content.into());
        self
    }

    /// Also writes infinite and NaN parameters, which are rejected by default.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        Self { allows_non_finite: true, ..self }
    }
}

/// Writes the parameters of a model into `folder`, creating it if necessary. Every process must
/// call it; rank 0 writes.
///
/// All processes call `whole` in the same order, once per parameter, and drop each result before
/// the next call.
///
/// # Errors
///
/// Returns an error on all processes if one fails: the errors of `whole` and of
/// [`ModelFolder::write`], and for adapters [`Error::Lora`].
pub(crate) fn save(
    mesh: &DeviceMesh,
    folder: &Path,
    files: PretrainedFiles,
    parameters: &[TensorInfo],
    whole: impl Fn(&str) -> Result<Tensor>,
) -> Result<()> {
    let PretrainedFiles { content, max_bytes, allows_non_finite, dtype, mut files_beside } = files;
    if let SavedContent::Adapters(config) = &content {
        files_beside.insert(CONFIG.to_owned(), config.json().into_bytes());
    }
    let target = ModelFolder::new(mesh, folder).with_files(&files_beside);
    let target = if allows_non_finite { target.allow_non_finite() } else { target };
    let typed = |tensor: Result<Tensor>| match dtype {
        Some(dtype) => tensor?.to_dtype(dtype).doing("converting a parameter"),
        None => tensor,
    };
    match content {
        SavedContent::All => {
            target.write(infos(parameters, dtype), max_bytes, |name| typed(whole(name)))
        }
        SavedContent::Merged(config) => {
            let (_, base) = with_adapters(parameters, &config)?;
            let scale = config.scale();
            target.write(infos(base, dtype), max_bytes, |name| {
                typed(merged(name, (scale, dtype), parameters, &whole))
            })
        }
        SavedContent::Adapters(config) => {
            let (adapters, _) = with_adapters(parameters, &config)?;
            let mut infos = infos(adapters, dtype);
            for info in &mut infos {
                info.name.insert_str(0, FILE_PREFIX);
            }
            // All names start with the prefix, which was added above.
            let parameter = |name: &str| typed(whole(&name[FILE_PREFIX.len()..]));
            target.write_one(FILE, infos, parameter)
        }
    }
}

/// Returns descriptions of the tensors in the files, with dtype `dtype` if given.
fn infos<'a>(
    parameters: impl IntoIterator<Item = &'a TensorInfo>,
    dtype: Option<DType>,
) -> Vec<TensorInfo> {
    let stored =
        |info: &TensorInfo| TensorInfo { dtype: dtype.unwrap_or(info.dtype), ..info.clone() };
    parameters.into_iter().map(stored).collect()
}

/// Splits parameters into adapter matrices and others.
fn with_adapters<'a>(
    parameters: &'a [TensorInfo],
    config: &AdapterConfig,
) -> Result<(Vec<&'a TensorInfo>, Vec<&'a TensorInfo>)> {
    let (adapters, others): (Vec<_>, Vec<_>) =
        parameters.iter().partition(|info| matrices::adapted_by(&info.name).is_some());
    if adapters.is_empty() {
        let reason = format!("none of the {} parameters belongs to an adapter", parameters.len());
        return Err(Error::lora(reason));
    }
    config.check_matrices(&adapters)?;
    Ok((adapters, others))
}

/// Returns a parameter with its adapter merged, if it has one: in its own dtype, if none is given.
fn merged(
    name: &str,
    (scale, dtype): (f64, Option<DType>),
    parameters: &[TensorInfo],
    whole: impl Fn(&str) -> Result<Tensor>,
) -> Result<Tensor> {
    let matrices = matrices::layer_of(name).map(matrices::matrix_names);
    let is_known = |name: &String| parameters.iter().any(|info| info.name == *name);
    let Some([a, b]) = matrices.filter(|[a, b]| is_known(a) && is_known(b)) else {
        return whole(name);
    };
    // Gather all three before returning an error: gathering is collective, so all processes must do
    // it.
    let [weight, a, b] = [name, &a, &b].map(whole);
    let weight = weight?;
    let dtype = dtype.unwrap_or(weight.dtype());
    matrices::merge_adapter(&weight, &a?, &b?, scale, dtype).doing("merging an adapter")
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn parameters_are_saved_in_one_dtype() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let info = |name: &str, dtype| TensorInfo { name: name.to_owned(), shape: vec![4], dtype };
        let model = [info("a", DType::F32), info("b", DType::F64)];
        let whole = |name: &str| {
            let dtype = if name == "a" { DType::F32 } else { DType::F64 };
            Ok(Tensor::full(1_f32 / 3., 4, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
        };
        let files = PretrainedFiles::default().dtype(DType::BF16);
        save(&mesh, folder.path(), files, &model, whole).unwrap();
        let path = folder.path().join("model.safetensors");
        let found = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        assert_eq!(found.len(), 2);
        for (name, tensor) in found {
            assert_eq!(tensor.dtype(), DType::BF16, "{name}");
            let items = tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(items, [0.333_984_38; 4]);
        }
    }
}
