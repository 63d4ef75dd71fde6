//! The cost of checksums: 400 MB saved as a checkpoint, and as a plain file without them.
//!
//! ```text
//! cargo bench -p benches --bench checkpoint -- [folder] [rounds]
//! ```
//!
//! Each round writes the bytes as a plain file, as a checkpoint with checksums only, and as a
//! checkpoint that is also searched for non-finite values, which is the default. All three are
//! synced to disk. Prints a line per round, and the medians. In a memory folder (`/dev/shm`) the
//! checksums compete with copies alone.

#![allow(clippy::print_stdout, reason = "the lines are the result")]

use std::{
    env,
    error::Error,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process,
    time::Instant,
};

use benches::is_test;
use candle_core::Tensor;
use candle_distributed::{
    mesh::{DeviceMesh, keep_freed_memory},
    train::{Checkpoint, Checkpoints, DataParallel},
};
use candle_nn::{Init, Optimizer, SGD, VarBuilder};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const N_TENSORS: usize = 50;

fn main() -> Result<()> {
    keep_freed_memory();
    let args: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let parent = args.first().map_or_else(env::temp_dir, PathBuf::from);
    let rounds = match args.get(1) {
        Some(rounds) => rounds.parse()?,
        None if is_test() => 1,
        None => 11,
    };
    let rows = if is_test() { 2 } else { 2000 };
    let folder = parent.join(format!("checkpoint-bench-{}", process::id()));
    fs::create_dir_all(&folder)?;
    let result = measure(&folder, rows, rounds);
    fs::remove_dir_all(&folder)?;
    result
}

/// Seconds of one round: plain file, checkpoint with checksums only, default checkpoint, load.
type RoundTimes = [f64; 4];

fn measure(folder: &Path, rows: usize, rounds: usize) -> Result<()> {
    let mesh = DeviceMesh::cpu(1)?;
    // Without momentum, a checkpoint holds the parameters only.
    let mut model = DataParallel::builder(&mesh, |vb| declare_weights(rows, &vb))
        .build(|group| SGD::new(group.vars, 0.))?;
    let state = model.state_dict()?;
    let bytes = model.parameters()?.into_values().map(|tensor| {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).map(|()| bytes)
    });
    let bytes = bytes.collect::<candle_core::Result<Vec<_>>>()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let written = write_plain(&folder.join("plain"), &bytes)?;
        let save = |checkpoints: &Checkpoints| -> Result<f64> {
            let start = Instant::now();
            checkpoints.save(&mesh, 1, &state, &())?;
            Ok(start.elapsed().as_secs_f64())
        };
        let summed = save(&Checkpoints::new(folder.join("checkpoints")).allow_non_finite())?;
        fs::remove_dir_all(folder.join("checkpoints"))?;
        let checkpoints = Checkpoints::new(folder.join("checkpoints"));
        let searched = save(&checkpoints)?;
        let start = Instant::now();
        let latest =
            checkpoints.load_latest(&mesh, |checkpoint: &Checkpoint| model.load(checkpoint))?;
        let (checkpoint, ()) = latest.ok_or("no checkpoint")?;
        let loaded = start.elapsed().as_secs_f64();
        assert_eq!(checkpoint.step(), 1);
        fs::remove_dir_all(folder.join("checkpoints"))?;
        times.push([written, summed, searched, loaded]);
        print("round", [written, summed, searched, loaded]);
    }
    print("medians", [0, 1, 2, 3].map(|column| median(&times, column)));
    Ok(())
}

/// Declares the weights, drawn at random.
fn declare_weights(rows: usize, vb: &VarBuilder<'_>) -> candle_core::Result<Vec<Tensor>> {
    let random = Init::Uniform { lo: -1., up: 1. };
    let mut weights = Vec::with_capacity(N_TENSORS);
    for n in 0..N_TENSORS {
        weights.push(vb.get_with_hints((rows, 1000), &format!("layers.{n}.weight"), random)?);
    }
    Ok(weights)
}

fn print(name: &str, [plain, summed, searched, loaded]: RoundTimes) {
    println!(
        "{name}: plain {plain:.3} s, with checksums {summed:.3} s ({:.3}), and searched \
         {searched:.3} s ({:.3}), loaded {loaded:.3} s",
        summed / plain,
        searched / plain
    );
}

/// Writes the tensors' bytes to one file, without checksums, and returns the seconds.
fn write_plain(path: &Path, tensors: &[Vec<u8>]) -> Result<f64> {
    let start = Instant::now();
    let mut file = File::create(path)?;
    for bytes in tensors {
        file.write_all(bytes)?;
    }
    file.sync_all()?;
    let seconds = start.elapsed().as_secs_f64();
    fs::remove_file(path)?;
    Ok(seconds)
}

fn median(rounds: &[RoundTimes], column: usize) -> f64 {
    let mut times: Vec<f64> = rounds.iter().map(|round| round[column]).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
