//! The state of a training run on disk: a folder for each checkpoint, a file of tensors for each
//! slot, an index.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    fs::{self, File},
    io::{self, BufReader, Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use pmap_mesh::DeviceMesh;

use crate::error::{Error, Result};

/// The form of the index.
const FORMAT_VERSION: u32 = 1;
const INDEX: &str = "index.json";
/// What a checkpoint's folder is called while it is written.
const PARTIAL: &str = "partial";
/// No header is longer; the format's own limit. Nor is an index.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// What a model's variables are called among the kinds of tensors; an optimizer names its own.
pub(crate) const MODEL: &str = "model";

/// The tensors that the slots of this process contribute to a checkpoint.
///
/// A tensor is a run of a parameter's items, or of something that an optimizer keeps for each of
/// them, or a scalar that it keeps for the parameter. Made by
/// [`DataParallel::state_dict`](crate::DataParallel::state_dict) and `ShardedVars::state_dict`.
///
/// It shares the memory of the variables: save it before they change.
#[derive(Clone, Debug)]
pub struct StateDict {
    /// All parameters of the model, in whatever process they are kept.
    parameters: BTreeMap<String, Vec<usize>>,
    slots: Vec<Vec<(String, Tensor)>>,
}

impl StateDict {
    /// Nothing yet, of a model with these parameters, each with its shape.
    pub(crate) fn new(
        mesh: &DeviceMesh,
        parameters: impl IntoIterator<Item = (String, Vec<usize>)>,
    ) -> Self {
        Self {
            parameters: parameters.into_iter().collect(),
            slots: vec![Vec::new(); mesh.devices().len()],
        }
    }

    /// Adds a run of `kind` that begins at a parameter's item `start`, kept by the n-th slot of
    /// this process.
    pub(crate) fn add(
        &mut self,
        local_slot: usize,
        kind: &str,
        name: &str,
        start: usize,
        items: Tensor,
    ) {
        self.slots[local_slot].push((format!("{kind}/{name}@{start}"), items));
    }
}

/// A folder with the checkpoints of one run.
///
/// # Files
///
/// `step-0000000120/` holds `shard-00001-of-00004.safetensors` and so on, one for each slot that
/// keeps something, and `index.json`. A tensor's name is `{kind}/{parameter}@{first item}`; the
/// kinds are `model` and those of the optimizer, as in
/// [`StatefulOptimizer::state`](crate::StatefulOptimizer::state).
///
/// A checkpoint is written into `step-0000000120.partial/`, brought to disk, and renamed when all
/// slots are done: what bears the final name is whole, wherever the writing was stopped.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, ParamsAdamW, VarMap, linear, loss::mse};
/// use dist_train::{AdamW, Checkpoints, DataParallel};
/// use pmap_mesh::DeviceMesh;
///
/// let train = |slots: usize, folder: &std::path::Path, steps: u64| -> Result<f32, Box<dyn std::error::Error>> {
///     let (mesh, vars) = (DeviceMesh::cpu(slots)?, VarMap::new());
///     let adam = |vars| AdamW::new(vars, ParamsAdamW { lr: 0.1, ..Default::default() });
///     let mut model = DataParallel::new(&mesh, &vars, |vb| linear(3, 1, vb), adam)?.in_axes(Some(0));
///
///     let checkpoints = Checkpoints::new(folder);
///     let mut first = 0;
///     if let Some(checkpoint) = checkpoints.latest()? {
///         model.load(&checkpoint)?;
///         first = checkpoint.step();
///     }
///     let mut loss = f32::NAN;
///     for step in first..steps {
///         let x = Tensor::arange(0_f32, 24., &Device::Cpu)?.reshape((8, 3))?.affine(0.1, -(step as f64))?;
///         let y = x.sum_keepdim(1)?;
///         let of = |_: &_, model: &candle_nn::Linear, (x, y): (Tensor, Tensor)| mse(&model.forward(&x)?, &y);
///         loss = model.step((x, y), of)?.to_scalar()?;
///     }
///     checkpoints.save(&mesh, steps, &model.state_dict(), &"whatever else a run must know")?;
///     Ok(loss)
/// };
/// let folder = tempfile::tempdir()?;
/// train(2, folder.path(), 10)?;
/// let loss = train(4, folder.path(), 20)?; // goes on from step 10, on twice as many devices
/// # assert!(loss.is_finite());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

/// What is written into the index.
#[derive(Debug, Serialize, Deserialize)]
struct Index {
    format_version: u32,
    /// How many steps had been taken.
    step: u64,
    /// The model's parameters and their shapes.
    parameters: BTreeMap<String, Vec<usize>>,
    files: Vec<Listed>,
    /// Whatever else the run had to remember.
    state: Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Listed {
    name: String,
    bytes: u64,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not be there yet. The newest two are kept.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), keep: 2 }
    }

    /// How many are kept when a new one has been written; at least 1.
    #[must_use]
    pub fn keep(self, count: usize) -> Self {
        Self { keep: count.max(1), ..self }
    }

    /// The newest checkpoint that is whole; `None` if none was ever written.
    ///
    /// One of which a file is missing or has another size than the index says is passed over, with
    /// a warning in the log, if an earlier one is there. On a mesh of several processes all of them
    /// must find the same one.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the folder cannot be read, or all checkpoints in it are damaged: what the
    /// newest lacks.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut damaged = Ok(None);
        for path in self.complete()?.values().rev() {
            match Checkpoint::open(path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!("{} is passed over: {error}", path.display());
                    damaged = damaged.and(Err(error));
                }
            }
        }
        damaged
    }

    /// After how many steps each checkpoint was written that is whole, oldest first.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let whole = self.complete()?.into_iter().filter(|(_, path)| Checkpoint::open(path).is_ok());
        Ok(whole.map(|(step, _)| step).collect())
    }

    /// Writes a checkpoint after `step` steps: the tensors of all slots, and a `state` that serde
    /// can write. Returns when it is whole.
    ///
    /// Every process of the mesh calls this, with the same folder, which all of them must reach.
    /// Each writes the files of its own slots, the first one the index; then it removes what is not
    /// to be kept.
    ///
    /// # Errors
    ///
    /// [`Error::File`] with the path and what the system says, or if there is a whole checkpoint of
    /// this step; earlier ones are untouched. A process that fails leaves the others waiting in a
    /// mesh of several, and must end.
    pub fn save(
        &self,
        mesh: &DeviceMesh,
        step: u64,
        tensors: &StateDict,
        state: &impl Serialize,
    ) -> Result<()> {
        let whole = self.folder.join(folder_name(step));
        let partial = whole.with_extension(PARTIAL);
        let is_first = mesh.local_slots().start == 0;
        if tensors.slots.len() != mesh.devices().len() {
            let (found, expected) = (tensors.slots.len(), mesh.devices().len());
            return Err(file_error(
                &whole,
                format!("a state of {found} slots is not one of this mesh's {expected}"),
            ));
        }
        if is_first {
            self.make_room(&whole)?;
            fs::create_dir_all(&partial).map_err(|error| file_error(&partial, error))?;
        }
        all_are_here(mesh)?;
        let sizes = mesh.local_slots().zip(&tensors.slots).map(|(slot, entries)| {
            let path = partial.join(file_name(slot, mesh.len()));
            if entries.is_empty() { Ok(0) } else { write_tensors(&path, entries) }
        });
        let sizes = told_by_all(mesh, sizes.collect::<Result<_>>()?)?;
        if is_first {
            let files = sizes.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
            let files = files
                .map(|(slot, &bytes)| Listed { name: file_name(slot, mesh.len()), bytes })
                .collect();
            let state = serde_json::to_value(state)
                .map_err(|error| file_error(&whole.join(INDEX), error))?;
            let parameters = tensors.parameters.clone();
            let index = Index { format_version: FORMAT_VERSION, step, parameters, files, state };
            write_index(&partial.join(INDEX), &index)?;
            sync_folder(&partial)?;
            fs::rename(&partial, &whole).map_err(|error| file_error(&whole, error))?;
            sync_folder(&self.folder)?;
            self.remove_old(step);
        }
        all_are_here(mesh)
    }

    /// The folders that bear a final name, by step.
    fn complete(&self) -> Result<BTreeMap<u64, PathBuf>> {
        Ok(self
            .folders()?
            .into_iter()
            .filter_map(|path| Some((step_of(path.file_name()?.to_str()?)?, path)))
            .collect())
    }

    fn folders(&self) -> Result<Vec<PathBuf>> {
        let failed = |error| file_error(&self.folder, error);
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(failed));
        let mut paths = paths.collect::<Result<Vec<_>>>()?;
        paths.retain(|path| path.is_dir());
        Ok(paths)
    }

    /// Removes what an interrupted run has left, and a damaged checkpoint in the place of the new
    /// one.
    fn make_room(&self, whole: &Path) -> Result<()> {
        for path in self.folders()? {
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_suffix(PARTIAL));
            if name.and_then(|name| step_of(name.strip_suffix('.')?)).is_some() {
                remove(&path)?;
            }
        }
        if !whole.is_dir() {
            return Ok(());
        }
        match Checkpoint::open(whole) {
            Ok(_) => Err(file_error(whole, "there is a whole checkpoint of this step already")),
            Err(_) => remove(whole),
        }
    }

    /// Removes the checkpoints before `step` of which enough newer ones are whole. What cannot be
    /// removed stays, and is told in the log: the new one is whole.
    fn remove_old(&self, step: u64) {
        let mut newer = 1;
        for (_, path) in self.complete().unwrap_or_default().range(..step).rev() {
            if newer < self.keep && Checkpoint::open(path).is_ok() {
                newer += 1;
            } else if let Err(error) = retire(path) {
                tracing::warn!("an old checkpoint stays: {error}");
            }
        }
    }
}

