//! Writing the numbers of a run, a line for each step.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use crate::{
    checkpoint::disk::At,
    error::Result,
    metrics::{StepMetrics, read::Metrics},
};

/// A file that gets a line of JSON for each step: what `candle-distributed train` writes as
/// `metrics.jsonl`, and its pictures and reports read.
///
/// One process of a run writes it. A session that resumes a run goes on in the same file; that its
/// clock begins at 0 again tells it apart.
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
///     log.write(StepMetrics::of(step, &done).learning_rate(1e-3))?;
/// }
/// let metrics = Metrics::read(&path)?;
/// assert_eq!(metrics.steps().len(), 5);
/// println!("{:.3} after {:.1} s", metrics.last_loss(2), metrics.seconds());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    start: Instant,
}

impl MetricsLog {
    /// Opens a file to go on after `done` steps, or makes it and its folder. The lines of later steps, which the run
    /// that it resumes has taken after its checkpoint, are dropped, and with them those that are
    /// [damaged](Metrics::damaged). The clock of the session starts.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::CheckpointError::Io) if it cannot be opened or changed.
    pub fn open(path: impl Into<PathBuf>, done: u64) -> Result<Self> {
        let path = path.into();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).at(folder)?;
        }
        keep_before(&path, done)?;
        let file = File::options().create(true).append(true).open(&path).at(&path)?;
        Ok(Self { path, file, start: Instant::now() })
    }

    /// Writes the line of a step that ends now: its seconds and the memory of the process, where the
    /// system tells it (on Linux), are put in.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::CheckpointError::Io).
    pub fn write(&mut self, step: StepMetrics) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        let step = StepMetrics { seconds, peak_bytes: peak_bytes(), ..step };
        let line = serde_json::to_string(&step).map_err(io::Error::from).at(&self.path)?;
        writeln!(self.file, "{line}").at(&self.path)
    }

    /// Waits until all lines are on disk: call it before a checkpoint is saved, and no resumed run
    /// lacks the numbers of its steps.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`](crate::CheckpointError::Io).
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().at(&self.path)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Drops the lines of the steps from `end` on, if there are any.
fn keep_before(path: &Path, end: u64) -> Result<()> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text.at(path)?,
    };
    let mut metrics = Metrics::parse(&text);
    metrics.truncate(end);
    let kept = metrics.lines(&text);
    if kept == text {
        return Ok(());
    }
    // In one step: whoever reads the file finds the old lines or the new ones.
    let partial = path.with_extension("partial");
    fs::write(&partial, kept).at(&partial)?;
    fs::rename(&partial, path).at(path)
}

/// The largest resident memory of this process so far, where the system tells it.
fn peak_bytes() -> Option<u64> {
    peak_in(&fs::read_to_string("/proc/self/status").ok()?)
}

/// The high-water mark in a `/proc/PID/status`.
fn peak_in(status: &str) -> Option<u64> {
    let mark = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    mark.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::read::Metrics;

    #[test]
    fn sessions_append_and_their_clocks_begin_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/run/metrics.jsonl");
        // The second resumes at step 2, after which the first has taken another one.
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

    #[test]
    fn the_peak_is_read_from_the_status_of_a_process() {
        let status = "Name:\ttrain\nVmPeak:\t   99 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 5 kB\n";
        assert_eq!(peak_in(status), Some(1234 * 1024));
        assert_eq!((peak_in("VmHWM: lots"), peak_in("")), (None, None));
    }
}
