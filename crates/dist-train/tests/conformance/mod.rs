//! Training over an engine of several processes, compared bitwise with threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

mod batches;
mod fully_sharded;
mod pretrained;

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{
    BatchNorm, Linear, Module, ModuleT, Optimizer, ParamsAdamW, SGD, VarBuilder, batch_norm,
    linear, linear_no_bias,
};
use core_types::Seed;
use dist_train::{
    AdamW, Checkpoint, CheckpointError, Checkpoints, DataParallel, Declared, DistributedModel,
    Error, Group, Loss, ModelBuilder, ParamsSgd, Sgd, StateDict, TrainingError, UnitRules,
    value_and_grad,
};
use pmap_mesh::{DeviceMesh, Replica, Uneven};
use process_tests::{Engine, assert_same, folder, mesh, threads};

use crate::random::{Case, assert_near};

/// Runs a case on this rank.
pub(crate) fn run(engine: &impl Engine, case: &str, ranks: usize) {
    match case {
        "training" => training(engine, ranks),
        "beginnings" => beginnings(engine, ranks),
        "refusals" => refusals(engine, ranks),
        "losses" => weighted(engine, ranks),
        "batches" => batches::run(engine, ranks),
        "random" => random_models(engine, ranks),
        "checkpoints" => checkpoints(engine, ranks),
        "pretrained" => pretrained::run(engine, ranks),
        "fully-sharded" => fully_sharded::run(engine, ranks),
        "fully-sharded-groups" => fully_sharded::groups(engine, ranks),
        other => panic!("no case is named {other}"),
    }
}

