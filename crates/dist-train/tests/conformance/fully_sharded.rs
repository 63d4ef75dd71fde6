//! Sharded models over processes, compared bitwise with threads and data parallel.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, embedding, linear, linear_no_bias};
use core_types::Seed;
use dist_train::{
    AdamW, Checkpoints, DataParallel, DistributedModel, Error, FullyShard, Group, Keep,
    TrainingError, UnitRules, Units,
};
use fsdp_plan::strategy::{Choice, Full, Hsdp, Hybrid, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::{DeviceMesh, Replica};
use process_tests::{Engine, assert_same, folder, mesh, threads};

use super::number;

const BLOCKS: usize = 2;

fn build(vb: VarBuilder<'_>) -> Result<()> {
    embedding(7, 6, vb.pp("embed"))?;
    (0..BLOCKS).try_for_each(|block| linear(6, 6, vb.pp("blocks").pp(block)).map(drop))?;
    linear(6, 1, vb.pp("head")).map(drop)
}

fn rules() -> UnitRules {
    UnitRules::new().unit("embed", ["embed"]).unit("head", ["head"])
}

fn loss(_: &Replica, model: &Units, ids: Tensor) -> Result<Tensor> {
    let mut x = model.unit("embed", &ids, |vb, ids| embedding(7, 6, vb)?.forward(ids))?;
    for block in 0..BLOCKS {
        let name = format!("blocks.{block}");
        x = model.unit(&name, &x, |vb, x| x + linear(6, 6, vb)?.forward(x)?.tanh()?)?;
    }
    model.unit("head", &x, |vb, x| linear(6, 1, vb)?.forward(x))?.sqr()?.mean_all()
}

fn batch(mesh: &DeviceMesh, step: usize) -> Tensor {
    let ids: Vec<u32> = (0..mesh.len() * 4).map(|n| ((n * n + step) % 7) as u32).collect();
    Tensor::from_vec(ids, (mesh.len() * 2, 2), &Device::Cpu).unwrap()
}

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })
}

fn names() -> Vec<String> {
    let mut declared = dist_train::declare(build, DType::F32, &Device::Cpu).unwrap();
    declared.sort_by(|left, right| left.name.cmp(&right.name));
    declared.into_iter().map(|declared| declared.name).collect()
}

/// Trains for some steps; returns the losses and parameters, and the model.
fn trained(
    mesh: &DeviceMesh,
    strategy: impl ShardingStrategy + 'static,
    keep: Keep,
) -> (Vec<Tensor>, DistributedModel<Units, AdamW>) {
    let builder = FullyShard::builder(mesh, build).by_units(rules()).strategy(strategy);
    steps(mesh, builder.keep(keep))
}

/// Trains for some steps; returns the losses and parameters, and the model.
fn steps(
    mesh: &DeviceMesh,
    builder: dist_train::ModelBuilder<'_, Units>,
) -> (Vec<Tensor>, DistributedModel<Units, AdamW>) {
    let mut model = builder.build(adam).unwrap();
    let mut all: Vec<Tensor> =
        (0..5).map(|step| number(model.step(batch(mesh, step), loss).unwrap().loss)).collect();
    all.push(number(model.evaluate(batch(mesh, 9), loss).unwrap().loss));
    all.extend(names().iter().map(|name| model.parameter(name).unwrap()));
    (all, model)
}

pub(super) fn run(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let mut whole = DataParallel::builder(&threads, build).by_units(rules()).build(adam).unwrap();
    let mut expected: Vec<Tensor> =
        (0..5).map(|step| number(whole.step(batch(&threads, step), loss).unwrap().loss)).collect();
    expected.push(number(whole.evaluate(batch(&threads, 9), loss).unwrap().loss));
    expected.extend(whole.parameters().unwrap().into_values());
    for (keep, layout) in [
        (Keep::Inputs, Layout::Dim0),
        (Keep::Graph, Layout::Flat),
        (Keep::Gathered, Layout::BlockRagged { block: 4 }),
    ] {
        assert_same(&trained(&tested, Full::new(layout), keep).0, &expected);
    }
    assert_same(&trained(&tested, LayerWise::default(), Keep::Inputs).0, &expected);
    let builder = || FullyShard::builder(&tested, build).by_units(rules());
    assert_same(&steps(&tested, builder().prefetch(1)).0, &expected);
    assert_same(&steps(&tested, builder().keep(Keep::Graph).prefetch(2)).0, &expected);
    assert_same(&steps(&tested, builder().optimizer_in_backward()).0, &expected);
    let in_halves = mixed(&threads, false);
    assert_same(&mixed(&tested, false), &in_halves);
    assert_same(&mixed(&tested, true), &in_halves);
    checkpoints(&tested, &threads);
    refusals(&tested);
    weights(&tested);
}

