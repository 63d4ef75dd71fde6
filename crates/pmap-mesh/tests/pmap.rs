//! The success criteria of the pmap spec, and what happens when a call cannot succeed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "small whole numbers are exact")]

use std::{
    sync::{Mutex, mpsc},
    time::Duration,
};

use candle_core::{DType, Device, Tensor};
use pmap_mesh::{DeviceMesh, Error, InAxis, OutAxis, TensorTree};

/// 0, 1, 2, … in this shape.
fn iota(shape: (usize, usize)) -> Tensor {
    let len = u32::try_from(shape.0 * shape.1).unwrap();
    Tensor::arange(0, len, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().reshape(shape).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[test]
fn a_function_of_one_input_gives_what_it_gives_on_one_device() {
    let x = iota((12, 5));
    for devices in [1, 2, 3, 4, 6, 12] {
        let parallel = DeviceMesh::cpu(devices).unwrap().pmap(|_, x: Tensor| x.sqr()? + 1.0);
        assert_eq!(rows(&parallel.call(x.clone()).unwrap()), rows(&(x.sqr().unwrap() + 1.0).unwrap()));
    }
}

#[test]
fn of_two_inputs_the_first_is_sharded_and_the_second_replicated() {
    let (x, w) = (iota((6, 4)), iota((4, 3)));
    let parallel = DeviceMesh::cpu(3).unwrap().pmap(|replica, (x, w): (Tensor, Tensor)| {
        assert_eq!((replica.count(), x.dims(), w.dims()), (3, &[2, 4][..], &[4, 3][..]));
        x.matmul(&w)
    });
    assert_eq!(rows(&parallel.call((x.clone(), w.clone())).unwrap()), rows(&x.matmul(&w).unwrap()));
}

#[test]
fn every_pair_of_in_axes_gives_the_same_sum_of_products() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let (x, y) = (iota((4, 6)), iota((4, 6)));
    let whole: f32 = (&x * &y).unwrap().sum_all().unwrap().to_scalar().unwrap();
    for axis in [0, 1, -1, -2] {
        let dot = mesh
            .pmap(|_, (x, y): (Tensor, Tensor)| (x * y)?.sum_all())
            .in_axes([InAxis::Shard(axis); 2])
            .out_axes(OutAxis::Sum);
        assert_eq!(dot.call((x.clone(), y.clone())).unwrap().to_scalar::<f32>().unwrap(), whole);
    }
}

#[test]
fn shards_lie_in_mesh_order_and_gather_back_along_any_axis() {
    let x = iota((4, 6));
    for axis in [0, 1, -1, -2] {
        let tag = DeviceMesh::cpu(2).unwrap().pmap(|replica, x: Tensor| x + replica.index() as f64 * 100.0);
        let tagged = tag.in_axes(InAxis::Shard(axis)).out_axes(OutAxis::Gather(axis)).call(x.clone()).unwrap();
        let second_half = |row: usize, column: usize| if axis.rem_euclid(2) == 0 { row >= 2 } else { column >= 3 };
        for (row, values) in rows(&tagged).iter().enumerate() {
            for (column, &value) in values.iter().enumerate() {
                let tag = if second_half(row, column) { 100.0 } else { 0.0 };
                assert_eq!(value, (row * 6 + column) as f32 + tag);
            }
        }
    }
}

#[test]
fn results_may_be_nothing_several_tensors_or_a_struct() {
    struct Moments {
        sum: Tensor,
        squares: Vec<Tensor>,
    }
    impl TensorTree for Moments {
        fn try_map<E>(&self, f: &mut impl FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
            Ok(Self { sum: f(&self.sum)?, squares: self.squares.try_map(f)? })
        }
    }
    let mesh = DeviceMesh::cpu(2).unwrap();
    mesh.pmap(|_, _: Tensor| Ok(())).call(iota((2, 2))).unwrap();

    let moments = mesh.pmap(|_, x: Tensor| Ok(Moments { sum: x.sum_all()?, squares: vec![x.sqr()?, x.sqr()?.sqr()?] }));
    let moments = moments.out_axes([OutAxis::Mean, OutAxis::Gather(0), OutAxis::Sum]).call(iota((2, 2))).unwrap();
    assert_eq!(moments.sum.to_scalar::<f32>().unwrap(), 3.0);
    assert_eq!(rows(&moments.squares[0]), [[0.0, 1.0], [4.0, 9.0]]);
    assert_eq!(rows(&moments.squares[1]), [[16.0, 82.0]]);
}

/// Each replica waits for a sign of life from the other: run one after the other, they would time out.
#[test]
fn replicas_run_at_the_same_time() {
    let ((to_first, first), (to_second, second)) = (mpsc::channel(), mpsc::channel());
    let (to_other, mine) = ([to_second, to_first], [Mutex::new(first), Mutex::new(second)]);
    let meet = DeviceMesh::cpu(2).unwrap().pmap(move |replica, x: Tensor| {
        to_other[replica.index()].send(()).map_err(candle_core::Error::wrap)?;
        let other = mine[replica.index()].lock().unwrap().recv_timeout(Duration::from_secs(60));
        other.map_err(candle_core::Error::wrap)?;
        Ok(x)
    });
    assert_eq!(rows(&meet.call(iota((2, 1))).unwrap()), [[0.0], [1.0]]);
}

#[test]
fn calls_from_several_threads_do_not_disturb_each_other() {
    let add = DeviceMesh::cpu(2).unwrap().pmap(|_, (x, y): (Tensor, Tensor)| x.broadcast_add(&y));
    std::thread::scope(|scope| {
        for offset in 0..4_u8 {
            let add = &add;
            scope.spawn(move || {
                for _ in 0..50 {
                    let y = Tensor::full(f32::from(offset), 1, &Device::Cpu).unwrap();
                    let sum = add.call((iota((2, 1)), y)).unwrap();
                    assert_eq!(rows(&sum), [[f32::from(offset)], [f32::from(offset) + 1.0]]);
                }
            });
        }
    });
}

#[test]
fn gradients_of_shards_add_up_to_the_whole_batch_s() {
    let weight = candle_core::Var::from_tensor(&iota((4, 3))).unwrap();
    let gradient = |x: &Tensor, weight: &candle_core::Var| {
        let loss = x.matmul(weight)?.sqr()?.sum_all()?;
        loss.backward()?.get(weight).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
    };
    let whole = gradient(&iota((6, 4)), &weight).unwrap();
    let shared = weight.clone();
    let parallel = DeviceMesh::cpu(3).unwrap().pmap(move |_, x: Tensor| gradient(&x, &shared)).out_axes(OutAxis::Sum);
    assert_eq!(rows(&parallel.call(iota((6, 4))).unwrap()), rows(&whole));
}

#[test]
fn an_axis_that_does_not_divide_is_named_with_its_size_and_the_devices() {
    let mesh = DeviceMesh::cpu(4).unwrap();
    let error = mesh.pmap(|_, x: Tensor| Ok(x)).call(iota((10, 3))).unwrap_err();
    assert!(matches!(error, Error::NotDivisible { index: 0, axis: 0, size: 10, devices: 4 }));
    assert_eq!(error.to_string(), "axis 0 of input 0 has size 10, which does not split evenly over 4 devices");
}

#[test]
fn axes_out_of_range_are_named_with_the_shape() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    for axis in [2, -3, isize::MAX, isize::MIN] {
        let call = mesh.pmap(|_, x: Tensor| Ok(x)).in_axes(InAxis::Shard(axis)).call(iota((2, 2)));
        assert!(matches!(call, Err(Error::AxisOutOfRange { side: "in", index: 0, axis: a, .. }) if a == axis));
        let call = mesh.pmap(|_, x: Tensor| Ok(x)).out_axes(OutAxis::Gather(axis)).call(iota((2, 2)));
        assert!(matches!(call, Err(Error::AxisOutOfRange { side: "out", index: 0, axis: a, .. }) if a == axis));
    }
    let scalar = Tensor::new(1_f32, &Device::Cpu).unwrap();
    let call = mesh.pmap(|_, x: Tensor| Ok(x)).call(scalar);
    assert!(matches!(call, Err(Error::AxisOutOfRange { axis: 0, shape, .. }) if shape.is_empty()));
}

