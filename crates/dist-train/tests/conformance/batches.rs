//! Batches of several processes: the whole batch in each of them, or the rows of each.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, linear};
use dist_train::{
    AdamW, DataParallel, DistributedModel, Error, Group, Loss, ModelBuilder, TrainingError,
    UnitRules, Units,
};
use pmap_mesh::{DeviceMesh, Replica, Uneven};
use process_tests::{Engine, assert_same, mesh, threads};

use super::number;

fn build(vb: VarBuilder<'_>) -> Result<()> {
    linear(3, 4, vb.pp("0"))?;
    linear(4, 1, vb.pp("1")).map(drop)
}

/// A mean over rows with noise for each row, and the predictions.
fn loss(ctx: &Replica, model: &Units, x: Tensor) -> Result<Loss<Tensor>> {
    let key = ctx.batch_keys().next_key(&x)?;
    let noise: Vec<f32> = (0..x.elem_count() as u64)
        .map(|n| (key.seed.derive(key.offset + n).as_u64() >> 40) as f32 / (1_u32 << 24) as f32)
        .collect();
    let x = (&x + Tensor::from_vec(noise, x.dims(), x.device())?)?;
    let x = model.unit("0", &x, |vb, x| linear(3, 4, vb)?.forward(x)?.tanh())?;
    let y = model.unit("1", &x, |vb, x| linear(4, 1, vb)?.forward(x))?;
    Ok(Loss::mean(y.sqr()?.mean_all()?).with_rows(y))
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })
}

type Model = DistributedModel<Units, AdamW>;

fn builder(mesh: &DeviceMesh, is_sharded: bool) -> ModelBuilder<'_, Units> {
    let builder = DataParallel::builder(mesh, build).by_units(UnitRules::new());
    if is_sharded { builder.fully_shard() } else { builder }
}

/// Accumulates, trains and evaluates; `part` returns the rows of a batch that this process passes.
fn trained(mut model: Model, rows: usize, part: impl Fn(Tensor) -> Tensor) -> Vec<Tensor> {
    let batch = |n: usize| {
        let x = Tensor::arange(n as f32, (n + rows * 3) as f32, &Device::Cpu).unwrap();
        part(x.sin().unwrap().reshape((rows, 3)).unwrap())
    };
    let mut all = Vec::new();
    for step in 0..3 {
        let accumulated = model.accumulate(batch(step), loss).unwrap();
        let step = model.step(batch(10 + step), loss).unwrap();
        let evaluated = model.evaluate(batch(20), loss).unwrap();
        all.extend([accumulated.weight, step.weight, evaluated.weight].map(number));
        all.extend([accumulated.loss, step.loss, evaluated.loss].map(number));
        all.extend([accumulated.aux, step.aux, evaluated.aux]);
    }
    all.extend(model.parameters().unwrap().into_values());
    all
}

pub(super) fn run(engine: &impl Engine, ranks: usize) {
    let tested = mesh(engine, &[], None);
    let threads = threads(&[(DeviceMesh::AXIS, ranks)], &engine.device());
    let alone = DeviceMesh::cpu(1).unwrap();
    let rank = tested.local_slots().start;
    for is_sharded in [false, true] {
        // The first rank has one row more, as if the whole batch was cut by `Balanced`.
        let rows = ranks * 2 + 1;
        let local = |extra: usize| {
            let start = if rank == 0 { 0 } else { extra + rank * 2 };
            let len = if rank == 0 { 2 + extra } else { 2 };
            move |x: Tensor| x.narrow(0, start, len).unwrap()
        };
        let model = || builder(&tested, is_sharded).local_batches().build(adam).unwrap();
        let whole = builder(&threads, is_sharded).uneven(Uneven::Balanced).build(adam).unwrap();
        assert_same(&trained(model(), rows, local(1)), &trained(whole, rows, |x| x));

        // One device trains the same rows, whatever their distribution.
        let one = builder(&alone, false).build(adam).unwrap();
        let found = trained(model(), rows + 3, local(4));
        for (found, expected) in found.iter().zip(trained(one, rows + 3, |x| x)) {
            let difference = (found - expected).unwrap().abs().unwrap().to_dtype(DType::F64);
            let largest = difference.unwrap().flatten_all().unwrap().max(0).unwrap();
            assert!(largest.to_scalar::<f64>().unwrap() < 1e-5, "{found}");
        }
        refusals(&tested, is_sharded);
    }
    // A process whose rows cannot be cut ends the step in all processes.
    let mut model = builder(&tested, false).local_batches().build(adam).unwrap();
    let x = if rank == 1 {
        number(1.0)
    } else {
        Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap()
    };
    let error = model.step(x, loss).unwrap_err();
    let is_own = matches!(error, Error::Mesh(pmap_mesh::Error::Specs(_)));
    assert_eq!(is_own, rank == 1, "{error}");
}

/// Checks that each process is told if processes pass different rows as the whole batch.
fn refusals(mesh: &DeviceMesh, is_sharded: bool) {
    let rank = mesh.local_slots().start;
    let mut model = builder(mesh, is_sharded).build(adam).unwrap();
    // Large enough to be sampled.
    let batch =
        |rank: usize| Tensor::full(rank as f32, (mesh.len() * 512, 3), &Device::Cpu).unwrap();
    let refused = |outcome: dist_train::Result<()>| match outcome {
        Err(Error::Training(error)) => {
            assert_eq!(error, TrainingError::BatchMismatch { replica: 1 });
        }
        other => panic!("{other:?}"),
    };
    refused(model.step(batch(rank), loss).map(drop));
    refused(model.accumulate(batch(rank), loss).map(drop));
    refused(model.evaluate(batch(rank), loss).map(drop));
    model.step(batch(7), loss).unwrap();
}
