//! Writing a model's parameters as pretrained weights: safetensors files with the names that
//! Hugging Face's libraries look for.
//!
//! A model of one file is replaced in one step: whoever reads the folder finds the old one or the
//! new one. Several files cannot be: their index, without which nobody looks for them, is removed
//! before the first of them is replaced, and written when all are there, so that nobody takes parts
//! of two models for one. Adapters are two files, of which the configuration is removed first and
//! written last.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use fsdp_plan::ParameterInfo;
use pmap_mesh::DeviceMesh;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::json;

use crate::{
    checkpoint::{
        disk::{At, sync_folder},
        finite::Values,
    },
    dtype::{dtype_of, elem_of},
    error::{
        Doing, Result, checkpoint::CheckpointError, lora::LoraError, parameter::ParameterError,
    },
    lora::{
        config::{CONFIG, Config},
        matrices::{self, FILE, FILE_PREFIX},
    },
    parameters::weights::{INDEX, ONE_FILE},
    processes::agreed,
    sharded::describe::natural_order,
    stored::beginning,
};

/// How [`DataParallel::save_pretrained`](crate::DataParallel::save_pretrained) and
/// [`FullyShard::save_pretrained`](crate::FullyShard::save_pretrained) write a model.
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
    values: Values,
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
        Self { content, max_bytes: 5_000_000_000, values: Values::default(), dtype: None }
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
        Self { values: Values::Any, ..self }
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
/// On all processes, if one fails: the errors of `whole`, [`CheckpointError::NotFinite`],
/// [`CheckpointError::Header`] for a file of more parameters than could be read again,
/// [`CheckpointError::Io`], and where adapters are asked for [`LoraError::NoAdapters`] and those of
/// [`Config::check_are_mine`].
pub(crate) fn save(
    mesh: &DeviceMesh,
    folder: &Path,
    files: PretrainedFiles,
    parameters: &[ParameterInfo],
    whole: impl Fn(&str) -> Result<Tensor>,
) -> Result<()> {
    let PretrainedFiles { content, max_bytes, values, dtype } = files;
    let parameters = &retyped(parameters, dtype)?;
    let typed = |tensor: Result<Tensor>| match dtype {
        Some(dtype) => tensor?.to_dtype(dtype).doing("converting a parameter"),
        None => tensor,
    };
    let writer = Writer { folder, values, is_first: mesh.local_slots().start == 0 };
    match content {
        Content::All => {
            let all = parameters.iter().collect();
            writer.write_model(mesh, all, max_bytes, |name| typed(whole(name)))
        }
        Content::Merged(config) => {
            let (_, base) = with_adapters(parameters, &config)?;
            let scale = config.scale();
            let merged = |name: &str| typed(merged(name, scale, parameters, &whole));
            writer.write_model(mesh, base, max_bytes, merged)
        }
        Content::Adapters(config) => {
            let (adapters, _) = with_adapters(parameters, &config)?;
            writer.write_adapters(mesh, &config, &adapters, |name| typed(whole(name)))
        }
    }
}

/// The parameters, of one type if one is asked for.
fn retyped(parameters: &[ParameterInfo], dtype: Option<DType>) -> Result<Vec<ParameterInfo>> {
    let Some(dtype) = dtype else { return Ok(parameters.to_vec()) };
    let unknown = |info: &ParameterInfo| ParameterError::UnknownDtype {
        name: info.name().to_owned(),
        dtype: dtype.as_str().to_owned(),
    };
    let of_type = |info: &ParameterInfo| -> Result<ParameterInfo> {
        let elem = elem_of(dtype).ok_or_else(|| unknown(info))?;
        Ok(ParameterInfo::new(info.name(), info.shape().to_vec(), elem)?)
    };
    parameters.iter().map(of_type).collect()
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

/// A file that is to be written.
struct Planned<'a> {
    name: String,
    /// In the order of the file: wide types first, so that all are aligned.
    parameters: Vec<&'a ParameterInfo>,
}

