//! The folder of a run: its description, its metrics, its checkpoints and its model.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, BufReader, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use core_types::files::{self as atomic, AtomicFolder};
use dist_checkpoint::Checkpoints;
use dist_train::{Metrics, peak_bytes};
use pmap_mesh::DeviceMesh;
use serde::Serialize;

use crate::{
    cost::traffic::StepTraffic,
    error::{Error, Result, run::RunError},
    files::{self, is_missing},
    folder::{INDEX, ONE_FILE},
    run::{
        damage, model_files,
        validations::{self, ValidationPoint},
    },
    spec::{self, Spec, session::Session},
};

const METRICS: &str = "metrics.jsonl";
const CHECKPOINTS: &str = "checkpoints";
const ADAPTER: &str = "adapter";
const MODEL_FOLDER: &str = "model";
const BEST: &str = "best";
const SAMPLE: &str = "sample.txt";

/// Returns the folder of run `number`: `runs/0001` for the first.
pub(crate) fn numbered(number: u64) -> PathBuf {
    Path::new("runs").join(format!("{number:04}"))
}

/// Returns the folder of the adapters of a run.
pub(crate) fn adapter_in(path: &Path) -> PathBuf {
    path.join(ADAPTER)
}

/// Returns the folder of a run's result: its model, or only its adapters.
pub(crate) fn product_of(path: &Path, spec: &Spec) -> PathBuf {
    if spec.recipe.lora.is_some() && !spec.finetune.merge {
        return adapter_in(path);
    }
    path.join(MODEL_FOLDER)
}

/// Returns the folder of the model with the lowest validation loss.
pub(crate) fn best_in(path: &Path) -> PathBuf {
    path.join(BEST)
}

/// Returns the file of the text generated at the end of a run.
pub fn sample_in(path: &Path) -> PathBuf {
    path.join(SAMPLE)
}

/// Makes a temporary folder next to `folder`, to write its content before it gets its name.
///
/// # Errors
///
/// [`Error::Write`] if it cannot be made.
pub(crate) fn folder_beside(folder: &Path) -> Result<AtomicFolder> {
    AtomicFolder::new(folder).map_err(|cause| Error::write(folder, cause))
}

/// Returns the checkpoints of the run with this description in `path`. Checkpoints of other runs
/// are rejected.
pub fn checkpoints(path: &Path, spec: &Spec) -> Checkpoints {
    let checkpoints = Checkpoints::new(path.join(CHECKPOINTS)).run(spec.identity());
    if spec.allow_non_finite { checkpoints.allow_non_finite() } else { checkpoints }
}

/// Reads the metrics of the run in `path`, which are empty if the file is missing. Damaged lines
/// are skipped with a warning.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be read.
pub fn metrics(path: &Path) -> Result<Metrics> {
    let path = path.join(METRICS);
    let metrics = read_metrics(&path)?.unwrap_or_default();
    damage::warn_damaged(&path, metrics.damaged());
    Ok(metrics)
}

/// Reads a file of metrics, of any length, or returns `None` if it does not exist.
fn read_metrics(path: &Path) -> Result<Option<Metrics>> {
    let Some(file) = files::open_if_there(path)? else { return Ok(None) };
    let metrics = Metrics::read_lines(BufReader::new(file));
    metrics.map(Some).map_err(|cause| Error::io(path, cause))
}

/// Returns the names of the files and folders of a run, or of a model, in the folder `path`.
///
/// # Errors
///
/// [`Error::Io`] if the folder cannot be read.
pub(crate) fn contents(path: &Path) -> Result<Vec<&'static str>> {
    let mut found = Vec::new();
    let names = [spec::FILE, METRICS, validations::FILE, MODEL_FOLDER, BEST, ADAPTER, CHECKPOINTS];
    // A run in the folder of a model would mix their files.
    for name in names.into_iter().chain([ONE_FILE, INDEX]) {
        let path = path.join(name);
        // A link counts, wherever it points.
        match fs::symlink_metadata(&path) {
            Ok(metadata)
                if metadata.is_dir() && name == CHECKPOINTS && !has_checkpoints(&path)? => {}
            Ok(_) => found.push(name),
            Err(error) if is_missing(&error) => {}
            Err(cause) => return Err(Error::io(path, cause)),
        }
    }
    Ok(found)
}