/// Compares gradients and steps with threads.
fn training(engine: &impl Engine, ranks: usize) {
    // Threads use the same device, because devices round matrix products differently.
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

type Constructor = fn(VarBuilder<'_>) -> Result<[Linear; 2]>;
type SetOption = for<'a> fn(ModelBuilder<'a, [Linear; 2]>) -> ModelBuilder<'a, [Linear; 2]>;

/// Checks that all processes start with the first one's variables, and that other models are
/// rejected.
fn beginnings(engine: &impl Engine, ranks: usize) {
    let tested = mesh(engine, &[], None);
    let rank = tested.local_slots().start;
    let sgd = |group: Group| SGD::new(group.vars, 0.1);
    // Each process has other initial values, and decays weights at another rate.
    let first = move |_: &Declared, items: Range<usize>| {
        Tensor::full(rank as f32 + 0.5, items.len(), &Device::Cpu)
    };
    let weight_decay = 0.1 * rank as f64;
    let mut model = DataParallel::builder(&tested, |vb| linear_no_bias(3, 2, vb))
        .init_with(first)
        .build(|group| {
            Sgd::new(group.vars, ParamsSgd { lr: 0.1, weight_decay, ..ParamsSgd::default() })
        })
        .unwrap();
    let start = Tensor::full(0.5_f32, (2, 3), &Device::Cpu).unwrap();
    assert_same(&[model.parameter("weight").unwrap()], &[start]);
    model.state_dict().unwrap();

    let x = Tensor::ones((ranks, 3), DType::F32, &Device::Cpu).unwrap();
    model.step(x, |_, model: &Linear, x: Tensor| model.forward(&x)?.sqr()?.mean_all()).unwrap();
    let diverged = model.check_in_sync();
    let is_refused =
        matches!(diverged, Err(Error::Diverged { name, replica: 1 }) if name == "weight");
    assert_eq!(is_refused, ranks > 1);

    let other = DataParallel::builder(&tested, |vb| linear_no_bias(3, 2 + rank, vb)).build(sgd);
    let is_refused = matches!(
        other,
        Err(Error::Training(TrainingError::OptionMismatch { option: "variables", replica: 1 }))
    );
    assert_eq!(is_refused, ranks > 1);

    // The variables are equal, but process 1 sets different options.
    let layers: Constructor =
        |vb| Ok([linear_no_bias(3, 2, vb.pp("a"))?, linear_no_bias(3, 2, vb.pp("b"))?]);
    let options: [(&str, SetOption); 2] = [
        ("group", |builder| builder.group("a", ["a"])),
        ("seed", |builder| builder.seed(Seed::new(1))),
    ];
    for (name, option) in options {
        let builder = DataParallel::builder(&tested, layers);
        let other = if rank == 1 { option(builder) } else { builder }.build(sgd);
        let is_refused = matches!(
            other,
            Err(Error::Training(TrainingError::OptionMismatch { option, replica: 1 })) if option == name
        );
        assert_eq!(is_refused, ranks > 1, "{name}");
    }
    let builder = DataParallel::builder(&tested, layers)
        .by_units(UnitRules::new().unit("layers", ["a", "b"]));
    let other = if rank == 1 { builder.fully_shard() } else { builder }.build(sgd);
    let is_rejected = matches!(
        other,
        Err(Error::Training(TrainingError::OptionMismatch { option: "fully_shard", replica: 1 }))
    );
    assert_eq!(is_rejected, ranks > 1);
    let rate = 0.1 + f64::from(u8::from(rank == 1));
    let other =
        DataParallel::builder(&tested, layers).build(|group: Group| SGD::new(group.vars, rate));
    let is_refused =
        matches!(other, Err(Error::Training(TrainingError::OptionMismatch { replica: 1, .. })));
    assert_eq!(is_refused, ranks > 1);
    fail_together(&tested);
}

/// Checks that an error in one process ends `build` in all processes.
fn fail_together(mesh: &DeviceMesh) {
    let (rank, last) = (mesh.local_slots().start, mesh.len() - 1);
    let linear = |vb: VarBuilder<'_>| linear_no_bias(3, 2, vb);
    let constructor = move |vb: VarBuilder<'_>| {
        if rank == last {
            candle_core::bail!("no such file")
        }
        linear(vb)
    };
    let optimizer = move |group: Group| {
        if rank == last {
            candle_core::bail!("no such file")
        }
        SGD::new(group.vars, 0.1)
    };
    let by_constructor =
        DataParallel::builder(mesh, constructor).build(|group| SGD::new(group.vars, 0.1));
    let by_optimizer = DataParallel::builder(mesh, linear).build(optimizer);
    for error in [by_constructor.unwrap_err(), by_optimizer.unwrap_err()] {
        let is_expected = match &error {
            Error::Model { .. } => rank == last,
            Error::OtherProcess { slot, .. } => rank != last && *slot == last,
            _ => false,
        };
        assert!(is_expected && error.to_string().contains("no such file"), "{error}");
    }
}

