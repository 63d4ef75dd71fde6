//! Rejected models, plans and losses.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder, batch_norm, linear, linear_no_bias, ops::dropout};
use core_types::Seed;
use dist_train::{AdamW, DistributedModel, Error, FullyShard, Keep, TrainingError, Units};
use fsdp_plan::strategy::{Choice, Full, Hybrid, Layout, ShardingStrategy};
use pmap_mesh::{CollectiveError, DeviceMesh, Replica};

use super::model::{KEEPS, adam, sharded};
use crate::support::{LAYOUTS, input, layers, refused, replicated, saved};

fn cannot_build(build: impl Fn(VarBuilder<'_>) -> Result<()>) -> String {
    let mesh = DeviceMesh::cpu(2).unwrap();
    sharding_error(FullyShard::builder(&mesh, build).build(adam))
}

/// Returns the message of a rejected model.
fn sharding_error(built: dist_train::Result<DistributedModel<Units, AdamW>>) -> String {
    match built {
        Err(Error::Sharding { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn unassigned_parameters_are_rejected() {
    let homeless = cannot_build(|vb| {
        linear(3, 3, vb.pp("blocks.0"))?;
        linear(3, 1, vb.pp("head")).map(drop)
    });
    assert!(homeless.starts_with("2 parameters are in no unit: head.bias, head."), "{homeless}");
    let buffer = cannot_build(|vb| batch_norm(3, 1e-5, vb.pp("blocks.0")).map(drop));
    assert!(buffer.starts_with("blocks.0.running_mean is a buffer"), "{buffer}");
}

#[test]
fn unfit_plans_are_rejected() {
    let two = DeviceMesh::cpu(2).unwrap();
    let plan = sharded(&two).build(adam).unwrap().plan().unwrap().clone();
    let with = |mesh: &DeviceMesh| sharded(mesh).plan(plan.clone()).build(adam);
    assert_eq!(with(&two).unwrap().plan().unwrap(), &plan);
    let three = sharding_error(with(&DeviceMesh::cpu(3).unwrap()));
    assert_eq!(three, "the plan does not fit: it is for 2 ranks, but the mesh has 3 slots");
    let whole = FullyShard::builder(&two, layers::<2>).plan(plan.clone()).build(adam);
    assert_eq!(sharding_error(whole), "the plan does not fit: it has no parameter 0.bias");
    let infos: Vec<_> = plan.parameters().iter().map(|planned| planned.info().clone()).collect();
    let frozen: Vec<_> = infos.iter().map(|info| info.clone().with_requires_grad(false)).collect();
    let frozen = Full::new(Layout::Dim0).plan(&frozen, plan.world_size()).unwrap();
    let other = sharding_error(sharded(&two).plan(frozen).build(adam));
    assert!(other.contains("whether a gradient is required of"), "{other}");
}

#[test]
fn unknown_units_are_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = FullyShard::builder(&mesh, layers::<2>).build(adam).unwrap();
    let missing = |_: &Replica, model: &Units, x: Tensor| {
        model.unit("2", &x, |vb, x| linear(3, 3, vb)?.forward(x))?.mean_all()
    };
    let units = vec!["0".to_owned(), "1".to_owned()];
    let expected = TrainingError::UnknownUnit { unit: "2".to_owned(), units };
    assert_eq!(refused(model.step(input(4), missing)), expected);
    assert_eq!(refused(model.evaluate(input(4), missing)), expected);
}

#[test]
fn missing_parameters_are_named_with_their_unit() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for layout in LAYOUTS {
        let mut model = layout(replicated(&mesh)).build(adam).unwrap();
        let misspelled = |_: &Replica, model: &Units, x: Tensor| {
            model.unit("1", &x, |vb, x| linear(3, 3, vb.pp("a"))?.forward(x))?.mean_all()
        };
        let error = model.step(input(4), misspelled).unwrap_err().to_string();
        assert!(error.contains("cannot find tensor a.weight"), "{error}");
        assert!(error.contains("unit 1 has the parameters bias, weight"), "{error}");
    }
    let mut whole = replicated(&mesh).build(adam).unwrap();
    let unknown = whole.step(input(4), |_: &Replica, model: &Units, x| {
        model.unit("block", &x, |vb, x| linear(3, 3, vb)?.forward(x)?.mean_all())
    });
    let error = unknown.unwrap_err().to_string();
    assert!(error.contains("no parameter is in unit \"block\""), "{error}");
}

#[test]
fn ignored_unit_errors_are_harmless() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let build = || FullyShard::builder(&mesh, layers::<2>).build(adam).unwrap();
    let whole = second(|vb, x| linear(3, 3, vb)?.forward(x));
    let trying = |ctx: &Replica, model: &Units, x: Tensor| {
        let missing = model.unit("2", &x, |vb, x| linear(3, 3, vb)?.forward(x));
        missing.or_else(|_| whole(ctx, model, x))
    };
    let (mut expected, mut found) = (build(), build());
    let expected = expected.step(input(4), &whole).unwrap().loss;
    assert_eq!(found.step(input(4), trying).unwrap().loss.to_bits(), expected.to_bits());
    // The reported error is the one that ends the step, not the ignored one.
    let infinite = found.step(input(4), |ctx, model, x| trying(ctx, model, x)? * f64::INFINITY);
    let error = refused(infinite);
    assert!(matches!(error, TrainingError::NonFiniteLoss { slot: 0, .. }), "{error}");
}

/// Returns a loss of two layers; `f` is the second.
fn second(
    f: impl Fn(VarBuilder<'_>, &Tensor) -> Result<Tensor> + Send + Sync + Clone + 'static,
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, x| {
        let x = model.unit("0", &x, |vb, x| linear(3, 3, vb)?.forward(x))?;
        model.unit("1", &x, f.clone())?.sqr()?.mean_all()
    }
}

/// Enters only the first of two units.
fn first_unit(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    model.unit("0", &x, |vb, x| linear(3, 3, vb)?.forward(x))?.sqr()?.mean_all()
}

#[test]
fn skipped_units_must_be_allowed() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let unused = second(|vb, x| linear_no_bias(3, 3, vb)?.forward(x));
    let build = || FullyShard::builder(&mesh, layers::<2>);
    let error = refused(build().build(adam).unwrap().step(input(4), first_unit));
    let parameters = vec!["1.bias".to_owned(), "1.weight".to_owned()];
    assert_eq!(error, TrainingError::NotEntered { unit: "1".to_owned(), parameters });

    let mut model = build().allow_unused(["1"]).build(adam).unwrap();
    let values = |model: &DistributedModel<Units, _>| {
        ["0.bias", "1.bias", "1.weight"].map(|name| {
            model.parameter(name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        })
    };
    let before = values(&model);
    model.step(input(4), first_unit).unwrap();
    let after = values(&model);
    assert_ne!(after[0], before[0]);
    // Weight decay skips them too.
    assert_eq!(after[1..], before[1..]);
    model.step(input(4), unused).unwrap();
    assert_ne!(values(&model)[2], before[2]);
    assert_eq!(values(&model)[1], before[1]);
}

/// Masks the second unit with random numbers of a seed that the replica draws.
fn masked(ctx: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let drawn = ctx.rng().uniform(())?.to_scalar::<f32>()?;
    let seed = Seed::new(drawn.to_bits().into());
    let x = model.unit("0", &x, |vb, x| linear(3, 3, vb)?.forward(x))?;
    let x = model.unit("1", &x, move |vb, x| {
        let mask: Vec<f32> =
            (0..x.elem_count() as u64).map(|n| (seed.derive(n).as_u64() % 2) as f32).collect();
        linear(3, 3, vb)?.forward(x)? * Tensor::from_vec(mask, x.shape(), x.device())?
    })?;
    x.sqr()?.mean_all()
}

#[test]
fn unrepeatable_units_are_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let dropping = second(|vb, x| dropout(&linear(3, 3, vb)?.forward(x)?, 0.5));
    let mut model = FullyShard::builder(&mesh, layers::<2>).build(adam).unwrap();
    // Two masks of six items are equal by chance once in 64 steps, on each slot.
    let outcomes: Vec<_> = (0..8).map(|_| model.step(input(4), &dropping)).collect();
    let expected = TrainingError::NotRepeatable { unit: "1".to_owned() };
    assert!(outcomes.into_iter().any(|outcome| refused(outcome) == expected));
    // A kept graph contains the mask, so nothing is recomputed.
    for keep in [Keep::Graph, Keep::Gathered] {
        let keeping = FullyShard::builder(&mesh, layers::<2>).keep_unit("1", keep);
        keeping.build(adam).unwrap().step(input(4), &dropping).unwrap();
    }

    let losses = |keep| {
        let mut model = FullyShard::builder(&mesh, layers::<2>).keep(keep).build(adam).unwrap();
        [0, 1, 2].map(|_| model.step(input(4), masked).unwrap().loss.to_bits())
    };
    assert_eq!(losses(Keep::Inputs), losses(Keep::Graph));
    assert_eq!(losses(Keep::Inputs), losses(Keep::Gathered));
}

/// The checkpoint may come from a model that does not recompute units.
#[test]
fn loaded_models_check_repeatability() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let dropping = second(|vb, x| dropout(&linear(3, 3, vb)?.forward(x)?, 0.5));
    let build = |keep| FullyShard::builder(&mesh, layers::<2>).keep(keep).build(adam).unwrap();
    let mut once = build(Keep::Gathered);
    once.step(input(4), &dropping).unwrap();
    let mut model = build(Keep::Inputs);
    model.load(&saved(&mesh, &once)).unwrap();
    let expected = TrainingError::NotRepeatable { unit: "1".to_owned() };
    assert!((0..8).any(|_| refused(model.step(input(4), &dropping)) == expected));
}

#[test]
fn builder_overrides_kept_units() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let plan = sharded(&mesh).build(adam).unwrap().plan().unwrap().clone();
    let kept = plan.units()[1].to_owned();
    let keeping = plan.clone().with_kept_units([&*kept]).unwrap();
    let silent = sharded(&mesh).plan(keeping.clone()).build(adam).unwrap();
    assert_eq!(silent.plan().unwrap(), &keeping);
    let said = sharded(&mesh).plan(keeping).keep(Keep::Inputs).build(adam).unwrap();
    assert_eq!(said.plan().unwrap(), &plan);
}

