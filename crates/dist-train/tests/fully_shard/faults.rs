//! An error, a panic or an early return in any unit and pass ends the step for all slots, and the
//! model trains on as if the step had not been.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{FullyShard, Keep, Units};
use pmap_mesh::{DeviceMesh, Replica};

use crate::model::{adam, bits};

const SLOTS: usize = 3;
const UNITS: usize = 3;

/// What goes wrong where.
#[derive(Clone, Copy, Debug)]
struct Fault {
    slot: usize,
    unit: usize,
    /// Which run of the unit's function: the first is that of the forward pass.
    run: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Error,
    Panic,
    Return,
}

fn layers(vb: VarBuilder<'_>) -> Result<()> {
    (0..UNITS).try_for_each(|layer| linear(3, 3, vb.pp(layer)).map(drop))
}

fn input() -> Tensor {
    let items = Tensor::arange(0_f32, 6. * 3., &candle_core::Device::Cpu).unwrap();
    (items.reshape((6, 3)).unwrap() / 10.).unwrap()
}

fn loss(fault: Option<Fault>) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |ctx, model, mut x| {
        for unit in 0..UNITS {
            let fault = fault.filter(|fault| fault.unit == unit && fault.slot == ctx.slot());
            if fault.is_some_and(|fault| fault.kind == Kind::Return) {
                return x.sqr()?.mean_all();
            }
            let runs = Arc::new(AtomicUsize::new(0));
            x = model.unit(&unit.to_string(), &x, move |vb, x| {
                let run = runs.fetch_add(1, Ordering::Relaxed);
                match fault {
                    Some(Fault { kind: Kind::Panic, run: at, .. }) if at == run => {
                        panic!("run {run} breaks")
                    }
                    Some(Fault { run: at, .. }) if at == run => bail!("run {run} fails"),
                    _ => linear(3, 3, vb)?.forward(x)?.tanh(),
                }
            })?;
        }
        x.sqr()?.mean_all()
    }
}

/// What is left after two good steps, with a bad one between them if there is a fault.
fn trained(mesh: &DeviceMesh, keep: Keep, fault: Option<Fault>) -> Vec<Vec<u32>> {
    let mut model = FullyShard::builder(mesh, layers).keep(keep).build(adam).unwrap();
    model.step(input(), loss(None)).unwrap();
    if let Some(fault) = fault {
        model.accumulate(input(), loss(None)).unwrap();
        let error = model.step(input(), loss(Some(fault))).unwrap_err().to_string();
        check(&error, fault);
    }
    model.step(input(), loss(None)).unwrap();
    (0..UNITS).map(|unit| bits(&model.gather(&format!("{unit}.weight")).unwrap())).collect()
}

/// The error says where it was.
fn check(error: &str, fault: Fault) {
    let Fault { slot, unit, run, kind } = fault;
    let parts = match kind {
        Kind::Error => {
            let pass = if run == 0 { "forward" } else { "backward" };
            vec![format!("unit {unit}, {pass} pass"), format!("run {run} fails")]
        }
        Kind::Panic => vec![format!("run {run} breaks")],
        // It goes on to what a step does after its units, or has returned.
        Kind::Return => Vec::new(),
    };
    assert!(error.contains(&format!("replica {slot}")), "{fault:?}: {error}");
    for part in parts {
        assert!(error.contains(&part), "{part} in {error}");
    }
}

#[test]
fn every_fault_ends_the_step_and_the_model_trains_on() {
    // A slot that waited for ever would end the test program.
    let mesh = DeviceMesh::builder()
        .axis(DeviceMesh::AXIS, SLOTS)
        .deadline(Duration::from_secs(60))
        .cpu()
        .unwrap();
    for (keep, runs) in [(Keep::Inputs, 2), (Keep::Gathered, 1)] {
        let expected = trained(&mesh, keep, None);
        for slot in 0..SLOTS {
            for unit in 0..UNITS {
                for run in 0..runs {
                    for kind in [Kind::Error, Kind::Panic, Kind::Return] {
                        let fault = Fault { slot, unit, run, kind };
                        let found = trained(&mesh, keep, Some(fault));
                        assert_eq!(found, expected, "{keep:?}, {fault:?}");
                    }
                }
            }
        }
    }
}
