//! The share of batch-making time that a prefetching thread hides behind training steps, on one slot
//! that leaves a core free. A batch takes half as long as a step.
//!
//! ```text
//! cargo bench -p benches --bench prefetch -- [batches]
//! ```
//!
//! Prints mean times: of a batch, of a step, of a step while an unrelated thread makes batches (the
//! slowdown that the machine causes), of batch and step in turn, and of a step whose batch
//! a thread prefetches. Then the time that prefetching saves, as a share of the batch time.

#![allow(clippy::print_stdout, reason = "the lines are the result")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers are small")]

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use benches::is_test;
use candle_core::{DType, Device, Result, Tensor};
use candle_distributed::{
    data::prefetch,
    mesh::{DeviceMesh, Replica, init_threads},
    train::{AdamW, DataParallel, DistributedModel},
};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, linear};

const ROWS: usize = 64;
const HIDDEN: usize = 512;

type Model = DistributedModel<Linear, AdamW>;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // Half of the cores for the one slot; on two cores, the other is free for batches.
    init_threads(2)?;
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let n = args.first().map_or(Ok(if is_test() { 2 } else { 100 }), |arg| arg.parse())?;
    let mesh = DeviceMesh::cpu(1)?;
    let mut model = DataParallel::builder(&mesh, |vb| linear(HIDDEN, HIDDEN, vb))
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))?;
    let rounds = calibrate_rounds(&mut model)?;

    let batch = time(n, || black_box(make_batch(0, rounds)).map(drop))?;
    let ready = make_batch(0, rounds)?;
    let step = time(n, || train_step(&mut model, ready.clone()))?;
    let contended = with_busy_thread(rounds, || time(n, || train_step(&mut model, ready.clone())))?;
    let mut serial = (0..n).map(|index| make_batch(index, rounds));
    let serial = time(n, || serial.next().map_or(Ok(()), |batch| train_step(&mut model, batch?)))?;
    let mut batches = prefetch(0..n).threads(1).map(move |index| make_batch(index, rounds))?;
    let prefetched =
        time(n, || batches.next().map_or(Ok(()), |batch| train_step(&mut model, batch?)))?;

    let hidden = (serial.as_secs_f64() - prefetched.as_secs_f64()) / batch.as_secs_f64();
    println!("batch {batch:.2?}  step {step:.2?}, with another busy thread {contended:.2?}");
    println!("in turn {serial:.2?}  prefetched {prefetched:.2?}");
    println!("hidden: {:.0} % of the batches' time", 100. * hidden);
    Ok(())
}

/// Returns the number of rounds that make a batch take half as long as a step.
fn calibrate_rounds(model: &mut Model) -> Result<usize> {
    let ready = make_batch(0, 1)?;
    let n = if is_test() { 2 } else { 20 };
    let step = time(n, || train_step(model, ready.clone()))?;
    let rounds = 4;
    let batch = time(n, || black_box(make_batch(0, rounds)).map(drop))?;
    let wanted = rounds as f64 * step.as_secs_f64() / 2. / batch.as_secs_f64();
    Ok((wanted.round() as usize).max(1))
}

fn train_step(model: &mut Model, batch: Tensor) -> Result<()> {
    let step = model
        .step(batch, |_: &Replica, model: &Linear, x: Tensor| model.forward(&x)?.sqr()?.mean_all());
    step.map(drop).map_err(candle_core::Error::wrap)
}

/// Runs `f` while another thread makes batches, and rests as long after each.
fn with_busy_thread<R>(rounds: usize, f: impl FnOnce() -> R) -> R {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let start = Instant::now();
                drop(black_box(make_batch(0, rounds)));
                thread::sleep(start.elapsed());
            }
        });
        let outcome = f();
        is_over.store(true, Ordering::Relaxed);
        outcome
    })
}

/// Makes a batch by mixing its numbers `rounds` times.
fn make_batch(index: usize, rounds: usize) -> Result<Tensor> {
    let mut state = index as u32;
    let mut values = vec![0_u32; ROWS * HIDDEN];
    for _ in 0..rounds {
        for value in &mut values {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *value ^= state.rotate_left(*value & 31);
        }
    }
    let values = values.into_iter().map(|value| value as f32 / u32::MAX as f32);
    Tensor::from_iter(values, &Device::Cpu)?.reshape((ROWS, HIDDEN))?.to_dtype(DType::F32)
}

/// Returns the mean time of `n` calls of `f`.
fn time(n: usize, mut f: impl FnMut() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    for _ in 0..n {
        f()?;
    }
    Ok(start.elapsed() / n as u32)
}
