//! Pretrained weights: a safetensors file, or the several files of a Hugging Face index.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use core_types::Fingerprint;
use fsdp_plan::{ParameterInfo, Pattern, source};

use crate::{
    disk::{AtPath, check_file},
    error::{Doing, Error, Result, parameter::ParameterError},
    folder::{INDEX, ONE_FILE},
    safetensors::{
        checksum::{Checksum, file_of_key},
        finite::AllowedValues,
        stored::{self, StoredItems},
        tensor_file::TensorInfo,
    },
};

/// The tensors of pretrained weights by name, in files that are read range by range.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use dist_checkpoint::{StoredWeights, TensorInfo};
///
/// # let folder = tempfile::tempdir()?;
/// let weight = Tensor::arange(0_f32, 6., &Device::Cpu)?.reshape((2, 3))?;
/// let info = TensorInfo::new("weight", &weight);
/// weight.save_safetensors("weight", folder.path().join("model.safetensors"))?;
/// let weights = StoredWeights::open(folder.path())?;
/// let items = weights.items(&info, 2..4, &Device::Cpu)?.ok_or("no weight")?;
/// assert_eq!(items.to_vec1::<f32>()?, [2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct StoredWeights {
    path: PathBuf,
    tensors: BTreeMap<String, ShapedItems>,
    /// The checksums of the files that were written beside the weights, by name.
    files_beside: BTreeMap<String, Option<Checksum>>,
}

/// A tensor in one of the files.
#[derive(Clone, Debug)]
struct ShapedItems {
    shape: Vec<u64>,
    items: StoredItems,
}

/// The differences between the names of a model and its weights that are allowed.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowedNames<'a> {
    /// Parameters that the weights may lack.
    pub missing: &'a [Pattern],
    /// Tensors of the weights that the model may lack.
    pub unexpected: &'a [Pattern],
}