/// Checks that a rejected step ends on all processes, which continue.
fn refusals(engine: &impl Engine, ranks: usize) {
    let tested = mesh(engine, &[], None);
    let last = ranks - 1;
    let x = Tensor::ones((ranks * 2, 3), DType::F32, &Device::Cpu).unwrap();
    let layers = |vb: VarBuilder<'_>| -> Result<Vec<Linear>> {
        Ok(vec![linear_no_bias(3, 1, vb.pp("a"))?, linear_no_bias(3, 1, vb.pp("b"))?])
    };
    let build = |unused: &[&str]| {
        DataParallel::builder(&tested, layers)
            .allow_unused(unused.iter().copied())
            .build(|group| SGD::new(group.vars, 0.1))
            .unwrap()
    };
    // A loss with options for the last slot: to use the second layer, and to be finite.
    let loss = |is_used: bool, is_finite: bool| {
        move |ctx: &Replica, layers: &Vec<Linear>, x: Tensor| {
            let mut y = layers[0].forward(&x)?;
            if is_used && ctx.slot() == last {
                y = (y + layers[1].forward(&x)?)?;
            }
            let scale = if is_finite || ctx.slot() != last { 1.0 } else { f64::INFINITY };
            y.sqr()?.mean_all()? * scale
        }
    };
    let mut model = build(&[]);
    let error = model.step(x.clone(), loss(false, true)).unwrap_err();
    let missing = vec!["b.weight".to_owned()];
    assert!(
        matches!(&error, Error::Training(TrainingError::NoGradient { missing: found, trained: 2 }) if *found == missing),
        "{error}"
    );
    let error = model.step(x.clone(), loss(true, false)).unwrap_err();
    assert!(
        matches!(error, Error::Training(TrainingError::NonFiniteLoss { slot, .. }) if slot == last),
        "{error}"
    );
    // The last slot's loss, or its weight, is not a scalar.
    let shapeless = model.step(x.clone(), |ctx: &Replica, layers: &Vec<Linear>, x| {
        let y = layers[0].forward(&x)?.sqr()?;
        if ctx.slot() == last { Ok(y) } else { y.mean_all() }
    });
    let error = shapeless.unwrap_err();
    let not_scalar =
        |what, shape| TrainingError::NotScalar { slot: last, what, shape, dtype: "f32".to_owned() };
    let expected = not_scalar("loss", vec![2, 1]);
    assert!(matches!(&error, Error::Training(error) if *error == expected), "{error}");
    let weightless = model.evaluate(x.clone(), |ctx: &Replica, layers: &Vec<Linear>, x| {
        let weight = if ctx.slot() == last { x.clone() } else { x.ones_like()?.sum_all()? };
        Ok(Loss::sum(layers[0].forward(&x)?.sum_all()?, weight))
    });
    let error = weightless.unwrap_err();
    let expected = not_scalar("weight of the loss", vec![2, 3]);
    assert!(matches!(&error, Error::Training(error) if *error == expected), "{error}");
    model.step(x.clone(), loss(true, true)).unwrap();
    model.check_in_sync().unwrap();
    let mut model = build(&["b"]);
    model.step(x.clone(), loss(false, true)).unwrap();
    model.step(x, loss(true, true)).unwrap();
    model.check_in_sync().unwrap();
}

/// Compares weighted losses of padded batches with threads: accumulated and clipped, with buffers,
/// frozen and unused variables, and random numbers.
fn weighted(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    assert_same(&weighted_steps(&tested), &weighted_steps(&threads));
}

/// Compares random models bitwise with threads, and in double precision with one device.
fn random_models(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    for seed in 0..20 {
        let case = Case::new(1000 * ranks as u64 + seed, ranks, DType::F64);
        let found = case.on_mesh(&tested);
        let name = format!("case {seed} on {ranks} ranks");
        assert_near(&found, &case.on_one_device(), 1e-11, &name);
        let bits = |numbers: Vec<f64>| numbers.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(found), bits(case.on_mesh(&threads)), "{name}");
    }
    for dtype in [DType::BF16, DType::F16] {
        for seed in 0..4 {
            let case = Case::new(seed, ranks, dtype);
            assert_near(&case.on_mesh(&tested), &case.on_mesh(&threads), 0.0, "halves");
        }
    }
}

