//! Sums over processes: `psum` of a mesh beside MPI's own call, on 2 and on 4 ranks of this
//! machine.
//!
//! Not with criterion, which decides by itself how often to measure: all ranks must do the same
//! number of calls. The program starts itself under `mpirun`, in turn as one and as the other,
//! since MPI begins once in a process. Run it with `cargo bench -p benches --features mpi --bench
//! mpi`.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(clippy::print_stdout, reason = "this is a report")]

use std::{collections::BTreeMap, env, process::Command, time::Instant};

use candle_core::{DType, Device, Tensor};
use candle_distributed::{
    mesh::{ALL, DeviceMesh},
    types::Launched,
};
use ferrompi::{Mpi, ReduceOp};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Bytes of single-precision numbers, and how many calls are measured.
const SIZES: [(usize, usize); 5] =
    [(4 << 10, 3000), (16 << 10, 2000), (256 << 10, 500), (4 << 20, 100), (64 << 20, 12)];
/// What is measured: a mesh's sum, and MPI's into memory that is new and that is kept.
const MODES: [&str; 3] = ["psum", "allreduce-new", "allreduce-kept"];
const ROUNDS: usize = 3;

fn main() {
    if Launched::from_env().unwrap().is_some() {
        as_rank(&env::args().nth(1).unwrap());
    } else {
        [2, 4].into_iter().for_each(report);
    }
}

/// Runs all modes in turn, and prints the best median of each.
fn report(ranks: usize) {
    let mut best: BTreeMap<(usize, &str), f64> = BTreeMap::new();
    for _ in 0..ROUNDS {
        for mode in MODES {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]);
            command.arg(env::current_exe().unwrap()).arg(mode);
            let output = command
                .env("RAYON_NUM_THREADS", "1")
                .env("CANDLE_NUM_THREADS", "1")
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            for line in String::from_utf8(output.stdout).unwrap().lines() {
                let (bytes, micros) = line.split_once(' ').unwrap();
                let micros: f64 = micros.parse().unwrap();
                let kept = best.entry((bytes.parse().unwrap(), mode)).or_insert(micros);
                *kept = kept.min(micros);
            }
        }
    }
    println!("{ranks} ranks, µs: {}, psum over each of the others", MODES.join(", "));
    for (bytes, _) in SIZES {
        let [psum, new, kept] = MODES.map(|mode| best[&(bytes, mode)]);
        println!(
            "{bytes:>9} bytes: {psum:>9.1} {new:>9.1} {kept:>9.1}  {:.2} {:.2}",
            psum / new,
            psum / kept
        );
    }
}

fn as_rank(mode: &str) {
    match mode {
        "psum" => over_mesh(),
        "allreduce-new" => direct(true),
        _ => direct(false),
    }
}

fn over_mesh() {
    let mesh = DeviceMesh::builder().mpi(Device::Cpu).unwrap();
    for (bytes, calls) in SIZES {
        let run = mesh.pmap(move |ctx, _: Tensor| {
            let x = Tensor::full(1.5_f32, bytes / 4, ctx.device())?;
            let mut seconds = Vec::new();
            for call in 0..calls + calls / 10 {
                let start = Instant::now();
                let sum = ctx.psum(&x, ALL)?;
                seconds.extend((call >= calls / 10).then(|| start.elapsed().as_secs_f64()));
                assert_eq!(
                    sum.get(bytes / 8)?.to_scalar::<f32>()?.to_bits(),
                    (1.5 * ctx.count() as f32).to_bits()
                );
            }
            if ctx.slot() == 0 {
                print(bytes, seconds);
            }
            Ok(())
        });
        run.in_axes(None).call(Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    }
}

fn direct(new: bool) {
    let mpi = Mpi::init().unwrap();
    let world = mpi.world();
    for (bytes, calls) in SIZES {
        let x = vec![1.5_f32; bytes / 4];
        let mut kept = vec![0_f32; bytes / 4];
        let mut seconds = Vec::new();
        for call in 0..calls + calls / 10 {
            let start = Instant::now();
            let mut fresh = if new { vec![0_f32; bytes / 4] } else { Vec::new() };
            let sum = if new { &mut fresh } else { &mut kept };
            world.allreduce(&x, sum, ReduceOp::Sum).unwrap();
            seconds.extend((call >= calls / 10).then(|| start.elapsed().as_secs_f64()));
            assert_eq!(sum[bytes / 8].to_bits(), (1.5 * world.size() as f32).to_bits());
        }
        if world.rank() == 0 {
            print(bytes, seconds);
        }
    }
}

fn print(bytes: usize, mut seconds: Vec<f64>) {
    seconds.sort_by(f64::total_cmp);
    println!("{bytes} {}", seconds[seconds.len() / 2] * 1e6);
}