#[test]
fn a_wrong_number_of_axes_is_refused() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let call = mesh.pmap(|_, x: Tensor| Ok(x)).in_axes([InAxis::Replicate; 2]).call(iota((2, 2)));
    assert!(matches!(call, Err(Error::AxesCount { side: "in", axes: 2, tensors: 1 })));
    let call = mesh.pmap(|_, x: Tensor| Ok(x)).out_axes(Vec::new()).call(iota((2, 2)));
    assert!(matches!(call, Err(Error::AxesCount { side: "out", axes: 0, tensors: 1 })));
}

#[test]
fn meshes_of_no_devices_or_too_many_are_refused() {
    for count in [0, DeviceMesh::MAX_DEVICES + 1, usize::MAX] {
        let refused = |mesh| matches!(mesh, Err(Error::MeshSize { count: c, .. }) if c == count);
        assert!(
            refused(DeviceMesh::cpu(count)) && refused(DeviceMesh::cuda(count)) && refused(DeviceMesh::metal(count))
        );
    }
    assert!(matches!(DeviceMesh::new(Vec::new()), Err(Error::MeshSize { count: 0, .. })));
}

#[test]
fn a_failing_replica_is_named_and_the_mesh_lives_on() {
    let fail = DeviceMesh::cpu(3).unwrap().pmap(|replica, x: Tensor| match replica.index() {
        1 if x.dims()[1] == 1 => candle_core::bail!("no data"),
        2 if x.dims()[1] == 2 => panic!("out of order"),
        _ => Ok(x),
    });
    for _ in 0..3 {
        let error = fail.call(iota((3, 1))).unwrap_err();
        assert!(matches!(&error, Error::Replica { index: 1, source, .. } if source.to_string().contains("no data")));
        let error = fail.call(iota((3, 2))).unwrap_err();
        assert!(matches!(&error, Error::Panicked { index: 2, message, .. } if message == "out of order"));
        assert!(fail.call(iota((3, 3))).is_ok());
    }
}