/// One checkpoint that is whole, to be read under any number of slots and any plan.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    pieces: BTreeMap<Key, Vec<Piece>>,
}

/// What a tensor belongs to: its kind, and the parameter.
type Key = (String, String);

/// A run of items in a file.
#[derive(Debug)]
struct Piece {
    /// The first item, in the parameter.
    start: usize,
    shape: Vec<usize>,
    dtype: DType,
    file: PathBuf,
    /// Where its bytes lie in the file.
    offset: u64,
}

impl Piece {
    fn end(&self) -> usize {
        self.start + self.shape.iter().product::<usize>()
    }
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`, and reads the headers of its files.
    ///
    /// # Errors
    ///
    /// [`Error::File`] with what is missing, of another size than the index says, or not of this
    /// format.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let index_path = path.join(INDEX);
        let failed = |error: &dyn Display| file_error(&index_path, error);
        let text = read_text(&index_path).map_err(|error| failed(&error))?;
        let index: Index = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        if index.format_version != FORMAT_VERSION {
            let found = index.format_version;
            return Err(failed(&format!(
                "format_version is {found}, this program reads {FORMAT_VERSION}"
            )));
        }
        let names: BTreeSet<&str> = index.files.iter().map(|file| file.name.as_str()).collect();
        if names.len() < index.files.len() || !names.iter().all(|name| is_shard(name)) {
            return Err(failed(&"names something else than its shards, each once"));
        }
        let mut pieces: BTreeMap<Key, Vec<Piece>> = BTreeMap::new();
        for file in &index.files {
            for (key, piece) in read_header(&path.join(&file.name), file.bytes)? {
                pieces.entry(key).or_default().push(piece);
            }
        }
        for pieces in pieces.values_mut() {
            pieces.sort_by_key(|piece| piece.start);
        }
        Ok(Self { path, index, pieces })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many steps had been taken.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// The state that it was saved with.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it is not a `T`.
    pub fn state<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.index.state).map_err(|error| file_error(&self.path.join(INDEX), error))
    }

    /// The names of the model's parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.index.parameters.keys().map(String::as_str)
    }

    /// Checks that the model has these parameters and no others, that is of this shape each, and
    /// that all processes of the mesh read the same checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownParameter`], [`Error::Incomplete`], [`Error::OtherShape`]; [`Error::File`]
    /// if another process reads another one.
    pub(crate) fn expect(
        &self,
        mesh: &DeviceMesh,
        expected: &BTreeMap<String, Vec<usize>>,
    ) -> Result<()> {
        if let Some(unknown) = self.parameters().find(|name| !expected.contains_key(*name)) {
            return Err(Error::UnknownParameter { name: unknown.to_owned() });
        }
        for (name, shape) in expected {
            match self.index.parameters.get(name) {
                Some(found) if found == shape => {}
                Some(found) => {
                    let (name, found, expected) = (name.clone(), found.clone(), shape.clone());
                    return Err(Error::OtherShape { name, found, expected });
                }
                None => return Err(Error::Incomplete { name: name.clone(), missing: 0 }),
            }
        }
        let steps = told_by_all(mesh, mesh.local_slots().map(|_| self.step()).collect())?;
        match steps.into_iter().find(|&step| step != self.step()) {
            None => Ok(()),
            Some(step) => Err(file_error(
                &self.path,
                format!("another process reads the checkpoint of step {step}"),
            )),
        }
    }

    /// Items `range` of what `kind` keeps for the parameter `name`: one dimension, on the
    /// processor.
    ///
    /// # Errors
    ///
    /// [`Error::Incomplete`] if one of them is nowhere, [`Error::File`] if a file cannot be read.
    pub(crate) fn items(&self, kind: &str, name: &str, range: Range<usize>) -> Result<Tensor> {
        let missing = |missing| Error::Incomplete { name: name.to_owned(), missing };
        let pieces = self.of(kind, name).ok_or_else(|| missing(range.start))?;
        let (mut reached, mut parts) = (range.start, Vec::new());
        for piece in pieces {
            let end = piece.end().min(range.end);
            if piece.start <= reached && reached < end {
                parts.push(read(piece, reached..end)?);
                reached = end;
            }
        }
        match parts.len() {
            _ if reached < range.end => Err(missing(reached)),
            // No items were asked for, of a parameter that is there.
            0 => read(&pieces[0], pieces[0].start..pieces[0].start),
            1 => Ok(parts.remove(0)),
            _ => Tensor::cat(&parts, 0).map_err(Error::Assemble),
        }
    }

    /// What a kind keeps for a parameter, for a place that keeps something like `like`: the items
    /// from `start` on, or the parameter's scalar.
    pub(crate) fn like(
        &self,
        kind: &str,
        name: &str,
        start: usize,
        like: &Tensor,
    ) -> Result<Tensor> {
        if like.elem_count() == 0 {
            return Tensor::zeros(like.dims(), like.dtype(), &Device::Cpu).map_err(Error::Assemble);
        }
        if like.rank() > 0 {
            let items = self.items(kind, name, start..start + like.elem_count())?;
            return items.reshape(like.dims()).map_err(Error::Assemble);
        }
        let missing = || Error::Incomplete { name: name.to_owned(), missing: start };
        let first = self.of(kind, name).and_then(<[Piece]>::first).ok_or_else(missing)?;
        read(first, first.start..first.end())
            .and_then(|item| item.reshape(()).map_err(Error::Assemble))
    }

    fn of(&self, kind: &str, name: &str) -> Option<&[Piece]> {
        self.pieces.get(&(kind.to_owned(), name.to_owned())).map(Vec::as_slice)
    }
}

