//! Learning-rate schedules, compared with rates set explicitly, and resumed.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, linear};
use dist_train::{
    DataParallel, DistributedModel, Error, ParamsSgd, Schedule, Sgd, UnitRules, Units,
};
use pmap_mesh::{DeviceMesh, Replica};

use crate::support::{LAYOUTS, saved};

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

type ScheduledModel = DistributedModel<Units, Sgd>;

/// Builds a model in one of the layouts.
fn model(layout: usize, schedule: Schedule) -> ScheduledModel {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, build).by_units(UnitRules::new());
    let builder = builder.unit("head", ["head"]).schedule(schedule).group("bias", ["**.bias"]);
    let model = LAYOUTS[layout](builder).build(|group| {
        let rate = if group.name == "bias" { RATE / 2. } else { RATE };
        sgd(group.vars, rate)
    });
    model.unwrap()
}

/// Returns the losses of ten steps with explicitly set rates.
fn expected() -> Vec<u64> {
    let mut model = model(0, Schedule::constant());
    let mut losses = Vec::new();
    for step in 0..10 {
        let factor = schedule().factor(step);
        model.set_learning_rate(RATE * factor).unwrap();
        model.set_group_learning_rate("bias", RATE / 2. * factor).unwrap();
        losses.push(model.step(batch(), loss).unwrap().loss.to_bits());
    }
    losses
}

#[test]
fn both_layouts_follow_the_schedule() {
    let expected = expected();
    for layout in [0, 1] {
        let mut model = model(layout, schedule());
        for (step, expected) in expected.iter().enumerate() {
            // Evaluations do not advance the schedule.
            model.evaluate(batch(), loss).unwrap();
            let rate = model.learning_rate().to_bits();
            assert_eq!(rate, (RATE * schedule().factor(step as u64)).to_bits());
            let done = model.step(batch(), loss).unwrap();
            assert_eq!((done.loss.to_bits(), done.learning_rate.to_bits()), (*expected, rate));
        }
    }
}

#[test]
fn accumulation_does_not_advance_schedules() {
    for layout in [0, 1] {
        let mut found = model(layout, Schedule::constant().warmup(2));
        let mut by_hand = model(layout, Schedule::constant());
        for rate in [RATE / 2., RATE] {
            by_hand.set_learning_rate(rate).unwrap();
            by_hand.set_group_learning_rate("bias", rate / 2.).unwrap();
            for model in [&mut found, &mut by_hand] {
                model.accumulate(batch(), loss).unwrap();
            }
            let expected = by_hand.step(batch(), loss).unwrap().loss.to_bits();
            assert_eq!(found.step(batch(), loss).unwrap().loss.to_bits(), expected);
        }
    }
}

#[test]
fn checkpoints_resume_schedules() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut first = model(0, schedule());
    for _ in 0..4 {
        first.step(batch(), loss).unwrap();
    }
    let latest = saved(&mesh, &first);
    let resumed = |layout| {
        // The checkpoint overrides the builder's schedule.
        let mut model = model(layout, Schedule::linear(3));
        model.load(&latest).unwrap();
        for expected in &expected()[4..] {
            assert_eq!(model.step(batch(), loss).unwrap().loss.to_bits(), *expected);
        }
        model.set_schedule(Schedule::linear(20)).unwrap();
        model.step(batch(), loss).unwrap();
        model.evaluate(batch(), loss).unwrap().loss.to_bits()
    };
    assert_eq!(resumed(0), resumed(1));
}

#[test]
fn invalid_schedules_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let builder = DataParallel::builder(&mesh, build).by_units(UnitRules::new());
    let error =
        builder.schedule(Schedule::linear(5).warmup(5)).build(|group| sgd(group.vars, RATE));
    assert!(matches!(error, Err(Error::Setting { .. })));
    let mut model = model(0, Schedule::constant());
    assert!(matches!(
        model.set_schedule(Schedule::constant().floor(2.0)),
        Err(Error::Setting { .. })
    ));
}