/// Returns true if the folder of checkpoints has complete or partial checkpoints. A run that failed
/// to start leaves at most its lock there.
fn has_checkpoints(checkpoints: &Path) -> Result<bool> {
    let entries = fs::read_dir(checkpoints).map_err(|cause| Error::io(checkpoints, cause))?;
    for entry in entries {
        let entry = entry.map_err(|cause| Error::io(checkpoints, cause))?;
        if entry.file_name().as_encoded_bytes().starts_with(b"step-") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The state of a run's folder. It changes when another process that trains the run saves a
/// checkpoint or ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RunSnapshot {
    spec: Option<Vec<u8>>,
    /// Length and time of each product of a run.
    products: Vec<Option<(u64, Option<SystemTime>)>>,
    /// Checkpoints and their times: a damaged one may be replaced.
    checkpoints: BTreeMap<OsString, Option<SystemTime>>,
}

impl RunSnapshot {
    /// Takes a snapshot. A snapshot from before the folder is read and a snapshot under the lock
    /// differ if the run continued in between.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be read.
    pub(crate) fn take(path: &Path) -> Result<Self> {
        let spec = files::read_if_there(&path.join(spec::FILE))?;
        let mut products = Vec::new();
        for name in [MODEL_FOLDER, ADAPTER] {
            products.push(length_and_time(&path.join(name))?);
        }
        Ok(Self { spec, products, checkpoints: checkpoint_times(&path.join(CHECKPOINTS))? })
    }
}

/// Returns the length of a file or folder and its time, or `None` if it does not exist.
fn length_and_time(path: &Path) -> Result<Option<(u64, Option<SystemTime>)>> {
    match fs::symlink_metadata(path) {
        // On systems without modification times, only the length is compared.
        Ok(metadata) => Ok(Some((metadata.len(), metadata.modified().ok()))),
        Err(error) if is_missing(&error) => Ok(None),
        Err(cause) => Err(Error::io(path, cause)),
    }
}

/// Returns the complete checkpoints in a folder with their times. A checkpoint that disappears
/// meanwhile is skipped.
fn checkpoint_times(folder: &Path) -> Result<BTreeMap<OsString, Option<SystemTime>>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if is_missing(&error) => return Ok(BTreeMap::new()),
        Err(cause) => return Err(Error::io(folder, cause)),
    };
    let mut saved = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|cause| Error::io(folder, cause))?;
        let name = entry.file_name();
        let digits = name.as_encoded_bytes().strip_prefix(b"step-");
        if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_digit)) {
            continue;
        }
        match entry.metadata() {
            Ok(metadata) => drop(saved.insert(name, metadata.modified().ok())),
            Err(error) if is_missing(&error) => {}
            Err(cause) => return Err(Error::io(entry.path(), cause)),
        }
    }
    Ok(saved)
}

/// Returns true if the run in `path` is complete: it has metrics up to its last step, and the model
/// that it wrote. Warns about another model.
///
/// # Errors
///
/// [`Error::Io`] if the folder cannot be read, or if a file takes the place of the model.
pub fn is_complete(path: &Path, spec: &Spec) -> Result<bool> {
    let model = product_of(path, spec);
    if length_and_time(&model)?.is_none() {
        return Ok(false);
    }
    let fault = completion_fault(path, spec)?;
    if let Some(fault) = &fault {
        tracing::warn!("{} does not complete the run: {fault}", model.display());
    }
    Ok(fault.is_none())
}

/// Returns the reason why the run is incomplete, or `None` if it is complete.
fn completion_fault(path: &Path, spec: &Spec) -> Result<Option<String>> {
    let model = product_of(path, spec);
    if !model.is_dir() {
        // The model of the run cannot replace this file.
        return Err(Error::io(model, io::Error::other("it is not a folder")));
    }
    let done = metrics(path)?.done();
    let steps = spec.steps;
    if done != steps {
        return Ok(Some(format!("there are metrics of {done} of {steps} steps")));
    }
    if spec.recipe.lora.is_some() && !adapter_in(path).is_dir() {
        return Ok(Some("its adapter is gone".into()));
    }
    match model_files::fingerprint(&model, &spec.model_files) {
        Ok(found) if Some(&found) == spec.model_fingerprint.as_ref() => Ok(None),
        Ok(_) => Ok(Some("it is not as the run wrote it".into())),
        Err(error) if is_missing(&error) => Ok(Some("it is gone".into())),
        Err(cause) => Err(Error::io(model, cause)),
    }
}