/// Waits for all processes of a mesh.
fn all_are_here(mesh: &DeviceMesh) -> Result<()> {
    mesh.process_allgather(mesh.local_slots().map(|_| Vec::new()).collect())?;
    Ok(())
}

/// The numbers of all slots, from those of this process's.
fn told_by_all(mesh: &DeviceMesh, numbers: Vec<u64>) -> Result<Vec<u64>> {
    let told = |number: u64| Tensor::new(i64::try_from(number).unwrap_or(i64::MAX), &Device::Cpu);
    let lists = numbers
        .into_iter()
        .map(|number| Ok(vec![told(number)?]))
        .collect::<candle_core::Result<_>>();
    let of_all = mesh.process_allgather(lists.map_err(Error::Assemble)?)?;
    let numbers = of_all.iter().flatten().map(|told| Ok(told.to_scalar::<i64>()?.unsigned_abs()));
    numbers.collect::<candle_core::Result<_>>().map_err(Error::Assemble)
}

fn folder_name(step: u64) -> String {
    format!("step-{step:010}")
}

/// The step in the name of a folder.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Whether this is the name of a slot's file, in the folder of its checkpoint.
fn is_shard(name: &str) -> bool {
    name.starts_with("shard-") && name.ends_with(".safetensors") && !name.contains(['/', '\\'])
}

