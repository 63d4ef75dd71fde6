//! Parameters used outside their units.

use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{AdamW, DistributedModel, Error, FullyShard, Keep, TrainingError, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{KEEPS, adam};
use crate::support::{input, layer, layers, replicated};

/// The tensor that unit `0` leaks through a lock.
#[derive(Clone, Copy, Debug)]
enum HandedOut {
    Weight,
    Transposed,
    /// A result computed with the weight.
    Product,
    /// A constant without a gradient.
    Detached,
}

/// The place where the loss uses the leaked tensor.
#[derive(Clone, Copy, Debug)]
enum UsedIn {
    Loss,
    /// An input of the last unit.
    Input,
    /// A capture of the last unit's function.
    Capture,
    Nothing,
}

fn leaking(
    handed_out: HandedOut,
    used_in: UsedIn,
) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, x| {
        let door: Arc<Mutex<Option<Tensor>>> = Arc::default();
        let into = Arc::clone(&door);
        let x = model.unit("0", &x, move |vb, x| {
            let weight = vb.get((3, 3), "weight")?;
            *into.lock().unwrap() = Some(match handed_out {
                HandedOut::Weight => weight.clone(),
                HandedOut::Transposed => weight.t()?,
                HandedOut::Product => weight.sqr()?,
                HandedOut::Detached => weight.detach(),
            });
            layer(vb, x)
        })?;
        let x = model.unit("1", &x, layer)?;
        let leaked = door.lock().unwrap().take().unwrap();
        let y = match used_in {
            UsedIn::Loss => model.unit("2", &x, layer)?.matmul(&leaked)?,
            UsedIn::Input => {
                let inputs = (x, leaked);
                model.unit("2", &inputs, |vb, (x, leaked)| layer(vb, &x.matmul(leaked)?))?
            }
            UsedIn::Capture => model.unit("2", &x, move |vb, x| layer(vb, &x.matmul(&leaked)?))?,
            UsedIn::Nothing => model.unit("2", &x, layer)?,
        };
        y.sqr()?.mean_all()
    }
}

fn build(mesh: &DeviceMesh, keep: Keep) -> DistributedModel<Units, AdamW> {
    FullyShard::builder(mesh, layers::<3>).keep(keep).build(adam).unwrap()
}

#[test]
fn leaked_parameters_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let (unit, parameter) = ("0".to_owned(), "0.weight".to_owned());
    let expected = TrainingError::ParameterOutsideUnit { unit, parameter };
    for keep in KEEPS {
        for handed_out in [HandedOut::Weight, HandedOut::Transposed, HandedOut::Product] {
            for used_in in [UsedIn::Loss, UsedIn::Input, UsedIn::Capture] {
                let mut model = build(&mesh, keep);
                let case = format!("{keep:?} {handed_out:?} {used_in:?}");
                let outcome = model.step(input(6), leaking(handed_out, used_in));
                let Err(Error::Training(found)) = outcome else { panic!("{case}: {outcome:?}") };
                assert_eq!(found, expected, "{case}");
                // The model is unchanged and can be trained.
                let right = leaking(handed_out, UsedIn::Nothing);
                let trained = model.step(input(6), &right).unwrap().loss;
                let afresh = build(&mesh, keep).step(input(6), &right).unwrap().loss;
                assert_eq!(trained.to_bits(), afresh.to_bits(), "{case}");
            }
        }
    }
}

/// A detached parameter has no gradient in any layout, so none is lost.
#[test]
fn detached_parameters_may_leak() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let detached = leaking(HandedOut::Detached, UsedIn::Loss);
    let mut whole = replicated(&mesh).build(adam).unwrap();
    let expected = [0, 1, 2].map(|_| whole.step(input(6), &detached).unwrap().loss.to_bits());
    // `Keep::Graph` frees the memory, so the tensor cannot be read there.
    for keep in [Keep::Inputs, Keep::Gathered] {
        let mut model = build(&mesh, keep);
        let found = [0, 1, 2].map(|_| model.step(input(6), &detached).unwrap().loss.to_bits());
        assert_eq!(found, expected, "{keep:?}");
    }
}

/// A cached layer uses the parameters of an earlier pass.
fn cached(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let made: Arc<Mutex<Option<candle_nn::Linear>>> = Arc::default();
    let twice = move |vb: VarBuilder<'_>, x: &Tensor| {
        let mut made = made.lock().unwrap();
        let layer = match made.take() {
            Some(layer) => layer,
            None => linear(3, 3, vb)?,
        };
        *made = Some(layer.clone());
        layer.forward(x)
    };
    let x = model.unit("0", &x, layer)?;
    let x = model.unit("1", &x, twice.clone())?;
    let x = model.unit("1", &x, twice)?;
    model.unit("2", &x, layer)?.sqr()?.mean_all()
}

#[test]
fn cached_layers_are_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for keep in KEEPS {
        let outcome = build(&mesh, keep).step(input(6), cached);
        let Err(Error::Training(TrainingError::ParameterOutsideUnit { unit, .. })) = outcome else {
            panic!("{keep:?}: {outcome:?}")
        };
        assert_eq!(unit, "1", "{keep:?}");
    }
}
