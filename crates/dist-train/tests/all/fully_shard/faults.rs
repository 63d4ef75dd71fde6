//! An error, a panic, an early return or a different order in any slot, unit and pass ends the step
//! on all slots, and leaves the model unchanged.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use candle_core::{Result, Tensor, Var, backprop::GradStore, bail};
use candle_nn::{Module, Optimizer, linear};
use dist_train::{
    AdamW, DistributedModel, Error, FullyShard, Group, Keep, StatefulOptimizer, TrainingError,
    Units,
};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::adam;
use crate::support::{bits, input, layers, replicated, saved};

const SLOTS: usize = 3;
const UNITS: usize = 3;

/// A fault and its location.
#[derive(Clone, Copy, Debug)]
struct InjectedFault {
    slot: usize,
    unit: usize,
    /// The run of the unit's function: 0 is the forward pass.
    run: usize,
    kind: FaultKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum FaultKind {
    Error,
    Panic,
    /// The loss returns before it enters the unit.
    Return,
    /// The loss enters the next unit instead.
    Order,
}

fn loss(
    fault: Option<InjectedFault>,
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |ctx, model, mut x| {
        for unit in 0..UNITS {
            let fault = fault.filter(|fault| fault.unit == unit && fault.slot == ctx.slot());
            let kind = fault.map(|fault| fault.kind);
            if kind == Some(FaultKind::Return) {
                return x.sqr()?.mean_all();
            }
            let entered = if kind == Some(FaultKind::Order) { (unit + 1) % UNITS } else { unit };
            let runs = Arc::new(AtomicUsize::new(0));
            x = model.unit(&entered.to_string(), &x, move |vb, x| {
                let run = runs.fetch_add(1, Ordering::Relaxed);
                match fault {
                    Some(InjectedFault { kind: FaultKind::Panic, run: at, .. }) if at == run => {
                        panic!("run {run} breaks")
                    }
                    Some(InjectedFault { kind: FaultKind::Error, run: at, .. }) if at == run => {
                        bail!("run {run} fails")
                    }
                    _ => linear(3, 3, vb)?.forward(x)?.tanh(),
                }
            })?;
        }
        x.sqr()?.mean_all()
    }
}

/// Trains for two steps, with a failing step between them if there is a fault, and returns the
/// weights.
fn trained(
    mesh: &DeviceMesh,
    keep: Keep,
    prefetch: usize,
    fault: Option<InjectedFault>,
) -> Vec<Vec<u32>> {
    let builder = FullyShard::builder(mesh, layers::<3>).keep(keep).prefetch(prefetch);
    let mut model = builder.build(adam).unwrap();
    model.step(input(6), loss(None)).unwrap();
    if let Some(fault) = fault {
        model.accumulate(input(6), loss(None)).unwrap();
        let error = model.step(input(6), loss(Some(fault))).unwrap_err().to_string();
        check(&error, fault, prefetch > 0);
    }
    model.step(input(6), loss(None)).unwrap();
    weights(&model)
}

fn weights<O: Optimizer>(model: &DistributedModel<Units, O>) -> Vec<Vec<u32>> {
    (0..UNITS).map(|unit| bits(&model.parameter(&format!("{unit}.weight")).unwrap())).collect()
}

/// Checks that the error names the fault's location.
fn check(error: &str, fault: InjectedFault, is_ahead: bool) {
    let InjectedFault { slot, unit, run, kind } = fault;
    let pass = if run == 0 { "forward" } else { "backward" };
    let place = format!("unit {unit}, {pass} pass");
    let parts = match kind {
        FaultKind::Error => vec![place, format!("run {run} fails")],
        FaultKind::Panic => vec![place, format!("run {run} breaks")],
        // The unit that the other slots enter depends on their prefetched units.
        FaultKind::Return | FaultKind::Order if is_ahead => Vec::new(),
        // The mismatch names both calls.
        FaultKind::Return => vec![format!("({unit}, layout"), "all_gather".to_owned()],
        FaultKind::Order => {
            vec![format!("({unit}, layout"), format!("({}, layout", (unit + 1) % UNITS)]
        }
    };
    if is_ahead && matches!(kind, FaultKind::Return | FaultKind::Order) {
        // The error names the next unit, or all units that both slots entered.
        let says = ["(0, layout", "(1, layout", "(2, layout", "enters the units"];
        assert!(says.iter().any(|says| error.contains(says)), "{fault:?}: {error}");
    }
    assert!(error.contains(&format!("replica {slot}")), "{fault:?}: {error}");
    for part in parts {
        assert!(error.contains(&part), "{fault:?}: {part} in {error}");
    }
}

/// Builds a mesh with a deadline, so that a deadlock fails the test.
fn mesh() -> DeviceMesh {
    let builder = DeviceMesh::builder().axis(DeviceMesh::AXIS, SLOTS);
    builder.deadline(Duration::from_mins(1)).cpu().unwrap()
}

#[test]
fn every_fault_ends_only_the_step() {
    let mesh = mesh();
    let start = Instant::now();
    let mut n_faults = 0;
    let cases = [
        (Keep::Inputs, 2, 0),
        (Keep::Graph, 1, 0),
        (Keep::Gathered, 1, 0),
        (Keep::Inputs, 2, 1),
        (Keep::Graph, 1, 2),
    ];
    for (keep, runs, prefetch) in cases {
        let expected = trained(&mesh, keep, prefetch, None);
        for slot in [0, SLOTS - 1] {
            for unit in [0, UNITS - 1] {
                for run in 0..runs {
                    for kind in
                        [FaultKind::Error, FaultKind::Panic, FaultKind::Return, FaultKind::Order]
                    {
                        let fault = InjectedFault { slot, unit, run, kind };
                        let found = trained(&mesh, keep, prefetch, Some(fault));
                        assert_eq!(found, expected, "{keep:?}, {prefetch}, {fault:?}");
                        n_faults += 1;
                    }
                }
            }
        }
    }
    // A single fault may wait for the processor, so the limit covers all faults together.
    assert!(start.elapsed() < n_faults * Duration::from_secs(1), "{:?}", start.elapsed());
}

/// An optimizer that fails in the next step on request.
struct FailingOptimizer {
    inner: AdamW,
    breaks: Arc<AtomicBool>,
    panics: bool,
}

impl Optimizer for FailingOptimizer {
    type Config = ();

