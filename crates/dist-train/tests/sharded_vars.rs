//! Plans carried out: every slot holds what the plan says, and together they hold the model.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use core_types::WorldSize;
use dist_train::{
    AdamW, Checkpoint, Checkpoints, Error, ParameterError, ShardedVars, ShardingError,
    StatefulOptimizer, parameter_infos,
};
use fsdp_plan::{
    ElemType, ParameterInfo, ShardingPlan,
    cost::CostModel,
    strategy::{Full, Hsdp, LayerWise, Layout, ShardingStrategy, WholeTensor},
};
use pmap_mesh::{DeviceMesh, P};

/// A small model: a name, a shape and values for each parameter.
fn model() -> Vec<(&'static str, Tensor)> {
    let shapes: [(&str, &[usize]); 5] = [
        ("wte", &[7, 4]),
        ("h.0.up", &[4, 6]),
        ("h.0.down", &[6, 4]),
        ("h.1.up", &[4, 5]),
        ("norm", &[4]),
    ];
    let tensor = |(n, &(name, shape)): (usize, &(&'static str, &[usize]))| {
        let len: usize = shape.iter().product();
        let values: Vec<f32> = (0..len).map(|item| (n * 100 + item) as f32).collect();
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    };
    shapes.iter().enumerate().map(tensor).collect()
}

fn plan(strategy: &dyn ShardingStrategy, world: usize) -> ShardingPlan {
    let model = model();
    let infos = parameter_infos(model.iter().map(|(name, tensor)| (name, tensor))).unwrap();
    strategy.plan(&infos, WorldSize::new(world as u64).unwrap()).unwrap()
}

fn strategies() -> Vec<Box<dyn ShardingStrategy>> {
    let full = |layout| Box::new(Full::new(layout)) as Box<dyn ShardingStrategy>;
    let mut all: Vec<_> =
        [Layout::Dim0, Layout::Flat, Layout::FlatAligned, Layout::ROWS].map(full).into();
    all.push(Box::new(LayerWise::default()));
    all.push(Box::new(WholeTensor));
    all
}

fn shard(mesh: &DeviceMesh, plan: &ShardingPlan) -> ShardedVars {
    ShardedVars::shard(mesh, plan, model().iter().map(|(name, tensor)| (*name, tensor))).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_whole(vars: &ShardedVars) {
    for (name, tensor) in model() {
        let gathered = vars.gather(name).unwrap();
        assert_eq!(
            (gathered.dims(), values(&gathered)),
            (tensor.dims(), values(&tensor)),
            "{name}"
        );
    }
}

#[test]
fn every_slot_holds_the_bytes_of_its_plan_and_all_together_the_model() {
    for world in 1..6 {
        let mesh = DeviceMesh::cpu(world).unwrap();
        for strategy in strategies() {
            let plan = plan(&*strategy, world);
            let vars = shard(&mesh, &plan);
            let cost = plan.cost(&CostModel::default()).unwrap();
            for (slot, rank) in cost.ranks.iter().enumerate() {
                assert_eq!(
                    vars.bytes(slot).unwrap(),
                    rank.param_bytes,
                    "{} on {world}, slot {slot}",
                    plan.strategy()
                );
            }
            assert_whole(&vars);
        }
    }
}

#[test]
fn parameters_are_gathered_in_replicas_and_gradients_come_back_to_their_owners() {
    for world in [1, 2, 3] {
        let mesh = DeviceMesh::cpu(world).unwrap();
        for strategy in strategies() {
            let plan = plan(&*strategy, world);
            check_gradients(&mesh, &shard(&mesh, &plan));
        }
    }
}

#[test]
fn replicas_of_shard_groups_sum_their_gradients_too() {
    let mesh = DeviceMesh::builder().axis("replicate", 2).axis("shard", 2).cpu().unwrap();
    let plan = plan(&Hsdp::new(Full::default(), 2), 4);
    let vars = shard(&mesh, &plan);
    assert_eq!(vars.bytes(0).unwrap(), vars.bytes(2).unwrap());
    assert_whole(&vars);
    check_gradients(&mesh, &vars);
    let row = ShardedVars::shard(
        &DeviceMesh::cpu(4).unwrap(),
        &plan,
        model().iter().map(|(name, tensor)| (*name, tensor)),
    );
    assert!(matches!(row, Err(Error::Sharding(ShardingError::Replicas { group: 2, replicas: 2 }))));
}

/// The loss of slot n is (n + 1) times a weighted sum of all parameters: gradients are the weights
/// times the sum of those factors.
fn check_gradients(mesh: &DeviceMesh, vars: &ShardedVars) {
    let weights = |tensor: &Tensor| tensor.affine(0.5, 1.0);
    let in_replica = vars.clone();
    let run = mesh.pmap(move |ctx, _: Tensor| {
        let mut loss = Tensor::zeros((), DType::F32, ctx.device())?;
        for (name, tensor) in model() {
            let gathered = in_replica.all_gather(ctx, name)?;
            assert_eq!(values(&gathered), values(&tensor));
            loss = (loss + (gathered * weights(&tensor)?)?.sum_all()?)?;
        }
        let grads = (loss * (ctx.slot() + 1) as f64)?.backward()?;
        let vars = in_replica.vars(ctx.slot())?;
        vars.iter()
            .map(|var| Ok(grads.get(var).unwrap().clone()))
            .collect::<candle_core::Result<Vec<Tensor>>>()
    });
    let x = Tensor::zeros((mesh.len(), 1), DType::F32, &Device::Cpu).unwrap();
    let grads = run.call_sharded(x).unwrap();
    let factor = (mesh.len() * (mesh.len() + 1) / 2) as f64;
    for (slot, grads) in grads.shards().iter().enumerate() {
        for (var, grad) in vars.vars(slot).unwrap().iter().zip(grads) {
            let expected = weights(var.as_tensor()).unwrap().affine(factor, 0.0).unwrap();
            assert_eq!(values(grad), values(&expected), "{} slot {slot}", vars.plan().strategy());
        }
    }
}

#[test]
fn a_unit_is_gathered_by_name_and_a_gradient_of_a_whole_is_scattered() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let vars = shard(&mesh, &plan(&Full::default(), 2));
    let in_replica = vars.clone();
    let run = mesh.pmap(move |ctx, _: Tensor| {
        let unit = in_replica.all_gather_unit(ctx, "h.0")?;
        assert_eq!(unit.keys().collect::<Vec<_>>(), ["h.0.down", "h.0.up"]);
        let parts = in_replica.reduce_scatter(ctx, "h.0.up", &unit["h.0.up"])?;
        for (var, sum) in parts {
            assert_eq!(values(&sum), values(&(var.as_tensor() * 2.0)?));
        }
        Ok(())
    });
    run.call(Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap()).unwrap();
    let in_replica = vars.clone();
    let unknown = mesh.pmap(move |ctx, _: Tensor| in_replica.all_gather(ctx, "lm_head"));
    let error = unknown.call(Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap()).unwrap_err();
    let unknown = "replica 0 on Cpu failed: there is no parameter or unit named lm_head";
    assert_eq!(error.to_string(), unknown);
    assert!(matches!(
        vars.gather("lm_head"),
        Err(Error::Parameter(ParameterError::Unknown { .. }))
    ));
}

#[test]
fn units_are_gathered_and_reduced_as_their_parameters_are_whatever_the_plan() {
    let mut cases = Vec::new();
    for world in 1..4 {
        let mesh = DeviceMesh::cpu(world).unwrap();
        cases.extend(strategies().iter().map(|strategy| (mesh.clone(), plan(&**strategy, world))));
    }
    let groups = DeviceMesh::builder().axis("replicate", 2).axis("shard", 2).cpu().unwrap();
    cases.push((groups, plan(&Hsdp::new(Full::default(), 2), 4)));
    for (mesh, plan) in &cases {
        let vars = shard(mesh, plan);
        let units: BTreeSet<String> =
            plan.parameters().iter().map(|parameter| parameter.info().unit().to_owned()).collect();
        let in_replica = vars.clone();
        let run = mesh.pmap(move |ctx, _: Tensor| {
            for unit in &units {
                let gathered = in_replica.gather_unit(ctx, unit)?;
                let single = in_replica.all_gather_unit(ctx, unit)?;
                assert!(gathered.keys().eq(single.keys()));
                for (name, var) in &gathered {
                    assert!(var.is_variable());
                    assert_eq!(values(var.as_tensor()), values(&single[name]), "{name}");
                }
                let grad = |name: &str| gathered[name].affine(ctx.slot() as f64 + 0.1, 0.3).ok();
                let sums = in_replica.reduce_unit(ctx, unit, grad)?;
                let mut expected = Vec::new();
                for name in gathered.keys() {
                    expected.extend(in_replica.reduce_scatter(ctx, name, &grad(name).unwrap())?);
                }
                // Variables have no order of their own; their values differ.
                let sorted = |parts: Vec<(Var, Tensor)>| -> Vec<(Vec<f32>, Vec<f32>)> {
                    let mut values: Vec<_> =
                        parts.iter().map(|(var, sum)| (values(var), values(sum))).collect();
                    values.sort_by(|a, b| a.partial_cmp(b).unwrap());
                    values
                };
                assert_eq!(sorted(sums), sorted(expected));
            }
            Ok(())
        });
        run.call(Tensor::zeros((mesh.len(), 1), DType::F32, &Device::Cpu).unwrap()).unwrap();
    }
}

#[test]
fn a_unit_s_parameter_without_a_gradient_is_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let vars = shard(&mesh, &plan(&Full::default(), 2));
    let run = mesh.pmap(move |ctx, _: Tensor| {
        vars.reduce_unit(ctx, "h.0", |name| {
            // Of the right shape.
            (name != "h.0.up").then(|| Tensor::zeros((6, 4), DType::F32, &Device::Cpu).unwrap())
        })
        .map(drop)
    });
    let x = Tensor::zeros((2, 1), DType::F32, &Device::Cpu).unwrap();
    let error = run.call(x).unwrap_err().to_string();
    assert!(error.contains("h.0.up"), "{error}");
}

