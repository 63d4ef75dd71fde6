//! The acceptance criteria of pmap, and calls that cannot succeed.

#![allow(clippy::float_cmp, reason = "small whole numbers are exact")]

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use core_types::Seed;
use pmap_mesh::{ALL, DeviceMesh, Error, MeshError, P, Replica, ReplicaError, Uneven, ValueError};

/// Returns 0, 1, 2, … in this shape.
fn iota(shape: (usize, usize)) -> Tensor {
    let len = u32::try_from(shape.0 * shape.1).unwrap();
    Tensor::arange(0, len, &Device::Cpu)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .reshape(shape)
        .unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[expect(clippy::disallowed_types, reason = "users have them")]
#[test]
fn maps_iterate_in_key_order() {
    type Entries = std::collections::HashMap<&'static str, Tensor>;
    let mesh = DeviceMesh::cpu(2).unwrap();
    let means = mesh.pmap(|ctx, mut x: Entries| {
        let mean = ctx.pmean(&x["a"], ALL)?;
        x.insert("a", mean);
        Ok(x)
    });
    let means = means.in_axes([P::shard(0, ALL), P::replicate(), P::shard(0, ALL)]);
    for _ in 0..20 {
        let names = ["c", "a", "b"].into_iter().zip(1..);
        let x: Entries = names.map(|(name, columns)| (name, iota((2, columns)))).collect();
        assert_eq!(rows(&means.call(x).unwrap()["a"]), [[1.0, 2.0], [1.0, 2.0]]);
    }
}

/// Returns an empty view that begins at the end of its storage.
fn empty_past_the_end() -> Tensor {
    Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap().narrow(1, 2, 3).unwrap()
}

#[test]
fn empty_view_may_start_past_storage() {
    let every = [(Uneven::Pad, 0), (Uneven::Pad, 1), (Uneven::Balanced, 1)];
    for (slots, (uneven, dim)) in [1, 3].into_iter().flat_map(|slots| every.map(|way| (slots, way)))
    {
        let mesh = DeviceMesh::cpu(slots).unwrap();
        let f = mesh.pmap(|ctx, x: Tensor| {
            read(&x)?;
            read_all_collectives(ctx)?;
            Ok(vec![empty_past_the_end(); 3])
        });
        let f = f.in_axes(Some(dim)).uneven(uneven);
        let f = f.out_axes([P::concat(1, ALL), P::stack(0, ALL), P::replicate()]);
        let results = f.call(empty_past_the_end()).unwrap();
        assert_eq!(results[0].dims(), [0, 3 * slots]);
        assert_eq!((results[1].dims(), results[2].dims()), (&[slots, 0, 3][..], &[0, 3][..]));
        let shards = mesh.shard(empty_past_the_end(), Some(1)).unwrap();
        shards.shards().iter().try_for_each(read).unwrap();
    }
}

fn read_all_collectives(ctx: &pmap_mesh::Replica) -> candle_core::Result<()> {
    let x = empty_past_the_end();
    read(&ctx.psum(&x, ALL)?)?;
    read(&ctx.pmax(&x, ALL)?)?;
    read(&ctx.psum_scatter(&x, 1, ALL)?)?;
    read(&ctx.all_gather(&x, 0, ALL)?)?;
    read(&ctx.all_to_all(&x, 1, 0, ALL)?)?;
    read(&ctx.broadcast(&x, 0, ALL)?)?;
    read(&ctx.ppermute(&x, &[(0, ctx.count() - 1)], ALL)?)
}

/// Reads a tensor as candle does; that panics if a view begins past the end.
fn read(x: &Tensor) -> candle_core::Result<()> {
    x.flatten_all()?.to_vec1::<f32>().map(drop)
}

#[test]
fn gradients_do_not_cross_a_call() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let w = candle_core::Var::from_tensor(&arange(4)).unwrap();
    let sum = |ctx: &pmap_mesh::Replica, x: &Tensor| ctx.psum(&x.sqr()?.sum_all()?, ALL);
    let of_argument = mesh.pmap(move |ctx, x: Tensor| sum(ctx, &x)).out_axes(P::replicate());
    let captured = w.clone();
    let of_captured = mesh.pmap(move |ctx, _: Tensor| sum(ctx, &captured)).out_axes(P::replicate());
    for f in [of_argument.call(w.as_tensor().clone()), of_captured.call(arange(4))] {
        assert!(f.unwrap().backward().unwrap().get(&w).is_none());
    }
    let kept = mesh.shard(w.as_tensor().clone(), Some(0)).unwrap();
    assert!(kept.shards().iter().all(|shard| !shard.track_op()));
}

