//! Tensors on their way to a device and back: whole, wherever they come from.
//!
//! What a GPU has begun goes on while the program does: a copy that does not wait for it is right for
//! small tensors, by luck, and wrong for large ones, now and then. So these are large, and moved many
//! times.

use candle_core::{DType, Device, Tensor};
use candle_distributed::mesh::{ALL, DeviceMesh, Error, MeshError, P};

use super::meshes;

/// How many rows of [`COLUMNS`] a large tensor has on this mesh, and how often it is moved.
fn effort(mesh: &DeviceMesh) -> (usize, usize) {
    if mesh.devices()[0].is_cpu() { (64, 2) } else { (16 << 10, 50) }
}

const COLUMNS: usize = 1024;

/// The devices that a user may have opened beside those of the mesh, of the same kind.
fn own_devices(mesh: &DeviceMesh) -> Vec<Device> {
    let open = |index: usize, device: &Device| match device {
        Device::Cpu => vec![Device::Cpu],
        Device::Cuda(_) => [Device::new_cuda, Device::new_cuda_with_stream]
            .into_iter()
            .filter_map(|open| open(index).ok())
            .collect(),
        Device::Metal(_) => Device::new_metal(index).into_iter().collect(),
    };
    let devices = mesh.devices().iter().enumerate();
    devices.flat_map(|(index, device)| open(index, device)).chain([Device::Cpu]).collect()
}

/// Numbers that are exact in single precision, other ones in each round; computed on the device, which
/// may not be done when this returns.
fn numbers(rows: usize, round: usize, device: &Device) -> Tensor {
    let end = u32::try_from(rows * COLUMNS).unwrap();
    let x = Tensor::arange(0, end, device).unwrap().to_dtype(DType::F32).unwrap();
    // Several kernels one after the other, so that the last ones have not begun yet.
    let x = (0..4).fold(x, |x, _| x.affine(1.0, 1.0).unwrap());
    x.affine(0.5, round as f64).unwrap().reshape((rows, COLUMNS)).unwrap()
}

#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims());
    let host = |x: &Tensor| x.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
    let bits = |x: &Tensor| -> Vec<u32> {
        host(x).to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    let [found, expected] = [found, expected].map(bits);
    let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "the first item that is wrong");
}

#[test]
fn arguments_of_any_device_arrive_whole() {
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
                // Dropped while they are under way.
                let arguments = (numbers(rows, round, &device), numbers(rows, round, &device));
                let (cut, whole) = double.call(arguments).unwrap();
                assert_same(&cut, &expected);
                assert_same(&whole, &expected);
            }
        }
    }
}

#[test]
fn views_are_moved_as_what_they_look_at() {
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
fn captured_tensors_are_complete_when_a_replica_begins() {
    for mesh in meshes() {
        let (rows, rounds) = effort(&mesh);
        for round in 0..rounds {
            // Written by this thread, read by the workers'.
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
fn results_of_any_device_come_back_whole() {
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
            let (here, elsewhere) = make.call(argument).unwrap();
            let expected = numbers(rows, round, &Device::Cpu);
            for stacked in [here, elsewhere] {
                for slot in 0..mesh.len() {
                    assert_same(&stacked.get(slot).unwrap(), &expected);
                }
            }
        }
    }
}

#[test]
fn results_that_stay_are_the_arguments_of_the_next_call() {
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
fn devices_that_are_not_there_are_refused_by_number() {
    // No machine has as many, and a build without their feature none.
    for refused in [DeviceMesh::cuda(1000), DeviceMesh::metal(1000)] {
        assert!(matches!(refused, Err(Error::Mesh(MeshError::Device { .. }))), "{refused:?}");
    }
}
