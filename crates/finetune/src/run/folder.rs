//! The folder of a run: what it is, its metrics, its checkpoints and its model.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use candle_distributed::{
    train::{Checkpoints, Metrics, peak_bytes},
    types::files::{self, AtomicFolder},
};
use serde::Serialize;

use crate::{
    error::{Error, Result},
    input, output,
    train::{
        curve, model_file,
        session::Session,
        settings::{self, Settings},
        traffic::StepTraffic,
        validation::{self, Validated},
    },
};

const METRICS: &str = "metrics.jsonl";
const CURVE: &str = "loss.svg";
const CHECKPOINTS: &str = "checkpoints";
const ADAPTER: &str = "adapter";
const MODEL_FOLDER: &str = "model";
const BEST: &str = "best";
const SAMPLE: &str = "sample.txt";

/// The folder of run `number`, where `--out` names none.
pub(crate) fn numbered(number: u32) -> PathBuf {
    Path::new("runs").join(format!("{number:04}"))
}

/// The folder of the adapters that a run has trained, once it has ended.
pub(crate) fn adapter_in(path: &Path) -> PathBuf {
    path.join(ADAPTER)
}

/// Returns the folder that a run ends with: of its model, or of its adapters alone.
pub(crate) fn product_of(path: &Path, settings: &Settings) -> PathBuf {
    if settings.recipe.lora.is_some() && !settings.finetune.merge {
        return adapter_in(path);
    }
    path.join(MODEL_FOLDER)
}

/// The folder of what did best on the examples that were held out.
pub(crate) fn best_in(path: &Path) -> PathBuf {
    path.join(BEST)
}

/// The file of what the model of a run wrote at the end.
pub(crate) fn sample_in(path: &Path) -> PathBuf {
    path.join(SAMPLE)
}

/// Makes a folder beside another one, in which that is written before it gets its name.
pub(crate) fn folder_beside(folder: &Path) -> Result<AtomicFolder> {
    AtomicFolder::new(folder).map_err(|source| Error::write(folder, source))
}

/// The checkpoints of the run with these settings in `path`; those of other runs are refused.
pub(crate) fn checkpoints(path: &Path, settings: &Settings) -> Checkpoints {
    let checkpoints = Checkpoints::new(path.join(CHECKPOINTS)).run(settings.identity());
    if settings.allow_non_finite { checkpoints.allow_non_finite() } else { checkpoints }
}

/// The steps of the run in `path`. Damaged lines are left out, and said.
pub(crate) fn metrics(path: &Path) -> Result<Metrics> {
    let path = path.join(METRICS);
    let metrics = Metrics::parse(&input::read_if_there(&path)?.unwrap_or_default());
    if !metrics.damaged().is_empty() {
        output::warning(format_args!("{} {}", path.display(), output::damage(metrics.damaged())));
    }
    Ok(metrics)
}

/// The names of what the folder `path` holds of a run.
pub(crate) fn contents(path: &Path) -> Result<Vec<&'static str>> {
    let mut found = Vec::new();
    for name in
        [settings::FILE, METRICS, validation::FILE, MODEL_FOLDER, BEST, ADAPTER, CHECKPOINTS]
    {
        let path = path.join(name);
        // A link counts wherever it leads.
        match fs::symlink_metadata(&path) {
            Ok(known) if known.is_dir() && name == CHECKPOINTS && !has_steps(&path)? => {}
            Ok(_) => found.push(name),
            Err(error) if is_nothing(&error) => {}
            Err(source) => return Err(Error::read(path, source)),
        }
    }
    Ok(found)
}