#[test]
fn all_faults_are_reported_together() {
    let grid = DeviceMesh::builder().axis("data", 2).axis("model", 3).cpu().unwrap();
    let call = grid.pmap(|_, (x, _, _): (Tensor, Tensor, Tensor)| Ok(x)).in_axes([
        P::shard(0, "data").and(P::shard(5, "model")),
        P::shard(0, "rows"),
        P::stack(0, "data").and(P::shard(0, ALL)),
    ]);
    let x = iota((5, 3));
    let Error::Specs(faults) = call.call((x.clone(), x.clone(), x)).unwrap_err() else {
        panic!("not a spec error")
    };
    let uneven = |index, parts, sizes| {
        format!(
            "dimension 0 of input {index} of shape [5, 3] has size 5, which {parts} devices; {sizes}"
        )
    };
    assert_eq!(
        faults,
        [
            "input 1: the mesh has no axis named rows; its axes are data, model".to_owned(),
            "input 2: an argument can be sharded or replicated, nothing else".to_owned(),
            "input 2: a mesh axis of all axes is named twice".to_owned(),
            uneven(0, "does not split evenly over 2", "4 and 6 do, and `uneven` allows others"),
            "dimension 5 is out of range for input 0 of shape [5, 3]".to_owned(),
            uneven(2, "is too small for 6", "")
                .replace("; ", "; use a size of at least 6, or `Uneven::Pad`"),
        ]
    );
}

fn faults(call: pmap_mesh::Result<Tensor>) -> Vec<String> {
    match call {
        Err(Error::Specs(faults)) => faults,
        other => panic!("expected faults of specs, got {other:?}"),
    }
}

#[test]
fn wrong_spec_count_is_rejected() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let call = mesh.pmap(|_, x: Tensor| Ok(x)).in_axes([None, None]).call(iota((2, 2)));
    let advice = |part| format!("give one spec, one for each {part}, or one for each tensor");
    let count = "in_axes has 2 specs for 1 arguments of 1 tensors";
    assert_eq!(faults(call), [format!("{count}; {}", advice("argument"))]);
    let call = mesh.pmap(|_, x: Tensor| Ok(x)).out_axes(Vec::<P>::new()).call(iota((2, 2)));
    let count = "out_axes has 0 specs for 1 results of 1 tensors";
    assert_eq!(faults(call), [format!("{count}; {}", advice("result"))]);
}

#[test]
fn invalid_mesh_sizes_are_rejected() {
    for count in [0, DeviceMesh::MAX_DEVICES + 1, usize::MAX] {
        let refused =
            |mesh| matches!(mesh, Err(Error::Mesh(MeshError::Size { count: c, .. })) if c == count);
        assert!(
            refused(DeviceMesh::cpu(count))
                && refused(DeviceMesh::cuda(count))
                && refused(DeviceMesh::metal(count))
        );
    }
    assert!(matches!(
        DeviceMesh::new(Vec::new()),
        Err(Error::Mesh(MeshError::Size { count: 0, .. }))
    ));
}