#[test]
fn outputs_that_do_not_fit_together_are_named() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let uneven = mesh.pmap(|replica, x: Tensor| Ok(vec![x; replica.index()]));
    let error = uneven.call(iota((2, 2))).unwrap_err();
    assert!(matches!(error, Error::OutputsDiffer { index: 1, tensors: 1, expected: 0 }));
    let ragged = mesh.pmap(|replica, x: Tensor| x.narrow(1, 0, replica.index() + 1));
    assert!(matches!(ragged.call(iota((2, 2))).unwrap_err(), Error::Gather { index: 0, .. }));
}

#[test]
fn sums_are_of_any_type_and_means_of_floats() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let reduced = |dtype, axis| {
        let x = iota((2, 2)).to_dtype(dtype).unwrap();
        mesh.pmap(|_, x: Tensor| Ok(x)).out_axes(axis).call(x)
    };
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64] {
        assert_eq!(rows(&reduced(dtype, OutAxis::Sum).unwrap().to_dtype(DType::F32).unwrap()), [[2.0, 4.0]]);
        let mean = reduced(dtype, OutAxis::Mean);
        if dtype.is_float() {
            assert_eq!(rows(&mean.unwrap().to_dtype(DType::F32).unwrap()), [[1.0, 2.0]]);
        } else {
            assert!(matches!(mean, Err(Error::MeanOfIntegers { index: 0, dtype: of }) if of == dtype));
        }
    }
}

#[test]
fn a_call_inside_a_replica_is_refused_instead_of_waiting_for_itself() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let inner = mesh.pmap(|_, x: Tensor| Ok(x));
    let outer = mesh.pmap(move |_, x: Tensor| {
        // Whatever else the worker is lent to meanwhile, it stays a replica.
        rayon::yield_now();
        inner.call(x).map_err(candle_core::Error::wrap)
    });
    let Error::Replica { source, .. } = outer.call(iota((4, 1))).unwrap_err() else {
        panic!("not an error of a replica")
    };
    assert!(source.to_string().contains("cannot be called inside a replica"));
}
