//! What every engine of several processes must do: what the engine of threads does, to the bit, or end.
//!
//! The program of a test runs this in each of its processes, which find a folder for what they write as the second of
//! their arguments.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small")]

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use core_types::WorldSize;
use fsdp_plan::strategy::{Full, LayerWise, Layout, ShardingStrategy};
use pmap_mesh::{
    ALL, AdamW, Checkpoint, Checkpoints, DataParallel, DeviceMesh, DeviceMeshBuilder, MeshAxes, P, Replica,
    ShardedVars, TensorTree, Uneven, parameter_infos, value_and_grad,
};

/// How long a replica waits in the case of that name.
const DEADLINE: Duration = Duration::from_millis(500);

/// How an engine makes its mesh of a builder with axes.
pub(crate) trait Engine {
    /// Over the processes.
    fn open(&self, builder: DeviceMeshBuilder) -> DeviceMesh;

    /// The device of this process, on which threads compute the same.
    fn device(&self) -> Device;
}

/// Runs a case, as one of so many processes.
pub(crate) fn run(engine: &impl Engine, case: &str, ranks: usize) {
    match case {
        "collectives" => {
            // An engine may end with its last mesh, and not begin again.
            let _row = mesh(engine, &[], None);
            for axes in grids(ranks) {
                collectives(engine, &axes);
            }
        }
        "training" => training(engine, ranks),
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
            let run = mesh.pmap(|ctx, _: Tensor| match ctx.index() {
                0 | 3 => ctx.barrier("a"),
                _ => ctx.barrier("b"),
            });
            drop(run.in_axes(None).call(nothing()));
        }
        "checkpoints" => checkpoints(engine, ranks),
        "sharded" => sharded(engine, ranks),
        "deserted" => {
            let run = mesh(engine, &[], None);
            let run = run.pmap(|ctx, x: Tensor| if ctx.index() == 1 { Ok(x) } else { ctx.psum(&x, ALL) });
            drop(run.in_axes(None).call(nothing()));
        }
        "mismatch" => {
            let mesh = mesh(engine, &[("a", ranks)], None);
            let run = mesh.pmap(|ctx, _: Tensor| match ctx.index() {
                1 => ctx.pmax(&Tensor::ones(70_000, DType::F32, ctx.device())?, ALL),
                _ => ctx.psum(&Tensor::ones(3, DType::F32, ctx.device())?, ALL),
            });
            drop(run.in_axes(None).call(nothing()));
        }
        other => panic!("no case is named {other}"),
    }
}

/// All wait for rank 1, which does something else.
fn barrier_of_rank_0(
    engine: &impl Engine,
    deadline: Option<Duration>,
    other: impl Fn() -> Result<()> + Send + Sync + 'static,
) -> pmap_mesh::Result<()> {
    let run = mesh(engine, &[], deadline).pmap(move |ctx, _: Tensor| {
        if ctx.index() == 1 {
            other()?;
        }
        ctx.barrier(ALL)
    });
    run.in_axes(None).call(nothing())
}

fn grids(ranks: usize) -> Vec<Vec<(&'static str, usize)>> {
    let mut grids = vec![vec![("a", ranks)], vec![("a", 1), ("b", ranks)]];
    if ranks == 4 {
        grids.push(vec![("a", 2), ("b", 2)]);
    }
    grids
}

fn mesh(engine: &impl Engine, axes: &[(&str, usize)], deadline: Option<Duration>) -> DeviceMesh {
    engine.open(deadline.into_iter().fold(builder(axes), DeviceMeshBuilder::deadline))
}

/// The same mesh over threads, of processors or of one device several times.
fn threads(axes: &[(&str, usize)], device: &Device) -> DeviceMesh {
    let slots = axes.iter().map(|(_, size)| size).product();
    builder(axes).pin(false).devices(vec![device.clone(); slots]).unwrap()
}

fn builder(axes: &[(&str, usize)]) -> DeviceMeshBuilder {
    axes.iter().fold(DeviceMesh::builder(), |builder, (name, size)| builder.axis(name, *size))
}

fn nothing() -> Tensor {
    Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()
}

/// Runs `f` over both engines, and compares what this rank's slot gets.
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