fn weighted_steps(mesh: &DeviceMesh) -> Vec<Tensor> {
    type Model = (BatchNorm, Linear, Linear);
    let layers = |vb: VarBuilder<'_>| -> Result<Model> {
        linear(3, 3, vb.pp("unused"))?;
        let norm = batch_norm(3, 1e-5, vb.pp("norm"))?;
        Ok((norm, linear(3, 4, vb.pp("frozen"))?, linear(4, 1, vb.pp("head"))?))
    };
    let mut model = DataParallel::builder(mesh, layers)
        .freeze(["frozen"])
        .allow_unused(["unused"])
        .group("head", ["head"])
        .uneven(Uneven::Pad)
        .clip_grad_norm(0.1)
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap();
    let loss = |ctx: &Replica, model: &Model, (x, mask): (Tensor, Tensor)| {
        let noise = ctx.rng().uniform(x.shape())?;
        let x = model.0.forward_t(&(x + noise)?, true)?;
        let y = model.2.forward(&model.1.forward(&x)?.tanh()?)?.squeeze(1)?.sqr()?;
        Ok(Loss::sum((y * &mask)?.sum_all()?, mask.sum_all()?).with_sums(mask.sum_all()?))
    };
    let batch = |rows: usize| {
        let x = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu).unwrap();
        let mask = Tensor::ones(rows, DType::F32, &Device::Cpu).unwrap();
        (x.sin().unwrap().reshape((rows, 3)).unwrap(), mask)
    };
    let mut all = Vec::new();
    for step in 0..4 {
        // Four rows on each slot, of which the last has one or two of padding, or none.
        let accumulated = model.accumulate(batch(mesh.len() * 4 - 1), loss).unwrap();
        let step = model.step(batch(mesh.len() * 4 - step % 3), loss).unwrap();
        all.extend([accumulated.aux, step.aux]);
        all.extend([accumulated.loss, step.loss, step.grad_norm, step.weight].map(number));
    }
    model.check_in_sync().unwrap();
    let evaluated = model.evaluate(batch(mesh.len() * 2 - 1), loss).unwrap();
    all.extend([number(evaluated.loss), evaluated.aux]);
    all.extend(model.parameters().unwrap().into_values());
    all
}

/// Loads checkpoints of processes on threads, and of threads on processes.
fn checkpoints(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu)
        .unwrap()
        .reshape((ranks * 2, 3))
        .unwrap();
    let folder = folder();
    let trained = |mesh: &DeviceMesh, from: Option<&Checkpoint>| {
        let mut model = model(mesh);
        if let Some(checkpoint) = from {
            model.load(checkpoint).unwrap();
        }
        train(&mut model, &x, 5);
        (values(&model), model.state_dict().unwrap())
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
        "a shard from each rank, and the index"
    );
    let own = folder.join(format!("threads-{}", tested.local_slots().start));
    let own = Checkpoints::new(own);
    let (found, state) = trained(&threads, None);
    assert_same(&found, &expected);
    own.save(&threads, 5, &state, &()).unwrap();
    let of_threads = own.latest().unwrap().unwrap();
    let (expected, _) = trained(&tested, Some(&of_threads));
    assert_same(&trained(&threads, Some(&checkpoint)).0, &expected);

    // Each process loads the checkpoint of a different step.
    let step = 10 + tested.local_slots().start as u64;
    own.save(&threads, step, &state, &()).unwrap();
    let mut model = model(&tested);
    let loaded = model.load(&own.latest().unwrap().unwrap());
    let is_refused = matches!(
        loaded,
        Err(Error::Checkpoint(CheckpointError::ProcessesDiffer { reason, .. }))
            if reason.starts_with(&format!("step {step} in this process, but step"))
    );
    assert_eq!(is_refused, ranks > 1);
    // The steps are equal, but the contents differ.
    own.save(&threads, 30, &state, &step).unwrap();
    let loaded = model.load(&own.latest().unwrap().unwrap());
    let is_refused =
        matches!(loaded, Err(Error::Checkpoint(CheckpointError::ProcessesDiffer { .. })));
    assert_eq!(is_refused, ranks > 1);
    if ranks > 1 {
        refused_saves(&tested, &checkpoints, &model.state_dict().unwrap());
        damage_at_one_rank(&tested, &threads, &state);
    }
}