#[test]
fn device_count_must_match_axes() {
    let reason = |refused: pmap_mesh::Result<DeviceMesh>| match refused {
        Err(Error::Mesh(MeshError::Axes { reason })) => reason,
        other => panic!("{other:?}"),
    };
    let many = (0..17).fold(DeviceMesh::builder(), |mesh, n| mesh.axis(&n.to_string(), 1));
    assert_eq!(reason(many.cpu()), "invalid number of axes 17: at most 16");
    let too_few = DeviceMesh::builder().axis("a", 2).devices(vec![Device::Cpu]);
    assert_eq!(reason(too_few), "1 devices do not fill a mesh of 2 slots");
}

#[test]
#[cfg(not(feature = "metal"))]
fn missing_device_names_the_reason() {
    let error = DeviceMesh::metal(1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device 0 cannot be opened: the candle crate has not been built with metal support"
    );
    assert!(matches!(error, Error::Mesh(MeshError::Device { index: 0, .. })));
}

#[test]
fn shard_error_names_the_input() {
    // candle cannot copy tensors of such small floats, which a cut across rows needs.
    let x = Tensor::from_raw_buffer(&[0; 4], DType::F8E8M0, &[2, 2], &Device::Cpu).unwrap();
    let mesh = DeviceMesh::cpu(2).unwrap();
    let error = mesh.shard((iota((2, 2)), x), [P::replicate(), P::shard(1, ALL)]).unwrap_err();
    assert!(matches!(error, Error::Value(ValueError::Shard { index: 1, .. })), "{error:?}");
    assert!(error.to_string().starts_with("input 1 cannot be sharded: "), "{error}");
}

#[test]
fn process_allgather_returns_every_list() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let lists = vec![vec![iota((1, 2)), iota((2, 1))], Vec::new()];
    let of_all = mesh.process_allgather(lists).unwrap();
    assert_eq!([of_all[0].len(), of_all[1].len()], [2, 0]);
    let missing = mesh.process_allgather(vec![Vec::new()]);
    let refused = missing.unwrap_err().to_string();
    assert!(refused.ends_with("got 1 lists for the 2 slots of this process"), "{refused}");
}

#[test]
fn gather_error_names_the_output() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let uneven = mesh.pmap(|replica, x: Tensor| Ok(vec![x; replica.slot()]));
    let error = uneven.call(iota((2, 2))).unwrap_err();
    assert!(matches!(
        error,
        Error::Value(ValueError::OutputCount { slot: 1, tensors: 1, expected: 0 })
    ));
    let ragged = mesh.pmap(|replica, x: Tensor| x.narrow(1, 0, replica.slot() + 1));
    assert!(matches!(
        ragged.call(iota((2, 2))).unwrap_err(),
        Error::Value(ValueError::Gather { index: 0, .. })
    ));
}

#[test]
fn one_spec_may_cover_an_argument() {
    let mesh = DeviceMesh::cpu(2).unwrap();
    let f = mesh.pmap(|_, (w, x): (Vec<Tensor>, Tensor)| x.matmul(&w[0])?.broadcast_add(&w[1]));
    let f = f.in_axes([None, Some(0)]);
    let (w, b, x) = (iota((3, 2)), iota((1, 2)), iota((4, 3)));
    let serial = x.matmul(&w).unwrap().broadcast_add(&b).unwrap();
    assert_eq!(rows(&f.call((vec![w, b], x)).unwrap()), rows(&serial));
}

#[test]
fn values_of_another_mesh_are_rejected() {
    let [mesh, other] = [2, 2].map(|slots| DeviceMesh::cpu(slots).unwrap());
    let elsewhere = other.shard(iota((4, 2)), Some(0)).unwrap();
    let refused = mesh.pmap(|_, x: Tensor| Ok(x)).run(elsewhere);
    assert!(matches!(refused, Err(Error::Value(ValueError::MeshMismatch))));
}

#[test]
fn call_into_needs_tensors_of_the_joined_shape() {
    let f = DeviceMesh::cpu(2).unwrap().pmap(|_, x: Tensor| x.sqr()).in_axes(Some(1));
    let error = f.out_axes(Some(1)).call_into(iota((2, 4)), &iota((2, 6))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "output 0 has size 4 in dimension 1, but the tensor passed for it has shape [2, 6]"
    );
}