/// Whether there are checkpoints in their folder, or parts of some. A run that could not start has
/// left at most its lock.
fn has_steps(checkpoints: &Path) -> Result<bool> {
    let entries = fs::read_dir(checkpoints).map_err(|source| Error::read(checkpoints, source))?;
    for entry in entries {
        let entry = entry.map_err(|source| Error::read(checkpoints, source))?;
        if entry.file_name().as_encoded_bytes().starts_with(b"step-") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What decides how a run is resumed, as it lies in its folder: another process that trains the run
/// changes some of it when it saves a checkpoint or ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    settings: Option<Vec<u8>>,
    /// The length of each file or folder that a run may end with, and when it was written.
    products: Vec<Option<(u64, Option<SystemTime>)>>,
    /// The checkpoints, and when each was written: one that is damaged may be replaced.
    checkpoints: BTreeMap<OsString, Option<SystemTime>>,
}

impl Seen {
    /// What there is now. Call it before the rest is read: what changes meanwhile is then noticed
    /// by a second call, which is to come once the run is locked.
    pub(crate) fn in_folder(path: &Path) -> Result<Self> {
        let settings = input::read_if_there(&path.join(settings::FILE))?;
        let products = [MODEL_FOLDER, ADAPTER].map(|name| path.join(name));
        let products = products.iter().map(|product| written(product)).collect::<Result<_>>()?;
        Ok(Self { settings, products, checkpoints: saved(&path.join(CHECKPOINTS))? })
    }
}

/// The length of a file or folder, and when it was written, if it is there.
fn written(path: &Path) -> Result<Option<(u64, Option<SystemTime>)>> {
    match fs::symlink_metadata(path) {
        // Some systems know no times; then the length alone is compared.
        Ok(known) => Ok(Some((known.len(), known.modified().ok()))),
        Err(error) if is_nothing(&error) => Ok(None),
        Err(source) => Err(Error::read(path, source)),
    }
}

/// The checkpoints in their folder, and when each was written. What is not whole yet has another
/// name; what has gone while it is looked at was no longer there.
fn saved(folder: &Path) -> Result<BTreeMap<OsString, Option<SystemTime>>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if is_nothing(&error) => return Ok(BTreeMap::new()),
        Err(source) => return Err(Error::read(folder, source)),
    };
    let mut saved = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|source| Error::read(folder, source))?;
        let name = entry.file_name();
        let digits = name.as_encoded_bytes().strip_prefix(b"step-");
        if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_digit)) {
            continue;
        }
        match entry.metadata() {
            Ok(known) => drop(saved.insert(name, known.modified().ok())),
            Err(error) if is_nothing(&error) => {}
            Err(source) => return Err(Error::read(entry.path(), source)),
        }
    }
    Ok(saved)
}

/// Whether an error says that there is nothing, because of what is missing or is no folder.
fn is_nothing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Whether the run of these settings in `path` is complete: there are metrics up to its last step,
/// and the model that it ended with. A model that is not that one is said.
pub(crate) fn is_complete(path: &Path, settings: &Settings) -> Result<bool> {
    let model = product_of(path, settings);
    if written(&model)?.is_none() {
        return Ok(false);
    }
    let fault = incomplete(path, settings)?;
    if let Some(fault) = &fault {
        output::warning(format_args!("{} does not complete the run: {fault}", model.display()));
    }
    Ok(fault.is_none())
}

/// Why the model in `path` does not complete the run of these settings, if it does not.
fn incomplete(path: &Path, settings: &Settings) -> Result<Option<String>> {
    let model = product_of(path, settings);
    if !model.is_dir() {
        // The model of the run could not take its place.
        return Err(Error::usage(format!("{} is not a folder", model.display())));
    }
    let done = metrics(path)?.done();
    let steps = settings.steps;
    if done != steps {
        return Ok(Some(format!("there are metrics of {done} of {steps} steps")));
    }
    if settings.recipe.lora.is_some() && !adapter_in(path).is_dir() {
        return Ok(Some("its adapter is gone".into()));
    }
    match model_file::fingerprint_of_model(&model, &settings.model_files) {
        Ok(found) if Some(&found) == settings.model_fingerprint.as_ref() => Ok(None),
        Ok(_) => Ok(Some("it is not as the run wrote it".into())),
        Err(error) if is_nothing(&error) => Ok(Some("it is gone".into())),
        Err(source) => Err(Error::read(model, source)),
    }
}