impl StoredWeights {
    /// Opens a safetensors file, an index (a `.json` file, in the folder of its files), or a folder
    /// with either; a single file takes precedence. This reads only headers.
    ///
    /// Files that [`TensorFile`](crate::TensorFile) wrote have checksums. They are compared when a
    /// header or tensor is read.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::Header`] or [`Error::Damaged`] if a file cannot be read, is malformed
    /// or is not as it was written, or if the index is wrong about a tensor;
    /// [`ParameterError::UnknownDtype`] for tensors that candle cannot hold.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let mut path = path.into();
        if path.is_dir() {
            let one_file = path.join(ONE_FILE);
            path = if one_file.exists() { one_file } else { path.join(INDEX) };
        }
        let mut weights =
            Self { path: path.clone(), tensors: BTreeMap::new(), files_beside: BTreeMap::new() };
        if path.extension().is_some_and(|extension| extension == "json") {
            weights.add_index(&path)?;
        } else {
            weights.add_file(&path)?;
        }
        Ok(weights)
    }

    /// Removes a prefix from the names that have it, unless there is another tensor of the shorter
    /// name.
    #[doc(hidden)]
    #[must_use]
    pub fn without_prefix(self, prefix: &str) -> Self {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            let shorter = name.strip_prefix(prefix).filter(|rest| !self.contains(rest));
            tensors.insert(shorter.unwrap_or(name).to_owned(), tensor.clone());
        }
        Self { tensors, ..self }
    }

    /// Returns the names of the files that were written beside the weights, and that have changed
    /// or are missing.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a file cannot be read.
    #[doc(hidden)]
    pub fn changed_files(&self) -> Result<Vec<String>> {
        let mut changed = Vec::new();
        for (name, expected) in &self.files_beside {
            let path = self.path.with_file_name(name);
            let found = match check_file(&path) {
                Ok(_) => Some(Checksum::compute(&fs::read(&path).at(&path)?)),
                // It is missing, or it is a pipe or a folder now.
                Err(_) => None,
            };
            if found.is_none() || found != *expected {
                changed.push(name.clone());
            }
        }
        Ok(changed)
    }

    /// Returns the paths of the files, sorted.
    #[doc(hidden)]
    pub fn files(&self) -> BTreeSet<&Path> {
        self.tensors.values().map(|tensor| tensor.items.path()).collect()
    }

    /// Returns true if there is a tensor of this name.
    #[doc(hidden)]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the dtype of a tensor in its file, or `None` without such a tensor.
    #[doc(hidden)]
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.tensors.get(name).map(|tensor| tensor.items.dtype())
    }

    /// Returns the tensors whose names match one of the patterns.
    #[doc(hidden)]
    pub fn matching(&self, patterns: &[Pattern]) -> Vec<TensorInfo> {
        let found = self.tensors.iter().filter(|(name, _)| matches_any(patterns, name));
        found.map(|(name, tensor)| tensor.info(name)).collect()
    }

    /// Checks that these are the weights of a model: every parameter exists, with its shape and a
    /// convertible dtype, and there are no other tensors.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Weights`] with all missing or unexpected names that are not allowed,
    /// [`ParameterError::Shape`] or [`ParameterError::Conversion`] for the first parameter that
    /// differs.
    #[doc(hidden)]
    pub fn check_fits(&self, model: &[TensorInfo], allowed: AllowedNames<'_>) -> Result<()> {
        let mut unexpected: BTreeMap<_, _> = self.tensors.iter().collect();
        let mut missing = Vec::new();
        for declared in model {
            match unexpected.remove(&declared.name) {
                Some(tensor) => tensor.check(declared)?,
                None if matches_any(allowed.missing, &declared.name) => {}
                None => missing.push(declared.name.clone()),
            }
        }
        let mut unexpected: Vec<_> = unexpected.into_keys().cloned().collect();
        unexpected.retain(|name| !matches_any(allowed.unexpected, name));
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(ParameterError::Weights {
            path: self.path.clone(),
            missing,
            n_parameters: model.len(),
            unexpected,
            n_tensors: self.tensors.len(),
        }
        .into())
    }

    /// Reads items `range` of a parameter, in row-major order, converted to its dtype, as one
    /// dimension on `device`; returns `None` if the weights lack it. This reads only these items.
    ///
    /// # Errors
    ///
    /// [`ParameterError::Shape`] or [`ParameterError::Conversion`] if the parameter differs,
    /// [`ParameterError::Incomplete`] if the range ends behind the parameter, [`Error::Damaged`] if
    /// the items are damaged, [`Error::Io`] if a file cannot be read,
    /// [`Error::Tensor`] if candle fails.
    pub fn items(
        &self,
        declared: &TensorInfo,
        range: Range<usize>,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let Some(tensor) = self.tensors.get(&declared.name) else { return Ok(None) };
        tensor.check(declared)?;
        tensor.items.check_range(&range)?;
        let items = tensor.items.read(range, AllowedValues::Any)?.to_dtype(declared.dtype);
        items
            .and_then(|items| items.to_device(device))
            .doing("converting pretrained weights")
            .map(Some)
    }

    /// Reads all tensors, and compares them with their checksums, if they have some.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] for a damaged tensor or one without a checksum, [`Error::Io`] if a file
    /// cannot be read.
    #[doc(hidden)]
    pub fn verify(&self) -> Result<()> {
        self.tensors.values().try_for_each(|tensor| tensor.items.verify(AllowedValues::Any))
    }

    /// Returns a fingerprint of the weights that a model uses: the names of its parameters, and a
    /// sample of their items; all items if there are few. Further training changes nearly every
    /// item, so a sample suffices, but a few changed items may be missed.
    ///
    /// # Errors
    ///
    /// The errors of [`items`](Self::items).
    #[doc(hidden)]
    pub fn fingerprint(&self, model: &[TensorInfo]) -> Result<u64> {
        let mut found = Fingerprint::new();
        for declared in model {
            let len = declared.shape.iter().product();
            found
                .write_bytes(declared.name.as_bytes())
                .write_u64(self.contains(&declared.name).into());
            for run in sampled(len) {
                let Some(items) = self.items(declared, run, &Device::Cpu)? else { break };
                let mut bytes = Vec::new();
                items.write_bytes(&mut bytes).doing("comparing pretrained weights")?;
                found.write_bytes(&bytes);
            }
        }
        Ok(found.finish())
    }

    /// Adds the tensors of a file; returns the planner's descriptions of them.
    fn add_file(&mut self, path: &Path) -> Result<Vec<ParameterInfo>> {
        let file: Arc<Path> = path.into();
        let header = stored::header(path)?;
        let none = BTreeMap::new();
        // Other programs may store anything there.
        let metadata = header.metadata().unwrap_or(&none);
        for (key, digits) in metadata {
            if let Some(name) = file_of_key(key) {
                self.files_beside.insert(name.to_owned(), Checksum::parse(digits));
            }
        }
        for tensor in &header.tensors {
            let shape = tensor.info.shape().to_vec();
            let items = StoredItems::new(&file, tensor, metadata)?;
            self.tensors.insert(tensor.info.name().to_owned(), ShapedItems { shape, items });
        }
        Ok(header.tensors.iter().map(|tensor| tensor.info.clone()).collect())
    }

    /// Adds the tensors of the files in an index, and checks the index.
    fn add_index(&mut self, path: &Path) -> Result<()> {
        let json = fs::read_to_string(path).at(path)?;
        match source::from_index(&json, |name| self.add_file(&path.with_file_name(name))) {
            Ok(_) => Ok(()),
            // The reader of the index does not know the path.
            Err(Error::Plan(cause)) => Err(Error::header(path, cause)),
            Err(error) => Err(error),
        }
    }
}

