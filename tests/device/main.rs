//! The same test bodies on every kind of device that is there; the others are skipped, and say so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor, Var};
use candle_distributed::mesh::{ALL, DeviceMesh, P};

/// A mesh of two slots for each kind of device: two devices if there are so many, else the first one twice.
fn meshes() -> Vec<DeviceMesh> {
    let mut meshes = vec![DeviceMesh::cpu(2).unwrap()];
    for (kind, open) in [("cuda", Device::new_cuda as fn(usize) -> _), ("metal", Device::new_metal)] {
        match open(0) {
            Ok(first) => {
                let second = open(1).unwrap_or_else(|_| first.clone());
                meshes.push(DeviceMesh::new(vec![first, second]).unwrap());
            }
            Err(error) => eprintln!("SKIPPED on {kind}: {error}"),
        }
    }
    meshes
}

/// 0, 1, 2, … in this shape, on the host.
fn iota(shape: (usize, usize)) -> Tensor {
    let len = u32::try_from(shape.0 * shape.1).unwrap();
    Tensor::arange(0, len, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().reshape(shape).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[test]
fn shards_lie_on_their_devices_and_come_back_in_order() {
    for mesh in meshes() {
        for axis in [0, 1] {
            let square = mesh.pmap(|replica, x: Tensor| {
                assert!(x.device().same_device(replica.device()));
                x.sqr()
            });
            let square = square.in_axes(P::shard(axis, ALL)).out_axes(P::shard(axis, ALL));
            let x = iota((4, 6));
            let result = square.call(x.clone()).unwrap();
            assert!(result.device().same_device(&mesh.devices()[0]));
            assert_eq!(rows(&result), rows(&x.sqr().unwrap()));
        }
    }
}

#[test]
fn replicated_inputs_are_whole_everywhere() {
    for mesh in meshes() {
        let matmul = mesh.pmap(|_, (x, w): (Tensor, Tensor)| x.matmul(&w));
        let (x, w) = (iota((4, 3)), iota((3, 2)));
        assert_eq!(rows(&matmul.call((x.clone(), w.clone())).unwrap()), rows(&x.matmul(&w).unwrap()));
    }
}

#[test]
fn gradients_of_shards_add_up_on_the_first_device() {
    for mesh in meshes() {
        let weight = Var::from_tensor(&iota((3, 2)).to_device(&mesh.devices()[0]).unwrap()).unwrap();
        let shared = weight.clone();
        let gradient = mesh
            .pmap(move |replica, x: Tensor| {
                let loss = x.matmul(&shared.to_device(replica.device())?)?.sum_all()?;
                loss.backward()?.get(&shared).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
            })
            .out_axes(P::sum(ALL));
        let of_columns = rows(&gradient.call(iota((4, 3))).unwrap());
        assert_eq!(of_columns, [[18.0, 18.0], [22.0, 22.0], [26.0, 26.0]]);
    }
}