/// The files of a model, with its parameters in their order: the n-th begins where the one before
/// has no room.
fn planned<'a>(parameters: &[&'a ParameterInfo], max_bytes: u64) -> Vec<Planned<'a>> {
    let mut files: Vec<Vec<&ParameterInfo>> = vec![Vec::new()];
    let mut room = max_bytes;
    for &parameter in parameters {
        match files.last_mut() {
            Some(file) if file.is_empty() || parameter.bytes() <= room => file.push(parameter),
            _ => {
                files.push(vec![parameter]);
                room = max_bytes;
            }
        }
        room = room.saturating_sub(parameter.bytes());
    }
    let n_files = files.len();
    let file = |(number, mut parameters): (usize, Vec<_>)| {
        parameters.sort_by_key(|info: &&ParameterInfo| Reverse(stored_as(info)));
        let name = if n_files == 1 { ONE_FILE.to_owned() } else { name(number, n_files) };
        Planned { name, parameters }
    };
    (1..).zip(files).map(file).collect()
}

/// The name of one of several files, numbered from 1.
fn name(number: usize, of: usize) -> String {
    format!("model-{number:05}-of-{of:05}.safetensors")
}

/// Whether a file is one of several that hold a model.
fn is_part(name: &OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| {
        name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")
    });
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, of)| is_number(number) && is_number(of))
}

#[expect(clippy::expect_used, reason = "models are of candle's tensors")]
fn stored_as(info: &ParameterInfo) -> Dtype {
    dtype_of(info.dtype()).expect("candle holds its items").into()
}

/// A process that writes, or calls what all call while another one writes.
struct Writer<'a> {
    folder: &'a Path,
    values: Values,
    /// Whether it is the one that writes.
    is_first: bool,
}