impl ShapedItems {
    /// Describes the tensor. A size that exceeds memory becomes the largest number.
    fn info(&self, name: &str) -> TensorInfo {
        let size = |&dim: &u64| usize::try_from(dim).unwrap_or(usize::MAX);
        let shape = self.shape.iter().map(size).collect();
        TensorInfo { name: name.to_owned(), shape, dtype: self.items.dtype() }
    }

    /// Checks that the tensor can be the value of a parameter. Integers are never converted, since
    /// rounding or wrapping would change them.
    fn check(&self, declared: &TensorInfo) -> Result<(), ParameterError> {
        let expected = &declared.shape;
        if !self.shape.iter().copied().eq(expected.iter().map(|&dim| dim as u64)) {
            let name = declared.name.clone();
            let found = self.info(&name).shape;
            return Err(ParameterError::Shape { name, found, expected: expected.clone() });
        }
        let found = self.items.dtype();
        if found == declared.dtype || (found.is_float() && declared.dtype.is_float()) {
            return Ok(());
        }
        Err(ParameterError::Conversion {
            name: declared.name.clone(),
            found: found.as_str(),
            expected: declared.dtype.as_str(),
        })
    }
}

/// Returns ranges that sample a tensor of `len` items: evenly spaced, including the first and the
/// last items.
pub fn sampled(len: usize) -> impl Iterator<Item = Range<usize>> {
    const RUNS: usize = 8;
    const ITEMS: usize = 32;
    let is_small = len <= RUNS * ITEMS;
    let (runs, items) = if is_small { (1, len) } else { (RUNS, ITEMS) };
    // Two terms avoid overflow.
    let step = (len - items) / (RUNS - 1);
    let rest = (len - items) % (RUNS - 1);
    (0..runs).map(move |run| run * step + run * rest / (RUNS - 1)).map(move |at| at..at + items)
}

