//! What training over any engine of several processes must do: what it does over threads, to the
//! bit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

use std::{collections::BTreeMap, path::Path};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use core_types::WorldSize;
use dist_train::{
    AdamW, Checkpoint, CheckpointError, Checkpoints, DataParallel, Error, ShardedVars,
    parameter_infos, value_and_grad,
};
use fsdp_plan::strategy::{Full, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::{ALL, DeviceMesh, P, Replica};
use process_tests::{Engine, assert_same, folder, mesh, threads};

/// Runs a case, as one of so many processes.
pub(crate) fn run(engine: &impl Engine, case: &str, ranks: usize) {
    match case {
        "training" => training(engine, ranks),
        "checkpoints" => checkpoints(engine, ranks),
        "sharded" => sharded(engine, ranks),
        other => panic!("no case is named {other}"),
    }
}

/// Gradients and steps.
fn training(engine: &impl Engine, ranks: usize) {
    // Matrix products of a processor are not those of another device.
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu)
        .unwrap()
        .reshape((ranks * 2, 3))
        .unwrap();
    let gradient = |mesh: &DeviceMesh| {
        let w = Var::ones((3, 5), DType::F32, &mesh.devices()[0]).unwrap();
        let model = w.clone();
        let step = value_and_grad(mesh, vec![w.clone()], move |_, x: Tensor| {
            x.matmul(&model)?.sqr()?.mean_all()
        });
        let (loss, grads) = step.call(x.clone()).unwrap();
        [number(loss), grads.get(&w).unwrap().clone()]
    };
    assert_same(&gradient(&tested), &gradient(&threads));
    assert_same(&losses(&tested, &x), &losses(&threads, &x));
}

/// What processes write, threads read, and the other way round.
fn checkpoints(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu)
        .unwrap()
        .reshape((ranks * 2, 3))
        .unwrap();
    let folder = folder();
    let trained = |mesh: &DeviceMesh, from: Option<&Checkpoint>| {
        let (vars, mut model) = model(mesh);
        if let Some(checkpoint) = from {
            model.load(checkpoint).unwrap();
        }
        train(&mut model, &x, 5);
        (values(&vars), model.state_dict().unwrap())
    };
    let (expected, state) = trained(&tested, None);
    let checkpoints = Checkpoints::new(folder.join("tested"));
    checkpoints.save(&tested, 5, &state, &"half way").unwrap();
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    assert_eq!(
        (checkpoint.step(), checkpoint.state::<String>().unwrap()),
        (5, "half way".to_owned())
    );
    assert_eq!(
        std::fs::read_dir(checkpoint.path()).unwrap().count(),
        ranks + 1,
        "each rank its shard, and the index"
    );
    let own = folder.join(format!("threads-{}", tested.local_slots().start));
    let own = Checkpoints::new(own);
    let (found, state) = trained(&threads, None);
    assert_same(&found, &expected);
    own.save(&threads, 5, &state, &()).unwrap();
    let of_threads = own.latest().unwrap().unwrap();
    let (expected, _) = trained(&tested, Some(&of_threads));
    assert_same(&trained(&threads, Some(&checkpoint)).0, &expected);

    // Each process comes with the checkpoint of a step of its own.
    let step = 10 + tested.local_slots().start as u64;
    own.save(&threads, step, &state, &()).unwrap();
    let (_, mut model) = model(&tested);
    let loaded = model.load(&own.latest().unwrap().unwrap());
    let is_refused = matches!(
        loaded,
        Err(Error::Checkpoint(CheckpointError::OtherStep { step: here, other, .. }))
            if here == step && other != step
    );
    assert_eq!(is_refused, ranks > 1);
}

