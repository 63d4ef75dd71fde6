//! Copies of tensors to a device and back are complete, for every source.
//!
//! A GPU computes while the program continues. A copy that does not wait is right for small
//! tensors, by luck, and sometimes wrong for large ones. So these tensors are large and move many
//! times.

use candle_core::{DType, Device, Tensor};
use candle_distributed::mesh::{ALL, DeviceMesh, Error, MeshError, P};

use super::meshes;

/// Returns the number of rows of a large tensor on this mesh, and the number of moves. With more rows
/// or moves, single precision would round the numbers.
fn effort(mesh: &DeviceMesh) -> (usize, usize) {
    if mesh.devices()[0].is_cpu() { (64, 2) } else { (8 << 10, 8) }
}

/// Columns of a large tensor.
const COLUMNS: usize = 1024;

/// Opens the mesh's devices again, as a user may do, and adds the CPU.
fn own_devices(mesh: &DeviceMesh) -> Vec<Device> {
    let mut devices = Vec::new();
    for (index, device) in mesh.devices().iter().enumerate() {
        match device {
            Device::Cpu => devices.push(Device::Cpu),
            Device::Cuda(_) => {
                devices.extend(Device::new_cuda(index));
                devices.extend(Device::new_cuda_with_stream(index));
            }
            Device::Metal(_) => devices.extend(Device::new_metal(index)),
        }
    }
    devices.push(Device::Cpu);
    devices
}

/// Returns different numbers in each round, exact in single precision. The device may still compute
/// them when this returns.
fn numbers(rows: usize, round: usize, device: &Device) -> Tensor {
    let end = u32::try_from(rows * COLUMNS).unwrap();
    let x = Tensor::arange(0, end, device).unwrap().to_dtype(DType::F32).unwrap();
    // A queue of several kernels, so that the last ones have not started yet.
    let x = (0..4).fold(x, |x, _| x.affine(1.0, 1.0).unwrap());
    x.affine(0.5, round as f64).unwrap().reshape((rows, COLUMNS)).unwrap()
}

#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims());
    let [found, expected] = [bits(found), bits(expected)];
    let first_wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(first_wrong, None, "an item differs");
}

fn bits(x: &Tensor) -> Vec<u32> {
    let host = x.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
    host.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn arguments_arrive_complete() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        let double = mesh
            .pmap(|ctx, (x, w): (Tensor, Tensor)| {
                assert!(x.device().same_device(ctx.device()));
                assert!(w.device().same_device(ctx.device()));
                Ok((x.affine(2.0, 0.0)?, w.affine(2.0, 0.0)?))
            })
            .in_axes([P::shard(0, ALL), P::replicate()])
            .out_axes([P::shard(0, ALL), P::replicate()]);
        for device in own_devices(&mesh) {
            for round in 0..rounds {
                let expected = numbers(rows, round, &Device::Cpu).affine(2.0, 0.0).unwrap();
                // Dropped while the copies are in flight.
                let arguments = (numbers(rows, round, &device), numbers(rows, round, &device));
                let (cut, whole) = double.call(arguments).unwrap();
                assert_same(&cut, &expected);
                assert_same(&whole, &expected);
            }
        }
    }
}

#[test]
fn views_arrive_with_their_values() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        let copy = mesh.pmap(|_, x: Tensor| x.affine(1.0, 0.0));
        let views: [fn(&Tensor) -> Tensor; 4] = [
            |x| x.t().unwrap(),
            |x| x.narrow(1, 3, 10).unwrap(),
            |x| x.narrow(0, 2, x.dims()[0] - 2).unwrap(),
            |x| x.narrow(1, 7, 1).unwrap().broadcast_as((x.dims()[0], 4)).unwrap(),
        ];
        for device in own_devices(&mesh) {
            for round in 0..rounds.div_ceil(10) {
                let x = numbers(rows, round, &device);
                for view in views {
                    let whole = numbers(rows, round, &Device::Cpu);
                    assert_same(&copy.call(view(&x)).unwrap(), &view(&whole));
                }
            }
        }
    }
}

#[test]
fn captured_tensors_are_complete() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        for round in 0..rounds {
            // Written by this thread, read by the workers.
            let captured: Vec<Tensor> =
                mesh.devices().iter().map(|device| numbers(rows, round, device)).collect();
            let sum = mesh
                .pmap(move |ctx, ()| captured[ctx.slot()].affine(2.0, 0.0))
                .out_axes(P::replicate());
            let expected = numbers(rows, round, &Device::Cpu).affine(2.0, 0.0).unwrap();
            assert_same(&sum.call(()).unwrap(), &expected);
        }
    }
}

#[test]
fn results_arrive_complete() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        let own = own_devices(&mesh);
        let n_own = own.len();
        let make = mesh
            .pmap(move |ctx, round: Tensor| {
                let round = round.to_dtype(DType::U32)?.to_scalar::<u32>()? as usize;
                Ok((numbers(rows, round, ctx.device()), numbers(rows, round, &own[round % n_own])))
            })
            .in_axes(P::replicate())
            .out_axes(P::stack(0, ALL));
        for round in 0..rounds.max(n_own) {
            let argument = Tensor::new(round as f32, &Device::Cpu).unwrap();
            let (replica_device, own_device) = make.call(argument).unwrap();
            let expected = numbers(rows, round, &Device::Cpu);
            for stacked in [replica_device, own_device] {
                for slot in 0..mesh.len() {
                    assert_same(&stacked.get(slot).unwrap(), &expected);
                }
            }
        }
    }
}

#[test]
fn resident_results_feed_the_next_call() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        let add = mesh.pmap(|_, x: Tensor| x.affine(1.0, 1.0));
        for device in own_devices(&mesh) {
            let mut x = mesh.shard(numbers(rows, 0, &device), P::shard(0, ALL)).unwrap();
            for _ in 0..rounds {
                x = add.run(x).unwrap();
            }
            let expected = numbers(rows, rounds, &Device::Cpu);
            assert_same(&x.gather(P::shard(0, ALL)).unwrap(), &expected);
        }
    }
}

#[test]
fn missing_devices_are_errors() {
    // No machine has 1,000 devices, and a build without the feature has none.
    for mesh in [DeviceMesh::cuda(1000), DeviceMesh::metal(1000)] {
        assert!(matches!(mesh, Err(Error::Mesh(MeshError::Device { .. }))), "{mesh:?}");
    }
}