/// An optimizer for each slot, which has taken one step along the variables themselves.
fn trained(vars: &ShardedVars, slots: usize) -> Vec<AdamW> {
    let adam = |slot| {
        let vars = vars.vars(slot).unwrap();
        let mut adam = AdamW::new(vars.clone(), ParamsAdamW::default()).unwrap();
        let mut grads = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap().backward().unwrap();
        for var in &vars {
            grads.insert(var, var.as_detached_tensor());
        }
        // A step of length 0: only the moments move.
        adam.set_learning_rate(0.0);
        adam.step(&grads).unwrap();
        adam
    };
    (0..slots).map(adam).collect()
}

#[test]
fn checkpoints_are_read_under_every_other_plan() {
    let folder = tempfile::tempdir().unwrap();
    for (n, strategy) in strategies().iter().enumerate() {
        let checkpoints = Checkpoints::new(folder.path().join(n.to_string()));
        let mesh = DeviceMesh::cpu(3).unwrap();
        let vars = shard(&mesh, &plan(&**strategy, 3));
        let mut state = vars.state_dict().unwrap();
        for (slot, adam) in trained(&vars, 3).iter().enumerate() {
            vars.add_optimizer(&mut state, slot, adam).unwrap();
        }
        checkpoints.save(&mesh, 7, &state, &()).unwrap();
        let checkpoint = checkpoints.latest().unwrap().unwrap();
        for world in [1, 2, 5] {
            let mesh = DeviceMesh::cpu(world).unwrap();
            for other in strategies() {
                let other = plan(&*other, world);
                assert_whole(&ShardedVars::load(&mesh, &other, &checkpoint).unwrap());
                assert_whole(&vars.resharded(&mesh, &other).unwrap());
                check_moments(&shard(&mesh, &other), &checkpoint);
            }
        }
    }
}