/// Trains in half precision, replicated, or sharded with one unit prefetched.
fn mixed(mesh: &DeviceMesh, is_sharded: bool) -> Vec<Tensor> {
    let builder = DataParallel::builder(mesh, build).by_units(rules());
    let builder = builder.mixed_precision(DType::BF16, DType::F32);
    let builder =
        if is_sharded { builder.fully_shard().keep(Keep::Graph).prefetch(1) } else { builder };
    let mut model = builder.build(adam).unwrap();
    let mut all: Vec<Tensor> =
        (0..5).map(|step| number(model.step(batch(mesh, step), loss).unwrap().loss)).collect();
    all.extend(names().iter().map(|name| model.parameter(name).unwrap()));
    all
}

/// Trains on pairs of processes that each store all parameters, and rejects different initial
/// values.
pub(super) fn groups(engine: &impl Engine, ranks: usize) {
    let axes = [("replicate", ranks / 2), ("shard", 2)];
    let (tested, threads) = (mesh(engine, &axes, None), threads(&axes, &engine.device()));
    let strategy = || Hsdp::new(Full::default(), ranks as u64 / 2);
    let expected = trained(&threads, strategy(), Keep::Inputs).0;
    for keep in [Keep::Inputs, Keep::Graph] {
        assert_same(&trained(&tested, strategy(), keep).0, &expected);
    }

    // One device with the full batch.
    let alone = DeviceMesh::cpu(1).unwrap();
    let mut whole = DataParallel::builder(&alone, build).by_units(rules()).build(adam).unwrap();
    for (step, found) in expected.iter().take(5).enumerate() {
        let expected = whole.step(batch(&tested, step), loss).unwrap().loss;
        let found = found.to_scalar::<f64>().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }

    // An item outside the compared sample differs in the shard of each pair's first process.
    let rank = tested.local_slots().start;
    let path = folder().join(format!("weights-groups-{rank}.safetensors"));
    let mut items = vec![0_f32; 1600];
    items[100] = if rank == 2 { 1.0 } else { 0.0 };
    let weight = Tensor::from_vec(items, (40, 40), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("layer.weight", weight)].into(), path.clone()).unwrap();
    let outcome = FullyShard::builder(&tested, |vb| linear_no_bias(40, 40, vb.pp("layer")))
        .unit("layer", ["layer"])
        .weights(path)
        .strategy(strategy())
        .build(adam)
        .map(drop);
    let is_refused = matches!(
        &outcome,
        Err(Error::Diverged { name, replica: 2 }) if name == "layer.weight"
    );
    assert!(is_refused, "{outcome:?}");
}

/// Resumes checkpoints of processes on threads, and of threads on processes.
fn checkpoints(tested: &DeviceMesh, threads: &DeviceMesh) {
    let folder = folder();
    let rank = tested.local_slots().start;
    let resumed = |mesh: &DeviceMesh, from: &Checkpoints| {
        let mut model = FullyShard::builder(mesh, build).by_units(rules()).build(adam).unwrap();
        model.load(&from.latest().unwrap().unwrap()).unwrap();
        let losses: Vec<Tensor> =
            (5..8).map(|step| number(model.step(batch(mesh, step), loss).unwrap().loss)).collect();
        losses
    };
    let of_processes = Checkpoints::new(folder.join("fully-sharded"));
    let (_, mut model) = trained(tested, Full::new(Layout::Flat), Keep::Inputs);
    of_processes.save(tested, 5, &model.state_dict().unwrap(), &()).unwrap();
    let expected: Vec<Tensor> =
        (5..8).map(|step| number(model.step(batch(tested, step), loss).unwrap().loss)).collect();
    assert_same(&resumed(threads, &of_processes), &expected);
    let of_threads = Checkpoints::new(folder.join(format!("fully-sharded-threads-{rank}")));
    let (_, model) = trained(threads, Full::default(), Keep::Inputs);
    of_threads.save(threads, 5, &model.state_dict().unwrap(), &()).unwrap();
    assert_same(&resumed(tested, &of_threads), &expected);
}