impl Writer<'_> {
    /// Writes the files of a model.
    fn write_model(
        &self,
        mesh: &DeviceMesh,
        mut parameters: Vec<&ParameterInfo>,
        max_bytes: u64,
        whole: impl Fn(&str) -> Result<Tensor>,
    ) -> Result<()> {
        parameters.sort_by(|left, right| natural_order(left.name(), right.name()));
        let planned = planned(&parameters, max_bytes);
        self.write_all(mesh, &planned, whole, || self.put_in_place(&planned))
    }

    /// Writes the files of adapters.
    fn write_adapters(
        &self,
        mesh: &DeviceMesh,
        config: &Config,
        adapters: &[&ParameterInfo],
        whole: impl Fn(&str) -> Result<Tensor>,
    ) -> Result<()> {
        let in_file = |info: &&ParameterInfo| {
            let name = format!("{FILE_PREFIX}{}", info.name());
            ParameterInfo::new(name, info.shape().to_vec(), info.dtype())
        };
        let mut renamed: Vec<ParameterInfo> =
            adapters.iter().map(in_file).collect::<fsdp_plan::Result<_>>()?;
        renamed.sort_by(|left, right| natural_order(left.name(), right.name()));
        let file = Planned { name: FILE.to_owned(), parameters: renamed.iter().collect() };
        // Names begin with it, as they were made so.
        let whole = |name: &str| whole(&name[FILE_PREFIX.len()..]);
        self.write_all(mesh, &[file], whole, || {
            remove(&self.folder.join(CONFIG))?;
            sync_folder(self.folder)?;
            self.rename(FILE)?;
            self.write_text(CONFIG, &config.json())?;
            sync_folder(self.folder)
        })
    }

    /// Writes files, gives them their names by `put_in_place`, and removes what is left if that
    /// fails.
    fn write_all(
        &self,
        mesh: &DeviceMesh,
        planned: &[Planned<'_>],
        whole: impl Fn(&str) -> Result<Tensor>,
        put_in_place: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let write = || {
            agreed(mesh, self.here(|| fs::create_dir_all(self.folder).at(self.folder)))?;
            for file in planned {
                agreed(mesh, self.write(file, &whole))?;
            }
            agreed(mesh, self.here(put_in_place))
        };
        let written = write();
        if written.is_err() {
            // What cannot be removed now is overwritten when the next model is saved here.
            let mut partial = planned.iter().map(|file| self.partial(&file.name));
            drop(self.here(|| partial.try_for_each(|path| remove(&path))));
        }
        written
    }

    /// Does something in the process that writes alone.
    fn here(&self, f: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.is_first { f() } else { Ok(()) }
    }

    /// Where a file is until it is whole.
    fn partial(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.partial"))
    }

    /// Writes a file, and waits until it is on disk. If something fails on the way, the other
    /// parameters are asked for all the same: all processes put them together.
    fn write(&self, planned: &Planned<'_>, whole: impl Fn(&str) -> Result<Tensor>) -> Result<()> {
        let path = self.partial(&planned.name);
        let mut outcome = self.begin(&path, planned);
        for parameter in &planned.parameters {
            let tensor = whole(parameter.name());
            outcome = outcome.and_then(|file| {
                let tensor = tensor?;
                if let Some(file) = &file {
                    self.write_items(file, &path, parameter.name(), &tensor)?;
                }
                Ok(file)
            });
        }
        match outcome? {
            Some(file) => file.sync_all().at(&path),
            None => Ok(()),
        }
    }

    /// A file with its header, in the process that writes.
    fn begin(&self, path: &Path, planned: &Planned<'_>) -> Result<Option<File>> {
        if !self.is_first {
            return Ok(None);
        }
        let header = header(path, &planned.parameters)?;
        let mut file = File::create(path).at(path)?;
        file.write_all(&header).at(path)?;
        Ok(Some(file))
    }

    fn write_items(&self, mut file: &File, path: &Path, name: &str, tensor: &Tensor) -> Result<()> {
        let here = tensor.contiguous().and_then(|items| items.to_device(&Device::Cpu));
        let mut bytes = Vec::new();
        let copied = here.and_then(|items| items.write_bytes(&mut bytes));
        copied.doing("copying a parameter")?;
        match self.values.first_refused(tensor.dtype(), &bytes) {
            None => file.write_all(&bytes).at(path),
            Some(item) => {
                let (path, tensor) = (path.to_owned(), name.to_owned());
                Err(CheckpointError::NotFinite { path, tensor, item }.into())
            }
        }
    }

    /// Gives the files their names, and removes those of an earlier model that nobody is to take
    /// for parts of this one.
    fn put_in_place(&self, planned: &[Planned<'_>]) -> Result<()> {
        let index = self.folder.join(INDEX);
        if let [file] = planned {
            self.rename(&file.name)?;
            remove(&index)?;
        } else {
            remove(&index)?;
            sync_folder(self.folder)?;
            for file in planned {
                self.rename(&file.name)?;
            }
            self.write_text(INDEX, &index_of(planned))?;
            remove(&self.folder.join(ONE_FILE))?;
        }
        self.remove_parts_but(planned)?;
        sync_folder(self.folder)
    }

    /// Writes a file that is in place when it is whole.
    fn write_text(&self, name: &str, text: &str) -> Result<()> {
        let partial = self.partial(name);
        File::create(&partial)
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .at(&partial)?;
        self.rename(name)
    }

    fn rename(&self, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        fs::rename(self.partial(name), &path).at(&path)
    }

    /// Removes the files of an earlier model of other numbers.
    fn remove_parts_but(&self, planned: &[Planned<'_>]) -> Result<()> {
        for entry in fs::read_dir(self.folder).at(self.folder)? {
            let name = entry.at(self.folder)?.file_name();
            if is_part(&name) && planned.iter().all(|file| name != *file.name) {
                remove(&self.folder.join(name))?;
            }
        }
        Ok(())
    }
}

/// Removes a file, if it is there.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at(path),
        _ => Ok(()),
    }
}

/// The beginning of a file: the length of the header, and the header.
#[expect(clippy::expect_used, reason = "a planner knows what its tensors take")]
fn header(path: &Path, parameters: &[&ParameterInfo]) -> Result<Vec<u8>> {
    let mut end = 0;
    let info = |info: &&ParameterInfo| {
        let begin = end;
        end += usize::try_from(info.bytes()).expect("a parameter that is in memory");
        let dims = info.shape().iter().map(|&dim| usize::try_from(dim));
        let shape = dims.collect::<Result<_, _>>().expect("as above");
        let tensor = TensorInfo { dtype: stored_as(info), shape, data_offsets: (begin, end) };
        (info.name().to_owned(), tensor)
    };
    let tensors = parameters.iter().map(info).collect();
    // Hugging Face's libraries refuse a file that does not say for whom it was written.
    let metadata = [("format".to_owned(), "pt".to_owned())];
    let metadata =
        Metadata::new(Some(metadata.into()), tensors).expect("tensors follow each other");
    let json = serde_json::to_vec(&metadata).expect("names and numbers have a form in JSON");
    beginning(&json, path)
}