/// A plan carried out by processes: gathered, trained, written, and cut another way.
fn sharded(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let folder = folder();
    let tensor = |rows, start: f64| {
        let items = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu)
            .unwrap()
            .affine(0.01, start)
            .unwrap();
        items.reshape((rows, 3)).unwrap()
    };
    let tensors = [("a", tensor(7, -0.1)), ("b", tensor(2, 0.2))];
    let infos = parameter_infos(tensors.iter().map(|(name, tensor)| (*name, tensor))).unwrap();
    let world_size = WorldSize::new(ranks as u64).unwrap();
    for layout in [Layout::Dim0, Layout::Flat] {
        let plan = Full::new(layout).plan(&infos, world_size).unwrap();
        let other = LayerWise::default().plan(&infos, world_size).unwrap();
        let run = |mesh: &DeviceMesh, folder: &Path| {
            let vars = ShardedVars::shard(
                mesh,
                &plan,
                tensors.iter().map(|(name, tensor)| (*name, tensor)),
            )
            .unwrap();
            let mut wholes = sharded_steps(mesh, &vars);
            let gather = |vars: &ShardedVars| ["a", "b"].map(|name| vars.gather(name).unwrap());
            wholes.extend(gather(&vars));
            wholes.extend(gather(&vars.resharded(mesh, &other).unwrap()));
            let checkpoints = Checkpoints::new(folder.join(format!("{layout:?}")));
            checkpoints.save(mesh, 1, &vars.state_dict().unwrap(), &()).unwrap();
            let checkpoint = checkpoints.latest().unwrap().unwrap();
            wholes.extend(gather(&ShardedVars::load(mesh, &other, &checkpoint).unwrap()));
            wholes
        };
        let slot = tested.local_slots().start;
        let over_threads = run(&threads, &folder.join(format!("threads-{slot}")));
        assert_same(&run(&tested, &folder.join("tested")), &over_threads);
    }
}

/// Some steps against the gradient; the losses.
fn sharded_steps(mesh: &DeviceMesh, vars: &ShardedVars) -> Vec<Tensor> {
    let in_step = vars.clone();
    let step = mesh.pmap(move |ctx, x: Tensor| {
        let (a, b) = (in_step.all_gather(ctx, "a")?, in_step.all_gather(ctx, "b")?);
        let loss = (x.matmul(&a)?.sqr()?.mean_all()? + b.sqr()?.sum_all()?)?;
        let grads = loss.backward()?;
        for var in in_step.vars(ctx.slot())? {
            if let Some(grad) = grads.get(&var) {
                var.set(&(var.as_tensor() - (grad * 0.01)?)?)?;
            }
        }
        ctx.psum(&loss.detach(), ALL)
    });
    let step = step.out_axes(P::replicate());
    let x = Tensor::arange(0_f32, (mesh.len() * 2 * 7) as f32, &Device::Cpu).unwrap();
    let x = x.affine(0.01, -0.3).unwrap().reshape((mesh.len() * 2, 7)).unwrap();
    (0..3).map(|_| step.call(x.clone()).unwrap()).collect()
}

/// The losses of some steps, and the trained variables.
fn losses(mesh: &DeviceMesh, x: &Tensor) -> Vec<Tensor> {
    let (vars, mut model) = model(mesh);
    let mut all = train(&mut model, x, 10);
    model.check_in_sync().unwrap();
    all.extend(values(&vars));
    all
}

type Model = DataParallel<Vec<Linear>, AdamW>;

fn train(model: &mut Model, x: &Tensor, steps: usize) -> Vec<Tensor> {
    let loss = |_: &Replica, layers: &Vec<Linear>, x: Tensor| {
        layers.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?.sqr()?.mean_all()
    };
    let step = |_| number(model.step((x / 10.0).unwrap(), loss).unwrap().loss);
    (0..steps).map(step).collect()
}

fn number(number: f64) -> Tensor {
    Tensor::new(number, &Device::Cpu).unwrap()
}

fn named(vars: &VarMap) -> BTreeMap<String, Var> {
    vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

fn values(vars: &VarMap) -> Vec<Tensor> {
    named(vars).values().map(|var| var.as_tensor().copy().unwrap()).collect()
}

/// Two layers that begin as they do everywhere.
fn model(mesh: &DeviceMesh) -> (VarMap, Model) {
    let vars = VarMap::new();
    let layers = |vb: VarBuilder<'_>| -> Result<Vec<Linear>> {
        Ok(vec![linear(3, 40, vb.pp("a"))?, linear(40, 1, vb.pp("b"))?])
    };
    layers(VarBuilder::from_varmap(&vars, DType::F32, &mesh.devices()[0])).unwrap();
    for var in named(&vars).values() {
        let values = Tensor::arange(0_f32, var.elem_count() as f32, var.device()).unwrap();
        var.set(&(values * 0.01).unwrap().reshape(var.shape()).unwrap()).unwrap();
    }
    let model = DataParallel::builder(mesh, layers)
        .variables(&vars)
        .clip_grad_norm(1.0)
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()));
    (vars, model.unwrap())
}