/// Checks the folders of a complete run that [`is_complete`] does not compare: the best model, and the
/// adapters beside a merged model. Resuming the run would not write them again.
///
/// # Errors
///
/// The errors of damaged weights.
pub(crate) fn check_other_products(path: &Path) -> Result<()> {
    let written = [best_in(path), adapter_in(path)].into_iter().filter(|folder| folder.exists());
    for folder in written {
        model_files::verify(&folder)?;
    }
    Ok(())
}

/// Makes the first folder of [`numbered`] that does not exist, and returns its number.
///
/// # Errors
///
/// [`Error::Write`] if it cannot be made.
pub(crate) fn claim_number() -> Result<u64> {
    let mut number = 1_u64;
    loop {
        let path = numbered(number);
        let parent = path.parent().map_or(Ok(()), fs::create_dir_all);
        // If two programs start at once, only one of them creates this folder.
        match parent.and_then(|()| fs::create_dir(&path)) {
            Ok(()) => return Ok(number),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(cause) => return Err(Error::write(path, cause)),
        }
    }
}

/// The folder of a run in training. Another run is never overwritten.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    /// Description of the run. Its last session is the current one.
    spec: Spec,
    metrics: File,
}

impl RunFolder {
    /// Makes the folder of a run, which must not hold one: see [`check_empty`].
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if another program has made it meanwhile.
    pub(crate) fn create(path: &Path, spec: &Spec) -> Result<Self> {
        fs::create_dir_all(path).map_err(|cause| Error::write(path, cause))?;
        // If two programs start at once, only one of them creates this file.
        spec.write_new(path)?;
        let metrics = path.join(METRICS);
        let file = File::options()
            .append(true)
            .create_new(true)
            .open(&metrics)
            .map_err(|cause| Error::write(&metrics, cause))?;
        Ok(Self { path: path.into(), spec: spec.clone(), metrics: file })
    }

    /// Opens the folder of a run to resume it at `step`, or to start it.
    ///
    /// Metrics from `step` on are dropped, since the run repeats these steps. The file is backed up
    /// first if lines are damaged, or if no checkpoint is left and the metrics are the only trace
    /// of the steps.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Write`] if a file cannot be read or written.
    pub(crate) fn resume(path: &Path, spec: &Spec, step: u64) -> Result<Self> {
        fs::create_dir_all(path).map_err(|cause| Error::write(path, cause))?;
        restore_folders(path, spec)?;
        remove_partial(path);
        // The description comes first: no other file is of a run without one.
        spec.write(path)?;
        let metrics = path.join(METRICS);
        let recorded = read_metrics(&metrics)?;
        // A run may be killed before its first step, and `--resume` may start one.
        if recorded.is_none() {
            atomic::write(&metrics, b"").map_err(|cause| Error::write(&metrics, cause))?;
        }
        let mut kept = recorded.unwrap_or_default();
        damage::back_up_damaged(&metrics, kept.damaged())?;
        if step == 0 && kept.done() > 0 {
            // A run killed before its first checkpoint looks the same, and must resume without user
            // action.
            let backup = keep_longest(path, METRICS, kept.done())?;
            tracing::warn!(
                "{} ends with step {}, but there is no checkpoint in {}: the run starts anew, and \
                 the longest file is backed up as {}",
                metrics.display(),
                kept.done(),
                path.join(CHECKPOINTS).display(),
                backup.display()
            );
            atomic::write(&metrics, b"").map_err(|cause| Error::write(&metrics, cause))?;
        }
        if step == 0 {
            keep_unsaved(path, spec)?;
        }
        kept.truncate(step);
        for gap in kept.missing(step) {
            let name = metrics.display();
            let steps = match gap.end - gap.start {
                1 => format!("step {}", gap.end),
                _ => format!("steps {} to {}", gap.start + 1, gap.end),
            };
            tracing::warn!("{name} lacks the metrics of {steps}");
        }
        kept.rewrite(&metrics).map_err(|cause| Error::write(&metrics, cause))?;
        validations::keep_up_to(path, step)?;
        let file = File::options()
            .append(true)
            .open(&metrics)
            .map_err(|cause| Error::write(&metrics, cause))?;
        Ok(Self { path: path.into(), spec: spec.clone(), metrics: file })
    }