#[test]
fn captured_tensors_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let skipping = |is_captured: bool| {
        move |_: &Replica, model: &Units, x: Tensor| {
            let first = model.unit("0", &x, |vb, x| linear(3, 3, vb)?.forward(x))?;
            let skip = first.clone();
            let last = if is_captured {
                model.unit("1", &first, move |vb, x| linear(3, 3, vb)?.forward(x)? + &skip)?
            } else {
                let inputs = (first, skip);
                model.unit("1", &inputs, |vb, (x, skip)| linear(3, 3, vb)?.forward(x)? + skip)?
            };
            last.sqr()?.mean_all()
        }
    };
    for keep in KEEPS {
        let mut model = FullyShard::builder(&mesh, layers::<2>).keep(keep).build(adam).unwrap();
        let expected = TrainingError::Captured { unit: "1".to_owned() };
        assert_eq!(refused(model.step(input(4), skipping(true))), expected, "{keep:?}");
        model.step(input(4), skipping(false)).unwrap();
        let outside = Var::ones((2, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        let with_variable =
            second(move |vb, x| linear(3, 3, vb)?.forward(x)? + outside.as_tensor());
        assert_eq!(refused(model.step(input(4), with_variable)), expected, "{keep:?}");
    }
}

#[test]
fn differentiating_losses_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = FullyShard::builder(&mesh, layers::<2>).build(adam).unwrap();
    let penalized = model.step(input(4), |ctx: &Replica, model: &Units, x| {
        let loss = second(|vb, x| linear(3, 3, vb)?.forward(x))(ctx, model, x)?;
        loss.backward()?;
        Ok(loss)
    });
    let how = "by the loss itself";
    let expected = TrainingError::Differentiated { unit: "1".to_owned(), how };
    assert_eq!(refused(penalized), expected);
    model.step(input(4), second(|vb, x| linear(3, 3, vb)?.forward(x))).unwrap();
}

