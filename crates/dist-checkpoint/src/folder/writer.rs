//! Writing a model as pretrained weights: safetensors files with the names that Hugging Face's
//! libraries expect.
//!
//! A model of one file is replaced atomically: readers of the folder find the old or the new one.
//! Several files are not atomic. So their index, which readers need to find them, is removed before
//! the first file is replaced, and written after the last one: no reader mixes parts of two models.

use std::{collections::BTreeMap, ffi::OsStr, fmt::Display, fs, io::Write, path::Path};

use candle_core::Tensor;
use core_types::files::AtomicFile;
use pmap_mesh::DeviceMesh;
use serde_json::json;

use crate::{
    disk::{AtPath, between_calls, create_folder, remove_file, sync_folder},
    error::{Error, Result},
    folder::{INDEX, ONE_FILE, natural_order},
    safetensors::{
        checksum::{Checksum, file_key},
        finite::AllowedValues,
        tensor_file::{TensorFile, TensorInfo},
    },
};

/// A folder that a model is written to. Every process calls its methods, and rank 0 writes.
///
/// Tensors come from a function that all processes call in the same order, once for each tensor.
/// Each result is dropped before the next is made.
#[derive(Clone, Copy, Debug)]
pub struct ModelFolder<'a> {
    mesh: &'a DeviceMesh,
    path: &'a Path,
    values: AllowedValues,
    files_beside: &'a BTreeMap<String, Vec<u8>>,
}

static NO_FILES: BTreeMap<String, Vec<u8>> = BTreeMap::new();

/// A file to be written.
struct PlannedFile {
    name: String,
    tensors: Vec<TensorInfo>,
}

impl<'a> ModelFolder<'a> {
    /// Returns the folder `path`, which need not exist.
    pub fn new(mesh: &'a DeviceMesh, path: &'a Path) -> Self {
        Self { mesh, path, values: AllowedValues::default(), files_beside: &NO_FILES }
    }

    /// Accepts infinite numbers and NaN, which are errors by default.
    #[must_use]
    pub fn allow_non_finite(self) -> Self {
        Self { values: AllowedValues::Any, ..self }
    }

    /// Also writes other files that readers of the model need, by name. The metadata of the first
    /// weights file contains their checksums. They are removed before the weights are replaced, and
    /// written after them, so that no reader mixes two models.
    #[must_use]
    pub fn with_files(self, files: &'a BTreeMap<String, Vec<u8>>) -> Self {
        Self { files_beside: files, ..self }
    }