    /// Returns this session.
    pub(crate) fn session(&self) -> &Session {
        self.spec.session()
    }

    /// Records the peak of this session's memory.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the file cannot be written.
    pub(crate) fn end_session(&mut self) -> Result<()> {
        // Only CPU devices use the memory of the process.
        if let Some(session) = self.spec.sessions.last_mut()
            && session.on_processors
        {
            session.peak_bytes = peak_bytes();
        }
        self.spec.write(&self.path)
    }

    /// Sets the collectives of the first device in the last step.
    pub(crate) fn set_step_traffic(&mut self, traffic: StepTraffic) {
        if let Some(session) = self.spec.sessions.last_mut() {
            session.step_traffic = Some(traffic);
        }
    }

    /// Appends one line to the metrics.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the file cannot be written.
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.metrics, "{line}"));
        written.map_err(|cause| Error::write(self.path.join(METRICS), cause))
    }

    /// Appends the result of a validation, and syncs it, so that no checkpoint is ahead of it.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the file cannot be written.
    pub(crate) fn append_validation(&self, found: ValidationPoint) -> Result<()> {
        let path = self.path.join(validations::FILE);
        let line = serde_json::to_string(&found).map_err(io::Error::from);
        let file = File::options().create(true).append(true).open(&path);
        let written = line.and_then(|line| {
            let mut file = file?;
            writeln!(file, "{line}")?;
            file.sync_data()
        });
        written.map_err(|cause| Error::write(path, cause))
    }

    /// Syncs the metrics to disk, so that they never have fewer steps than a checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the file cannot be written.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.metrics.sync_data().and_then(|()| self.check_not_removed());
        synced.map_err(|cause| Error::write(self.path.join(METRICS), cause))
    }

    /// Checks that the folder was not removed while the run trains, since further metrics would be
    /// lost.
    #[cfg(unix)]
    fn check_not_removed(&self) -> io::Result<()> {
        use std::os::unix::fs::MetadataExt;

        match self.metrics.metadata()?.nlink() {
            0 => Err(io::Error::other("it was removed while the run was writing it")),
            _ => Ok(()),
        }
    }

    #[cfg(not(unix))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as on other systems")]
    fn check_not_removed(&self) -> io::Result<()> {
        Ok(())
    }

    /// Gives the written model folder its final name, which completes the run.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the file cannot be written.
    pub(crate) fn save(&mut self, partial: AtomicFolder) -> Result<()> {
        self.set_fingerprint(partial.path())?;
        let folder = product_of(&self.path, &self.spec);
        if let Some(backup) = move_model(&folder)? {
            tracing::warn!(
                "the old content of {} is backed up as {}",
                folder.display(),
                backup.display()
            );
        }
        partial.persist().map_err(|cause| Error::write(folder, cause))
    }

    /// Records the fingerprint of the model before the model gets its name, so that no model is
    /// without one.
    fn set_fingerprint(&mut self, model: &Path) -> Result<()> {
        let failed = |cause| Error::io(model, cause);
        let names = model_files::names(model).map_err(failed)?;
        let fingerprint = model_files::fingerprint(model, &names).map_err(failed)?;
        self.spec.model_files = names;
        self.spec.model_fingerprint = Some(fingerprint);
        self.spec.write(&self.path)
    }
}

/// Ends replacements of folders that a kill has interrupted.
fn restore_folders(path: &Path, spec: &Spec) -> Result<()> {
    for folder in [product_of(path, spec), adapter_in(path), best_in(path)] {
        atomic::restore_replaced(&folder).map_err(|cause| Error::write(folder, cause))?;
    }
    Ok(())
}