/// Makes the first folder of those that [`numbered`] names which is not there yet, and returns its
/// number.
pub(crate) fn claim_number() -> Result<u32> {
    let mut number = 1_u32;
    loop {
        let path = numbered(number);
        let parent = path.parent().map_or(Ok(()), fs::create_dir_all);
        // Of two programs that start at once, one makes this folder and the other fails to.
        match parent.and_then(|()| fs::create_dir(&path)) {
            Ok(()) => return Ok(number),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(source) => return Err(Error::write(path, source)),
        }
    }
}

/// A folder that holds one run and never overwrites another.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// The last of its sessions is this one.
    settings: Settings,
    metrics: File,
}

impl RunDir {
    /// Makes the folder `path`, which must not hold a run: [`refuse_contents`] says so beforehand.
    pub(crate) fn create(path: &Path, settings: &Settings) -> Result<Self> {
        fs::create_dir_all(path).map_err(|source| Error::write(path, source))?;
        // Of two programs that start at once, one makes this file and the other fails to.
        settings.write_new(path)?;
        let metrics = path.join(METRICS);
        let file = File::create_new(&metrics).map_err(|source| Error::write(&metrics, source))?;
        Ok(Self { path: path.into(), settings: settings.clone(), metrics: file })
    }

    /// Opens the folder `path` to resume at `step`: metrics from there on are dropped, because the
    /// steps are about to be done again. Damaged ones are kept beside, and so are all where no
    /// checkpoint is left: nothing else tells that these steps were ever done.
    pub(crate) fn resume(path: &Path, settings: &Settings, step: u64) -> Result<Self> {
        fs::create_dir_all(path).map_err(|source| Error::write(path, source))?;
        remove_partial(path);
        let metrics = path.join(METRICS);
        // A run may be killed before its first step, and `--resume` may start one.
        let known = input::read_if_there(&metrics)?.unwrap_or_default();
        let mut kept = Metrics::parse(&known);
        output::keep_damaged(&metrics, kept.damaged(), &known)?;
        if step == 0 && kept.done() > 0 {
            // A run that is killed before its first checkpoint leaves the same, and must go on
            // without anybody's help.
            let beside = output::back_up(&metrics, "unsaved", &known)?;
            output::warning(format_args!(
                "{} ends with step {}, but there is no checkpoint in {}: the run starts anew, and \
                 the whole file is kept as {}",
                metrics.display(),
                kept.done(),
                path.join(CHECKPOINTS).display(),
                beside.display()
            ));
        }
        if step == 0 {
            keep_unsaved(path, settings)?;
        }
        kept.truncate(step);
        for gap in kept.missing(step) {
            let name = metrics.display();
            let steps = match gap.end - gap.start {
                1 => format!("step {}", gap.end),
                _ => format!("steps {} to {}", gap.start + 1, gap.end),
            };
            output::warning(format_args!("{name} lacks the metrics of {steps}"));
        }
        output::file(&metrics, &kept.lines(&known))?;
        validation::keep_up_to(path, step)?;
        let file = File::options().append(true).open(&metrics);
        let file = file.map_err(|source| Error::write(&metrics, source))?;
        settings.write(path)?;
        Ok(Self { path: path.into(), settings: settings.clone(), metrics: file })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// This session.
    pub(crate) fn session(&self) -> &Session {
        self.settings.session()
    }

    /// Adds to the settings how much memory this session took, and draws how the run went so far.
    pub(crate) fn end_session(&mut self) -> Result<()> {
        // Memory of other devices is not that of the process.
        if let Some(session) = self.settings.sessions.last_mut()
            && session.on_processors
        {
            session.peak_bytes = peak_bytes();
        }
        self.settings.write(&self.path)?;
        let held_out = validation::found_in(&self.path, self.settings.steps)?;
        let curve = curve::draw(&metrics(&self.path)?, &held_out)?;
        output::file(&self.path.join(CURVE), curve.as_bytes())
    }

    /// Remembers what the first device handed over in a step.
    pub(crate) fn set_step_traffic(&mut self, traffic: StepTraffic) {
        if let Some(session) = self.settings.sessions.last_mut() {
            session.step_traffic = Some(traffic);
        }
    }

    /// Appends one line to the metrics.
    pub(crate) fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line).map_err(io::Error::from);
        let written = line.and_then(|line| writeln!(self.metrics, "{line}"));
        written.map_err(|source| Error::write(self.path.join(METRICS), source))
    }

    /// Appends what a validation has found to its file, and syncs that: no checkpoint is ahead of it.
    pub(crate) fn append_validation(&self, found: Validated) -> Result<()> {
        let path = self.path.join(validation::FILE);
        let line = serde_json::to_string(&found).map_err(io::Error::from);
        let file = File::options().create(true).append(true).open(&path);
        let written = line.and_then(|line| {
            let mut file = file?;
            writeln!(file, "{line}")?;
            file.sync_data()
        });
        written.map_err(|source| Error::write(path, source))
    }

    /// Syncs the metrics to disk, so that they never have fewer steps than a checkpoint.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.metrics.sync_data().and_then(|()| self.refuse_removed());
        synced.map_err(|source| Error::write(self.path.join(METRICS), source))
    }

    /// Notices when the folder was removed while the run trains: what is written to a file without a
    /// name is lost.
    #[cfg(unix)]
    fn refuse_removed(&self) -> io::Result<()> {
        use std::os::unix::fs::MetadataExt;

        match self.metrics.metadata()?.nlink() {
            0 => Err(io::Error::other("it was removed while the run was writing it")),
            _ => Ok(()),
        }
    }

    #[cfg(not(unix))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as on other systems")]
    fn refuse_removed(&self) -> io::Result<()> {
        Ok(())
    }

    /// Gives the folder of the model, which is written, its name; that completes the run.
    pub(crate) fn save(&mut self, partial: AtomicFolder) -> Result<()> {
        self.set_fingerprint(partial.path())?;
        let folder = product_of(&self.path, &self.settings);
        if let Some(beside) = move_model(&folder)? {
            output::warning(format_args!(
                "what was in {} is kept as {}",
                folder.display(),
                beside.display()
            ));
        }
        partial.persist().map_err(|source| Error::write(folder, source))
    }

    /// Records the model that is about to get its name: it is never there without that.
    fn set_fingerprint(&mut self, model: &Path) -> Result<()> {
        let failed = |source| Error::read(model, source);
        let names = model_file::names_in(model).map_err(failed)?;
        let fingerprint = model_file::fingerprint_of_model(model, &names).map_err(failed)?;
        self.settings.model_files = names;
        self.settings.model_fingerprint = Some(fingerprint);
        self.settings.write(&self.path)
    }
}