    /// Writes a model in files of at most `max_bytes`, or of one tensor.
    ///
    /// # Errors
    ///
    /// On all processes, if one fails: the errors of `tensor`, [`Error::NotFinite`],
    /// [`Error::Header`] if a file has too many tensors to be read again, [`Error::Io`].
    pub fn write<E: Display + From<Error> + From<pmap_mesh::Error>>(
        &self,
        mut tensors: Vec<TensorInfo>,
        max_bytes: u64,
        tensor: impl Fn(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        tensors.sort_by(|left, right| natural_order(&left.name, &right.name));
        let planned = plan_files(tensors, max_bytes);
        self.write_all(&planned, tensor, |files| self.publish(&planned, files))
    }

    /// Writes the tensors to one file `name`.
    ///
    /// # Errors
    ///
    /// The errors of [`write`](Self::write).
    pub fn write_one<E: Display + From<Error> + From<pmap_mesh::Error>>(
        &self,
        name: &str,
        mut tensors: Vec<TensorInfo>,
        tensor: impl Fn(&str) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        tensors.sort_by(|left, right| natural_order(&left.name, &right.name));
        TensorInfo::sort(&mut tensors);
        let planned = [PlannedFile { name: name.to_owned(), tensors }];
        self.write_all(&planned, tensor, |files| self.persist(files))
    }

    /// Writes files under temporary names, and calls `publish` to rename them.
    fn write_all<E: Display + From<Error> + From<pmap_mesh::Error>>(
        &self,
        planned: &[PlannedFile],
        tensor: impl Fn(&str) -> Result<Tensor, E>,
        publish: impl FnOnce(Vec<AtomicFile>) -> Result<()>,
    ) -> Result<(), E> {
        let is_first = self.mesh.is_first_process();
        let created = if is_first { create_folder(self.path) } else { Ok(()) };
        self.mesh.all_ok(created.map_err(E::from))?;
        let mut files = Vec::new();
        for (position, file) in planned.iter().enumerate() {
            let metadata = self.metadata(position == 0);
            files.extend(self.mesh.all_ok(self.write_file(file, metadata, &tensor))?);
        }
        let published = if is_first { self.publish_beside(|| publish(files)) } else { Ok(()) };
        self.mesh.all_ok(published.map_err(E::from))
    }

    /// Returns the metadata of a weights file; the first one lists the files beside it.
    fn metadata(&self, is_first: bool) -> BTreeMap<String, String> {
        // Hugging Face's libraries reject a file that does not name its framework.
        let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        if is_first {
            for (name, content) in self.files_beside {
                metadata.insert(file_key(name), Checksum::compute(content).to_string());
            }
        }
        metadata
    }

    /// Removes the files beside the weights, publishes the weights, and writes the files again.
    fn publish_beside(&self, publish: impl FnOnce() -> Result<()>) -> Result<()> {
        for name in self.files_beside.keys() {
            remove_file(&self.path.join(name))?;
        }
        if !self.files_beside.is_empty() {
            sync_folder(self.path)?;
        }
        publish()?;
        for (name, content) in self.files_beside {
            self.write_file_beside(name, content)?;
        }
        Ok(())
    }

    /// Writes a file in the first process. After an error it still requests the other tensors,
    /// because all processes gather each tensor together.
    fn write_file<E: From<Error>>(
        &self,
        planned: &PlannedFile,
        metadata: BTreeMap<String, String>,
        tensor: impl Fn(&str) -> Result<Tensor, E>,
    ) -> Result<Option<AtomicFile>, E> {
        let mut outcome = self.create(planned, metadata).map_err(E::from);
        for info in &planned.tensors {
            let tensor = tensor(&info.name);
            outcome = outcome.and_then(|mut file| {
                let tensor = tensor?;
                if let Some(file) = &mut file {
                    file.write(&tensor)?;
                }
                Ok(file)
            });
        }
        Ok(outcome?.map(TensorFile::finish).transpose()?)
    }

    fn create(
        &self,
        planned: &PlannedFile,
        metadata: BTreeMap<String, String>,
    ) -> Result<Option<TensorFile<AtomicFile>>> {
        if !self.mesh.is_first_process() {
            return Ok(None);
        }
        let path = self.path.join(&planned.name);
        let out = AtomicFile::replacing(&path).at(&path)?;
        let file = TensorFile::create(out, path, &planned.tensors, metadata)?;
        Ok(Some(file.with_values(self.values)))
    }

    /// Renames the files to their final names, and removes the files of an earlier model, so that
    /// no reader takes them for parts of this one.
    fn publish(&self, planned: &[PlannedFile], files: Vec<AtomicFile>) -> Result<()> {
        let index = self.path.join(INDEX);
        if let [_] = planned {
            self.persist(files)?;
            remove_file(&index)?;
        } else {
            remove_file(&index)?;
            sync_folder(self.path)?;
            self.persist(files)?;
            self.write_file_beside(INDEX, index_text(planned).as_bytes())?;
            remove_file(&self.path.join(ONE_FILE))?;
        }
        self.remove_other_parts(planned)?;
        sync_folder(self.path)
    }

    fn persist(&self, files: Vec<AtomicFile>) -> Result<()> {
        for file in files {
            between_calls();
            file.persist().at(self.path)?;
        }
        Ok(())
    }

    fn write_file_beside(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.path.join(name);
        let mut file = AtomicFile::replacing(&path).at(&path)?;
        file.write_all(content).at(&path)?;
        between_calls();
        file.persist().at(&path)
    }

    /// Removes the numbered files of an earlier model.
    fn remove_other_parts(&self, planned: &[PlannedFile]) -> Result<()> {
        for entry in fs::read_dir(self.path).at(self.path)? {
            let name = entry.at(self.path)?.file_name();
            if is_part(&name) && planned.iter().all(|file| name != *file.name) {
                remove_file(&self.path.join(name))?;
            }
        }
        Ok(())
    }
}

/// Distributes a model's tensors over files, in order: a tensor that does not fit begins the next
/// file.
fn plan_files(tensors: Vec<TensorInfo>, max_bytes: u64) -> Vec<PlannedFile> {
    let mut files: Vec<Vec<TensorInfo>> = vec![Vec::new()];
    let mut free_bytes = max_bytes;
    for tensor in tensors {
        let n_bytes = tensor.n_bytes() as u64;
        match files.last_mut() {
            Some(file) if file.is_empty() || n_bytes <= free_bytes => file.push(tensor),
            _ => {
                files.push(vec![tensor]);
                free_bytes = max_bytes;
            }
        }
        free_bytes = free_bytes.saturating_sub(n_bytes);
    }
    let n_files = files.len();
    let mut planned = Vec::with_capacity(n_files);
    for (number, mut tensors) in (1..).zip(files) {
        TensorInfo::sort(&mut tensors);
        let name = if n_files == 1 { ONE_FILE.to_owned() } else { part_name(number, n_files) };
        planned.push(PlannedFile { name, tensors });
    }
    planned
}

/// Returns the name of file `number` of several, counted from 1.
fn part_name(number: usize, n_files: usize) -> String {
    format!("model-{number:05}-of-{n_files:05}.safetensors")
}

/// Returns true if a file is one of several of a model.
fn is_part(name: &OsStr) -> bool {
    let numbers = name.to_str().and_then(|name| {
        name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")
    });
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, n_files)| is_number(number) && is_number(n_files))
}