/// The index of several files.
fn index_of(planned: &[Planned<'_>]) -> String {
    let all =
        || planned.iter().flat_map(|file| file.parameters.iter().map(move |info| (file, info)));
    let total_size: u64 = all().map(|(_, info)| info.bytes()).sum();
    let weight_map: BTreeMap<&str, &str> =
        all().map(|(file, info)| (info.name(), file.name.as_str())).collect();
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    format!("{index:#}\n")
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use fsdp_plan::ElemType;

    use super::*;
    use crate::{error::Error, parameters::weights::Weights};

    fn info(name: &str, len: u64, dtype: ElemType) -> ParameterInfo {
        ParameterInfo::new(name, [len], dtype).unwrap()
    }

    fn values(name: &str, len: u64, dtype: DType) -> Tensor {
        let first = f64::from(name.as_bytes()[0]);
        Tensor::arange(first, first + len as f64, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    /// Four parameters of 40, 40, 8 and 12 bytes.
    fn model() -> Vec<ParameterInfo> {
        vec![
            info("a", 10, ElemType::F32),
            info("b", 5, ElemType::F64),
            info("c", 4, ElemType::Bf16),
            info("d", 3, ElemType::F32),
        ]
    }

    #[expect(clippy::unnecessary_wraps, reason = "as models have it")]
    fn whole(name: &str) -> Result<Tensor> {
        Ok(match name {
            "a" => values(name, 10, DType::F32),
            "b" => values(name, 5, DType::F64),
            "c" => values(name, 4, DType::BF16),
            _ => values(name, 3, DType::F32),
        })
    }

    fn save_in(folder: &Path, max_bytes: u64) -> Result<()> {
        let mesh = DeviceMesh::cpu(1).unwrap();
        let files = PretrainedFiles::default().max_bytes(max_bytes);
        save(&mesh, folder, files, &model(), whole)
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[track_caller]
    fn check_read_back(folder: &Path) {
        let weights = Weights::open(folder).unwrap();
        for name in ["a", "b", "c", "d"] {
            let expected = whole(name).unwrap();
            let declared = crate::Declared {
                name: name.to_owned(),
                shape: expected.shape().clone(),
                dtype: expected.dtype(),
                init: candle_nn::init::ZERO,
            };
            let len = expected.elem_count();
            let found = weights.items(&declared, 0..len, &Device::Cpu).unwrap().unwrap();
            let numbers = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(numbers(&found), numbers(&expected));
        }
    }

    #[test]
    fn a_file_is_full_before_the_next_one_begins() {
        for (max_bytes, expected) in [
            (100, vec!["b a d c"]),
            (99, vec!["b a c", "d"]),
            (80, vec!["b a", "d c"]),
            (50, vec!["a", "b c", "d"]),
            (20, vec!["a", "b", "d c"]),
            (0, vec!["a", "b", "c", "d"]),
        ] {
            let model = model();
            let files = planned(&model.iter().collect::<Vec<_>>(), max_bytes);
            let of = |file: &Planned<'_>| {
                file.parameters.iter().map(|info| info.name()).collect::<Vec<_>>().join(" ")
            };
            assert_eq!(files.iter().map(of).collect::<Vec<_>>(), expected, "{max_bytes}");
        }
        assert_eq!(planned(&[], 5).len(), 1);
    }

    #[test]
    fn files_have_the_names_that_libraries_look_for_and_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/model");
        let several =
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX];
        for (max_bytes, expected) in
            [(100, &[ONE_FILE][..]), (80, &several), (100, &[ONE_FILE]), (80, &several)]
        {
            save_in(&path, max_bytes).unwrap();
            assert_eq!(names(&path), expected, "nothing of the model before is left");
            check_read_back(&path);
        }
        save_in(&path, 0).unwrap();
        assert_eq!(names(&path).len(), 5);
        fs::write(path.join("config.json"), "{}").unwrap();
        save_in(&path, 80).unwrap();
        assert_eq!(names(&path).len(), 4);
        check_read_back(&path);
    }

    #[test]
    fn the_index_says_where_parameters_are_and_how_many_bytes_they_have() {
        let folder = tempfile::tempdir().unwrap();
        save_in(folder.path(), 80).unwrap();
        let json = fs::read_to_string(folder.path().join(INDEX)).unwrap();
        let found: serde_json::Value = serde_json::from_str(&json).unwrap();
        let [first, second] = [1, 2].map(|number| name(number, 2));
        let expected = json!({
            "metadata": { "total_size": 100 },
            "weight_map": { "a": first, "b": first, "c": second, "d": second },
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn all_parameters_are_written_in_one_type_if_one_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let files = PretrainedFiles::default().dtype(DType::BF16);
        save(&mesh, folder.path(), files, &model(), whole).unwrap();
        let found = candle_core::safetensors::load(folder.path().join(ONE_FILE), &Device::Cpu);
        for (name, tensor) in found.unwrap() {
            assert_eq!(tensor.dtype(), DType::BF16, "{name}");
            let expected = whole(&name).unwrap().to_dtype(DType::BF16).unwrap();
            let pair = [tensor, expected].map(|tensor| tensor.flatten_all().unwrap());
            let [found, expected] = pair.map(|tensor| tensor.to_dtype(DType::F32).unwrap());
            assert_eq!(found.to_vec1::<f32>().unwrap(), expected.to_vec1::<f32>().unwrap());
        }
    }

    #[test]
    fn files_say_for_whom_they_were_written_and_their_tensors_are_aligned() {
        let folder = tempfile::tempdir().unwrap();
        save_in(folder.path(), 100).unwrap();
        let bytes = fs::read(folder.path().join(ONE_FILE)).unwrap();
        let (len, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(len % crate::stored::ALIGNMENT, 0);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        for name in ["a", "b", "c", "d"] {
            let info = metadata.info(name).unwrap();
            assert_eq!(info.data_offsets.0 % (info.dtype.bitsize() / 8), 0);
        }
        // The same model has the same bytes, whatever was there.
        save_in(folder.path(), 100).unwrap();
        assert_eq!(fs::read(folder.path().join(ONE_FILE)).unwrap(), bytes);
    }

    #[test]
    fn what_fails_leaves_the_model_that_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        for max_bytes in [100, 80] {
            save_in(folder.path(), max_bytes).unwrap();
            let before = names(folder.path());
            let infinite = |name: &str| match name {
                "d" => Ok((whole(name)? / 0.).unwrap()),
                _ => whole(name),
            };
            let files = PretrainedFiles::default().max_bytes(max_bytes);
            let refused =
                save(&mesh, folder.path(), files.clone(), &model(), infinite).unwrap_err();
            assert!(
                matches!(&refused, Error::Checkpoint(CheckpointError::NotFinite { tensor, item: 0, .. }) if tensor == "d"),
                "{refused}"
            );
            assert_eq!(names(folder.path()), before);
            check_read_back(folder.path());
            save(&mesh, folder.path(), files.allow_non_finite(), &model(), infinite).unwrap();
        }
    }

    #[test]
    fn every_parameter_is_asked_for_though_one_fails() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let asked = std::cell::RefCell::new(Vec::new());
        let fails = |name: &str| {
            asked.borrow_mut().push(name.to_owned());
            match name {
                "b" => Err(Error::Diverged { name: "b".to_owned(), replica: 1 }),
                _ => whole(name),
            }
        };
        let files = PretrainedFiles::default();
        let failed = save(&mesh, folder.path(), files, &model(), fails).unwrap_err();
        assert!(matches!(failed, Error::Diverged { .. }), "{failed}");
        assert_eq!(asked.into_inner(), ["b", "a", "d", "c"]);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let refused = save_in(&file.join("model"), 100).unwrap_err();
        assert!(matches!(refused, Error::Checkpoint(CheckpointError::Io { .. })), "{refused}");
    }

    #[test]
    fn only_the_parts_of_a_model_are_removed() {
        for (name, expected) in [
            ("model-00001-of-00002.safetensors", true),
            ("model-00001-of-00002.safetensors.partial", false),
            ("model-1-of-2.safetensors", false),
            ("model-0000x-of-00002.safetensors", false),
            ("my-model-00001-of-00002.safetensors", false),
            ("model.safetensors", false),
            ("config.json", false),
        ] {
            assert_eq!(is_part(OsStr::new(name)), expected, "{name}");
        }
    }
}
