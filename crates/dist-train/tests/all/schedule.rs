//! A schedule sets the learning rates that one would set oneself, and is resumed.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, linear};
use dist_train::{
    Checkpoints, DataParallel, Error, FullyShard, ParamsSgd, Schedule, Sgd, TrainingError, Units,
};
use pmap_mesh::{DeviceMesh, Replica};

const RATE: f64 = 0.1;

fn schedule() -> Schedule {
    Schedule::cosine(8).warmup(3).floor(0.1)
}

fn build(vb: VarBuilder<'_>) -> Result<Linear> {
    linear(3, 2, vb.pp("head"))
}

fn batch() -> Tensor {
    Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().reshape((4, 3)).unwrap()
}

fn loss(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    model.unit("head", &x, |vb, x| linear(3, 2, vb)?.forward(x))?.sqr()?.mean_all()
}

fn sgd(vars: Vec<candle_core::Var>, lr: f64) -> Result<Sgd> {
    Sgd::new(vars, ParamsSgd { lr, momentum: 0.9, ..ParamsSgd::default() })
}

fn data_parallel(schedule: Schedule) -> DataParallel<Units, Sgd> {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, Units::of(build)).schedule(schedule);
    let builder = builder.group("bias", ["**.bias"]);
    builder
        .build(|group| sgd(group.vars, if group.name == "bias" { RATE / 2. } else { RATE }))
        .unwrap()
}

fn fully_sharded(schedule: Schedule) -> FullyShard<Sgd> {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = FullyShard::builder(&mesh, build).schedule(schedule).unit("head", ["head"]);
    let builder = builder.group("bias", ["**.bias"]);
    builder
        .build(|group| sgd(group.vars, if group.name == "bias" { RATE / 2. } else { RATE }))
        .unwrap()
}

/// The losses of ten steps whose rates are set by hand.
fn expected() -> Vec<u64> {
    let mut model = data_parallel(Schedule::constant());
    let step = |step| {
        let factor = schedule().factor(step);
        model.set_learning_rate(RATE * factor).unwrap();
        model.set_group_learning_rate("bias", RATE / 2. * factor).unwrap();
        model.step(batch(), loss).unwrap().loss.to_bits()
    };
    (0..10).map(step).collect()
}

#[test]
fn rates_are_those_of_the_schedule_in_either_kind_of_model() {
    let mut whole = data_parallel(schedule());
    let mut sharded = fully_sharded(schedule());
    for (step, expected) in expected().into_iter().enumerate() {
        // Batches that are accumulated, and evaluations, are no updates.
        whole.evaluate(batch(), loss).unwrap();
        assert_eq!(whole.step(batch(), loss).unwrap().loss.to_bits(), expected, "{step}");
        assert_eq!(sharded.step(batch(), loss).unwrap().loss.to_bits(), expected, "{step}");
    }
}

#[test]
fn an_accumulated_batch_does_not_advance_it() {
    let mut model = data_parallel(Schedule::constant().warmup(2));
    let mut by_hand = data_parallel(Schedule::constant());
    for rate in [RATE / 2., RATE] {
        by_hand.set_learning_rate(rate).unwrap();
        by_hand.set_group_learning_rate("bias", rate / 2.).unwrap();
        for model in [&mut model, &mut by_hand] {
            model.accumulate(batch(), loss).unwrap();
        }
        let expected = by_hand.step(batch(), loss).unwrap().loss.to_bits();
        assert_eq!(model.step(batch(), loss).unwrap().loss.to_bits(), expected);
    }
}

#[test]
fn a_checkpoint_resumes_it() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model = data_parallel(schedule());
    let expected = expected();
    for _ in 0..4 {
        model.step(batch(), loss).unwrap();
    }
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints.save(&mesh, 4, &model.state_dict().unwrap(), &()).unwrap();
    let latest = checkpoints.latest().unwrap().unwrap();

    // Whatever the builder said.
    let mut sharded = fully_sharded(Schedule::linear(3));
    sharded.load(&latest).unwrap();
    let mut whole = data_parallel(Schedule::constant());
    whole.load(&latest).unwrap();
    for expected in &expected[4..] {
        assert_eq!(sharded.step(batch(), loss).unwrap().loss.to_bits(), *expected);
        assert_eq!(whole.step(batch(), loss).unwrap().loss.to_bits(), *expected);
    }

    sharded.set_schedule(Schedule::linear(20)).unwrap();
    whole.set_schedule(Schedule::linear(20)).unwrap();
    sharded.step(batch(), loss).unwrap();
    whole.step(batch(), loss).unwrap();
    let loss_of_sharded = sharded.evaluate(batch(), loss).unwrap().loss;
    assert_eq!(loss_of_sharded.to_bits(), whole.evaluate(batch(), loss).unwrap().loss.to_bits());
}

#[test]
fn what_cannot_be_followed_is_refused() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, Units::of(build));
    let error =
        builder.schedule(Schedule::linear(5).warmup(5)).build(|group| sgd(group.vars, RATE));
    assert!(matches!(error, Err(Error::Setting { .. })));
    let mut model = data_parallel(Schedule::constant());
    assert!(matches!(
        model.set_schedule(Schedule::constant().floor(2.0)),
        Err(Error::Setting { .. })
    ));
    let error = model.set_group_learning_rate("norms", RATE).unwrap_err();
    assert!(matches!(error, Error::Training(TrainingError::UnknownGroup { .. })), "{error}");
}
