//! Mesh: what a parallel call costs beside the same work in plain candle.

use candle_core::{DType, Device, Tensor};
use candle_distributed::mesh::{DeviceMesh, InAxis, OutAxis};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A function that does next to nothing: what is left is the cost of a call.
fn call(c: &mut Criterion) -> Outcome {
    let x = Tensor::zeros((8, 4), DType::F32, &Device::Cpu)?;
    let mut group = c.benchmark_group("mesh/call_tiny");
    group.throughput(Throughput::Elements(1));
    for devices in [1, 2, 4] {
        let neg = DeviceMesh::cpu(devices)?.pmap(|_, x: Tensor| x.neg());
        assert_eq!(neg.call(x.clone())?.dims(), [8, 4]);
        group.bench_function(BenchmarkId::from_parameter(devices), |b| b.iter(|| neg.call(x.clone())));
    }
    group.bench_function("plain_candle", |b| b.iter(|| x.neg()));
    group.finish();
    Ok(())
}

/// A chain of matrix products, batch-parallel.
fn matmul(c: &mut Criterion) -> Outcome {
    const SIZE: usize = 256;
    let x = Tensor::ones((2 * SIZE, SIZE), DType::F32, &Device::Cpu)?;
    let w = (Tensor::ones((SIZE, SIZE), DType::F32, &Device::Cpu)? / SIZE as f64)?;
    let chain = |x: &Tensor, w: &Tensor| (0..8).try_fold(x.clone(), |x, _| x.matmul(w));
    let mut group = c.benchmark_group("mesh/matmul_chain");
    group.throughput(Throughput::Elements((8 * 2 * 2 * SIZE * SIZE * SIZE) as u64)).sample_size(20);
    for devices in [1, 2] {
        let parallel = DeviceMesh::cpu(devices)?
            .pmap(move |_, (x, w): (Tensor, Tensor)| chain(&x, &w))
            .in_axes([InAxis::Shard(0), InAxis::Replicate])
            .out_axes(OutAxis::Gather(0));
        assert_eq!(parallel.call((x.clone(), w.clone()))?.dims(), [2 * SIZE, SIZE]);
        let id = BenchmarkId::from_parameter(devices);
        group.bench_function(id, |b| b.iter(|| parallel.call((x.clone(), w.clone()))));
    }
    group.bench_function("plain_candle", |b| b.iter(|| chain(&x, &w)));
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    for bench in [call, matmul] {
        if let Err(error) = bench(c) {
            panic!("a bench cannot run: {error}");
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
