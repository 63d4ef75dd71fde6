//! Parallel calls and training steps on a mesh, compared with the same work in plain candle.

use std::{hint::black_box, time::Duration};

use benches::n_items;
use candle_core::{DType, Device, Tensor};
use candle_distributed::{
    mesh::{ALL, DeviceMesh, P, Replica},
    train::{DataParallel, FullyShard, Units},
};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Times a function that does almost nothing, which leaves the overhead of a call.
fn call(c: &mut Criterion) -> Outcome {
    let x = Tensor::zeros((8, 4), DType::F32, &Device::Cpu)?;
    let mut group = c.benchmark_group("mesh/call_tiny");
    group.throughput(Throughput::Elements(1));
    for devices in [1, 2, 4] {
        let neg = DeviceMesh::cpu(devices)?.pmap(|_, x: Tensor| x.neg());
        assert_eq!(neg.call(x.clone())?.dims(), [8, 4]);
        group.bench_function(BenchmarkId::from_parameter(devices), |b| {
            b.iter(|| neg.call(x.clone()));
        });
    }
    group.bench_function("plain_candle", |b| b.iter(|| x.neg()));
    group.finish();
    Ok(())
}

/// Times sums over two replicas: a hundred in one call, so that the call itself hardly counts.
fn psum(c: &mut Criterion) -> Outcome {
    let rounds = n_items(100);
    let mesh = DeviceMesh::cpu(2)?;
    let mut group = c.benchmark_group("mesh/psum_2");
    group.sample_size(10);
    for (name, bytes) in [("4KB", 4 << 10), ("1MB", 1 << 20), ("16MB", 16 << 20)] {
        let x = Tensor::ones((2, bytes / 4), DType::F32, &Device::Cpu)?;
        let sums = mesh.pmap(move |ctx, x: Tensor| {
            for _ in 0..rounds {
                ctx.psum(&x, ALL)?;
            }
            ctx.psum(&x, ALL)
        });
        let sums = sums.out_axes(P::replicate());
        let x = mesh.shard(x, P::shard(0, ALL))?;
        assert!(
            (sums.run(x.clone())?.shards()[1].max_all()?.to_scalar::<f32>()? - 2.0).abs()
                < f32::EPSILON
        );
        group.throughput(Throughput::Elements(rounds));
        group.bench_function(name, |b| b.iter(|| sums.run(x.clone())));
    }
    group.finish();
    Ok(())
}

/// Times sums over two replicas that each keep one half: a hundred in one call.
fn psum_scatter(c: &mut Criterion) -> Outcome {
    let rounds = n_items(100);
    let mesh = DeviceMesh::cpu(2)?;
    let mut group = c.benchmark_group("mesh/psum_scatter_2");
    group.throughput(Throughput::Elements(rounds)).sample_size(20);
    for (name, bytes) in [("4KB", 4 << 10), ("1MB", 1 << 20)] {
        let x = Tensor::ones((2, bytes / size_of::<f32>()), DType::F32, &Device::Cpu)?;
        let halves = mesh.pmap(move |ctx, x: Tensor| {
            for _ in 0..rounds {
                black_box(ctx.psum_scatter(&x, 1, ALL)?);
            }
            ctx.psum_scatter(&x, 1, ALL)
        });
        let x = mesh.shard(x, P::shard(0, ALL))?;
        let sums = halves.run(x.clone())?.shards()[1].flatten_all()?.to_vec1::<f32>()?;
        assert_eq!(sums, vec![2.; bytes / size_of::<f32>() / 2]);
        group.bench_function(name, |b| b.iter(|| halves.run(x.clone())));
    }
    group.finish();
    Ok(())
}

/// Times the broadcast of 64 MB from one of four replicas.
fn broadcast(c: &mut Criterion) -> Outcome {
    const LEN: usize = (64 << 20) / size_of::<f32>();
    let root = Tensor::ones(LEN, DType::F32, &Device::Cpu)?;
    let zero = Tensor::zeros(1, DType::F32, &Device::Cpu)?.broadcast_as(LEN)?;
    let from_root = DeviceMesh::cpu(4)?.pmap(move |ctx, ()| {
        let x = if ctx.slot() == 0 { &root } else { &zero };
        ctx.broadcast(x, 0, ALL)
    });
    let last: Vec<f32> =
        from_root.call_sharded(())?.shards()[3].narrow(0, LEN - 1, 1)?.to_vec1()?;
    assert_eq!(last[0].to_bits(), 1_f32.to_bits());
    let mut group = c.benchmark_group("mesh/broadcast");
    group.throughput(Throughput::Bytes(64 << 20)).sample_size(10);
    group.bench_function("64MB_4", |b| b.iter(|| from_root.call_sharded(())));
    group.finish();
    Ok(())
}

