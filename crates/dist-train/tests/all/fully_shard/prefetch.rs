//! Units gathered before their use.

use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, linear};
use dist_train::{Error, FullyShard, Keep, TrainingError, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{KEEPS, adam};
use crate::support::{bits, input, layers, through};

/// Orders of units: longer, shorter, swapped, and with a repeated unit.
const ROUTES: [&[&str]; 6] = [
    &["0", "1", "2", "3"],
    &["0", "2", "1", "3"],
    &["0", "1"],
    &["0", "1", "2", "3", "0"],
    &["3"],
    &["0", "1", "2", "3"],
];

fn failing(ctx: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let loss = through(ROUTES[2])(ctx, model, x)?;
    if ctx.slot() == 0 {
        bail!("the loss fails")
    }
    Ok(loss)
}

/// Returns a loss with different units on the first slot.
fn apart(
    first: &'static [&'static str],
    others: &'static [&'static str],
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |ctx: &Replica, model: &Units, x: Tensor| {
        through(if ctx.slot() == 0 { first } else { others })(ctx, model, x)
    }
}

/// The error names the call of the slot that continues after the other ends.
#[test]
fn prefetched_units_are_gathered_early() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for (prefetch, called) in [(0, "(1, layout"), (1, "(2, layout"), (2, "(3, layout")] {
        let builder = FullyShard::builder(&mesh, layers::<4>).prefetch(prefetch);
        let mut model = builder.build(adam).unwrap();
        model.step(input(12), through(ROUTES[0])).unwrap();
        model.evaluate(input(12), through(ROUTES[0])).unwrap();
        let ended = apart(&["0"], ROUTES[0]);
        let evaluated = model.evaluate(input(12), &ended).unwrap_err().to_string();
        assert!(evaluated.contains(called), "{prefetch} ahead: {evaluated}");
        let trained = model.step(input(12), &ended).unwrap_err().to_string();
        assert!(trained.contains(called), "{prefetch} ahead: {trained}");
    }
}

#[test]
fn different_units_are_rejected() {
    const LEFT_OUT: [&str; 3] = ["0", "2", "3"];
    let mesh = DeviceMesh::cpu(2).unwrap();
    let check = |error: Error| {
        let Error::Training(TrainingError::UnitMismatch { left_units, right_units, .. }) = &error
        else {
            panic!("{error}")
        };
        assert_eq!(*left_units, LEFT_OUT);
        assert_eq!(*right_units, ROUTES[0]);
        assert!(error.to_string().contains("replica 0 enters the units 0, 2, 3"), "{error}");
    };
    // `Keep::Gathered` has no backward gathers, so the collectives are equal.
    let build = || {
        let builder = FullyShard::builder(&mesh, layers::<4>).prefetch(1).keep(Keep::Gathered);
        let mut model = builder.freeze(["1.*"]).build(adam).unwrap();
        model.step(input(12), through(ROUTES[0])).unwrap();
        model.evaluate(input(12), through(ROUTES[0])).unwrap();
        model
    };
    let mut model = build();
    check(model.evaluate(input(12), apart(&LEFT_OUT, ROUTES[0])).unwrap_err());
    check(model.step(input(12), apart(&LEFT_OUT, ROUTES[0])).unwrap_err());
    // The model is unchanged and can be trained.
    let [found, expected] = [model, build()]
        .map(|mut model| model.step(input(12), through(ROUTES[0])).unwrap().loss.to_bits());
    assert_eq!(found, expected);
}

#[test]
fn changed_orders_preserve_bits() {
    for slots in [1, 3] {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        for keep in KEEPS {
            let trained = |prefetch| {
                let builder = FullyShard::builder(&mesh, layers::<4>).keep(keep).prefetch(prefetch);
                let mut model = builder.allow_unused(["**"]).build(adam).unwrap();
                let mut losses = Vec::new();
                for route in ROUTES.into_iter().chain(ROUTES) {
                    losses.push(model.step(input(12), through(route)).unwrap().loss.to_bits());
                    let evaluated = model.evaluate(input(12), through(route)).unwrap();
                    losses.push(evaluated.loss.to_bits());
                }
                // Also after a step that fails during prefetching.
                for route in ROUTES {
                    model.step(input(12), failing).unwrap_err();
                    losses.push(model.step(input(12), through(route)).unwrap().loss.to_bits());
                }
                (losses, bits(&model.parameter("0.weight").unwrap()))
            };
            let expected = trained(0);
            for prefetch in [1, 3] {
                assert_eq!(trained(prefetch), expected, "{keep:?}, {prefetch}, {slots} slots");
            }
        }
    }
}

/// A step that all replicas reject waits for units in flight.
#[test]
fn rejected_step_reports_its_cause() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    // Factors for the gradients of two units, with an infinite product, or for the loss.
    let scaled = |gradient_factor: f64, loss_factor: f64| {
        move |_: &Replica, model: &Units, mut x: Tensor| {
            for unit in ROUTES[0] {
                let factor = if ["1", "2"].contains(unit) { gradient_factor } else { 1.0 };
                x = model.unit(unit, &x, move |vb, x| {
                    let y = linear(3, 3, vb)?.forward(x)?.tanh()?;
                    let zero = (&y - y.detach())?;
                    y.detach() + (zero * factor)?
                })?;
            }
            x.sqr()?.mean_all()? * loss_factor
        }
    };
    for is_late in [false, true] {
        for is_in_backward in [false, true] {
            let builder = FullyShard::builder(&mesh, layers::<4>).prefetch(2);
            let builder = if is_in_backward { builder.optimizer_in_backward() } else { builder };
            let mut model = builder.build(adam).unwrap();
            model.step(input(12), scaled(1.0, 1.0)).unwrap();
            let failing = if is_late { scaled(1e38, 1.0) } else { scaled(1.0, f64::INFINITY) };
            let error = model.step(input(12), failing).unwrap_err();
            let is_expected = match &error {
                Error::Training(TrainingError::NonFiniteLoss { .. }) => !is_late,
                Error::Training(TrainingError::NonFiniteNorm { .. }) => is_late,
                _ => false,
            };
            assert!(is_expected, "{error}");
        }
    }
}