/// The moments of a checkpoint, read for other parts, are those of a step along the variables.
fn check_moments(vars: &ShardedVars, checkpoint: &Checkpoint) {
    let slots = usize::try_from(vars.plan().world_size().as_u64()).unwrap();
    for (slot, expected) in trained(vars, slots).iter().enumerate() {
        let mut adam = AdamW::new(vars.vars(slot).unwrap(), ParamsAdamW::default()).unwrap();
        vars.load_optimizer(checkpoint, slot, &mut adam).unwrap();
        for var in 0..vars.vars(slot).unwrap().len() {
            for ((name, found), (_, expected)) in
                adam.state(var).unwrap().iter().zip(expected.state(var).unwrap())
            {
                let f32s = |tensor: &Tensor| values(&tensor.to_dtype(DType::F32).unwrap());
                assert_eq!(f32s(found), f32s(&expected), "{name} of variable {var} of slot {slot}");
            }
        }
    }
}

#[test]
fn resized_plans_gather_runs_in_the_order_of_the_parameter() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let resized = plan(&Full::new(Layout::ROWS), 2).resized(WorldSize::new(3).unwrap()).unwrap();
    let vars = shard(&mesh, &resized);
    assert_whole(&vars);
    check_gradients(&mesh, &vars);
}

#[test]
fn what_is_trained_is_what_is_saved() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let plan = plan(&Full::default(), 2);
    let vars = shard(&mesh, &plan);
    let part: &Var = &vars.vars(1).unwrap()[0];
    part.set(&part.zeros_like().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 0, &vars.state_dict().unwrap(), &()).unwrap();
    let loaded = ShardedVars::load(&mesh, &plan, &checkpoints.latest().unwrap().unwrap()).unwrap();
    assert!(values(loaded.vars(1).unwrap()[0].as_tensor()).iter().all(|&value| value == 0.0));
}

