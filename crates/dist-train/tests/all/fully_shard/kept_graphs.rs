//! Units that keep their graphs while their parameters are freed.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor};
use dist_train::{Error, FullyShard, Keep, Units};
use pmap_mesh::{DeviceMesh, Replica};

use super::model::{KEEPS, adam, sharded, train};
use crate::support::{bits, input, layer, layers};

/// Ties layers: the first unit passes its weight and a view of it to the last.
fn tied(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let (x, weight, row) = model.unit("0", &x, |vb, x| {
        let weight = vb.get((3, 3), "weight")?;
        Ok((layer(vb, x)?, weight.clone(), weight.t()?.narrow(0, 1, 1)?))
    })?;
    let x = model.unit("1", &x, layer)?;
    let y = model.unit("2", &(x, weight, row), |vb, (x, weight, row)| {
        layer(vb, x)?.matmul(weight)?.broadcast_mul(row)
    })?;
    y.sqr()?.mean_all()
}

#[test]
fn returned_parameters_work_in_other_units() {
    for slots in 1..4 {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let [expected, graph, gathered] = KEEPS.map(|keep| {
            let mut model = FullyShard::builder(&mesh, layers::<3>).keep(keep).build(adam).unwrap();
            let losses: Vec<u64> =
                (0..5).map(|_| model.step(input(12), tied).unwrap().loss.to_bits()).collect();
            (losses, bits(&model.parameter("0.weight").unwrap()))
        });
        assert_eq!(graph, expected, "{slots} slots");
        assert_eq!(gathered, expected, "{slots} slots");
    }
}

/// Returns a loss that reads the first unit's weight after `n_before` other units.
fn smuggling(n_before: usize) -> impl Fn(&Replica, &Units, Tensor) -> Result<Tensor> + Send + Sync {
    move |_, model, mut x| {
        let door: Arc<Mutex<Option<Tensor>>> = Arc::default();
        let into = Arc::clone(&door);
        x = model.unit("0", &x, move |vb, x| {
            let weight = vb.get((3, 3), "weight")?.detach();
            *into.lock().unwrap_or_else(PoisonError::into_inner) = Some(weight);
            layer(vb, x)
        })?;
        // Once the second unit is entered, all slots have left the first.
        for unit in 1..=n_before {
            x = model.unit(&unit.to_string(), &x, layer)?;
        }
        let weight = door.lock().unwrap().take().unwrap();
        for unit in n_before + 1..3 {
            let weight = weight.clone();
            x = model.unit(&unit.to_string(), &x, move |vb, x| layer(vb, &x.matmul(&weight)?))?;
        }
        if n_before == 2 { x.matmul(&weight)?.sqr()?.mean_all() } else { x.sqr()?.mean_all() }
    }
}

#[test]
fn freed_parameters_cannot_be_read() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for n_before in [1, 2] {
        let build =
            || FullyShard::builder(&mesh, layers::<3>).keep(Keep::Graph).build(adam).unwrap();
        let mut model = build();
        let Error::Mesh(error) = model.step(input(12), smuggling(n_before)).unwrap_err() else {
            panic!("expected a mesh error")
        };
        assert!(error.to_string().contains("F4"), "{error}");
        assert_eq!(
            model.step(input(12), tied).unwrap().loss.to_bits(),
            build().step(input(12), tied).unwrap().loss.to_bits(),
            "the model trains on"
        );
    }
}

#[test]
fn keeps_can_differ_by_unit() {
    let mesh = DeviceMesh::cpu(3).unwrap();
    let expected = train(sharded(&mesh).build(adam).unwrap(), 6, 6);
    let builder = sharded(&mesh).keep_unit("blocks.*", Keep::Graph);
    let builder = builder.keep_unit("head", Keep::Gathered);
    assert_eq!(train(builder.build(adam).unwrap(), 6, 6), expected);
}