/// The units need no gathering, and their gradients have equal shapes.
#[test]
fn replicated_units_need_one_order() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let replicated = Hybrid::default().with_rule("**", Choice::Replicate).unwrap();
    let builder = FullyShard::builder(&mesh, layers::<2>).strategy(replicated);
    let mut model = builder.allow_unused(["**"]).build(adam).unwrap();
    let experts = model.step(input(4), |ctx: &Replica, model: &Units, x| {
        let expert = ["0", "1"][ctx.slot()];
        model.unit(expert, &x, |vb, x| linear(3, 3, vb)?.forward(x))?.sqr()?.mean_all()
    });
    let error = experts.unwrap_err();
    let is_mismatch = matches!(
        &error,
        Error::Mesh(pmap_mesh::Error::Collective(CollectiveError::Mismatch { .. }))
    );
    assert!(is_mismatch, "{error}");
    model.step(input(4), first_unit).unwrap();
}

#[test]
fn sharded_gradients_are_checked() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    // A softmax without a backward pass, next to a residual.
    let mut model = FullyShard::builder(&mesh, layers::<2>).build(adam).unwrap();
    let fused = second(|vb, x| {
        let y = candle_nn::ops::softmax_last_dim(&x.contiguous()?)?;
        linear(3, 3, vb)?.forward(&(y * 3.)?)? + x
    });
    let error = model.check_gradients(input(4), fused).unwrap_err();
    assert!(matches!(error, Error::Gradient(_)), "{error}");
    assert!(error.to_string().contains("0 ("), "{error}");
    model.step(input(4), second(|vb, x| linear(3, 3, vb)?.forward(x))).unwrap();
}
