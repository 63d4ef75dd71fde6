//! One program, many devices: cut the arguments, run everywhere at once, put the results together.

mod call;
mod exchange;
pub(crate) mod sharded;

use std::{
    fmt,
    marker::PhantomData,
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use core_types::Seed;

use crate::{
    axes::ALL,
    error::Result,
    mesh::{DeviceMesh, workers::Workers},
    pmap::{
        call::{Call, Part},
        sharded::Sharded,
    },
    replica::Replica,
    spec::{
        P, Specs,
        cut::{Cut, Uneven},
        tree::TensorTree,
    },
};

/// A function that runs on every device of a mesh; made by [`DeviceMesh::pmap`] and
/// [`DeviceMesh::pmap_scoped`].
///
/// # Determinism
///
/// Results are put together in the order of the mesh, whichever device finishes first.
///
/// # References
///
/// JAX's `pmap` and `shard_map`. As in `shard_map`, a mapped dimension is cut into shards and keeps
/// its place, where `pmap` would remove it: a batch of 8 on 2 devices is two batches of 4.
pub struct PMap<I, O, F> {
    mesh: DeviceMesh,
    f: Arc<F>,
    /// How its replicas are waited for: by [`Workers::run`] if `F` borrows nothing, or else by
    /// [`Workers::run_scoped`].
    run_call: RunCall<I, O, F>,
    in_axes: Specs,
    out_axes: Specs,
    uneven: Uneven,
    /// Whether replicated results are not compared.
    trust: bool,
    seed: Seed,
    calls: AtomicU64,
    signature: PhantomData<fn(I) -> O>,
}

type RunCall<I, O, F> = fn(&Workers, &Arc<Call<I, O, F>>, &'static Location<'static>) -> Result<()>;

impl DeviceMesh {
    /// Returns a function that runs `f` on every device at once, each on its shard of the
    /// arguments.
    ///
    /// By default the first tensor among the arguments is cut in dimension 0 and all others are
    /// replicated, and results are concatenated in dimension 0; see [`PMap::in_axes`] and
    /// [`PMap::out_axes`]. What `f` is given besides, a [`Replica`], tells it where it runs and
    /// lets it talk to the others.
    ///
    /// `f` owns what it captures, so that a call may return at its [deadline] although a replica
    /// does not; [`pmap_scoped`](Self::pmap_scoped) is for functions that borrow.
    ///
    /// [deadline]: crate::DeviceMeshBuilder::deadline
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let x = Tensor::arange(0_f32, 8., &Device::Cpu)?;
    ///
    /// let square = mesh.pmap(|_, x: Tensor| x.sqr());
    /// assert_eq!(square.call(x.clone())?.to_vec1::<f32>()?, [0., 1., 4., 9., 16., 25., 36., 49.]);
    ///
    /// let total = mesh.pmap(|_, x: Tensor| x.sum_all()).out_axes(P::sum(ALL));
    /// assert_eq!(total.call(x)?.to_scalar::<f32>()?, 28.);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(alias = "shard_map")]
    pub fn pmap<I, O, F>(&self, f: F) -> PMap<I, O, F>
    where
        I: TensorTree,
        O: TensorTree,
        F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync + 'static,
    {
        PMap::new(self.clone(), f, Workers::run::<Call<I, O, F>>)
    }

    /// [`pmap`](Self::pmap) of a function that may borrow what lies around it, as the closures of
    /// [`std::thread::scope`] may.
    ///
    /// A call waits for every replica that has begun, since each may use what is borrowed until it
    /// returns. On a mesh with a [deadline](crate::DeviceMeshBuilder::deadline) a replica that does
    /// not return in time therefore ends the **process**, with exit code 1 and the error on
    /// standard error, where a call of `pmap` would return the error. Without a deadline the call
    /// waits for it for ever.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::DeviceMesh;
    /// use std::sync::Mutex;
    ///
    /// let names = Mutex::new(Vec::new()); // neither cloned nor counted
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let double = mesh.pmap_scoped(|ctx, x: Tensor| {
    ///     names.lock().unwrap().push(format!("replica {}", ctx.slot()));
    ///     x * 2.
    /// });
    /// let doubled = double.call(Tensor::new(&[1_f32, 2.], &Device::Cpu)?)?;
    /// assert_eq!(doubled.to_vec1::<f32>()?, [2., 4.]);
    /// assert_eq!(names.lock().unwrap().len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pmap_scoped<I, O, F>(&self, f: F) -> PMap<I, O, F>
    where
        I: TensorTree,
        O: TensorTree,
        F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync,
    {
        PMap::new(self.clone(), f, Workers::run_scoped::<Call<I, O, F>>)
    }
}

impl<I, O, F> PMap<I, O, F>
where
    I: TensorTree,
    O: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync,
{
    fn new(mesh: DeviceMesh, f: F, run_call: RunCall<I, O, F>) -> Self {
        Self {
            mesh,
            f: Arc::new(f),
            run_call,
            in_axes: Specs::first_and_rest(P::shard(0, ALL), P::replicate()),
            out_axes: P::shard(0, ALL).into(),
            uneven: Uneven::default(),
            trust: false,
            seed: Seed::new(0),
            calls: AtomicU64::new(0),
            signature: PhantomData,
        }
    }

    /// Sets what each device gets of the arguments: a [`P`] for each tensor, for each argument, or
    /// one for all.
    ///
    /// By default the first tensor is cut in dimension 0 over all devices and the others are
    /// replicated.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
    /// let w = Tensor::eye(4, DType::F32, &Device::Cpu)?;
    ///
    /// // Columns of `w` on different devices: the columns of the product come back side by side.
    /// let matmul = mesh
    ///     .pmap(|_, (x, w): (Tensor, Tensor)| x.matmul(&w))
    ///     .in_axes([P::replicate(), P::shard(-1, ALL)])
    ///     .out_axes(P::shard(-1, ALL));
    /// assert_eq!(matmul.call((x.clone(), w))?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn in_axes(self, specs: impl Into<Specs>) -> Self {
        Self { in_axes: specs.into(), ..self }
    }

    /// Sets what becomes of the results; by default they are concatenated in dimension 0 over all
    /// devices.
    #[must_use]
    pub fn out_axes(self, specs: impl Into<Specs>) -> Self {
        Self { out_axes: specs.into(), ..self }
    }

    /// Sets what happens to a dimension that the devices do not divide; by default the call is
    /// refused.
    ///
    /// # Examples
    ///
    /// A batch of 5 on 2 devices: weighted by [`Replica::weight`], the mean is that of the whole
    /// batch.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P, Uneven};
    ///
    /// let mean = DeviceMesh::cpu(2)?
    ///     .pmap(|ctx, x: Tensor| x.mean_all()? * ctx.weight())
    ///     .out_axes(P::mean(ALL))
    ///     .uneven(Uneven::Balanced);
    /// let x = Tensor::new(&[1_f32, 2., 3., 4., 5.], &Device::Cpu)?;
    /// assert_eq!(mean.call(x)?.to_scalar::<f32>()?, 3.);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { uneven, ..self }
    }

    /// Takes results that are said to be replicated from the first device unseen.
    ///
    /// By default they are compared to the bit with those of the other devices, since the first of
    /// several different results would be as good as wrong. That costs the reading of all of them,
    /// and on GPUs their way to the processor: nothing for a loss, much for the parameters of a
    /// model.
    ///
    /// Processes compare a fingerprint of 64 bits of each result, in one collective of some bytes
    /// at the end of the call; where results are joined as well, these travel in the same one. All
    /// processes must trust alike: one that does, of results that are all replicated, does not come
    /// to that collective, and the others wait for it.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{DeviceMesh, Error, P, ValueError};
    ///
    /// let slots = |mesh: &DeviceMesh| {
    ///     let slot = mesh.pmap(|ctx, ()| Tensor::new(ctx.slot() as u32, &Device::Cpu));
    ///     slot.out_axes(P::replicate())
    /// };
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let differ = slots(&mesh).call(()).unwrap_err();
    /// assert!(matches!(differ, Error::Value(ValueError::NotReplicated { slot: 1, first: 0, .. })));
    /// assert_eq!(slots(&mesh).trust_replicated().call(())?.to_scalar::<u32>()?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn trust_replicated(self) -> Self {
        Self { trust: true, ..self }
    }

    /// Sets the seed of [`Replica::rng`]; 0 by default.
    #[must_use]
    pub fn seed(self, seed: Seed) -> Self {
        Self { seed, ..self }
    }

    /// Runs the function on every device and returns the results on the first device of the mesh.
    ///
    /// Shards are views of the argument where they lie on the same device and dimension 0 is cut,
    /// and a replicated argument is the caller's own tensor: what the function writes into it in
    /// place, all see.
    ///
    /// Arguments, and results that lie elsewhere, go to their device through the processor's
    /// memory; what any device of the mesh has begun is done before the function runs, so that
    /// tensors it has captured are complete. They must lie on [`Replica::device`], or be moved
    /// there inside.
    ///
    /// Nobody may [`set`](candle_core::Var::set) a variable while a replica computes with it:
    /// candle would wait for ever if the variable meets itself, as in `v * v`, which locks it
    /// twice.
    ///
    /// Gradients do not cross a call: arguments come without the graph they were computed by, and
    /// results go without theirs, which would hold the part of one replica only. Call `backward`
    /// inside the function and return the gradients, of variables that it captures or makes.
    ///
    /// A call inside a replica is refused, as [`ReplicaError::Nested`]. That is known of the mesh's
    /// own threads only: on a thread that a replica has started itself, a call of the same mesh
    /// waits for ever for the replica that waits for that thread. A deadline ends it only once
    /// another replica has returned or waits in a collective.
    ///
    /// # Errors
    ///
    /// Before a replica starts: [`Error::Specs`] with everything that is wrong with the arguments,
    /// and [`ReplicaError::Nested`]. From inside: [`ReplicaError::Failed`],
    /// [`ReplicaError::Panicked`] and those of [`CollectiveError`]; the mesh can be used again at
    /// once. Over several processes [`ProcessError::OtherThread`] for a second calling thread. If a
    /// replica has not returned by the mesh's [deadline], the call returns without it, and those
    /// that are queued behind it or follow are refused with [`ReplicaError::Stuck`] until it does.
    /// Afterwards: [`Error::Specs`], [`ValueError::OutputCount`], [`ValueError::NotReplicated`],
    /// [`ValueError::Gather`] and, over several processes, [`ValueError::OutAxes`],
    /// [`ProcessError::Exchange`] and [`ProcessError::Peer`].
    ///
    /// [deadline]: crate::DeviceMeshBuilder::deadline
    /// [`Error::Specs`]: crate::Error::Specs
    /// [`ProcessError::Exchange`]: crate::ProcessError::Exchange
    /// [`ProcessError::OtherThread`]: crate::ProcessError::OtherThread
    /// [`ProcessError::Peer`]: crate::ProcessError::Peer
    /// [`ReplicaError::Failed`]: crate::ReplicaError::Failed
    /// [`ReplicaError::Nested`]: crate::ReplicaError::Nested
    /// [`ReplicaError::Panicked`]: crate::ReplicaError::Panicked
    /// [`ReplicaError::Stuck`]: crate::ReplicaError::Stuck
    /// [`CollectiveError`]: crate::CollectiveError
    /// [`ValueError::OutputCount`]: crate::ValueError::OutputCount
    /// [`ValueError::NotReplicated`]: crate::ValueError::NotReplicated
    /// [`ValueError::OutAxes`]: crate::ValueError::OutAxes
    /// [`ValueError::Gather`]: crate::ValueError::Gather
    #[track_caller]
    pub fn call(&self, arguments: I) -> Result<O> {
        self.call_sharded(arguments)?.joined(&self.out_axes, self.trust)
    }

    /// [`call`](Self::call) as the given step, on which [`Replica::rng`] depends; without it, calls
    /// are counted from 0, those as a given step apart.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are given away, as to any function of tensors"
    )]
    #[track_caller]
    pub fn call_at(&self, step: u64, arguments: I) -> Result<O> {
        Workers::refuse_nesting()?;
        let (shards, cut) = self.shard(&arguments)?;
        self.run_on(step, shards, cut, Location::caller())?.joined(&self.out_axes, self.trust)
    }

    /// [`call`](Self::call), with results written into the tensors of `kept` instead of new ones.
    ///
    /// They must be contiguous and of the results' shapes, on the first device of the mesh. New
    /// tensors of many megabytes cost more in fresh memory than in copying.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call); what was written to `kept` by then is undefined.
    #[track_caller]
    pub fn call_into(&self, arguments: I, kept: &O) -> Result<()> {
        self.call_sharded(arguments)?.joined_into(&self.out_axes, kept, self.trust)
    }

    /// Runs the function on every device and leaves the results where they are.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call) that precede gathering.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are given away, as to any function of tensors"
    )]
    #[track_caller]
    pub fn call_sharded(&self, arguments: I) -> Result<Sharded<O>> {
        Workers::refuse_nesting()?;
        let (shards, cut) = self.shard(&arguments)?;
        self.run_on(self.next_step(), shards, cut, Location::caller())
    }

    /// Runs the function on what already lies on the devices.
    ///
    /// # Errors
    ///
    /// [`ValueError::OtherMesh`](crate::ValueError::OtherMesh) if it lies on those of another mesh,
    /// and those of [`call_sharded`](Self::call_sharded).
    #[track_caller]
    pub fn run(&self, arguments: Sharded<I>) -> Result<Sharded<O>> {
        Workers::refuse_nesting()?;
        let (shards, cut) = arguments.into_shards(&self.mesh)?;
        self.run_on(self.next_step(), shards, cut, Location::caller())
    }

    fn shard(&self, arguments: &I) -> Result<(Vec<I>, Option<Arc<Cut>>)> {
        sharded::shard(&self.mesh, arguments, &self.in_axes, self.uneven)
    }

    /// The number of a call that was not told its step.
    fn next_step(&self) -> u64 {
        // Only the number counts: nothing else is read or written under it.
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn run_on(
        &self,
        step: u64,
        shards: Vec<I>,
        cut: Option<Arc<Cut>>,
        site: &'static Location<'static>,
    ) -> Result<Sharded<O>> {
        self.mesh.refuse_other_thread()?;
        self.mesh.synchronize_all()?;
        let engines = self.mesh.backend().begin();
        let parts = shards.into_iter().zip(engines).zip(self.mesh.devices());
        let call = Arc::new(Call {
            f: Arc::clone(&self.f),
            topology: self.mesh.topology_arc(),
            first_slot: self.mesh.local_slots().start,
            cut: cut.clone(),
            seed: self.seed.derive(step),
            site,
            parts: parts
                .map(|((shard, engine), device)| Part::new(device.clone(), engine, shard))
                .collect(),
        });
        (self.run_call)(self.mesh.workers(), &call, site)?;
        Ok(Sharded::new(self.mesh.clone(), call.results()?, cut))
    }
}

impl<I, O, F> fmt::Debug for PMap<I, O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mesh, in_axes, out_axes, uneven, trust, seed, .. } = self;
        f.debug_struct("PMap")
            .field("mesh", mesh)
            .field("in_axes", in_axes)
            .field("out_axes", out_axes)
            .field("uneven", uneven)
            .field("trust", trust)
            .field("seed", seed)
            .finish_non_exhaustive()
    }
}
