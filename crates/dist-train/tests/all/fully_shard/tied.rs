//! Units that share a parameter, compared with data parallel.

use candle_core::{Device, Result, Tensor};
use candle_nn::Optimizer;
use dist_train::{DataParallel, FullyShard, Group, Keep, ParamsSgd, Sgd, UnitRules};
use pmap_mesh::DeviceMesh;

use super::model::tied;
use crate::support::layers;

fn sgd(group: Group) -> Result<Sgd> {
    Sgd::new(group.vars, ParamsSgd { lr: 0.1, momentum: 0.9, ..ParamsSgd::default() })
}

#[test]
fn tied_units_agree_to_rounding() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    // The second unit contains both layers.
    let rules = || UnitRules::new().unit("first", ["0"]).unit("both", ["0", "1"]);
    let x = Tensor::arange(0_f32, 12., &Device::Cpu).unwrap().sin().unwrap();
    let x = x.reshape((4, 3)).unwrap();
    let mut expected =
        DataParallel::builder(&mesh, layers::<2>).by_units(rules()).build(sgd).unwrap();
    let expected: Vec<f64> = (0..6).map(|_| expected.step(x.clone(), tied).unwrap().loss).collect();
    let trained = |keep| {
        let builder = FullyShard::builder(&mesh, layers::<2>).by_units(rules()).keep(keep);
        let mut model = builder.build(sgd).unwrap();
        assert_eq!(model.units().collect::<Vec<_>>(), ["both", "first"]);
        (0..6).map(|_| model.step(x.clone(), tied).unwrap().loss).collect::<Vec<f64>>()
    };
    let found = trained(Keep::Inputs);
    assert_eq!(found, trained(Keep::Graph), "to the bit");
    assert_eq!(found, trained(Keep::Gathered), "to the bit");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }
}