/// Removes what a run has left that was killed while it wrote a file or its model. What cannot be
/// removed harms nobody.
fn remove_partial(run: &Path) {
    let Ok(entries) = fs::read_dir(run) else { return };
    for entry in entries.flatten() {
        if !files::is_partial(entry.file_name()) {
            continue;
        }
        let path = entry.path();
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        drop(removed);
    }
}

/// Refuses a folder that holds a run or a part of one.
pub(crate) fn refuse_contents(path: &Path) -> Result<()> {
    if contents(path)?.is_empty() {
        return Ok(());
    }
    let held = Error::usage(format!("{} already holds a run or a model", path.display()));
    Err(held.hinted("resume that run with --resume, or choose another folder"))
}

/// Keeps what a run that starts anew would replace: its models and its validations.
fn keep_unsaved(path: &Path, settings: &Settings) -> Result<()> {
    for model in [product_of(path, settings), adapter_in(path), best_in(path)] {
        if let Some(beside) = move_model(&model)? {
            output::warning(format_args!(
                "the run starts anew, and the model that was there is kept as {}",
                beside.display()
            ));
        }
    }
    let validations = path.join(validation::FILE);
    match input::read_if_there(&validations)? {
        Some(known) if !known.is_empty() => {
            output::back_up(&validations, "unsaved", &known).map(drop)
        }
        Some(_) | None => Ok(()),
    }
}