fn leaves(tree: &impl TensorTree) -> Vec<Tensor> {
    let mut leaves = Vec::new();
    let visited: std::result::Result<_, ()> = tree.try_map(&mut |leaf| {
        leaves.push(leaf.clone());
        Ok(leaf.clone())
    });
    drop(visited.unwrap());
    leaves
}

fn assert_same(results: &[Tensor], expected: &[Tensor]) {
    assert_eq!(results.len(), expected.len());
    for (result, expected) in results.iter().zip(expected) {
        assert_eq!((result.dtype(), result.dims()), (expected.dtype(), expected.dims()));
        assert_eq!(bytes(result), bytes(expected));
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Views of nothing may begin behind the end, where candle panics.
    tensor.force_contiguous().and_then(|tensor| tensor.write_bytes(&mut bytes)).unwrap();
    bytes
}

/// Numbers that differ by replica, and whose sums depend on their order.
fn input(ctx: &Replica, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let seed = ctx.index() as u32 * 7919 + 1;
    let value = |n: u32| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) % 2003) as f32 * 0.0625 - 60.0;
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u32).map(value).collect();
    let x = Tensor::from_vec(values, shape, ctx.device())?;
    if dtype.is_int() { x.abs()?.to_dtype(dtype) } else { x.to_dtype(dtype) }
}