/// Returns the index of several files.
fn index_text(planned: &[PlannedFile]) -> String {
    let mut total_size = 0;
    let mut weight_map = BTreeMap::new();
    for file in planned {
        for tensor in &file.tensors {
            total_size += tensor.n_bytes();
            weight_map.insert(&tensor.name, &file.name);
        }
    }
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    format!("{index:#}\n")
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::folder::weights::StoredWeights;

    fn info(name: &str, len: usize, dtype: DType) -> TensorInfo {
        TensorInfo { name: name.to_owned(), shape: vec![len], dtype }
    }

    fn values(name: &str, len: u64, dtype: DType) -> Tensor {
        let first = f64::from(name.as_bytes()[0]);
        Tensor::arange(first, first + len as f64, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    /// Returns four parameters of 40, 40, 8 and 12 bytes.
    fn model() -> Vec<TensorInfo> {
        vec![
            info("a", 10, DType::F32),
            info("b", 5, DType::F64),
            info("c", 4, DType::BF16),
            info("d", 3, DType::F32),
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
        ModelFolder::new(&mesh, folder).write(model(), max_bytes, whole)
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
        let weights = StoredWeights::open(folder).unwrap();
        for name in ["a", "b", "c", "d"] {
            let expected = whole(name).unwrap();
            let declared = TensorInfo::new(name, &expected);
            let len = expected.elem_count();
            let found = weights.items(&declared, 0..len, &Device::Cpu).unwrap().unwrap();
            let numbers = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(numbers(&found), numbers(&expected));
        }
    }

    #[test]
    fn files_are_filled_in_order() {
        for (max_bytes, expected) in [
            (100, vec!["b a d c"]),
            (99, vec!["b a c", "d"]),
            (80, vec!["b a", "d c"]),
            (50, vec!["a", "b c", "d"]),
            (20, vec!["a", "b", "d c"]),
            (0, vec!["a", "b", "c", "d"]),
        ] {
            let files = plan_files(model(), max_bytes);
            assert_eq!(
                files
                    .iter()
                    .map(|file| {
                        file.tensors
                            .iter()
                            .map(|info| info.name.as_str())
                            .collect::<Vec<_>>()
                            .join(" ")
                    })
                    .collect::<Vec<_>>(),
                expected,
                "{max_bytes}"
            );
        }
        assert_eq!(plan_files(vec![], 5).len(), 1);
    }

    #[test]
    fn files_have_standard_names() {
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
    fn index_lists_files_and_bytes() {
        let folder = tempfile::tempdir().unwrap();
        save_in(folder.path(), 80).unwrap();
        let json = fs::read_to_string(folder.path().join(INDEX)).unwrap();
        let found: serde_json::Value = serde_json::from_str(&json).unwrap();
        let [first, second] = [1, 2].map(|number| part_name(number, 2));
        let expected = json!({
            "metadata": { "total_size": 100 },
            "weight_map": { "a": first, "b": first, "c": second, "d": second },
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn files_name_framework_and_are_aligned() {
        let folder = tempfile::tempdir().unwrap();
        save_in(folder.path(), 100).unwrap();
        let bytes = fs::read(folder.path().join(ONE_FILE)).unwrap();
        let (len, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(len % crate::safetensors::stored::ALIGNMENT, 0);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        for name in ["a", "b", "c", "d"] {
            let info = metadata.info(name).unwrap();
            assert_eq!(info.data_offsets.0 % (info.dtype.bitsize() / 8), 0);
        }
        // The same model has the same bytes, whatever the folder contained.
        save_in(folder.path(), 100).unwrap();
        assert_eq!(fs::read(folder.path().join(ONE_FILE)).unwrap(), bytes);
    }

    #[test]
    fn failed_write_keeps_the_old_model() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        for max_bytes in [100, 80] {
            save_in(folder.path(), max_bytes).unwrap();
            let original = names(folder.path());
            let infinite = |name: &str| match name {
                "d" => Ok((whole(name)? / 0.).unwrap()),
                _ => whole(name),
            };
            let files = ModelFolder::new(&mesh, folder.path());
            let rejected = files.write(model(), max_bytes, infinite).unwrap_err();
            assert!(
                matches!(&rejected, Error::NotFinite { tensor, item: 0, .. } if tensor == "d"),
                "{rejected}"
            );
            assert_eq!(names(folder.path()), original);
            check_read_back(folder.path());
            files.allow_non_finite().write(model(), max_bytes, infinite).unwrap();
        }
    }

    /// Otherwise a kill would leave new weights with the config of old ones.
    #[test]
    fn files_beside_are_gone_before_weights_change() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let config = folder.path().join("config.json");
        fs::write(&config, "old").unwrap();
        let files_beside = [("config.json".to_owned(), b"new".to_vec())].into();
        let files = ModelFolder::new(&mesh, folder.path()).with_files(&files_beside);
        let published = files.publish_beside(|| {
            assert!(!config.exists());
            Ok(())
        });
        published.unwrap();
        assert_eq!(fs::read_to_string(&config).unwrap(), "new");
    }

    #[test]
    fn the_first_of_several_files_lists_the_files_beside() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let files_beside = [("config.json".to_owned(), b"{}".to_vec())].into();
        let files = ModelFolder::new(&mesh, folder.path()).with_files(&files_beside);
        files.write(model(), 80, whole).unwrap();
        fs::write(folder.path().join("config.json"), "{ }").unwrap();
        let part = |number| {
            let part = StoredWeights::open(folder.path().join(part_name(number, 2))).unwrap();
            part.changed_files().unwrap()
        };
        assert_eq!(part(1), ["config.json"]);
        assert!(part(2).is_empty());
    }

    #[test]
    fn every_parameter_is_requested_despite_errors() {
        let folder = tempfile::tempdir().unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let requested = std::cell::RefCell::new(Vec::new());
        let files = ModelFolder::new(&mesh, folder.path());
        let written = files.write(model(), 100, |name| {
            requested.borrow_mut().push(name.to_owned());
            match name {
                "b" => Err(Error::OtherProcess { slot: 1, reason: "b".to_owned() }),
                _ => whole(name),
            }
        });
        let error = written.unwrap_err();
        assert!(matches!(error, Error::OtherProcess { .. }), "{error}");
        assert_eq!(requested.into_inner(), ["b", "a", "d", "c"]);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn uncreatable_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let rejected = save_in(&file.join("model"), 100).unwrap_err();
        assert!(matches!(rejected, Error::Io { .. }), "{rejected}");
    }

    #[test]
    fn only_old_parts_are_removed() {
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