#[test]
fn plans_and_files_that_do_not_fit_are_refused() {
    let (mesh, plan) = (DeviceMesh::cpu(2).unwrap(), plan(&Full::default(), 2));
    let three = DeviceMesh::cpu(3).unwrap();
    let sharded =
        ShardedVars::shard(&three, &plan, model().iter().map(|(name, tensor)| (*name, tensor)));
    assert!(matches!(sharded, Err(Error::Sharding(ShardingError::World { ranks: 2, slots: 3 }))));

    let sharded =
        ShardedVars::shard(&mesh, &plan, model()[1..].iter().map(|(name, tensor)| (*name, tensor)));
    assert!(
        matches!(sharded, Err(Error::Parameter(ParameterError::Missing { name })) if name == "wte")
    );

    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 1, &shard(&mesh, &plan).state_dict().unwrap(), &()).unwrap();
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    let other = [("other", Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap())];
    let infos = parameter_infos(other.iter().map(|(name, tensor)| (name, tensor))).unwrap();
    let other = Full::default().plan(&infos, WorldSize::new(2).unwrap()).unwrap();
    let loaded = ShardedVars::load(&mesh, &other, &checkpoint);
    assert!(
        matches!(loaded, Err(Error::Parameter(ParameterError::Unknown { name })) if name == "h.0.down")
    );
}

#[test]
fn a_step_of_sharded_training_is_a_step_of_plain_training() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let vars = shard(&mesh, &plan(&Full::default(), 2));
    let x = Tensor::arange(0_f32, 28., &Device::Cpu).unwrap().reshape((4, 7)).unwrap();
    let loss = |x: &Tensor, wte: &Tensor| (x / 100.0)?.matmul(&(wte / 100.0)?)?.sqr()?.mean_all();

    let whole = Var::from_tensor(&vars.gather("wte").unwrap()).unwrap();
    let grads = loss(&x, &whole).unwrap().backward().unwrap();
    let expected = (whole.as_tensor() - grads.get(&whole).unwrap() * 10.0).unwrap();

    let in_replica = vars.clone();
    let step = mesh.pmap(move |ctx, x: Tensor| {
        let share = (loss(&x, &in_replica.all_gather(ctx, "wte")?)? / ctx.count() as f64)?;
        let grads = share.backward()?;
        for var in in_replica.vars(ctx.slot())? {
            if let Some(grad) = grads.get(&var) {
                var.set(&(var.as_tensor() - (grad * 10.0)?)?)?;
            }
        }
        Ok(())
    });
    step.in_axes(P::from(Some(0))).call(x).unwrap();
    for (left, right) in values(&vars.gather("wte").unwrap()).iter().zip(values(&expected)) {
        assert!((left - right).abs() < 1e-4, "{left} for {right}");
    }
}

