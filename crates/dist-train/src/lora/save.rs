//! Writing a model's parameters, its adapters, or both merged, as pretrained weights.

use std::path::Path;

use candle_core::{DType, Tensor};
use dist_checkpoint::{
    ParameterError, TensorInfo,
    support::{ModelFolder, dtype_of},
};
use fsdp_plan::ParameterInfo;
use pmap_mesh::DeviceMesh;

use crate::{
    error::{Doing, Result, lora::LoraError},
    lora::{
        config::{CONFIG, Config},
        matrices::{self, FILE, FILE_PREFIX},
    },
    sharded::runs,
};

/// How [`save_pretrained`](crate::DistributedModel::save_pretrained) writes a model.
///
/// # Examples
///
/// ```
/// let files = dist_train::PretrainedFiles::default().max_bytes(2_000_000_000);
/// assert_ne!(files, dist_train::PretrainedFiles::default());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PretrainedFiles {
    content: Content,
    max_bytes: u64,
    allows_non_finite: bool,
    /// The type of all parameters in the files; each keeps its own if there is none.
    dtype: Option<DType>,
}

/// What of a model is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    /// Its parameters.
    All,
    /// The matrices of its adapters.
    Adapters(Config),
    /// The parameters that it would have without adapters, and with their effect.
    Merged(Config),
}

impl Default for PretrainedFiles {
    /// Files of 5 GB, as Hugging Face's have, of finite numbers.
    fn default() -> Self {
        Self::of(Content::All)
    }
}

impl PretrainedFiles {
    pub(crate) fn of(content: Content) -> Self {
        Self { content, max_bytes: 5_000_000_000, allows_non_finite: false, dtype: None }
    }

    /// Sets how many bytes of parameters a file has at most, 5 GB by default; a larger parameter
    /// has one of its own. A model of no more is one file, `model.safetensors`; one of more
    /// several, beside an index, `model.safetensors.index.json`. Adapters are always one file.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes, ..self }
    }

    /// Writes all parameters in one type, whatever they are trained in: each keeps its own by default.
    ///
    /// A model of mixed precision is kept in single precision, and may be wanted in the half in which
    /// it computes.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Writes parameters that are infinite or not numbers, too, which are refused by default.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        Self { allows_non_finite: true, ..self }
    }
}

/// Writes the parameters of a model into `folder`, which is made if it is not there; every process
/// calls it, and the first one writes.
///
/// `whole` is called in all processes in the same order, once for each parameter, and each result
/// is dropped before the next is made.
///
/// # Errors
///
/// On all processes, if one fails: the errors of `whole`, those of [`ModelFolder::write`], and where adapters are asked for [`LoraError::NoAdapters`] and those of
/// [`Config::check_are_mine`].
pub(crate) fn save(
    mesh: &DeviceMesh,
    folder: &Path,
    files: PretrainedFiles,
    parameters: &[ParameterInfo],
    whole: impl Fn(&str) -> Result<Tensor>,
) -> Result<()> {
    let PretrainedFiles { content, max_bytes, allows_non_finite, dtype } = files;
    let target = ModelFolder::new(mesh, folder);
    let target = if allows_non_finite { target.allow_non_finite() } else { target };
    let typed = |tensor: Result<Tensor>| match dtype {
        Some(dtype) => tensor?.to_dtype(dtype).doing("converting a parameter"),
        None => tensor,
    };
    let all: Vec<_> = parameters.iter().collect();
    match content {
        Content::All => target.write(infos(&all, dtype)?, max_bytes, |name| typed(whole(name))),
        Content::Merged(config) => {
            let (_, base) = with_adapters(parameters, &config)?;
            let scale = config.scale();
            let merged = |name: &str| typed(merged(name, scale, parameters, &whole));
            target.write(infos(&base, dtype)?, max_bytes, merged)
        }
        Content::Adapters(config) => {
            let (adapters, _) = with_adapters(parameters, &config)?;
            let mut infos = infos(&adapters, dtype)?;
            for info in &mut infos {
                info.name.insert_str(0, FILE_PREFIX);
            }
            // All names begin with the prefix.
            let whole = |name: &str| typed(whole(&name[FILE_PREFIX.len()..]));
            target.write_with_text(FILE, infos, whole, (CONFIG, &config.json()))
        }
    }
}

/// Returns the tensors of the files, of one type if one is asked for.
fn infos(parameters: &[&ParameterInfo], dtype: Option<DType>) -> Result<Vec<TensorInfo>> {
    let mut infos = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        let own = dtype_of(parameter.dtype()).ok_or_else(|| ParameterError::UnknownDtype {
            name: parameter.name().to_owned(),
            dtype: parameter.dtype().to_string(),
        })?;
        infos.push(TensorInfo {
            name: parameter.name().to_owned(),
            shape: runs::shape(parameter),
            dtype: dtype.unwrap_or(own),
        });
    }
    Ok(infos)
}

/// The parameters of adapters, and the others.
fn with_adapters<'a>(
    parameters: &'a [ParameterInfo],
    config: &Config,
) -> Result<(Vec<&'a ParameterInfo>, Vec<&'a ParameterInfo>), LoraError> {
    let (adapters, others): (Vec<_>, Vec<_>) =
        parameters.iter().partition(|info| matrices::is_matrix(info.name()));
    if adapters.is_empty() {
        return Err(LoraError::NoAdapters { parameters: parameters.len() });
    }
    config.check_are_mine(&adapters)?;
    Ok((adapters, others))
}

/// A parameter with the effect of its adapter, if it has one.
fn merged(
    name: &str,
    scale: f64,
    parameters: &[ParameterInfo],
    whole: impl Fn(&str) -> Result<Tensor>,
) -> Result<Tensor> {
    let matrices = matrices::layer_of(name).map(matrices::names_of);
    let has = |matrix: &String| parameters.iter().any(|info| info.name() == matrix);
    let Some([a, b]) = matrices.filter(|matrices| matrices.iter().all(has)) else {
        return whole(name);
    };
    // All three are asked for before one fails: all processes put them together.
    let [weight, a, b] = [name, &a, &b].map(whole);
    matrices::merged(&weight?, &a?, &b?, scale).doing("merging an adapter")
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use fsdp_plan::ElemType;

    use super::*;

    #[test]
    fn parameters_are_written_in_one_type() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let info = |name, dtype| ParameterInfo::new(name, [4], dtype).unwrap();
        let model = [info("a", ElemType::F32), info("b", ElemType::F64)];
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