/// Checks that a failed save fails in all processes, with the cause.
fn refused_saves(mesh: &DeviceMesh, checkpoints: &Checkpoints, state: &StateDict) {
    let slot = mesh.local_slots().start;
    let second =
        Checkpoints::new(folder().join("tested")).lock(mesh).map_err(Error::from).unwrap_err();
    let is_from_first = match slot {
        0 => matches!(second, Error::Checkpoint(CheckpointError::Locked { .. })),
        _ => matches!(second, Error::OtherProcess { slot: 0, .. }),
    };
    assert!(is_from_first, "{second}");
    assert!(second.to_string().contains("is being trained by process"), "{second}");

    let other_step = checkpoints.save(mesh, 20 + slot as u64, state, &()).unwrap_err();
    let is_refused = matches!(other_step, CheckpointError::ProcessesDiffer { .. });
    assert!(is_refused, "{other_step}");

    // The last process writes to a different folder.
    let is_elsewhere = slot + 1 == mesh.len();
    let name = if is_elsewhere { "elsewhere" } else { "here" };
    let error = Checkpoints::new(folder().join(name)).save(mesh, 1, state, &()).unwrap_err();
    let is_refused = match &error {
        CheckpointError::NotShared { .. } => is_elsewhere,
        CheckpointError::OtherProcess { slot, .. } => !is_elsewhere && slot + 1 == mesh.len(),
        _ => false,
    };
    assert!(is_refused, "{error}");
    assert!(error.to_string().contains("must see the same folder"), "{error}");
    assert!(Checkpoints::new(folder().join("here")).latest().unwrap().is_none());
}

/// Checks that all processes skip a checkpoint that one process finds corrupted.
fn damage_at_one_rank(mesh: &DeviceMesh, threads: &DeviceMesh, state: &StateDict) {
    let slot = mesh.local_slots().start;
    let folder = folder().join(format!("damaged-{slot}"));
    let checkpoints = Checkpoints::new(&folder);
    for step in [4, 8] {
        checkpoints.save(threads, step, state, &()).unwrap();
    }
    let newest = folder.join("step-0000000008");
    let file = newest.join(format!("shard-00001-of-{:05}.safetensors", threads.len()));
    if slot == 1 {
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
    let mut model = model(mesh);
    let error = model.load(&Checkpoint::open(newest).unwrap()).unwrap_err();
    let is_original = matches!(error, Error::Checkpoint(CheckpointError::Damaged { .. }));
    let is_reported = matches!(error, Error::OtherProcess { slot: 1, .. });
    assert_eq!((is_original, is_reported), (slot == 1, slot != 1), "{error}");
    assert!(error.to_string().contains("is damaged"), "{error}");

    let loaded = checkpoints.load_latest(mesh, |checkpoint| model.load(checkpoint));
    let (loaded, ()) = loaded.unwrap().unwrap();
    assert_eq!((loaded.step(), loaded.skipped().len()), (4, 1));
}

/// Returns the losses of some steps, and the trained variables.
fn losses(mesh: &DeviceMesh, x: &Tensor) -> Vec<Tensor> {
    let mut model = model(mesh);
    let mut all = train(&mut model, x, 10);
    model.check_in_sync().unwrap();
    all.extend(values(&model));
    all
}

type Model = DistributedModel<Vec<Linear>, AdamW>;

fn train(model: &mut Model, x: &Tensor, steps: usize) -> Vec<Tensor> {
    let loss = |_: &Replica, layers: &Vec<Linear>, x: Tensor| {
        layers.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?.sqr()?.mean_all()
    };
    (0..steps).map(|_| number(model.step((x / 10.0).unwrap(), loss).unwrap().loss)).collect()
}

fn number(number: f64) -> Tensor {
    Tensor::new(number, &Device::Cpu).unwrap()
}

fn values(model: &Model) -> Vec<Tensor> {
    model.parameters().unwrap().into_values().map(|value| value.copy().unwrap()).collect()
}

/// Builds two layers with fixed initial values.
fn model(mesh: &DeviceMesh) -> Model {
    let layers = |vb: VarBuilder<'_>| -> Result<Vec<Linear>> {
        Ok(vec![linear(3, 40, vb.pp("a"))?, linear(40, 1, vb.pp("b"))?])
    };
    DataParallel::builder(mesh, layers)
        .init_with(|_, items| {
            Tensor::arange(items.start as f32, items.end as f32, &Device::Cpu)? * 0.01
        })
        .clip_grad_norm(1.0)
        .build(|group| AdamW::new(group.vars, ParamsAdamW::default()))
        .unwrap()
}