fn file_name(slot: usize, slots: usize) -> String {
    format!("shard-{:05}-of-{slots:05}.safetensors", slot + 1)
}

/// Writes tensors, and waits until they are on disk; returns the length of the file.
fn write_tensors(path: &Path, entries: &[(String, Tensor)]) -> Result<u64> {
    let on_host = entries.iter().map(|(key, items)| Ok((key, on_host(items)?)));
    let on_host = on_host.collect::<candle_core::Result<Vec<_>>>().map_err(Error::Assemble)?;
    let failed = |error: &dyn Display| file_error(path, error);
    // The writer makes a file for its owner alone; this one is for whom the system says.
    let permissions = File::create(path)
        .and_then(|file| file.metadata())
        .map_err(|error| failed(&error))?
        .permissions();
    safetensors::serialize_to_file(on_host, None, path).map_err(|error| failed(&error))?;
    let synced = File::options().write(true).open(path).and_then(|file| {
        file.set_permissions(permissions)?;
        file.sync_all()?;
        file.metadata()
    });
    Ok(synced.map_err(|error| failed(&error))?.len())
}

fn write_index(path: &Path, index: &Index) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = File::create(path)?;
        serde_json::to_writer_pretty(&mut file, index)?;
        file.sync_all()
    };
    write().map_err(|error| file_error(path, error))
}