/// Checks that a rejected step ends on all processes, which continue.
fn refusals(tested: &DeviceMesh) {
    let ranks = tested.len();
    let rank = tested.local_slots().start;
    let (_, mut model) = trained(tested, Full::default(), Keep::Inputs);
    let infinite = model.step(batch(tested, 0), |ctx: &Replica, model: &Units, ids| {
        let scale = if ctx.slot() + 1 == ranks { f64::INFINITY } else { 1.0 };
        loss(ctx, model, ids)? * scale
    });
    let error = infinite.unwrap_err();
    assert!(matches!(error, Error::Training(TrainingError::NonFiniteLoss { .. })), "{error}");
    model.step(batch(tested, 0), loss).unwrap();

    let only_head = |_: &Replica, model: &Units, ids: Tensor| {
        let x = ids.to_dtype(DType::F32)?.unsqueeze(2)?.broadcast_as((2, 2, 6))?.contiguous()?;
        model.unit("head", &x, |vb, x| linear(6, 1, vb)?.forward(x))?.sqr()?.mean_all()
    };
    let build_one = || FullyShard::builder(tested, build).by_units(rules()).build(adam).unwrap();
    let error = build_one().step(batch(tested, 0), only_head).unwrap_err();
    let is_refused = matches!(
        &error,
        Error::Training(TrainingError::NotEntered { unit, parameters })
            if unit == "blocks.0" && parameters.len() == 2
    );
    assert!(is_refused, "{error}");

    // Process 1 has a different layout, `Keep`, or frozen parameters.
    let built = |builder: dist_train::ModelBuilder<'_, Units>| builder.build(adam).map(drop);
    let builder = || FullyShard::builder(tested, build).by_units(rules());
    let layout = if rank == 1 { Layout::Flat } else { Layout::Dim0 };
    let keep = if rank == 1 { Keep::Gathered } else { Keep::Inputs };
    let frozen = ["embed"].into_iter().filter(|_| rank == 1);
    for (outcome, expected) in [
        (built(builder().strategy(Full::new(layout))), "strategy"),
        (built(builder().keep(keep)), "keep"),
        (built(builder().freeze(frozen)), "freeze"),
    ] {
        let is_refused = matches!(
            outcome,
            Err(Error::Training(TrainingError::OptionMismatch { option, replica: 1 }))
                if option == expected
        );
        assert_eq!(is_refused, ranks > 1, "{outcome:?}");
    }
    let homeless = FullyShard::builder(tested, build).build(adam).map(drop);
    assert!(matches!(homeless, Err(Error::Sharding { .. })));
}

/// Checks that all processes must load the same weights.
fn weights(tested: &DeviceMesh) {
    let (ranks, rank) = (tested.len(), tested.local_slots().start);
    let folder = folder();
    let alone = DeviceMesh::cpu(1).unwrap();
    // Large enough that only a sample of the items is compared.
    let build = |vb: VarBuilder<'_>| linear(40, 40, vb.pp("layer"));
    let saved = |name: &str, seed: u64| {
        let path = folder.join(format!("weights-{name}-{rank}.safetensors"));
        let model = DataParallel::builder(&alone, build).init(Seed::new(seed)).build(adam).unwrap();
        #[expect(clippy::disallowed_types, reason = "candle saves a hash map")]
        let tensors: std::collections::HashMap<_, _> =
            model.parameters().unwrap().into_iter().collect();
        candle_core::safetensors::save(&tensors, &path).unwrap();
        path
    };
    let (same, other) = (saved("same", 7), saved("other", 8 + rank as u64));
    let builder = || FullyShard::builder(tested, build).unit("layer", ["layer"]);
    let model = builder().weights(&same).build(adam).unwrap();
    let whole = DataParallel::builder(&alone, build).init(Seed::new(7)).build(adam).unwrap();
    for (name, expected) in whole.parameters().unwrap() {
        assert_same(&[model.parameter(&name).unwrap()], &[expected]);
    }
    let absent = if rank == 1 { builder() } else { builder().weights(&same) };
    for builder in [absent, builder().weights(other)] {
        let outcome = builder.build(adam).map(drop);
        let is_refused = matches!(
            outcome,
            Err(Error::Training(TrainingError::OptionMismatch { option: "weights", replica: 1 }))
        );
        assert_eq!(is_refused, ranks > 1, "{outcome:?}");
    }

    // An item outside the compared sample differs in a replicated parameter.
    let mut tensors = candle_core::safetensors::load(&same, &Device::Cpu).unwrap();
    let mut items: Vec<f32> = tensors["layer.weight"].flatten_all().unwrap().to_vec1().unwrap();
    items[100] += rank as f32;
    let weight = Tensor::from_vec(items, (40, 40), &Device::Cpu).unwrap();
    tensors.insert("layer.weight".to_owned(), weight);
    candle_core::safetensors::save(&tensors, &same).unwrap();
    let strategy = Hybrid::default().with_rule("layer", Choice::Replicate).unwrap();
    let outcome = builder().weights(&same).strategy(strategy).build(adam).map(drop);
    let is_refused = matches!(
        &outcome,
        Err(Error::Diverged { name, replica: 1 }) if name == "layer.weight"
    );
    assert_eq!(is_refused, ranks > 1, "{outcome:?}");
}
