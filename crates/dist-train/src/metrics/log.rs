//! Writes the metrics of a run, one line per step.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use dist_checkpoint::files;

use crate::{
    error::{AtPath, Error, Result},
    metrics::{StepMetrics, read::Metrics},
};

/// A file with one line of JSON per step, in the format of `metrics.jsonl` of `candle-distributed
/// train`, which its plots and reports read.
///
/// One process of a run writes the file. A session that resumes a run appends to the same file;
/// readers recognize a new session because its clock starts at 0.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_nn::{Module, Optimizer, ParamsAdamW, linear};
/// use dist_train::{AdamW, DataParallel, Metrics, MetricsLog, StepMetrics};
/// use pmap_mesh::{DeviceMesh, Replica};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("metrics.jsonl");
/// let mesh = DeviceMesh::cpu(2)?;
/// let mut model = DataParallel::builder(&mesh, |vb| linear(3, 1, vb))
///     .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
/// let mut log = MetricsLog::open(&path, model.steps())?;
/// for step in 0..5 {
///     let x = Tensor::randn(0_f32, 1., (8, 3), &Device::Cpu)?;
///     let done = model.step(x, |_: &Replica, model: &candle_nn::Linear, x: Tensor| {
///         model.forward(&x)?.sqr()?.mean_all()
///     })?;
///     log.write(StepMetrics::from_step(step, &done))?;
/// }
/// let metrics = Metrics::read(&path)?;
/// assert_eq!(metrics.steps().len(), 5);
/// let seconds: f64 = metrics.timed().map(|step| step.seconds).sum();
/// println!("{} steps in {seconds:.1} s", metrics.done());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    start: Instant,
}

impl MetricsLog {
    /// Opens a file to resume it after `done` steps, or creates it and its folder. Lines of later
    /// steps are dropped, since the run takes these steps again, and so are
    /// [damaged](Metrics::damaged) lines. Starts the clock of the session.
    ///
    /// Backs up the whole file as `metrics.damaged-0001.jsonl` if lines are damaged, and as
    /// `metrics.unsaved-0001.jsonl` if a run without a checkpoint starts again.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoMetrics`] if the file has content that is not metrics, and
    /// [`CheckpointError::Io`](crate::CheckpointError::Io) if it cannot be opened or changed.
    pub fn open(path: impl Into<PathBuf>, done: u64) -> Result<Self> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).at(folder)?;
        }
        truncate(&path, done)?;
        let file = File::options().create(true).append(true).open(&path).at(&path)?;
        Ok(Self { path, file, start: Instant::now() })
    }

    /// Writes the line of the step that ends now, with the elapsed seconds and, on Linux, the peak
    /// memory of the process.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::Io`](crate::CheckpointError::Io) if writing fails.
    pub fn write(&mut self, step: StepMetrics) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        let step = StepMetrics { seconds, peak_bytes: peak_bytes(), ..step };
        let line = serde_json::to_string(&step).map_err(io::Error::from).at(&self.path)?;
        writeln!(self.file, "{line}").at(&self.path)
    }

    /// Flushes all lines to disk. Call it before saving a checkpoint, so that a resumed run has the
    /// metrics of all its steps.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::Io`](crate::CheckpointError::Io) if flushing fails.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().at(&self.path)
    }
}

/// Drops damaged lines and the lines of the steps from `end` on, after a backup if one is needed.
fn truncate(path: &Path, end: u64) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let mut metrics = Metrics::read(path)?;
    if metrics.steps().is_empty() && !is_first_line_start(path, &metrics)? {
        return Err(Error::NoMetrics { path: path.to_owned() });
    }
    if !metrics.damaged().is_empty() {
        back_up(path, "damaged")?;
    }
    if end == 0 && metrics.done() > 0 {
        back_up(path, "unsaved")?;
    }
    metrics.truncate(end);
    metrics.rewrite(path).at(path)
}

/// Returns true if a file without steps is empty or the start of a first line, which a killed run
/// may leave.
fn is_first_line_start(path: &Path, metrics: &Metrics) -> Result<bool> {
    const START: &[u8] = br#"{"step":"#;
    let mut start = Vec::new();
    let file = File::open(path).at(path)?;
    file.take(START.len() as u64).read_to_end(&mut start).at(path)?;
    // A file with complete lines would have steps or damaged lines.
    Ok(metrics.damaged().is_empty() && (start.is_empty() || start == START))
}