/// Removes partial files of a killed process from a complete run, unless another process has locked
/// it.
pub(crate) fn remove_leftovers(path: &Path, spec: &Spec) {
    if partial_in(path).is_empty() {
        return;
    }
    let checkpoints = checkpoints(path, spec);
    let mesh = DeviceMesh::builder().axis("device", 1).pin(false).cpu();
    if mesh.is_ok_and(|mesh| checkpoints.lock(&mesh).is_ok()) {
        remove_partial(path);
    }
}

/// Removes partial files and models of a killed run. Errors are ignored, since leftovers do no
/// harm.
fn remove_partial(run: &Path) {
    for path in partial_in(run) {
        drop(remove_all(&path));
    }
}

/// Returns the partial files and folders in a run.
fn partial_in(run: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(run) else { return Vec::new() };
    let partial = entries.flatten().filter(|entry| atomic::is_partial(entry.file_name()));
    partial.map(|entry| entry.path()).collect()
}

/// Removes a file, or a folder with its content.
fn remove_all(path: &Path) -> io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Checks that a folder holds no run, not even a part of a run.
///
/// # Errors
///
/// [`RunError::Occupied`] if it does.
pub(crate) fn check_empty(path: &Path) -> Result<()> {
    if contents(path)?.is_empty() {
        return Ok(());
    }
    Err(RunError::Occupied { path: path.into() }.into())
}

/// Backs up the models and validations that a restarted run would replace.
fn keep_unsaved(path: &Path, spec: &Spec) -> Result<()> {
    let validations = validations::validations(path, spec.steps)?;
    let trained = validations.last().map_or(0, |last| last.step);
    if best_in(path).exists() {
        let backup = keep_longest(path, BEST, trained)?;
        tracing::warn!(
            "the run starts anew, and the best model that was trained longest is backed up as {}",
            backup.display()
        );
    }
    for model in [product_of(path, spec), adapter_in(path)] {
        if let Some(backup) = move_model(&model)? {
            tracing::warn!(
                "the run starts anew, and the old model is backed up as {}",
                backup.display()
            );
        }
    }
    match length_and_time(&path.join(validations::FILE))? {
        Some((length, _)) if length > 0 => keep_longest(path, validations::FILE, trained).map(drop),
        Some(_) | None => Ok(()),
    }
}

/// Backs up a file or folder of a run under its name with `.unsaved-STEPS`, the number of its
/// trained steps, and returns the backup. Only the one that was trained longest stays, since a run
/// may be killed many times before its first checkpoint.
fn keep_longest(run: &Path, name: &str, trained: u64) -> Result<PathBuf> {
    let path = run.join(name);
    let failed = |cause| Error::write(&path, cause);
    for entry in fs::read_dir(run).map_err(failed)? {
        let earlier = entry.map_err(failed)?.path();
        let steps = unsaved_steps(&earlier, &path);
        if steps.is_some_and(|steps| steps >= trained) {
            remove_all(&path).map_err(failed)?;
            return Ok(earlier);
        }
        if steps.is_some() {
            remove_all(&earlier).map_err(failed)?;
        }
    }
    let stem = path.file_stem().unwrap_or_default().display();
    let mut backup = path.with_file_name(format!("{stem}.unsaved-{trained:04}"));
    if let Some(extension) = path.extension() {
        backup.add_extension(extension);
    }
    atomic::rename(&path, &backup).map_err(failed)?;
    Ok(backup)
}

/// Returns the steps in the name of a backup of `path`, or `None` for another file.
fn unsaved_steps(backup: &Path, path: &Path) -> Option<u64> {
    let name = backup.file_name()?.to_str()?.strip_prefix(path.file_stem()?.to_str()?)?;
    let extension =
        path.extension().map_or_else(String::new, |extension| format!(".{}", extension.display()));
    name.strip_prefix(".unsaved-")?.strip_suffix(&extension)?.parse().ok()
}