/// Gives a model that does not complete its run another name, if there is one: what made it is
/// gone, and the run will end with one of its own. Nobody else does so meanwhile, the run is locked.
fn move_model(model: &Path) -> Result<Option<PathBuf>> {
    let mut number = 1_u32;
    loop {
        let mut name = model.file_stem().map_or_else(OsString::new, OsString::from);
        name.push(format!(".unsaved-{number:04}"));
        let beside = model.with_file_name(name);
        match fs::symlink_metadata(&beside) {
            Ok(_) => number += 1,
            Err(error) if is_nothing(&error) => {
                return match fs::rename(model, &beside) {
                    Ok(()) => Ok(Some(beside)),
                    Err(error) if is_nothing(&error) => Ok(None),
                    Err(source) => Err(Error::write(model, source)),
                };
            }
            Err(source) => return Err(Error::read(beside, source)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{error::ErrorKind, train::settings::tests::settings};

    /// The line of a step.
    pub(crate) fn line(step: u64, loss: &str, seconds: f64) -> String {
        format!(
            "{{\"step\": {step}, \"epoch\": 0, \"loss\": {loss}, \"learning_rate\": 0.1, \
             \"sequences\": 1, \
             \"real_tokens\": 5, \"padded_tokens\": 8, \"seconds\": {seconds}}}\n"
        )
    }

    fn is_refused(path: &Path) -> bool {
        refuse_contents(path).is_err_and(|error| error.hint().is_some())
    }

    #[test]
    fn a_folder_that_holds_a_run_is_never_written_again() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        assert!(!is_refused(&run));
        RunDir::create(&run, &settings()).unwrap();
        assert_eq!(Settings::read(&run).unwrap(), Some(settings()));
        assert!(is_refused(&run));
        assert!(RunDir::create(&run, &settings()).is_err(), "another program made it meanwhile");

        for name in [MODEL_FOLDER, METRICS, settings::FILE, CHECKPOINTS] {
            let other = parent.path().join(name.replace('.', "-"));
            fs::create_dir(&other).unwrap();
            fs::write(other.join(name), "kept").unwrap();
            assert!(is_refused(&other));
            assert_eq!(fs::read_to_string(other.join(name)).unwrap(), "kept");
        }
        let file = RunDir::create(&run.join(METRICS), &settings());
        let is_write = |error: Error| matches!(*error.kind, ErrorKind::Write { .. });
        assert!(file.is_err_and(is_write), "a file is no folder");
    }

    fn lines(steps: std::ops::Range<u64>) -> String {
        steps.map(|step| line(step, "1", 1.0)).collect()
    }

    #[test]
    fn metrics_after_the_checkpoint_are_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunDir::create(&run, &settings()).unwrap();
        // The last line was cut off.
        fs::write(run.join(METRICS), lines(0..6) + "{\"ste").unwrap();
        for (step, kept) in [(6, 6), (4, 4), (0, 0)] {
            let mut resumed = RunDir::resume(&run, &settings(), step).unwrap();
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), lines(0..kept));
            resumed.append(&serde_json::json!({ "step": kept })).unwrap();
            let appended = format!("{}{{\"step\":{kept}}}\n", lines(0..kept));
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), appended);
            fs::write(run.join(METRICS), lines(0..kept)).unwrap();
        }
        let started = parent.path().join("started");
        RunDir::resume(&started, &settings(), 0).unwrap();
        assert_eq!(Settings::read(&started).unwrap(), Some(settings()));
    }

    #[test]
    fn damaged_metrics_are_kept_beside_and_the_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        RunDir::create(&run, &settings()).unwrap();
        let damaged = lines(0..2) + "damage\n" + &lines(3..6);
        for beside in ["metrics.damaged-0001.jsonl", "metrics.damaged-0002.jsonl"] {
            fs::write(run.join(METRICS), &damaged).unwrap();
            RunDir::resume(&run, &settings(), 5).unwrap();
            assert_eq!(fs::read_to_string(run.join(beside)).unwrap(), damaged);
            let kept = lines(0..2) + &lines(3..5);
            assert_eq!(fs::read_to_string(run.join(METRICS)).unwrap(), kept);
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_was_removed_is_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let run = parent.path().join("run");
        let open = RunDir::create(&run, &settings()).unwrap();
        open.sync().unwrap();
        fs::remove_dir_all(&run).unwrap();
        assert!(open.sync().unwrap_err().chain().contains("removed"));
    }
}
