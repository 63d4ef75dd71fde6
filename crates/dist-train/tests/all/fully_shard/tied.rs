//! Units that share a parameter, compared with data parallel.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder, linear};
use dist_train::{DataParallel, FullyShard, ModelBuilder, UnitRules, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{KEEPS, adam};
use crate::support::{bits, input, layers};

/// Two units have parameter `0`, and two units are entered twice.
fn shared(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let first = |vb: VarBuilder<'_>, x: &Tensor| linear(3, 3, vb.pp("0"))?.forward(x)?.tanh();
    let x = model.unit("first", &x, first)?;
    let x = model.unit("both", &x, |vb, x| {
        linear(3, 3, vb.pp("0"))?.forward(&linear(3, 3, vb.pp("1"))?.forward(x)?.tanh()?)
    })?;
    let x = model.unit("2", &x, |vb, x| linear(3, 3, vb)?.forward(x))?;
    // This result is not used, so it adds no gradients.
    model.unit("2", &x, |vb, x| linear(3, 3, vb)?.forward(x))?;
    model.unit("first", &x, first)?.sqr()?.mean_all()
}

/// Returns the losses, and the bits of the shared parameter.
fn trained(builder: ModelBuilder<'_, Units>) -> (Vec<f64>, Vec<u32>) {
    let mut model = builder.build(adam).unwrap();
    let losses = (0..5).map(|_| model.step(input(6), shared).unwrap().loss).collect();
    (losses, bits(&model.parameter("0.weight").unwrap()))
}

#[test]
fn shared_parameters_agree_to_rounding() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let rules = || UnitRules::new().unit("first", ["0"]).unit("both", ["0", "1"]);
    let whole = trained(DataParallel::builder(&mesh, layers::<3>).by_units(rules()));
    let builder = || FullyShard::builder(&mesh, layers::<3>).by_units(rules());
    let found = trained(builder());
    for (found, expected) in found.0.iter().zip(&whole.0) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }
    // An optimizer in the backward pass waits for the last unit of the parameter.
    for (keep, prefetch) in KEEPS.into_iter().zip([2, 0, 1]) {
        let configured = || builder().keep(keep).prefetch(prefetch);
        assert_eq!(trained(configured()), found, "{keep:?}, to the bit");
        assert_eq!(trained(configured().optimizer_in_backward()), found, "{keep:?}, in backward");
    }
}
