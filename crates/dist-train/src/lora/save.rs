//! Writing a model's parameters, its adapters, or both merged, as pretrained weights.

use std::{
    collections::BTreeMap,
    mem,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use dist_checkpoint::{ParameterError, StoredWeights, TensorInfo, support::ModelFolder};
use fsdp_plan::Pattern;
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Doing, Error, Result},
    lora::{
        config::{AdapterConfig, CONFIG},
        matrices::{self, FILE, FILE_PREFIX, peft_name},
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
    /// Weights with tensors to copy, and patterns of their names.
    copied: Option<(PathBuf, Vec<String>)>,
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
            copied: None,
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

    /// Also copies the tensors of other pretrained weights whose names match a pattern, in their own dtype
    /// and to the bit: the parts of a model that are not trained here, such as a `vision_tower`. Parameters
    /// of the model are never copied, and no tensor is copied beside adapters alone.
    ///
    /// One tensor at a time is in memory. A pattern may match no tensor.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor, safetensors};
    /// use candle_nn::{Optimizer, ParamsAdamW, linear};
    /// use dist_train::{AdamW, DataParallel, PretrainedFiles};
    /// use pmap_mesh::DeviceMesh;
    ///
    /// # let home = tempfile::tempdir()?;
    /// # let (published, saved) = (&home.path().join("published.safetensors"), &home.path().join("saved"));
    /// let seen = Tensor::new(&[0.5_f32], &Device::Cpu)?;
    /// seen.save_safetensors("vision_tower.bias", published)?;
    /// let model = DataParallel::builder(&DeviceMesh::cpu(1)?, |vb| linear(3, 1, vb))
    ///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    /// let files = PretrainedFiles::default().with_tensors_of(published, ["vision_tower"]);
    /// model.save_pretrained(saved, files)?;
    /// let tensors = safetensors::load(saved.join("model.safetensors"), &Device::Cpu)?;
    /// assert_eq!((tensors.len(), tensors["vision_tower.bias"].to_vec1()?), (3, vec![0.5_f32]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_tensors_of<S: Into<String>>(
        self,
        weights: impl Into<PathBuf>,
        patterns: impl IntoIterator<Item = S>,
    ) -> Self {
        let patterns = patterns.into_iter().map(Into::into).collect();
        Self { copied: Some((weights.into(), patterns)), ..self }
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
    let PretrainedFiles { content, max_bytes, allows_non_finite, dtype, .. } = files;
    let PretrainedFiles { mut files_beside, copied, .. } = files;
    if let SavedContent::Adapters(config) = &content {
        let (adapters, _) = with_adapters(parameters, config)?;
        let config = config.clone().with_full_targets(&adapters);
        files_beside.insert(CONFIG.to_owned(), config.json().into_bytes());
    }
    let target = ModelFolder::new(mesh, folder).with_files(&files_beside);
    let target = if allows_non_finite { target.allow_non_finite() } else { target };
    let typed = |tensor: Result<Tensor>| match dtype {
        Some(dtype) => tensor?.to_dtype(dtype).doing("converting a parameter"),
        None => tensor,
    };
    let write = |base: &[&TensorInfo], value: &dyn Fn(&str) -> Result<Tensor>| {
        let copied = CopiedTensors::open(mesh, copied, base)?;
        let infos = [infos(base.iter().copied(), dtype), copied.infos.clone()].concat();
        target.write(infos, max_bytes, |name| copied.read_or(name, || typed(value(name))))
    };
    match content {
        SavedContent::All => write(&parameters.iter().collect::<Vec<_>>(), &whole),
        SavedContent::Merged(config) => {
            let (_, base) = with_adapters(parameters, &config)?;
            let scale = config.scale();
            write(&base, &|name| merged(name, (scale, dtype), parameters, &whole))
        }
        SavedContent::Adapters(config) => {
            let (adapters, _) = with_adapters(parameters, &config)?;
            let mut infos = infos(adapters, dtype);
            let mut names = BTreeMap::new();
            for info in &mut infos {
                let saved = format!("{FILE_PREFIX}{}", peft_name(&info.name));
                names.insert(saved.clone(), mem::replace(&mut info.name, saved));
            }
            target.write_one(FILE, infos, |name| typed(whole(&names[name])))
        }
    }
}

/// Tensors of other weights, which are copied beside the parameters of a model.
struct CopiedTensors<'a> {
    mesh: &'a DeviceMesh,
    weights: Option<StoredWeights>,
    infos: Vec<TensorInfo>,
}

impl<'a> CopiedTensors<'a> {
    /// Opens the weights at a path, and lists their tensors that match a pattern and are no parameters.
    fn open(
        mesh: &'a DeviceMesh,
        copied: Option<(PathBuf, Vec<String>)>,
        parameters: &[&TensorInfo],
    ) -> Result<Self> {
        let Some((path, patterns)) = copied else {
            return Ok(Self { mesh, weights: None, infos: Vec::new() });
        };
        let patterns: fsdp_plan::Result<Vec<Pattern>> =
            patterns.iter().map(|pattern| pattern.parse()).collect();
        let weights = mesh.all_ok(StoredWeights::open(path).map_err(Error::from))?;
        let mut infos = weights.matching(&patterns?);
        infos.retain(|info| parameters.iter().all(|parameter| parameter.name != info.name));
        Ok(Self { mesh, weights: Some(weights), infos })
    }

    /// Returns the tensor of this name, or else that of `parameter`.
    fn read_or(&self, name: &str, parameter: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let info = self.infos.iter().find(|info| info.name == name);
        let (Some(info), Some(weights)) = (info, &self.weights) else { return parameter() };
        // The other processes do not write.
        let shape = if self.mesh.is_first_process() { &info.shape[..] } else { &[0] };
        let items = weights.items(info, 0..shape.iter().product(), &Device::Cpu)?;
        let items = items.ok_or_else(|| ParameterError::Missing { name: name.to_owned() })?;
        items.reshape(shape).doing("copying a tensor")
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
