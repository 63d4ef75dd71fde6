//! What checksums cost: a checkpoint of 400 MB, and the same bytes in a file without them.
//!
//! ```text
//! cargo bench -p benches --bench checkpoint -- [folder] [rounds]
//! ```
//!
//! The bytes are written as they lie in memory, then as a checkpoint with checksums alone, and as
//! one that is searched for what is not finite, too, which is the default. All are brought to disk.
//! Prints a line per round, and the medians. A folder in memory (`/dev/shm`) shows the cost beside
//! nothing but copies.

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

use candle_core::Tensor;
use candle_distributed::{
    mesh::DeviceMesh,
    train::{Checkpoint, Checkpoints, DataParallel},
};
use candle_nn::{Init, Optimizer, SGD, VarBuilder};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const N_TENSORS: usize = 50;

fn main() -> Result<()> {
    let is_test = env::args().any(|arg| arg == "--test");
    let args: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let parent = args.first().map_or_else(env::temp_dir, PathBuf::from);
    let rounds = match args.get(1) {
        Some(rounds) => rounds.parse()?,
        None if is_test => 1,
        None => 11,
    };
    // `cargo test --benches` only wants to know whether it runs.
    let rows = if is_test { 2 } else { 2000 };
    let folder = parent.join(format!("checkpoint-bench-{}", process::id()));
    fs::create_dir_all(&folder)?;
    let measured = measure(&folder, rows, rounds);
    fs::remove_dir_all(&folder)?;
    measured
}

/// The seconds that a round took: writing a plain file, saving a checkpoint with checksums alone
/// and one that is searched as well, loading it.
type Round = [f64; 4];

fn measure(folder: &Path, rows: usize, rounds: usize) -> Result<()> {
    let mesh = DeviceMesh::cpu(1)?;
    let random = Init::Uniform { lo: -1., up: 1. };
    let layers = |vb: VarBuilder<'_>| -> candle_core::Result<Vec<Tensor>> {
        let layer = |n| vb.get_with_hints((rows, 1000), &format!("layers.{n}.weight"), random);
        (0..N_TENSORS).map(layer).collect()
    };
    // Without momentum, so that the parameters are all that is written.
    let mut model = DataParallel::builder(&mesh, layers).build(|group| SGD::new(group.vars, 0.))?;
    let state = model.state_dict()?;
    let bytes = model.parameters()?.into_values().map(|tensor| {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).map(|()| bytes)
    });
    let bytes = bytes.collect::<candle_core::Result<Vec<_>>>()?;
    let mut all = Vec::new();
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
        let load = |checkpoint: &Checkpoint| model.load(checkpoint);
        let (checkpoint, ()) = checkpoints.load_latest(&mesh, load)?.ok_or("no checkpoint")?;
        let loaded = start.elapsed().as_secs_f64();
        assert_eq!(checkpoint.step(), 1);
        fs::remove_dir_all(folder.join("checkpoints"))?;
        all.push([written, summed, searched, loaded]);
        print("round", [written, summed, searched, loaded]);
    }
    print("medians", [0, 1, 2, 3].map(|column| median(&all, column)));
    Ok(())
}

fn print(name: &str, [plain, summed, searched, loaded]: Round) {
    println!(
        "{name}: plain {plain:.3} s, with checksums {summed:.3} s ({:.3}), and searched \
         {searched:.3} s ({:.3}), loaded {loaded:.3} s",
        summed / plain,
        searched / plain
    );
}

/// Writes bytes, and nothing else, to one file; returns the seconds that it took.
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

fn median(rounds: &[Round], column: usize) -> f64 {
    let mut times: Vec<f64> = rounds.iter().map(|round| round[column]).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