    fn new(_: Vec<Var>, (): ()) -> Result<Self> {
        bail!("use the literal, which wraps another optimizer")
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        if self.breaks.swap(false, Ordering::Relaxed) {
            assert!(!self.panics, "the optimizer breaks");
            bail!("the optimizer fails")
        }
        self.inner.step(grads)
    }

    fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.inner.set_learning_rate(learning_rate);
    }
}

impl StatefulOptimizer for FailingOptimizer {
    fn state(&self, var: usize) -> Result<Vec<(&'static str, Tensor)>> {
        self.inner.state(var)
    }

    fn load_state(&mut self, var: usize, name: &str, value: &Tensor) -> Result<()> {
        self.inner.load_state(var, name, value)
    }
}

#[test]
fn failed_optimizer_requires_a_load() {
    let mesh = mesh();
    let cases = [(0, false), (1, true), (2, false), (3, true), (4, false), (5, true)];
    for (run, panics) in cases {
        let breaks = Arc::new(AtomicBool::new(false));
        let breaking = |group: Group| {
            Ok(FailingOptimizer { inner: adam(group)?, breaks: Arc::clone(&breaks), panics })
        };
        let builder = match run / 2 {
            0 => replicated(&mesh),
            1 => FullyShard::builder(&mesh, layers::<3>),
            _ => FullyShard::builder(&mesh, layers::<3>).optimizer_in_backward(),
        };
        let mut model = builder.build(breaking).unwrap();
        model.step(input(6), loss(None)).unwrap();
        let checkpoint = saved(&mesh, &model);
        let before = weights(&model);
        // Only the first slot to step fails.
        breaks.store(true, Ordering::Relaxed);
        let error = model.step(input(6), loss(None)).unwrap_err().to_string();
        assert!(error.contains("the optimizer"), "{error}");
        let is_half = |error: Error| matches!(error, Error::Training(TrainingError::HalfUpdated));
        assert!(is_half(model.step(input(6), loss(None)).unwrap_err()));
        assert!(is_half(model.evaluate(input(6), loss(None)).unwrap_err()));
        assert!(is_half(model.parameter("0.weight").unwrap_err()));
        assert!(is_half(model.state_dict().unwrap_err()));
        model.load(&checkpoint).unwrap();
        assert_eq!(weights(&model), before);
        model.step(input(6), loss(None)).unwrap();
    }
}
