//! The conformance tests of multi-process engines: they equal the engine of threads to the bit, or
//! end with an error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

use std::{process::Command, slice, thread, time::Duration};

use candle_core::{DType, Device, Result, Tensor, Var};
use core_types::Seed;
use pmap_mesh::{
    ALL, DeviceMesh, Error, MeshAxes, P, Replica, Specs, TensorTree, Uneven, ValueError,
    support::{Run, RunLayout},
};
use process_tests::{Engine, assert_same, leaves, lists, mesh, nothing, threads};

/// The deadline in the case of that name.
const DEADLINE: Duration = Duration::from_millis(500);

/// The number of random orders of started collectives on every mesh.
const ORDERS: u64 = 24;

/// The deadline for waits that must end early: less than the time limit of a case.
const LATE: Duration = Duration::from_mins(1);

/// Runs a case in one of `ranks` processes.
pub(crate) fn run(engine: &impl Engine, case: &str, ranks: usize) {
    match case {
        "collectives" => {
            // An engine may stop with its last mesh, and not start again.
            let _row = mesh(engine, &[], None);
            for axes in grids(ranks) {
                collectives(engine, &axes);
            }
        }
        "calls" => calls(engine, ranks),
        "failure" => drop(barrier_of_rank_0(engine, None, || candle_core::bail!("no more data"))),
        "panic" => drop(barrier_of_rank_0(engine, None, || panic!("this one breaks"))),
        "killed" => drop(barrier_of_rank_0(engine, None, || {
            drop(Command::new("kill").args(["-9", &std::process::id().to_string()]).status());
            Ok(())
        })),
        "deadline" => drop(barrier_of_rank_0(engine, Some(DEADLINE), || {
            loop {
                thread::park();
            }
        })),
        "crosswise" => {
            // Slots 0 and 3 wait along one axis, 1 and 2 along the other.
            let mesh = mesh(engine, &[("a", 2), ("b", 2)], Some(DEADLINE));
            let run = mesh.pmap(|ctx, _: Tensor| match ctx.slot() {
                0 | 3 => ctx.barrier("a"),
                _ => ctx.barrier("b"),
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "deserted" => {
            let run = mesh(engine, &[], None);
            let run =
                run.pmap(|ctx, x: Tensor| if ctx.slot() == 1 { Ok(x) } else { ctx.psum(&x, ALL) });
            drop(run.in_axes(None).call(nothing()));
        }
        "mismatch" => {
            let mesh = mesh(engine, &[("a", ranks)], None);
            let run = mesh.pmap(|ctx, _: Tensor| match ctx.slot() {
                1 => ctx.pmax(&Tensor::ones(70_000, DType::F32, ctx.device())?, ALL),
                _ => ctx.psum(&Tensor::ones(3, DType::F32, ctx.device())?, ALL),
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "replicated" => replicated(engine, ranks),
        "trees" => trees(engine, ranks),
        "runs" => runs_of_any_number(engine),
        "underway" => grids(ranks).iter().for_each(|axes| underway(engine, axes)),
        "too many" => {
            let run = mesh(engine, &[], Some(LATE)).pmap(|ctx, _: Tensor| {
                let x = nothing().to_device(ctx.device())?;
                let started = (0..10_000)
                    .map(|_| lists::start_sum(ctx, &x, ALL))
                    .collect::<Result<Vec<_>>>()?;
                started.into_iter().try_for_each(|sum| sum.wait().map(drop))
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "started others" => {
            let run = mesh(engine, &[], Some(LATE)).pmap(|ctx, _: Tensor| {
                let x = Tensor::ones(3 + ctx.slot(), DType::F32, ctx.device())?;
                let first = lists::start_sum(ctx, &x, ALL)?;
                // The others observe it while they wait for another collective.
                lists::start_sum(ctx, &nothing().to_device(ctx.device())?, ALL)?.wait()?;
                first.wait().map(drop)
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "started and called" => {
            // The contents are sent with the header, but not all in the first message.
            let run = mesh(engine, &[], Some(LATE)).pmap(|ctx, _: Tensor| {
                let x = Tensor::ones(2000, DType::F32, ctx.device())?;
                if ctx.slot() == 0 {
                    lists::start_sum(ctx, &x, ALL)?.wait().map(drop)
                } else {
                    ctx.psum(&x, ALL).map(drop)
                }
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "not waited" => {
            let run = mesh(engine, &[], Some(LATE)).pmap(|ctx, _: Tensor| {
                let x = nothing().to_device(ctx.device())?;
                let sum = lists::start_sum(ctx, &x, ALL)?;
                if ctx.slot() == 0 { sum.wait().map(drop) } else { Ok(()) }
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "not started" => {
            let run = mesh(engine, &[], Some(DEADLINE)).pmap(|ctx, _: Tensor| {
                let x = nothing().to_device(ctx.device())?;
                let first = lists::start_sum(ctx, &x, ALL)?;
                if ctx.slot() == 1 {
                    loop {
                        thread::park();
                    }
                }
                lists::start_sum(ctx, &x, ALL)?.wait()?;
                first.wait().map(drop)
            });
            drop(run.in_axes(None).call(nothing()));
        }
        other => panic!("no case is named {other}"),
    }
}

/// Blocks all ranks in a barrier, except rank 1, which runs something else.
fn barrier_of_rank_0(
    engine: &impl Engine,
    deadline: Option<Duration>,
    other: impl Fn() -> Result<()> + Send + Sync + 'static,
) -> pmap_mesh::Result<()> {
    let run = mesh(engine, &[], deadline).pmap(move |ctx, _: Tensor| {
        if ctx.slot() == 1 {
            other()?;
        }
        ctx.barrier(ALL)
    });
    run.in_axes(None).call(nothing())
}

fn grids(ranks: usize) -> Vec<Vec<(&'static str, usize)>> {
    let second = if ranks == 4 { vec![("a", 2), ("b", 2)] } else { vec![("a", 1), ("b", ranks)] };
    vec![vec![("a", ranks)], second]
}

/// Runs `f` over both engines, and compares the results of this rank's slot.
fn compare<O: TensorTree>(
    tested: &DeviceMesh,
    threads: &DeviceMesh,
    f: impl Fn(&Replica) -> Result<O> + Clone + Send + Sync + 'static,
) {
    let run = |mesh: &DeviceMesh| {
        let f = f.clone();
        mesh.pmap(move |ctx, _: Tensor| f(ctx)).in_axes(None).call_sharded(nothing()).unwrap()
    };
    let (results, expected) = (run(tested), run(threads));
    let slot = tested.local_slots().start;
    assert_same(&leaves(&results.shards()[0]), &leaves(&expected.shards()[slot]));
}

/// Returns numbers that differ by replica, with sums that depend on the order.
fn input(ctx: &Replica, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let seed = ctx.slot() as u32 * 7919 + 1;
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u32)
        .map(|n: u32| {
            (n.wrapping_mul(2_654_435_761).wrapping_add(seed) % 2003) as f32 * 0.0625 - 60.0
        })
        .collect();
    let x = Tensor::from_vec(values, shape, ctx.device())?;
    if dtype.is_int() { x.abs()?.to_dtype(dtype) } else { x.to_dtype(dtype) }
}

fn collectives(engine: &impl Engine, axes: &[(&'static str, usize)]) {
    let (tested, threads) = (mesh(engine, axes, None), threads(axes, &Device::Cpu));
    // candle has no kernels for empty tensors on other devices.
    let fewest = usize::from(!engine.device().is_cpu());
    let sets: [MeshAxes; 3] = [ALL, "a".into(), "b".into()];
    for set in sets.into_iter().take(1 + axes.len()) {
        // Engines send bytes; random programs have the other dtypes.
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let axes = set.clone();
            compare(&tested, &threads, move |ctx| sums(ctx, &axes, dtype, fewest));
            let axes = set.clone();
            compare(&tested, &threads, move |ctx| moves(ctx, &axes, dtype, fewest));
            if fewest == 0 {
                let axes = set.clone();
                compare(&tested, &threads, move |ctx| lists::check(ctx, &axes, dtype, 1));
            }
        }
    }
    // Gradients run through the same engine.
    compare(&tested, &threads, |ctx| {
        let w = Var::from_tensor(&input(ctx, &[6, 4], DType::F32)?)?;
        let all = ctx.all_gather(w.as_tensor(), 0, ALL)?;
        let loss = (ctx.psum(&all.sqr()?, ALL)? * (ctx.slot() as f64 + 1.0))?.sum_all()?;
        Ok(loss.backward()?.get(&w).unwrap().clone())
    });
}

/// Sums tensors of sizes around the limits of inline messages and of parts.
fn sums(ctx: &Replica, set: &MeshAxes, dtype: DType, fewest: usize) -> Result<Vec<Tensor>> {
    let mut all = Vec::new();
    let largest = if dtype == DType::F32 { 300_011 } else { 70_001 };
    for count in [fewest, 1, 895, 897, 4096, 4099, largest] {
        let x = input(ctx, &[count], dtype)?;
        all.extend([ctx.psum(&x, set)?, ctx.pmax(&x, set)?, ctx.pmin(&x, set)?]);
        if dtype.is_float() {
            all.push(ctx.pmean(&x, set)?);
        }
    }
    if fewest == 0 {
        all.push(ctx.psum(&empty_past_the_end(ctx, dtype)?, set)?);
    }
    Ok(all)
}

/// Returns an empty view that begins at the end of its storage.
fn empty_past_the_end(ctx: &Replica, dtype: DType) -> Result<Tensor> {
    Tensor::zeros((0, 5), dtype, ctx.device())?.narrow(1, 2, 3)
}

fn moves(ctx: &Replica, set: &MeshAxes, dtype: DType, fewest: usize) -> Result<Vec<Tensor>> {
    let (size, position) = (ctx.axis_size(set)?, ctx.axis_index(set)?);
    let turn: Vec<_> = (0..size).map(|n| (n, (n + 1) % size)).collect();
    let mut all = Vec::new();
    for rows in [fewest, 5, 301] {
        let x = input(ctx, &[rows, size * 3, 8], dtype)?;
        // A different number of rows on each slot, once contiguous and once as a strided view.
        let uneven = input(ctx, &[fewest + rows * 10 * position, 8], dtype)?;
        let view =
            input(ctx, &[8, rows + position + 2], dtype)?.t()?.narrow(0, 1, rows + position)?;
        all.extend([
            ctx.all_gather(&uneven, 0, set)?,
            ctx.all_gather(&view, 0, set)?,
            ctx.all_gather(&x, 1, set)?,
        ]);
        all.extend([
            ctx.all_to_all(&x, 1, 0, set)?,
            ctx.all_to_all(&x, 1, 2, set)?,
            ctx.psum_scatter(&x, 1, set)?,
        ]);
        all.extend([ctx.ppermute(&x, &turn, set)?, ctx.ppermute(&x, &turn[1..], set)?]);
        for root in 0..size {
            all.push(ctx.broadcast(&x, root, set)?);
        }
        ctx.barrier(set)?;
    }
    if fewest == 0 {
        let x = empty_past_the_end(ctx, dtype)?;
        all.extend([ctx.all_gather(&x, 1, set)?, ctx.broadcast(&x, 0, set)?]);
        all.extend([ctx.ppermute(&x, &turn, set)?, ctx.all_to_all(&x, 0, 1, set)?]);
    }
    Ok(all)
}

/// Compares reductions of a tree, of several dtypes and sizes, and of an empty tree.
fn trees(engine: &impl Engine, ranks: usize) {
    let axes = [("a", ranks)];
    let (tested, threads) = (mesh(engine, &axes, None), threads(&axes, &engine.device()));
    compare(&tested, &threads, |ctx| {
        let tensor = |n: usize, dtype| input(ctx, &[n, n], dtype);
        let list = vec![tensor(3, DType::F32)?, tensor(0, DType::F32)?, tensor(90, DType::BF16)?];
        let tree = (list, Some(tensor(2, DType::F64)?));
        let reduced = [
            ctx.psum(&tree, ALL)?,
            ctx.pmean(&tree, ALL)?,
            ctx.pmax(&tree, ALL)?,
            ctx.pmin(&tree, ALL)?,
        ];
        ctx.psum(&(), ALL)?;
        Ok(reduced.iter().flat_map(leaves).collect::<Vec<_>>())
    });
}

/// Gathers more runs than there may be messages at a time.
fn runs_of_any_number(engine: &impl Engine) {
    const LEN: usize = 20_000;
    let run = mesh(engine, &[], None).pmap(|ctx, _: Tensor| {
        // The last rank has half as many as the others, and the others' runs are not alike.
        let owner = |item: usize| if item % 5 == 4 { ctx.count() - 1 } else { item % 2 };
        let layout = RunLayout::new(
            "items",
            [(LEN, DType::U32)],
            (0..ctx.count()).map(|rank| {
                (0..LEN)
                    .filter(|&item| owner(item) == rank)
                    .map(|item| Run { tensor: 0, items: item..item + 1 })
                    .collect()
            }),
        )
        .unwrap();
        let whole = Tensor::arange(0, LEN as u32, ctx.device())?;
        let own = lists::owned_runs(&layout, ctx.slot(), slice::from_ref(&whole))?;
        let gathered = ctx.gather_runs(own, &layout, ALL)?;
        assert_same(&[gathered[0].as_detached_tensor()], &[whole]);
        Ok(())
    });
    run.in_axes(None).call(nothing()).unwrap();
}

fn underway(engine: &impl Engine, axes: &[(&'static str, usize)]) {
    let (tested, threads) = (mesh(engine, axes, None), threads(axes, &Device::Cpu));
    for seed in 0..ORDERS {
        let axes = axes[seed as usize % axes.len()].0;
        compare(&tested, &threads, move |ctx| in_any_order(ctx, axes, seed));
    }
}

/// Starts collectives of all kinds, some of them large, mixed with called ones and computation, and
/// waits for them in an order that differs by replica. Returns all results in the order of the
/// calls.
fn in_any_order(ctx: &Replica, axes: &'static str, seed: u64) -> Result<Vec<Tensor>> {
    type Waiting<'a> = (usize, Box<dyn FnOnce() -> Result<Vec<Tensor>> + 'a>);
    let draw = |n: u64, limit: u64| Seed::new(seed).derive(n).as_u64() % limit;
    // Each replica draws a different order.
    let own_draw = |n: u64, limit: usize| {
        (Seed::new(seed).derive(1 + ctx.slot() as u64).derive(n).as_u64() % limit as u64) as usize
    };
    let tensors = [
        (vec![3, 5], DType::F32),
        (vec![100_003], DType::F32),
        (vec![1], DType::U32),
        (vec![70, 300], DType::BF16),
    ];
    let layout = lists::layout(&tensors, ctx.axis_size(axes)?, seed);
    let mut results: Vec<Vec<Tensor>> = Vec::new();
    let mut waiting: Vec<Waiting<'_>> = Vec::new();
    for n in 0..12 {
        let list = tensors.iter().map(|(shape, dtype)| input(ctx, shape, *dtype));
        // The device computes the argument, and is not done when the collective starts.
        let list = list.map(|x| x?.affine(1.0 + n as f64, 0.0)).collect::<Result<Vec<_>>>()?;
        let call: Box<dyn FnOnce() -> Result<Vec<Tensor>>> = match draw(n, 6) {
            0 => {
                let own = lists::owned_runs(&layout, ctx.axis_index(axes)?, &list)?;
                let pending = ctx.start_gather_runs(own, &layout, axes)?;
                Box::new(|| Ok(pending.wait()?.iter().map(Var::as_detached_tensor).collect()))
            }
            1 => {
                let pending = ctx.start_reduce_runs(list, &layout, axes)?;
                Box::new(|| pending.wait())
            }
            2 | 3 => {
                let pending = lists::start_sum(ctx, &list[draw(n + 100, 4) as usize], axes)?;
                Box::new(|| pending.wait())
            }
            4 => {
                let sum = ctx.psum(&list[draw(n + 100, 4) as usize], axes)?;
                Box::new(|| Ok(vec![sum]))
            }
            _ => {
                let all = ctx.all_gather(&list[1], 0, axes)?;
                Box::new(move || Ok(vec![all.affine(0.5, 1.0)?]))
            }
        };
        waiting.push((results.len(), call));
        results.push(Vec::new());
        if own_draw(n + 200, 2) == 0 {
            let (place, call) = waiting.swap_remove(own_draw(n + 300, waiting.len()));
            results[place] = call()?;
        }
    }
    while !waiting.is_empty() {
        let n_left = waiting.len();
        let (place, call) = waiting.swap_remove(own_draw(400 + n_left as u64, n_left));
        results[place] = call()?;
    }
    Ok(results.into_iter().flatten().collect())
}

/// Runs calls from arguments to results.
fn calls(engine: &impl Engine, ranks: usize) {
    let (tested, threads) =
        (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu)
        .unwrap()
        .reshape((ranks * 2, 3))
        .unwrap();
    let call = |mesh: &DeviceMesh, x: &Tensor| {
        let f = mesh.pmap(|ctx, x: Tensor| Ok((x.sqr()?, ctx.psum(&x, ALL)?, x.sum_all()?)));
        let f =
            f.out_axes([P::shard(0, ALL), P::replicate(), P::stack(0, ALL)]).uneven(Uneven::Pad);
        leaves(&f.call(x.clone()).unwrap())
    };
    assert_same(&call(&tested, &x), &call(&threads, &x));
    let uneven = x.narrow(0, 0, ranks * 2 - 1).unwrap();
    assert_same(&call(&tested, &uneven), &call(&threads, &uneven));
}

/// Checks that results declared as replicated are compared, and that all processes report a
/// difference.
fn replicated(engine: &impl Engine, ranks: usize) {
    let of_b = if ranks == 4 { 2 } else { 1 };
    let of_a = ranks / of_b;
    let mesh = mesh(engine, &[("a", of_a), ("b", of_b)], None);
    // The results of the last slot differ from all others.
    let gathered = |specs: Specs, trust: bool, of_last: Vec<Tensor>, of_others: Vec<Tensor>| {
        let f = mesh.pmap(move |ctx, _: Tensor| {
            let results = if ctx.slot() + 1 == ctx.count() { &of_last } else { &of_others };
            results.iter().map(|x| x.to_device(ctx.device())).collect::<Result<Vec<_>>>()
        });
        let f = f.in_axes(None).out_axes(specs);
        if trust { f.trust_replicated().call(nothing()) } else { f.call(nothing()) }
    };
    let full = |value: f32| Tensor::full(value, 1000, &Device::Cpu).unwrap();
    let (zeros, ones) = (full(0.), full(1.));
    let last = ranks - 1;
    let replicated = || Specs::from(P::replicate());
    let all_but_one =
        Tensor::cat(&[&full(0.).narrow(0, 0, 999).unwrap(), &ones.narrow(0, 0, 1).unwrap()], 0);
    let others = [full(-0.), all_but_one.unwrap(), zeros.reshape((10, 100)).unwrap()];
    let others = others.into_iter().chain([Tensor::zeros(1000, DType::U32, &Device::Cpu).unwrap()]);
    for other in others {
        let of_last = vec![ones.clone(), other.clone()];
        let differ = gathered(replicated(), false, of_last, vec![ones.clone(), zeros.clone()]);
        assert!(
            matches!(
                differ,
                Err(Error::Value(ValueError::NotReplicated { index: 1, slot, first: 0 })) if slot == last
            ),
            "{other}: {differ:?}"
        );
    }
    let same = gathered(replicated(), false, vec![ones.clone()], vec![ones.clone()]).unwrap();
    assert_same(&same, slice::from_ref(&ones));
    let own = if mesh.local_slots().contains(&last) { &ones } else { &zeros };
    let trusted = gathered(replicated(), true, vec![ones.clone()], vec![zeros.clone()]).unwrap();
    assert_same(&trusted, slice::from_ref(own));

    // Replicated along one axis, joined along the other.
    let along_b = || Specs::from([P::replicate(), P::shard(0, "a")]);
    let joined = |of_last: &Tensor| {
        let mut parts = vec![zeros.clone(); of_a - 1];
        parts.push(of_last.clone());
        [ones.clone(), Tensor::cat(&parts, 0).unwrap()]
    };
    let of_others = vec![ones.clone(), zeros.clone()];
    let differ = gathered(along_b(), false, vec![ones.clone(); 2], of_others.clone());
    if of_b == 1 {
        assert_same(&differ.unwrap(), &joined(&ones));
    } else {
        assert!(
            matches!(
                differ,
                Err(Error::Value(ValueError::NotReplicated { index: 1, slot: 3, first: 2 }))
            ),
            "{differ:?}"
        );
        let trusted = gathered(along_b(), true, vec![ones.clone(); 2], of_others).unwrap();
        assert_same(&trusted, &joined(&zeros));
    }

    let fewer = gathered(replicated(), false, Vec::new(), vec![ones.clone()]);
    assert!(
        matches!(
            fewer,
            Err(Error::Value(ValueError::OutputCount { slot, tensors: 0, expected: 1 })) if slot == last
        ),
        "{fewer:?}"
    );
    let fewer = gathered([P::replicate()].into(), false, Vec::new(), vec![ones.clone()]);
    assert!(matches!(fewer, Err(Error::Value(ValueError::OutputCount { .. }))), "{fewer:?}");
    let specs = if mesh.local_slots().contains(&last) { P::shard(0, ALL) } else { P::replicate() };
    let other_axes = gathered(specs.into(), false, vec![ones.clone()], vec![ones.clone()]);
    assert!(
        matches!(other_axes, Err(Error::Value(ValueError::OutAxes { slot })) if slot == last),
        "{other_axes:?}"
    );
    // The mesh can be used again.
    let same = gathered(replicated(), false, vec![ones.clone()], vec![ones.clone()]).unwrap();
    assert_same(&same, &[ones]);
}