fn matches_any(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, safetensors::save};
    use tempfile::TempDir;

    use super::*;

    /// Creates a folder with `model.safetensors`: `a` of [2, 3] in f32, `b` of [4] in bf16, `n` of
    /// [2] in i64.
    fn folder() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        save(&tensors().into(), folder.path().join("model.safetensors")).unwrap();
        folder
    }

    #[expect(clippy::disallowed_types, reason = "candle's writer takes a HashMap")]
    fn save_some(names: &[&str], path: &Path) {
        let some = tensors().into_iter().filter(|(name, _)| names.contains(&name.as_str()));
        save(&some.collect::<std::collections::HashMap<_, _>>(), path).unwrap();
    }

    fn tensors() -> [(String, Tensor); 3] {
        let a = Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let b = Tensor::arange(10_f32, 14., &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let n = Tensor::new(&[7_i64, 8], &Device::Cpu).unwrap();
        [("a", a), ("b", b), ("n", n)].map(|(name, tensor)| (name.to_owned(), tensor))
    }

    fn declared(name: &str, shape: &[usize], dtype: DType) -> TensorInfo {
        TensorInfo { name: name.to_owned(), shape: shape.to_vec(), dtype }
    }

    fn model() -> Vec<TensorInfo> {
        vec![
            declared("a", &[2, 3], DType::F32),
            declared("b", &[4], DType::F32),
            declared("n", &[2], DType::I64),
        ]
    }

    fn patterns(patterns: &[&str]) -> Vec<Pattern> {
        patterns.iter().map(|pattern| pattern.parse().unwrap()).collect()
    }

    /// Returns the missing and unexpected names, if there are any.
    fn difference(
        weights: &StoredWeights,
        model: &[TensorInfo],
        missing: &[&str],
        unexpected: &[&str],
    ) -> Option<(Vec<String>, Vec<String>)> {
        let (missing, unexpected) = (patterns(missing), patterns(unexpected));
        let allowed = AllowedNames { missing: &missing, unexpected: &unexpected };
        match weights.check_fits(model, allowed) {
            Ok(()) => None,
            Err(Error::Parameter(ParameterError::Weights { missing, unexpected, .. })) => {
                Some((missing, unexpected))
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn ranges_are_read_and_converted() {
        let folder = folder();
        let weights = StoredWeights::open(folder.path().join("model.safetensors")).unwrap();
        assert_eq!(weights.tensors.keys().collect::<Vec<_>>(), ["a", "b", "n"]);
        let values = |declared: &TensorInfo, range| {
            let items = weights.items(declared, range, &Device::Cpu).unwrap().unwrap();
            assert_eq!(items.dtype(), declared.dtype);
            items.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap()
        };
        let model = model();
        assert_eq!(values(&model[0], 0..6), [0., 1., 2., 3., 4., 5.]);
        assert_eq!(values(&model[0], 2..5), [2., 3., 4.]);
        assert_eq!(values(&model[1], 1..3), [11., 12.]);
        assert_eq!(values(&model[2], 0..2), [7., 8.]);
        assert_eq!(values(&declared("a", &[2, 3], DType::F16), 5..6), [5.]);
        assert!(values(&model[0], 3..3).is_empty());
        let other = declared("classifier.weight", &[2], DType::F32);
        assert!(weights.items(&other, 0..2, &Device::Cpu).unwrap().is_none());
        for range in [0..7, 7..8, 6..usize::MAX, usize::MAX..usize::MAX, Range { start: 3, end: 2 }]
        {
            let found = weights.items(&model[0], range.clone(), &Device::Cpu).map(drop);
            let is_found = matches!(found, Err(Error::Parameter(ParameterError::Incomplete { item, .. })) if item >= 3);
            assert!(is_found, "{range:?}: {found:?}");
        }
    }

    #[test]
    fn samples_cover_the_tensor() {
        for len in [0, 1, 255, 256] {
            assert!(sampled(len).eq(std::iter::once(0..len)), "{len}");
        }
        for len in [257, 300, 1000, 1001, usize::MAX] {
            let runs: Vec<_> = sampled(len).collect();
            assert_eq!((runs.len(), runs[0].start, runs[7].end), (8, 0, len));
            assert!(runs.is_sorted_by(|left, right| left.end <= right.start), "{runs:?}");
        }
    }

    #[test]
    fn fingerprint_depends_on_used_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let fingerprint = |factor: f64, dtype: DType, model: &[TensorInfo]| {
            let a = Tensor::arange(0_f32, 3000., &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let tensors = [("a".to_owned(), (a * factor).unwrap())];
            save(&tensors.into(), &path).unwrap();
            StoredWeights::open(&path).unwrap().fingerprint(model).unwrap()
        };
        let model = [declared("a", &[3000], DType::F32), declared("b", &[2], DType::F32)];
        let first = fingerprint(1.0, DType::F32, &model);
        assert_eq!(fingerprint(1.0, DType::F64, &model), first);
        assert_ne!(fingerprint(1.001, DType::F32, &model), first);
        assert_ne!(fingerprint(1.0, DType::F32, &model[..1]), first);
    }

    #[test]
    fn names_must_match_the_model() {
        let folder = folder();
        let weights = StoredWeights::open(folder.path().join("model.safetensors")).unwrap();
        let mut model = model();
        assert_eq!(difference(&weights, &model, &[], &[]), None);
        model.push(declared("classifier.weight", &[2], DType::F32));
        model.push(declared("pooler.weight", &[2], DType::F32));
        model.remove(1);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        for (missing, unexpected, expected) in [
            (
                &[][..],
                &[][..],
                Some((names(&["classifier.weight", "pooler.weight"]), names(&["b"]))),
            ),
            (&["classifier.*"], &["b"], Some((names(&["pooler.weight"]), vec![]))),
            (&["classifier", "pooler"], &[], Some((vec![], names(&["b"])))),
            (&["{classifier,pooler}.*"], &["?"], None),
        ] {
            assert_eq!(difference(&weights, &model, missing, unexpected), expected);
        }
    }

    #[test]
    fn shapes_and_dtypes_must_match() {
        let folder = folder();
        let weights = StoredWeights::open(folder.path().join("model.safetensors")).unwrap();
        let rejected = |declared: &TensorInfo| {
            let checked =
                weights.check_fits(std::slice::from_ref(declared), AllowedNames::default());
            let read = weights.items(declared, 0..1, &Device::Cpu).map(drop);
            assert_eq!(checked.unwrap_err().to_string(), read.as_ref().unwrap_err().to_string());
            match read {
                Err(Error::Parameter(error)) => error,
                other => panic!("{other:?}"),
            }
        };
        for shape in [&[3, 2][..], &[6], &[2, 3, 1], &[2, 2]] {
            let error = rejected(&declared("a", shape, DType::F32));
            assert!(matches!(error, ParameterError::Shape { .. }), "{error}");
        }
        for (name, shape, dtype) in
            [("a", &[2, 3][..], DType::I64), ("n", &[2], DType::F32), ("n", &[2], DType::U32)]
        {
            let error = rejected(&declared(name, shape, dtype));
            assert!(matches!(error, ParameterError::Conversion { .. }), "{error}");
        }
    }

    /// Writes an index and two files: the first with `a`, the second with `b` and `n`.
    fn open_indexed(weight_map: &str) -> Result<StoredWeights> {
        let folder = tempfile::tempdir().unwrap();
        save_some(&["a"], &folder.path().join("1.safetensors"));
        save_some(&["b", "n"], &folder.path().join("2.safetensors"));
        let index = folder.path().join("model.safetensors.index.json");
        fs::write(&index, format!(r#"{{"metadata": {{}}, "weight_map": {{{weight_map}}}}}"#))
            .unwrap();
        let weights = StoredWeights::open(index)?;
        let b = weights.items(&model()[1], 0..4, &Device::Cpu)?.unwrap();
        assert_eq!(b.to_vec1::<f32>().unwrap(), [10., 11., 12., 13.]);
        Ok(weights)
    }

    #[test]
    fn index_locates_tensors() {
        let weights =
            open_indexed(r#""a": "1.safetensors", "b": "2.safetensors", "n": "2.safetensors""#)
                .unwrap();
        assert_eq!(difference(&weights, &model(), &[], &[]), None);
    }

    #[test]
    fn wrong_index_is_rejected_with_path() {
        for (map, expected) in [
            (r#""a": "1.safetensors", "b": "2.safetensors""#, "does not list"),
            (
                r#""a": "1.safetensors", "b": "2.safetensors", "n": "1.safetensors""#,
                "does not list",
            ),
            (r#""a": "../1.safetensors""#, "plain file name"),
            (r#""a": 1"#, "malformed"),
            (r#""a": "3.safetensors""#, "3.safetensors"),
        ] {
            let error = open_indexed(map).unwrap_err();
            assert!(!matches!(error, Error::Parameter(_) | Error::Plan(_)), "{error:?}");
            let error = error.to_string();
            assert!(error.contains(expected), "{expected} in {error}");
        }
    }

    #[test]
    fn truncated_file_is_rejected() {
        let folder = folder();
        let path = folder.path().join("model.safetensors");
        let len = fs::metadata(&path).unwrap().len();
        fs::File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        assert!(matches!(StoredWeights::open(path).unwrap_err(), Error::Damaged { .. }));
    }
}