/// Brings the names in a folder to disk, where the system has a way to say so.
fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|error| file_error(path, error))?;
    }
    Ok(())
}

/// Removes a checkpoint, which loses its name first.
fn retire(path: &Path) -> Result<()> {
    let partial = path.with_extension(PARTIAL);
    fs::rename(path, &partial).map_err(|error| file_error(path, error))?;
    remove(&partial)
}

fn remove(path: &Path) -> Result<()> {
    fs::remove_dir_all(path).map_err(|error| file_error(path, error))
}

/// A file of reasonable length.
fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_HEADER_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// What a file of a checkpoint holds, which must be as long as the index says.
fn read_header(path: &Path, bytes: u64) -> Result<Vec<(Key, Piece)>> {
    let failed = |error: &dyn Display| file_error(path, error);
    let found = fs::metadata(path).map_err(|error| failed(&error))?;
    if !found.is_file() || found.len() != bytes {
        return Err(failed(&format!(
            "is no file of {bytes} bytes, as the index says, but has {}",
            found.len()
        )));
    }
    let mut file = File::open(path).map_err(|error| failed(&error))?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|error| failed(&error))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES.min(bytes) {
        return Err(failed(&format!("has a header of {header_bytes} bytes in {bytes}")));
    }
    let header = BufReader::new(file.take(header_bytes));
    let metadata: Metadata = serde_json::from_reader(header).map_err(|error| failed(&error))?;
    let data_start = length.len() as u64 + header_bytes;
    if data_start + metadata.data_len() as u64 != bytes {
        return Err(failed(&format!(
            "describes {} bytes of tensors in {bytes}",
            metadata.data_len()
        )));
    }
    let piece = |(key, info): (String, &TensorInfo)| {
        let Some((kind, name, start)) = parse_key(&key) else {
            return Err(failed(&format!("what is {key}?")));
        };
        if info
            .shape
            .iter()
            .try_fold(1, |items: usize, &dim| items.checked_mul(dim))
            .and_then(|items| items.checked_add(start))
            .is_none()
        {
            return Err(failed(&format!("{key} has no end")));
        }
        let dtype = info.dtype.try_into().map_err(|error: candle_core::Error| failed(&error))?;
        let offset = data_start + info.data_offsets.0 as u64;
        let piece =
            Piece { start, shape: info.shape.clone(), dtype, file: path.to_owned(), offset };
        Ok(((kind.to_owned(), name.to_owned()), piece))
    };
    metadata.tensors().into_iter().map(piece).collect()
}

fn parse_key(key: &str) -> Option<(&str, &str, usize)> {
    let (kind, rest) = key.split_once('/')?;
    let (name, start) = rest.rsplit_once('@')?;
    Some((kind, name, start.parse().ok()?))
}

/// Reads items of a parameter, all of which lie in this piece.
fn read(piece: &Piece, items: Range<usize>) -> Result<Tensor> {
    let item = piece.dtype.size_in_bytes();
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(&piece.file)?;
        file.seek(SeekFrom::Start(piece.offset + ((items.start - piece.start) * item) as u64))?;
        let mut bytes = vec![0; items.len() * item];
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| file_error(&piece.file, error))?;
    Tensor::from_raw_buffer(&bytes, piece.dtype, &[items.len()], &Device::Cpu)
        .map_err(Error::Assemble)
}

fn file_error(path: &Path, reason: impl Display) -> Error {
    Error::File { path: path.to_owned(), reason: reason.to_string() }
}

/// The tensor in one piece on the processor.
fn on_host(x: &Tensor) -> candle_core::Result<Tensor> {
    x.contiguous()?.to_device(&Device::Cpu)
}