/// Backs up a file with `kind` lines, and warns about it.
fn back_up(path: &Path, kind: &str) -> Result<()> {
    let copy = files::back_up(path, kind).at(path)?;
    tracing::warn!("{} has {kind} lines, backed up as {}", path.display(), copy.display());
    Ok(())
}

/// Returns the peak resident memory of this process in bytes, on Linux only.
///
/// # Examples
///
/// ```
/// let before = dist_train::peak_bytes();
/// assert!(dist_train::peak_bytes() >= before);
/// ```
pub fn peak_bytes() -> Option<u64> {
    peak_in(&fs::read_to_string("/proc/self/status").ok()?)
}

/// Returns the peak resident memory in bytes from the text of a `/proc/PID/status`.
fn peak_in(status: &str) -> Option<u64> {
    let mark = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    mark.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::read::Metrics;

    #[test]
    fn sessions_append_and_restart_the_clock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/run/metrics.jsonl");
        // The second session resumes at step 2, although the first session took one more step.
        for (first, end) in [(0, 3), (2, 4)] {
            let mut log = MetricsLog::open(&path, first).unwrap();
            for step in first..end {
                log.write(StepMetrics::new(step, 0.5).batch(1, 2, 2)).unwrap();
            }
            log.sync().unwrap();
        }
        let metrics = Metrics::read(&path).unwrap();
        let steps: Vec<u64> = metrics.steps().iter().map(|step| step.step).collect();
        assert_eq!(steps, [0, 1, 2, 3]);
        assert!(
            metrics
                .steps()
                .windows(2)
                .all(|steps| { steps[0].step == 1 || steps[0].seconds <= steps[1].seconds })
        );
        let peaks = metrics.steps().iter().map(|step| step.peak_bytes);
        assert!(!cfg!(target_os = "linux") || peaks.flatten().all(|bytes| bytes > 1 << 16));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 4, "{text}");
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn other_files_are_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts.jsonl");
        for text in ["{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "no end of a line", "\n"] {
            fs::write(&path, text).unwrap();
            let error = MetricsLog::open(&path, 0).unwrap_err();
            assert!(error.to_string().ends_with("texts.jsonl: no line is a step"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        // The first line of a run that was killed while writing it.
        fs::write(&path, "{\"step\":0,\"epo").unwrap();
        MetricsLog::open(&path, 0).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        assert_eq!(names(folder.path()), ["texts.jsonl"]);
    }

    #[test]
    fn unsaved_and_damaged_metrics_are_backed_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        // An unrelated file with the name of a temporary file, which must not be overwritten.
        fs::write(folder.path().join("metrics.partial"), "mine").unwrap();
        let written = || {
            let mut log = MetricsLog::open(&path, 0).unwrap();
            (0..2).for_each(|step| log.write(StepMetrics::new(step, 0.5)).unwrap());
            fs::read_to_string(&path).unwrap()
        };
        let text = written();
        assert_eq!(text.lines().count(), 2);
        assert_eq!(written().lines().count(), 2, "the run starts again");
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("metrics.unsaved-0001.jsonl"), text);
        for number in 1..=2 {
            let damaged = text.replacen('\n', "\ndamage\n", 1);
            fs::write(&path, &damaged).unwrap();
            MetricsLog::open(&path, 2).unwrap();
            assert_eq!(read(&format!("metrics.damaged-000{number}.jsonl")), damaged);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        // Steps after the checkpoint are taken again, so they need no backup.
        MetricsLog::open(&path, 1).unwrap();
        assert_eq!(Metrics::read(&path).unwrap().done(), 1);
        assert_eq!(
            names(folder.path()),
            [
                "metrics.damaged-0001.jsonl",
                "metrics.damaged-0002.jsonl",
                "metrics.jsonl",
                "metrics.partial",
                "metrics.unsaved-0001.jsonl"
            ]
        );
        assert_eq!(read("metrics.partial"), "mine");
    }

    #[test]
    fn peak_is_read_from_proc_status() {
        let status = "Name:\ttrain\nVmPeak:\t   99 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 5 kB\n";
        assert_eq!(peak_in(status), Some(1234 * 1024));
        for status in ["", "VmHWM: lots", "VmHWM: 12", "VmHWM: x kB"] {
            assert_eq!(peak_in(status), None);
        }
    }
}
