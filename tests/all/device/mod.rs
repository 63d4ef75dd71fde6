//! Runs the same tests on every kind of device present; the others are reported as skipped.

mod in_flight;
mod moves;
mod training;

use candle_core::{DType, Device, Tensor, Var};
use candle_distributed::{
    mesh::{ALL, DeviceMesh, P, Uneven},
    train::value_and_grad,
};

/// Returns a mesh of two slots for each kind of device and each way to open one. The slots are two
/// devices, or one device twice if there is no second.
fn meshes() -> Vec<DeviceMesh> {
    let mut meshes = vec![DeviceMesh::cpu(2).unwrap()];
    let kinds = [
        ("cuda", Device::new_cuda as fn(usize) -> _),
        ("cuda, separate streams", Device::new_cuda_with_stream),
        ("metal", Device::new_metal),
    ];
    for (kind, open) in kinds {
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

/// Returns 0, 1, 2, … in this shape, on the host.
fn iota(shape: (usize, usize)) -> Tensor {
    let len = u32::try_from(shape.0 * shape.1).unwrap();
    Tensor::arange(0, len, &Device::Cpu)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

/// Moves a tensor to another device through the host, and its gradient back on the same way.
///
/// candle's direct copies between GPUs may read memory that has been reused by then.
fn moved(x: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    x.to_device(&Device::Cpu)?.to_device(device)
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[test]
fn collectives_exchange_data_between_devices() {
    for mesh in meshes() {
        let run = mesh.pmap(|ctx, x: Tensor| {
            let sum = ctx.psum(&x, ALL)?;
            let max = ctx.pmax(&x, ALL)?;
            let gathered = ctx.all_gather(&x, 0, ALL)?;
            let scattered = ctx.psum_scatter(&x, 1, ALL)?;
            let swapped = ctx.ppermute(&x, &[(0, 1), (1, 0)], ALL)?;
            let first = ctx.broadcast(&x, 0, ALL)?;
            let exchanged = ctx.all_to_all(&x, 1, 0, ALL)?;
            for result in [&sum, &max, &gathered, &scattered, &swapped, &first, &exchanged] {
                assert!(result.device().same_device(ctx.device()));
            }
            Ok(((sum, max, gathered), (scattered, swapped, first, exchanged)))
        });
        let run = run.out_axes(
            [P::stack(0, ALL), P::stack(0, ALL), P::stack(0, ALL), P::shard(1, ALL)]
                .into_iter()
                .chain([P::shard(0, ALL), P::stack(0, ALL), P::stack(0, ALL)])
                .collect::<Vec<_>>(),
        );
        let ((sum, max, gathered), (scattered, swapped, first, exchanged)) =
            run.call(iota((2, 4))).unwrap();
        let stacked = |tensor: &Tensor| tensor.to_vec3::<f32>().unwrap();
        assert_eq!(stacked(&sum), vec![vec![vec![4.0, 6.0, 8.0, 10.0]]; 2]);
        assert_eq!(stacked(&max), vec![vec![vec![4.0, 5.0, 6.0, 7.0]]; 2]);
        assert_eq!(stacked(&gathered), vec![rows(&iota((2, 4))); 2]);
        assert_eq!(rows(&scattered), [[4.0, 6.0, 8.0, 10.0]]);
        assert_eq!(rows(&swapped), [[4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]);
        assert_eq!(stacked(&first), vec![vec![vec![0.0, 1.0, 2.0, 3.0]]; 2]);
        assert_eq!(stacked(&exchanged), [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]);
    }
}

#[test]
fn gradients_flow_through_collectives() {
    for mesh in meshes() {
        let run = mesh.pmap(|ctx, x: Tensor| {
            let var = Var::from_tensor(&x)?;
            // Every replica's loss uses all rows, weighted by the replica.
            let gathered = ctx.all_gather(var.as_tensor(), 0, ALL)?;
            let grads = (gathered * (ctx.slot() + 1) as f64)?.sum_all()?.backward()?;
            grads.get(&var).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
        });
        assert_eq!(rows(&run.call(iota((4, 2))).unwrap()), [[3.0, 3.0]; 4]);
    }
}

#[test]
fn padding_and_rng_match_the_cpu() {
    for mesh in meshes() {
        let padded =
            mesh.pmap(|_, x: Tensor| x.sqr()).uneven(Uneven::Pad).call(iota((3, 2))).unwrap();
        assert_eq!(rows(&padded), rows(&iota((3, 2)).sqr().unwrap()));
        let noise =
            mesh.pmap(|ctx, x: Tensor| ctx.rng().uniform(x.shape())).call(iota((2, 2))).unwrap();
        let on_cpu =
            DeviceMesh::cpu(2).unwrap().pmap(|ctx, x: Tensor| ctx.rng().uniform(x.shape()));
        assert_eq!(rows(&noise), rows(&on_cpu.call(iota((2, 2))).unwrap()));
    }
}

#[test]
fn value_and_grad_sums_over_devices() {
    for mesh in meshes() {
        let weight =
            Var::from_tensor(&iota((3, 2)).to_device(&mesh.devices()[0]).unwrap()).unwrap();
        let shared = weight.clone();
        let step = value_and_grad(&mesh, vec![weight.clone()], move |ctx, x: Tensor| {
            x.matmul(&moved(shared.as_tensor(), ctx.device())?)?.mean_all()
        });
        let (_, grads) = step.call(iota((4, 3))).unwrap();
        assert_eq!(rows(grads.get(&weight).unwrap()), [[2.25, 2.25], [2.75, 2.75], [3.25, 3.25]]);
    }
}
