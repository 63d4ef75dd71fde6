//! Units with several inputs and outputs.

use std::collections::BTreeMap;

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{FullyShard, Keep, TrainingError, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::adam;
use crate::support::{bits, input, layers, replicated};

const UNITS: usize = 3;

/// Passes a value and a residual from unit to unit.
fn pairs(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let mut pair = (x.zeros_like()?, x);
    for unit in 0..UNITS {
        pair = model.unit(&unit.to_string(), &pair, |vb, (x, residual)| {
            let residual = (residual + x)?;
            Ok((linear(3, 3, vb)?.forward(&residual)?.tanh()?, residual))
        })?;
    }
    (pair.0 + pair.1)?.sqr()?.mean_all()
}

/// Passes floats, integers and a constant in a map; the last unit gathers columns.
fn mixed(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let block = |vb: VarBuilder<'_>, x: &Tensor| {
        let y = linear(3, 3, vb)?.forward(x)?;
        let largest = y.argmax_keepdim(D::Minus1)?;
        let one = Tensor::ones(1, DType::F32, x.device())?;
        let named = [("unused", y.sqr()?), ("y", y.tanh()?), ("largest", largest), ("one", one)];
        Ok(BTreeMap::from(named.map(|(name, tensor)| (name.to_owned(), tensor))))
    };
    let first: BTreeMap<String, Tensor> = model.unit("0", &x, block)?;
    assert!(!first["largest"].track_op());
    let second = model.unit("1", &first["y"], block)?;
    let last = (second["y"].clone(), first["largest"].clone(), second["one"].clone());
    let picked = model.unit("2", &last, |vb, (y, largest, one)| {
        linear(3, 3, vb)?.forward(y)?.gather(largest, D::Minus1)?.broadcast_mul(one)
    })?;
    picked.sqr()?.mean_all()
}

type LossFn = fn(&Replica, &Units, Tensor) -> Result<Tensor>;

#[test]
fn several_outputs_agree_to_rounding() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for (name, loss) in [("pairs", pairs as LossFn), ("mixed", mixed as LossFn)] {
        let mut expected = replicated(&mesh).build(adam).unwrap();
        let expected: Vec<f64> =
            (0..8).map(|_| expected.step(input(6), loss).unwrap().loss).collect();
        assert!(expected[7] < expected[0], "{name} learns");
        let trained = |keep, is_in_backward: bool| {
            let builder = FullyShard::builder(&mesh, layers::<3>).keep(keep);
            let builder = if is_in_backward { builder.optimizer_in_backward() } else { builder };
            let mut model = builder.build(adam).unwrap();
            let losses: Vec<f64> =
                (0..8).map(|_| model.step(input(6), loss).unwrap().loss).collect();
            let evaluated = model.evaluate(input(6), loss).unwrap().loss;
            assert!(evaluated < losses[0]);
            (losses, bits(&model.parameter("0.weight").unwrap()))
        };
        let found = trained(Keep::Inputs, false);
        assert_eq!(found, trained(Keep::Graph, false), "{name}, to the bit");
        assert_eq!(found, trained(Keep::Gathered, false), "{name}, to the bit");
        assert_eq!(found, trained(Keep::Inputs, true), "{name}, to the bit");
        for (found, expected) in found.0.iter().zip(&expected) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{name}: {found} for {expected}");
        }
    }
}

#[test]
fn unrepeatable_unused_output_is_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let mut model =
        FullyShard::builder(&mesh, layers::<3>).allow_unused(["1", "2"]).build(adam).unwrap();
    let random = model.step(input(6), |_: &Replica, model: &Units, x| {
        let (y, _noise) = model.unit("0", &x, |vb, x| {
            let y = linear(3, 3, vb)?.forward(x)?;
            let noise = y.rand_like(0., 1.)?;
            Ok((y, noise))
        })?;
        y.sqr()?.mean_all()
    });
    let error = random.unwrap_err();
    let expected = TrainingError::NotRepeatable { unit: "0".to_owned() };
    assert!(matches!(&error, dist_train::Error::Training(found) if *found == expected), "{error}");
}