/// Renames an existing model that does not complete its run, and returns the new path. The run is
/// locked, so no other process does so at the same time.
fn move_model(model: &Path) -> Result<Option<PathBuf>> {
    let mut number = 1_u64;
    loop {
        let mut name = model.file_stem().map_or_else(OsString::new, OsString::from);
        name.push(format!(".unsaved-{number:04}"));
        let backup = model.with_file_name(name);
        match fs::symlink_metadata(&backup) {
            Ok(_) => number += 1,
            Err(error) if is_missing(&error) => {
                return match fs::rename(model, &backup) {
                    Ok(()) => Ok(Some(backup)),
                    Err(error) if is_missing(&error) => Ok(None),
                    Err(cause) => Err(Error::write(model, cause)),
                };
            }
            Err(cause) => return Err(Error::io(backup, cause)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::spec::tests::spec;

    /// Returns the metrics line of a step.
    pub(crate) fn line(step: u64, loss: &str, seconds: f64) -> String {
        format!(
            "{{\"step\": {step}, \"epoch\": 0, \"loss\": {loss}, \"learning_rate\": 0.1, \
             \"sequences\": 1, \
             \"real_tokens\": 5, \"padded_tokens\": 8, \"seconds\": {seconds}}}\n"
        )
    }

    #[test]
    fn only_the_written_model_completes_a_run() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let mut run = RunFolder::create(&path, &spec()).unwrap();
        let is_complete = |run: &RunFolder| is_complete(&path, &run.spec).unwrap();
        assert!(!is_complete(&run), "there is no model");
        let partial = folder_beside(&path.join(MODEL_FOLDER)).unwrap();
        fs::write(partial.path().join("weights"), "w").unwrap();
        run.save(partial).unwrap();
        let steps = run.spec.steps;
        fs::write(path.join(METRICS), lines(0..steps - 1)).unwrap();
        assert!(!is_complete(&run), "a step is missing");
        fs::write(path.join(METRICS), lines(0..steps)).unwrap();
        assert!(is_complete(&run));
        fs::write(path.join(MODEL_FOLDER).join("weights"), "x").unwrap();
        assert!(!is_complete(&run), "the model was changed");
    }

    #[test]
    fn a_merged_model_without_its_adapter_completes_no_run() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        let mut adapted = spec();
        adapted.recipe.lora = Some(2);
        adapted.finetune.merge = true;
        let mut run = RunFolder::create(&path, &adapted).unwrap();
        let partial = folder_beside(&path.join(MODEL_FOLDER)).unwrap();
        fs::write(partial.path().join("weights"), "w").unwrap();
        run.save(partial).unwrap();
        fs::write(path.join(METRICS), lines(0..adapted.steps)).unwrap();
        assert!(!is_complete(&path, &run.spec).unwrap());
        fs::create_dir(adapter_in(&path)).unwrap();
        assert!(is_complete(&path, &run.spec).unwrap());
    }

    #[test]
    fn checkpoints_count_as_a_run() {
        let run = tempfile::tempdir().unwrap();
        fs::create_dir(run.path().join(CHECKPOINTS)).unwrap();
        assert!(contents(run.path()).unwrap().is_empty());
        fs::create_dir(run.path().join(CHECKPOINTS).join("step-0000000004")).unwrap();
        assert_eq!(contents(run.path()).unwrap(), [CHECKPOINTS]);
    }

    #[test]
    fn validations_after_the_checkpoint_are_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        fs::write(run.join(METRICS), lines(0..6)).unwrap();
        fs::write(run.join(validations::FILE), point(4) + &point(6)).unwrap();
        RunFolder::resume(&run, &spec(), 4).unwrap();
        assert_eq!(fs::read_to_string(run.join(validations::FILE)).unwrap(), point(4));
    }

    /// Returns the validation line of a step.
    fn point(step: u64) -> String {
        format!("{{\"step\":{step},\"loss\":1.5,\"predictions\":2.0}}\n")
    }

    fn is_rejected(path: &Path) -> bool {
        check_empty(path).is_err()
    }

    #[test]
    fn existing_run_is_never_overwritten() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        assert!(!is_rejected(&run));
        RunFolder::create(&run, &spec()).unwrap();
        assert_eq!(Spec::read(&run).unwrap(), Some(spec()));
        assert!(is_rejected(&run));
        assert!(RunFolder::create(&run, &spec()).is_err(), "another program made it meanwhile");

        for name in [MODEL_FOLDER, METRICS, spec::FILE, CHECKPOINTS, ONE_FILE, INDEX] {
            let other = parent.path().join(name.replace('.', "-"));
            fs::create_dir(&other).unwrap();
            fs::write(other.join(name), "kept").unwrap();
            assert!(is_rejected(&other));
            assert_eq!(fs::read_to_string(other.join(name)).unwrap(), "kept");
        }
        let file = RunFolder::create(&run.join(METRICS), &spec());
        assert!(matches!(file, Err(Error::Write { .. })), "a file is not a folder");
    }

    fn lines(steps: std::ops::Range<u64>) -> String {
        steps.map(|step| line(step, "1", 1.0)).collect()
    }

    #[test]
    fn metrics_after_the_checkpoint_are_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        // The last line is truncated.
        fs::write(run.join(METRICS), lines(0..6) + "{\"ste").unwrap();
        for (step, kept) in [(6, 6), (4, 4), (0, 0)] {
            let mut resumed = RunFolder::resume(&run, &spec(), step).unwrap();
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), lines(0..kept));
            resumed.append(&serde_json::json!({ "step": kept })).unwrap();
            let appended = format!("{}{{\"step\":{kept}}}\n", lines(0..kept));
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), appended);
            fs::write(run.join(METRICS), lines(0..kept)).unwrap();
        }
        let started = parent.path().join("started");
        RunFolder::resume(&started, &spec(), 0).unwrap();
        assert_eq!(Spec::read(&started).unwrap(), Some(spec()));
    }

    #[test]
    fn damaged_metrics_are_backed_up() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        let damaged = lines(0..2) + "damage\n" + &lines(3..6);
        for beside in ["metrics.damaged-0001.jsonl", "metrics.damaged-0002.jsonl"] {
            fs::write(run.join(METRICS), &damaged).unwrap();
            RunFolder::resume(&run, &spec(), 5).unwrap();
            assert_eq!(fs::read_to_string(run.join(beside)).unwrap(), damaged);
            let kept = lines(0..2) + &lines(3..5);
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), kept);
        }
    }

    #[test]
    fn longest_unsaved_results_stay() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        for (trained, kept) in [(4, 4), (8, 8), (2, 8), (8, 8)] {
            fs::create_dir(run.join(BEST)).unwrap();
            fs::write(run.join(BEST).join("step"), trained.to_string()).unwrap();
            fs::write(run.join(validations::FILE), point(trained)).unwrap();
            fs::write(run.join(METRICS), lines(0..trained)).unwrap();
            RunFolder::resume(&run, &spec(), 0).unwrap();
            let names = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name());
            let copies = names.filter(|name| name.to_str().unwrap().contains("unsaved"));
            assert_eq!(copies.count(), 3);
            let copy = |name: String| fs::read_to_string(run.join(name)).unwrap();
            assert_eq!(copy(format!("best.unsaved-{kept:04}/step")), kept.to_string());
            assert_eq!(copy(format!("validation.unsaved-{kept:04}.jsonl")), point(kept));
            assert_eq!(copy(format!("metrics.unsaved-{kept:04}.jsonl")), lines(0..kept));
            assert_eq!(copy(METRICS.into()), "");
        }
    }

    #[test]
    fn locked_runs_keep_their_partial_files() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        let partial = folder_beside(&run.join(MODEL_FOLDER)).unwrap();
        let mesh = DeviceMesh::cpu(1).unwrap();
        let lock = checkpoints(&run, &spec());
        lock.lock(&mesh).unwrap();
        remove_leftovers(&run, &spec());
        assert!(partial.path().exists());
        drop(lock);
        remove_leftovers(&run, &spec());
        assert!(!partial.path().exists());
    }

    #[test]
    fn interrupted_replacement_is_ended() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunFolder::create(&run, &spec()).unwrap();
        fs::write(run.join(METRICS), lines(0..3)).unwrap();
        fs::create_dir(run.join("best.replaced")).unwrap();
        RunFolder::resume(&run, &spec(), 2).unwrap();
        assert!(run.join(BEST).is_dir() && !run.join("best.replaced").exists());
    }

    #[cfg(unix)]
    #[test]
    fn removed_folder_is_detected() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        let open = RunFolder::create(&run, &spec()).unwrap();
        open.sync().unwrap();
        fs::remove_dir_all(&run).unwrap();
        assert!(open.sync().unwrap_err().to_string().contains("removed"));
    }
}