#[test]
fn call_into_writes_kept_scalar() {
    let total = DeviceMesh::cpu(2).unwrap().pmap(|ctx, x: Tensor| ctx.psum(&x.sum_all()?, ALL));
    let total = total.out_axes(P::replicate());
    let kept = Tensor::new(7_f32, &Device::Cpu).unwrap();
    total.call_into(iota((2, 2)), &kept).unwrap();
    let sum: f32 = iota((2, 2)).sum_all().unwrap().to_scalar().unwrap();
    assert_eq!(kept.to_scalar::<f32>().unwrap().to_bits(), sum.to_bits());
    // One number in a dimension has another shape than a scalar.
    let row = Tensor::new(&[7_f32], &Device::Cpu).unwrap();
    assert!(matches!(
        total.call_into(iota((2, 2)), &row),
        Err(Error::Value(ValueError::Gather { index: 0, .. }))
    ));
}

#[test]
fn rng_depends_on_seed_step_replica() {
    let draw = |devices: usize, seed| {
        let mesh = DeviceMesh::cpu(devices).unwrap();
        mesh.pmap(|ctx, x: Tensor| ctx.rng().uniform(x.shape())).seed(Seed::new(seed))
    };
    let x = iota((4, 2));
    let first = draw(2, 1);
    let (a, b) = (rows(&first.call(x.clone()).unwrap()), rows(&first.call(x.clone()).unwrap()));
    assert!(a != b && a[..2] != a[2..]);
    assert_eq!(rows(&first.call_at(1, x.clone()).unwrap()), b);
    // An explicit step is not counted.
    assert_ne!(rows(&first.call(x.clone()).unwrap()), b);
    assert_eq!(rows(&draw(4, 1).call(x.clone()).unwrap())[0], a[0]);
    assert_ne!(rows(&draw(2, 2).call(x).unwrap()), a);
    assert_eq!(a[0], [0.616_152_6, 0.514_784_9], "the stream is pinned");
}

/// Returns the index in the full batch of each element of a result, by the offset of its key.
fn indices(ctx: &Replica, x: &Tensor) -> candle_core::Result<Tensor> {
    let mut keys = ctx.batch_keys();
    let first = keys.next_key(x)?;
    let second = keys.next_key(&x.narrow(0, 0, ctx.valid_len().unwrap())?)?;
    assert!(first.seed != second.seed && first.offset == second.offset);
    let offset = first.offset as f32;
    let size = x.elem_count() as f32;
    Tensor::arange(offset, offset + size, x.device())?.reshape(x.shape())
}

#[test]
fn batch_key_offsets_match_rows() {
    for (slots, size) in (1..=3).flat_map(|slots| (1..=7).map(move |size| (slots, size))) {
        let x = iota((size, 3));
        for uneven in [Uneven::Pad, Uneven::Balanced] {
            if uneven == Uneven::Balanced && size < slots {
                continue;
            }
            let f = DeviceMesh::cpu(slots).unwrap().pmap(|ctx, x: Tensor| indices(ctx, &x));
            let found = f.uneven(uneven).call(x.clone()).unwrap();
            assert_eq!(rows(&found), rows(&x), "{slots} slots, {size} rows, {uneven:?}");
        }
        // Cut along one axis after the other, and not along a third.
        let grid = DeviceMesh::builder().axis("a", slots).axis("b", 2).axis("c", 2).cpu().unwrap();
        let f = grid.pmap(|ctx, x: Tensor| indices(ctx, &x)).uneven(Uneven::Pad);
        let twice = || P::shard(0, "a").and(P::shard(0, "b"));
        let found = f.in_axes(twice()).out_axes(twice()).call(x.clone()).unwrap();
        assert_eq!(rows(&found), rows(&x), "{slots} by 2 slots, {size} rows");
    }
}

