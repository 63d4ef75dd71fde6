//! Sums over processes: `psum` of a mesh beside MPI's own call, on 2 and on 4 ranks of this
//! machine; and lists, gathered and reduced at once and under way.
//!
//! Not with criterion, which decides by itself how often to measure: all ranks must do the same
//! number of calls. The program starts itself under `mpirun`, in turn as one and as the other,
//! since MPI begins once in a process. Run it with `cargo bench -p benches --features mpi --bench
//! mpi`.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]
#![allow(clippy::print_stdout, reason = "this is a report")]

use std::{collections::BTreeMap, env, process::Command, time::Instant};

use candle_core::{DType, Device, Result, Tensor};
use candle_distributed::{
    mesh::{
        ALL, DeviceMesh,
        support::{Run, RunLayout},
    },
    types::LaunchEnv,
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

/// What is done with lists of four tensors of so many bytes in all, of which each rank owns a part.
const LISTS: [&str; 4] = ["gather", "start gather", "reduce", "start reduce"];
const LIST_SIZES: [(usize, usize); 3] = [(4 << 10, 1000), (4 << 20, 50), (64 << 20, 8)];

fn main() {
    if LaunchEnv::from_env().unwrap().is_some() {
        as_rank(&env::args().nth(1).unwrap());
    } else {
        [2, 4].into_iter().for_each(report);
        [2, 4].into_iter().for_each(report_lists);
    }
}

/// Runs all modes in turn, and prints the best median of each.
fn report(ranks: usize) {
    let best = best_of(ranks, &MODES);
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

/// Runs all of them in turn, and prints the best median of each.
fn report_lists(ranks: usize) {
    let best = best_of(ranks, &LISTS);
    println!("{ranks} ranks, µs: {}", LISTS.join(", "));
    for (bytes, _) in LIST_SIZES {
        let figures = LISTS.map(|mode| format!("{:>9.1}", best[&(bytes, mode)]));
        println!("{bytes:>9} bytes: {}", figures.join(" "));
    }
}

/// The best median of each mode and size.
fn best_of<'m>(ranks: usize, modes: &[&'m str]) -> BTreeMap<(usize, &'m str), f64> {
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

fn as_rank(mode: &str) {
    match mode {
        "psum" => over_mesh(),
        "allreduce-new" => direct(true),
        "allreduce-kept" => direct(false),
        list => lists(LISTS.into_iter().find(|mode| *mode == list).unwrap()),
    }
}

fn lists(mode: &'static str) {
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
                let (own, list) = (own.clone(), vec![whole.clone(); 4]);
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

/// Four tensors of so many items, of each of which each rank owns a part.
fn layout(n_items: usize, ranks: usize) -> RunLayout {
    let share = n_items / ranks;
    let of_rank = |rank: usize| {
        let run = |tensor| Run { tensor, items: rank * share..(rank + 1) * share };
        (0..4).map(run).collect()
    };
    RunLayout::new("list", vec![(n_items, DType::F32); 4], (0..ranks).map(of_rank)).unwrap()
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