/// Times gathering a transformer of 176 MiB in 14 units, sharded by rows: one collective per unit.
fn gather_units(c: &mut Criterion) -> Outcome {
    const UNITS: usize = 14;
    const SIZE: usize = 524;
    const SHAPES: [(&str, &[usize]); 6] = [
        ("attn.qkv", &[3 * SIZE, SIZE]),
        ("attn.out", &[SIZE, SIZE]),
        ("mlp.up", &[4 * SIZE, SIZE]),
        ("mlp.down", &[SIZE, 4 * SIZE]),
        ("norm.weight", &[SIZE]),
        ("norm.bias", &[SIZE]),
    ];
    fn declare(vb: &VarBuilder<'_>) -> candle_core::Result<()> {
        for unit in 0..UNITS {
            for (name, shape) in SHAPES {
                vb.pp("h").pp(unit).get(shape, name)?;
            }
        }
        Ok(())
    }
    let gather = |_: &Replica, model: &Units, x: Tensor| {
        for unit in 0..UNITS {
            model.unit(&format!("h.{unit}"), &x, |vb, x| {
                black_box(vb.get(SIZE, "norm.bias")?);
                Ok(x.clone())
            })?;
        }
        x.mean_all()
    };
    let items: usize = SHAPES.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let bytes = UNITS * items * size_of::<f32>();
    assert_eq!(bytes >> 20, 176);
    let mut group = c.benchmark_group("mesh/gather_176MiB_in_14_units");
    group.throughput(Throughput::Bytes(bytes as u64)).sample_size(10);
    for slots in [2, 4] {
        let mesh = DeviceMesh::cpu(slots)?;
        let mut model = FullyShard::builder(&mesh, |vb| declare(&vb))
            .build(|group| SGD::new(group.vars, 0.0))?;
        let x = Tensor::zeros((slots, 1), DType::F32, &Device::Cpu)?;
        assert_eq!(model.plan().map(|plan| plan.units().len()), Some(UNITS));
        model.evaluate(x.clone(), gather)?;
        group.bench_function(BenchmarkId::new("unit", slots), |b| {
            b.iter(|| model.evaluate(x.clone(), gather));
        });
    }
    group.finish();
    Ok(())
}

/// Times scattering and gathering 64 MB, into a new tensor and into a reused one.
fn scatter_and_gather(c: &mut Criterion) -> Outcome {
    let mesh = DeviceMesh::cpu(2)?;
    let x = Tensor::ones((2, 8 << 20), DType::F32, &Device::Cpu)?;
    let kept = Tensor::zeros((2, 8 << 20), DType::F32, &Device::Cpu)?;
    let identity = mesh.pmap(|_, x: Tensor| Ok(x));
    let mut group = c.benchmark_group("mesh/64MB");
    group.throughput(Throughput::Bytes(64 << 20)).sample_size(10);
    group.bench_function("scatter", |b| b.iter(|| identity.call_sharded(x.clone())));
    group.bench_function("gather", |b| b.iter(|| identity.call(x.clone())));
    group.bench_function("gather_into_kept", |b| b.iter(|| identity.call_into(x.clone(), &kept)));
    group.finish();
    Ok(())
}

/// A model dominated by matrix products.
struct Mlp(Vec<Linear>);

impl Mlp {
    #[allow(clippy::needless_pass_by_value, reason = "models are built of builders by value")]
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let sizes = [512, 1024, 1024, 512];
        let mut layers = Vec::new();
        for (n, size) in sizes.windows(2).enumerate() {
            layers.push(linear(size[0], size[1], vb.pp(n))?);
        }
        Ok(Self(layers))
    }

    fn loss(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())?.sqr()?.mean_all()
    }
}

/// Times one training step with AdamW on 2,048 rows, over slots and in plain candle.
///
/// With `RAYON_NUM_THREADS` and `CANDLE_NUM_THREADS` set to 1, only slots run in parallel; with 2,
/// candle's operations do as well.
fn training_step(c: &mut Criterion) -> Outcome {
    let x = Tensor::randn(0_f32, 1., (2048, 512), &Device::Cpu)?;
    let adam = |vars| AdamW::new(vars, ParamsAdamW::default());
    let mut group = c.benchmark_group("mesh/training_step");
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    for slots in [1, 2, 8] {
        let mut model = DataParallel::builder(&DeviceMesh::cpu(slots)?, Mlp::new)
            .build(|group| adam(group.vars))?;
        let mut step = || model.step(x.clone(), |_, model: &Mlp, x: Tensor| model.loss(&x));
        step()?;
        group.bench_function(BenchmarkId::from_parameter(slots), |b| b.iter(&mut step));
    }
    let vars = VarMap::new();
    let model = Mlp::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut optimizer = adam(vars.all_vars())?;
    group.bench_function("plain_candle", |b| {
        b.iter(|| model.loss(&x).and_then(|loss| optimizer.backward_step(&loss)));
    });
    group.finish();
    Ok(())
}

/// Times a call in which one replica fails while the other waits for it.
fn failure(c: &mut Criterion) -> Outcome {
    let mesh = DeviceMesh::cpu(2)?;
    let x = Tensor::zeros((2, 1), DType::F32, &Device::Cpu)?;
    let fails = mesh.pmap(|ctx, x: Tensor| {
        if ctx.slot() == 0 {
            candle_core::bail!("no");
        }
        ctx.psum(&x, ALL)
    });
    let differs = mesh
        .pmap(|ctx, x: Tensor| if ctx.slot() == 0 { ctx.pmax(&x, ALL) } else { ctx.psum(&x, ALL) });
    let mut group = c.benchmark_group("mesh/failure_known");
    group.bench_function("error", |b| b.iter(|| assert!(fails.call(x.clone()).is_err())));
    group.bench_function("mismatch", |b| b.iter(|| assert!(differs.call(x.clone()).is_err())));
    group.finish();
    Ok(())
}

fn all(c: &mut Criterion) {
    let benches = [
        call,
        psum,
        psum_scatter,
        broadcast,
        gather_units,
        scatter_and_gather,
        training_step,
        failure,
    ];
    for bench in benches {
        if let Err(error) = bench(c) {
            panic!("bench failed: {error}");
        }
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