#[test]
fn tensors_that_are_not_as_planned_are_refused() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let plan = plan(&Full::default(), 2);
    let with = |name: &str, tensor: Tensor| {
        let mut model = model();
        model.iter_mut().find(|(known, _)| *known == name).unwrap().1 = tensor;
        ShardedVars::shard(&mesh, &plan, model.iter().map(|(name, tensor)| (*name, tensor)))
            .unwrap_err()
    };
    // As many items, but in other rows.
    let error = with("wte", Tensor::zeros((4, 7), DType::F32, &Device::Cpu).unwrap());
    assert!(
        matches!(&error, Error::Parameter(ParameterError::Shape { name, found, expected }) if name == "wte" && found == &[4, 7] && expected == &[7, 4]),
        "{error}"
    );
    let error = with("norm", Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap());
    assert!(
        matches!(
            &error,
            Error::Parameter(ParameterError::Dtype { found: "f64", expected: "f32", .. })
        ),
        "{error}"
    );

    let complex = ParameterInfo::new("phase", vec![2], ElemType::C64).unwrap();
    let plan = Full::default().plan(&[complex], WorldSize::new(2).unwrap()).unwrap();
    let phase = [("phase", Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap())];
    let error = ShardedVars::shard(&mesh, &plan, phase.iter().map(|(name, x)| (*name, x)));
    assert!(
        matches!(error, Err(Error::Parameter(ParameterError::UnknownDtype { dtype, .. })) if dtype == "C64")
    );
    // Half of a byte.
    let tensor = Tensor::from_raw_buffer(&[0], DType::F4, &[1], &Device::Cpu).unwrap();
    assert!(matches!(parameter_infos([("w", &tensor)]), Err(Error::Plan(_))));
}

#[test]
fn slots_of_other_meshes_are_refused() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let vars = shard(&mesh, &plan(&Full::default(), 2));
    let refused = |error: Error| {
        assert!(
            matches!(&error, Error::Sharding(ShardingError::Slot { slot: 2, slots }) if *slots == (0..2)),
            "{error}"
        );
    };
    let mut adam = AdamW::new(Vec::new(), ParamsAdamW::default()).unwrap();
    let mut state = vars.state_dict().unwrap();
    refused(vars.vars(2).unwrap_err());
    refused(vars.bytes(2).unwrap_err());
    refused(vars.add_optimizer(&mut state, 2, &adam).unwrap_err());

    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 1, &state, &()).unwrap();
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    refused(vars.load_optimizer(&checkpoint, 2, &mut adam).unwrap_err());
    // An optimizer that was made with other variables.
    let error = vars.load_optimizer(&checkpoint, 1, &mut adam).unwrap_err();
    assert!(matches!(error, Error::Optimizer { .. }), "{error}");

    for slots in [1, 3] {
        let in_replica = vars.clone();
        let other = DeviceMesh::cpu(slots).unwrap().pmap(move |ctx, ()| {
            let error = in_replica.all_gather(ctx, "wte").unwrap_err().to_string();
            let expected = format!("a replica of {slots} gathers parameters of a mesh of 2 slots");
            assert!(error.starts_with(&expected), "{error}");
            Ok(())
        });
        other.call(()).unwrap();
    }
}

#[test]
fn tied_parameters_are_kept_once_and_found_under_both_names() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let wte = Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().reshape((6, 2)).unwrap();
    let tied = [("lm_head", &wte), ("wte", &wte)];
    let infos = parameter_infos(tied).unwrap();
    let plan = Full::default().plan(&infos, WorldSize::new(2).unwrap()).unwrap();
    for given in [&tied[..], &tied[..1]] {
        let vars = ShardedVars::shard(&mesh, &plan, given.iter().copied()).unwrap();
        assert_eq!([0, 1].map(|slot| vars.bytes(slot).unwrap()), [24, 24]);
        for (name, tensor) in tied {
            assert_eq!(values(&vars.gather(name).unwrap()), values(tensor), "{name}");
        }
        let again = vars.resharded(&mesh, &plan).unwrap();
        assert_eq!(values(&again.gather("wte").unwrap()), values(&wte));
    }
}