#[test]
fn batch_keys_share_seeds() {
    let seeds = |slots, step| {
        let f = DeviceMesh::cpu(slots).unwrap().pmap(|ctx, x: Tensor| {
            let mut keys = ctx.batch_keys();
            let first = keys.next_key(&x)?.seed.as_u64();
            let second = keys.next_key(&x)?.seed.as_u64();
            Tensor::new(&[[(first >> 32) as u32, (second >> 32) as u32]], &Device::Cpu)
        });
        let seeds = f.seed(Seed::new(1)).call_at(step, iota((4, 1))).unwrap();
        seeds.to_vec2::<u32>().unwrap()
    };
    let one = seeds(1, 0);
    assert_eq!(one, [[721_600_478, 2_900_953_130]], "the seeds are pinned");
    assert_eq!(seeds(4, 0), vec![one[0].clone(); 4]);
    assert_ne!(seeds(1, 1), one);
}

#[test]
fn batch_key_needs_batch_rows() {
    type Pick = fn(Tensor) -> candle_core::Result<Tensor>;

    let key = |spec: P, pick: fn(Tensor) -> candle_core::Result<Tensor>| {
        let f = DeviceMesh::cpu(2).unwrap().pmap(move |ctx, x: Tensor| {
            Tensor::new(ctx.batch_keys().next_key(&pick(x)?)?.offset as f32, &Device::Cpu)
        });
        f.in_axes(spec).out_axes(P::stack(0, ALL)).call(iota((4, 6)))
    };
    let offsets = key(P::shard(0, ALL), Ok).unwrap();
    assert_eq!(offsets.to_vec1::<f32>().unwrap(), [0.0, 12.0]);
    // A replica with the full batch draws the same numbers as the others.
    let whole = key(P::replicate(), |x| x.flatten_all()).unwrap();
    assert_eq!(whole.to_vec1::<f32>().unwrap(), [0.0, 0.0]);
    let refused: [(P, Pick); 3] = [
        (P::shard(1, ALL), Ok),
        (P::shard(0, ALL), |x| x.flatten_all()),
        (P::shard(0, ALL), |x| x.sum_all()),
    ];
    for (spec, pick) in refused {
        assert!(matches!(key(spec, pick), Err(Error::Replica(ReplicaError::Failed { .. }))));
    }
}

#[test]
fn last_clone_joins_the_threads() {
    let mesh = DeviceMesh::cpu(4).unwrap();
    let f = mesh.pmap(|_, x: Tensor| Ok(x));
    drop(mesh);
    assert!(f.call(iota((4, 1))).is_ok());
    let started = std::time::Instant::now();
    // Dropping joins all workers: it would not return if one of them kept running.
    drop(f);
    assert!(started.elapsed() < Duration::from_mins(1));
}

fn arange(len: u8) -> Tensor {
    Tensor::arange(0_f32, f32::from(len), &Device::Cpu).unwrap()
}

fn a_2_b_2() -> DeviceMesh {
    DeviceMesh::builder().axis("a", 2).axis("b", 2).cpu().unwrap()
}

/// Returns a spec that cuts dimension 0 along one axis after the other.
fn twice() -> P {
    P::shard(0, "a").and(P::shard(0, "b"))
}

#[test]
fn uneven_dimension_cannot_be_recut() {
    for (b, mesh) in [1, 2].map(|b| (b, DeviceMesh::builder().axis("a", 2).axis("b", b).cpu())) {
        let identity = mesh.unwrap().pmap(|_, x: Tensor| Ok(x)).in_axes(twice()).out_axes(twice());
        let refused = identity.uneven(Uneven::Balanced).call(arange(5));
        let expected = "dimension 0 of input 0 of shape [5] is cut a second time, but its first cut of size 5 over 2 \
                        devices is uneven; cut it along all axes at once, as `P::shard(0, [\"a\", \"b\"])`";
        assert_eq!(faults(refused), [expected], "b {b}");
    }
    let refused = a_2_b_2().pmap(|_, x: Tensor| Ok(x)).in_axes(twice()).call(arange(5));
    assert!(faults(refused)[0].contains("size 5, which does not split evenly over 2 devices"));
}