fn collectives(engine: &impl Engine, axes: &[(&'static str, usize)]) {
    let (tested, threads) = (mesh(engine, axes, None), threads(axes, &Device::Cpu));
    // candle's kernels for other devices are not made for empty tensors.
    let fewest = usize::from(!engine.device().is_cpu());
    let sets: [MeshAxes; 3] = [ALL, "a".into(), "b".into()];
    for set in sets.into_iter().take(1 + axes.len()) {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64] {
            let along = set.clone();
            compare(&tested, &threads, move |ctx| sums(ctx, &along, dtype, fewest));
            let along = set.clone();
            compare(&tested, &threads, move |ctx| moves(ctx, &along, dtype, fewest));
        }
    }
    // Gradients run through the same engine.
    compare(&tested, &threads, |ctx| {
        let w = Var::from_tensor(&input(ctx, &[6, 4], DType::F32)?)?;
        let all = ctx.all_gather(w.as_tensor(), 0, ALL)?;
        let loss = (ctx.psum(&all.sqr()?, ALL)? * (ctx.index() as f64 + 1.0))?.sum_all()?;
        Ok(loss.backward()?.get(&w).unwrap().clone())
    });
}

/// Sizes around the limits of messages that are sent at once, and of parts.
fn sums(ctx: &Replica, set: &MeshAxes, dtype: DType, fewest: usize) -> Result<Vec<Tensor>> {
    let mut all = Vec::new();
    for count in [fewest, 1, 3, 895, 897, 4096, 4099, 16_384, 70_001, 300_011] {
        let x = input(ctx, &[count], dtype)?;
        all.extend([ctx.psum(&x, set)?, ctx.pmax(&x, set)?, ctx.pmin(&x, set)?]);
        if dtype.is_float() {
            all.push(ctx.pmean(&x, set)?);
        }
    }
    Ok(all)
}

fn moves(ctx: &Replica, set: &MeshAxes, dtype: DType, fewest: usize) -> Result<Vec<Tensor>> {
    let (size, position) = (ctx.axis_size(set)?, ctx.axis_index(set)?);
    let turn: Vec<_> = (0..size).map(|n| (n, (n + 1) % size)).collect();
    let mut all = Vec::new();
    for rows in [fewest, 1, 5, 301] {
        let x = input(ctx, &[rows, size * 3, 8], dtype)?;
        // Another number of rows on each, once as it is and once as a view that is not contiguous.
        let uneven = input(ctx, &[fewest + rows * 10 * position, 8], dtype)?;
        let view = input(ctx, &[8, rows + position + 2], dtype)?.t()?.narrow(0, 1, rows + position)?;
        all.extend([ctx.all_gather(&uneven, 0, set)?, ctx.all_gather(&view, 0, set)?, ctx.all_gather(&x, 1, set)?]);
        all.extend([ctx.all_to_all(&x, 1, 0, set)?, ctx.all_to_all(&x, 1, 2, set)?, ctx.psum_scatter(&x, 1, set)?]);
        all.extend([ctx.ppermute(&x, &turn, set)?, ctx.ppermute(&x, &turn[1..], set)?]);
        for root in 0..size {
            all.push(ctx.broadcast(&x, root, set)?);
        }
        ctx.barrier(set)?;
    }
    Ok(all)
}

/// Calls, gradients and steps: the whole way from arguments to results.
fn training(engine: &impl Engine, ranks: usize) {
    // Matrix products of a processor are not those of another device.
    let (tested, threads) = (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu).unwrap().reshape((ranks * 2, 3)).unwrap();
    let call = |mesh: &DeviceMesh, x: &Tensor| {
        let f = mesh.pmap(|ctx, x: Tensor| Ok((x.sqr()?, ctx.psum(&x, ALL)?, x.sum_all()?)));
        let f = f.out_axes([P::shard(0, ALL), P::replicate(), P::sum(ALL)]).uneven(Uneven::Pad);
        leaves(&f.call(x.clone()).unwrap())
    };
    assert_same(&call(&tested, &x), &call(&threads, &x));
    let uneven = x.narrow(0, 0, ranks * 2 - 1).unwrap();
    assert_same(&call(&tested, &uneven), &call(&threads, &uneven));

    let gradient = |mesh: &DeviceMesh| {
        let w = Var::ones((3, 5), DType::F32, &mesh.devices()[0]).unwrap();
        let model = w.clone();
        let step = value_and_grad(mesh, vec![w.clone()], move |_, x: Tensor| x.matmul(&model)?.sqr()?.mean_all());
        let (loss, grads) = step.call(x.clone()).unwrap();
        [loss, grads.get(&w).unwrap().clone()]
    };
    assert_same(&gradient(&tested), &gradient(&threads));
    assert_same(&losses(&tested, &x), &losses(&threads, &x));
}

/// What processes write, threads read, and the other way round.
fn checkpoints(engine: &impl Engine, ranks: usize) {
    let (tested, threads) = (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let x = Tensor::arange(0_f32, (ranks * 2 * 3) as f32, &Device::Cpu).unwrap().reshape((ranks * 2, 3)).unwrap();
    let folder = PathBuf::from(env::args().nth(2).unwrap());
    let trained = |mesh: &DeviceMesh, from: Option<&Checkpoint>| {
        let (vars, mut model) = model(mesh);
        if let Some(checkpoint) = from {
            model.load(checkpoint).unwrap();
        }
        train(&mut model, &x, 5);
        (values(&vars), model.state_dict())
    };
    let (expected, state) = trained(&tested, None);
    let checkpoints = Checkpoints::new(folder.join("tested"));
    checkpoints.save(&tested, 5, &state, &"half way").unwrap();
    let checkpoint = checkpoints.latest().unwrap().unwrap();
    assert_eq!((checkpoint.step(), checkpoint.state::<String>().unwrap()), (5, "half way".to_owned()));
    assert_eq!(std::fs::read_dir(checkpoint.path()).unwrap().count(), ranks + 1, "each rank its shard, and the index");
    let own = folder.join(format!("threads-{}", tested.local_slots().start));
    let of_threads = Checkpoints::new(own);
    let (found, state) = trained(&threads, None);
    assert_same(&found, &expected);
    of_threads.save(&threads, 5, &state, &()).unwrap();
    let of_threads = of_threads.latest().unwrap().unwrap();
    let (expected, _) = trained(&tested, Some(&of_threads));
    assert_same(&trained(&threads, Some(&checkpoint)).0, &expected);
}

/// A plan carried out by processes: gathered, trained, written, and cut another way.
fn sharded(engine: &impl Engine, ranks: usize) {
    let (tested, threads) = (mesh(engine, &[], None), threads(&[(DeviceMesh::AXIS, ranks)], &engine.device()));
    let folder = PathBuf::from(env::args().nth(2).unwrap());
    let tensor = |rows, start: f64| {
        let items = Tensor::arange(0_f32, (rows * 3) as f32, &Device::Cpu).unwrap().affine(0.01, start).unwrap();
        items.reshape((rows, 3)).unwrap()
    };
    let tensors = [("a", tensor(7, -0.1)), ("b", tensor(2, 0.2))];
    let infos = parameter_infos(tensors.iter().map(|(name, tensor)| (*name, tensor))).unwrap();
    let world_size = WorldSize::new(ranks as u64).unwrap();
    for layout in [Layout::Dim0, Layout::Flat] {
        let plan = Full::new(layout).plan(&infos, world_size).unwrap();
        let other = LayerWise::default().plan(&infos, world_size).unwrap();
        let run = |mesh: &DeviceMesh, folder: &Path| {
            let vars = ShardedVars::shard(mesh, &plan, tensors.iter().map(|(name, tensor)| (*name, tensor))).unwrap();
            let mut wholes = sharded_steps(mesh, &vars);
            let gather = |vars: &ShardedVars| ["a", "b"].map(|name| vars.gather(name).unwrap());
            wholes.extend(gather(&vars));
            wholes.extend(gather(&vars.resharded(mesh, &other).unwrap()));
            let checkpoints = Checkpoints::new(folder.join(format!("{layout:?}")));
            checkpoints.save(mesh, 1, &vars.state_dict(), &()).unwrap();
            let checkpoint = checkpoints.latest().unwrap().unwrap();
            wholes.extend(gather(&ShardedVars::load(mesh, &other, &checkpoint).unwrap()));
            wholes
        };
        let slot = tested.local_slots().start;
        let over_threads = run(&threads, &folder.join(format!("threads-{slot}")));
        assert_same(&run(&tested, &folder.join("tested")), &over_threads);
    }
}

/// Some steps against the gradient; the losses.
fn sharded_steps(mesh: &DeviceMesh, vars: &ShardedVars) -> Vec<Tensor> {
    let in_step = vars.clone();
    let step = mesh.pmap(move |ctx, x: Tensor| {
        let (a, b) = (in_step.all_gather(ctx, "a")?, in_step.all_gather(ctx, "b")?);
        let loss = (x.matmul(&a)?.sqr()?.mean_all()? + b.sqr()?.sum_all()?)?;
        let grads = loss.backward()?;
        for var in in_step.vars(ctx.index()) {
            if let Some(grad) = grads.get(&var) {
                var.set(&(var.as_tensor() - (grad * 0.01)?)?)?;
            }
        }
        ctx.psum(&loss.detach(), ALL)
    });
    let step = step.out_axes(P::replicate());
    let x = Tensor::arange(0_f32, (mesh.len() * 2 * 7) as f32, &Device::Cpu).unwrap();
    let x = x.affine(0.01, -0.3).unwrap().reshape((mesh.len() * 2, 7)).unwrap();
    (0..3).map(|_| step.call(x.clone()).unwrap()).collect()
}

/// The losses of some steps, and the trained variables.
fn losses(mesh: &DeviceMesh, x: &Tensor) -> Vec<Tensor> {
    let (vars, mut model) = model(mesh);
    let mut all = train(&mut model, x, 10);
    model.check_in_sync().unwrap();
    all.extend(values(&vars));
    all
}

type Model = DataParallel<Vec<Linear>, AdamW>;

fn train(model: &mut Model, x: &Tensor, steps: usize) -> Vec<Tensor> {
    let loss = |_: &Replica, layers: &Vec<Linear>, x: Tensor| {
        layers.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?.sqr()?.mean_all()
    };
    (0..steps).map(|_| model.step((x / 10.0).unwrap(), loss).unwrap()).collect()
}

fn named(vars: &VarMap) -> BTreeMap<String, Var> {
    vars.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

fn values(vars: &VarMap) -> Vec<Tensor> {
    named(vars).values().map(|var| var.as_tensor().copy().unwrap()).collect()
}

/// Two layers that begin as they do everywhere.
fn model(mesh: &DeviceMesh) -> (VarMap, Model) {
    let vars = VarMap::new();
    let layers = |vb: VarBuilder<'_>| -> Result<Vec<Linear>> {
        Ok(vec![linear(3, 40, vb.pp("a"))?, linear(40, 1, vb.pp("b"))?])
    };
    layers(VarBuilder::from_varmap(&vars, DType::F32, &mesh.devices()[0])).unwrap();
    for var in named(&vars).values() {
        let values = Tensor::arange(0_f32, var.elem_count() as f32, var.device()).unwrap();
        var.set(&(values * 0.01).unwrap().reshape(var.shape()).unwrap()).unwrap();
    }
    let adam = |vars| AdamW::new(vars, ParamsAdamW::default());
    let model = DataParallel::new(mesh, &vars, layers, adam).unwrap().clip_norm(1.0);
    (vars, model)
}
