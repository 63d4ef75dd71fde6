//! Sums over processes, on 2 and 4 ranks of this machine: the mesh's `psum` and MPI's `allreduce`.
//! Then lists of tensors, gathered and reduced, blocking and non-blocking.
//!
//! Criterion chooses the number of calls itself, but all ranks must make equally many, so this
//! program times its own calls. It starts itself under `mpirun` once per mode, since a process can
//! initialize MPI only once. Run it with `cargo bench -p benches --features mpi --bench mpi`.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(clippy::print_stdout, reason = "this is a report")]

use std::{collections::BTreeMap, env, process::Command, time::Instant};

use candle_core::{DType, Device, Result, Tensor};
use candle_distributed::{
    mesh::{
        ALL, DeviceMesh, keep_freed_memory,
        support::{Run, RunLayout},
    },
    types::LaunchEnv,
};
use ferrompi::{Mpi, ReduceOp};

/// Message sizes in bytes, each with its number of timed calls.
const SIZES: [(usize, usize); 5] =
    [(4 << 10, 3000), (16 << 10, 2000), (256 << 10, 500), (4 << 20, 100), (64 << 20, 12)];
/// Timed calls: the mesh's sum, and MPI's into new and into reused memory.
const MODES: [&str; 3] = ["psum", "allreduce-new", "allreduce-kept"];
const ROUNDS: usize = 3;

/// Timed calls on lists of four tensors that are sharded over the ranks.
const LISTS: [&str; 4] = ["gather", "start gather", "reduce", "start reduce"];
/// Total bytes of a list, each with its number of timed calls.
const LIST_SIZES: [(usize, usize); 3] = [(4 << 10, 1000), (4 << 20, 50), (64 << 20, 8)];

fn main() {
    keep_freed_memory();
    if LaunchEnv::from_env().unwrap().is_some() {
        run_as_rank(&env::args().nth(1).unwrap());
    } else {
        [2, 4].into_iter().for_each(report);
        [2, 4].into_iter().for_each(report_lists);
    }
}

/// Runs all modes, and prints the best median of each.
fn report(ranks: usize) {
    let best = best_medians(ranks, &MODES);
    println!("{ranks} ranks, µs: {}; psum divided by each of the others", MODES.join(", "));
    for (bytes, _) in SIZES {
        let [psum, new, kept] = MODES.map(|mode| best[&(bytes, mode)]);
        println!(
            "{bytes:>9} bytes: {psum:>9.1} {new:>9.1} {kept:>9.1}  {:.2} {:.2}",
            psum / new,
            psum / kept
        );
    }
}

/// Runs all operations on lists, and prints the best median of each.
fn report_lists(ranks: usize) {
    let best = best_medians(ranks, &LISTS);
    println!("{ranks} ranks, µs: {}", LISTS.join(", "));
    for (bytes, _) in LIST_SIZES {
        let figures = LISTS.map(|mode| format!("{:>9.1}", best[&(bytes, mode)]));
        println!("{bytes:>9} bytes: {}", figures.join(" "));
    }
}

/// Returns the best median of each mode and size, in microseconds.
fn best_medians<'m>(ranks: usize, modes: &[&'m str]) -> BTreeMap<(usize, &'m str), f64> {
    let mut best: BTreeMap<(usize, &str), f64> = BTreeMap::new();
    for _ in 0..ROUNDS {
        for mode in modes {
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
                let kept = best.entry((bytes.parse().unwrap(), *mode)).or_insert(micros);
                *kept = kept.min(micros);
            }
        }
    }
    best
}

fn run_as_rank(mode: &str) {
    match mode {
        "psum" => time_psum(),
        "allreduce-new" => time_allreduce(true),
        "allreduce-kept" => time_allreduce(false),
        list => time_list(LISTS.into_iter().find(|mode| *mode == list).unwrap()),
    }
}

fn time_list(mode: &'static str) {
    let mesh = DeviceMesh::builder().mpi(Device::Cpu).unwrap();
    for (bytes, calls) in LIST_SIZES {
        let n_items = bytes / 16;
        let layout = layout(n_items, mesh.len());
        let run = mesh.pmap(move |ctx, _: Tensor| {
            let whole = Tensor::full(1.5_f32, n_items, ctx.device())?;
            let own = |run: &Run| whole.narrow(0, run.items.start, run.items.len());
            let own = layout.runs(ctx.slot()).iter().map(own).collect::<Result<Vec<_>>>()?;
            let mut seconds = Vec::new();
            for call in 0..calls + calls / 10 {
                let own = own.clone();
                let list = vec![whole.clone(); 4];
                let start = Instant::now();
                let n_results = match mode {
                    "gather" => ctx.gather_runs(own, &layout, ALL)?.len(),
                    "start gather" => ctx.start_gather_runs(own, &layout, ALL)?.wait()?.len(),
                    "reduce" => ctx.reduce_runs(list, &layout, ALL)?.len(),
                    _ => ctx.start_reduce_runs(list, &layout, ALL)?.wait()?.len(),
                };
                seconds.extend((call >= calls / 10).then(|| start.elapsed().as_secs_f64()));
                assert_eq!(n_results, 4);
            }
            if ctx.slot() == 0 {
                print(bytes, seconds);
            }
            Ok(())
        });
        run.in_axes(None).call(Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    }
}

/// Returns the layout of four tensors of `n_items` items, split evenly over the ranks.
fn layout(n_items: usize, ranks: usize) -> RunLayout {
    let share = n_items / ranks;
    let mut runs_by_rank: Vec<Vec<Run>> = Vec::new();
    for rank in 0..ranks {
        let items = rank * share..(rank + 1) * share;
        runs_by_rank.push((0..4).map(|tensor| Run { tensor, items: items.clone() }).collect());
    }
    RunLayout::new("list", vec![(n_items, DType::F32); 4], runs_by_rank).unwrap()
}

fn time_psum() {
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

fn time_allreduce(new: bool) {
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
