//! Parallel functions: cut the arguments, run on all devices in parallel, join the results.

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
        call::{PmapCall, SlotCall},
        sharded::Sharded,
    },
    replica::Replica,
    spec::{P, Specs, cut::Uneven, tree::TensorTree},
};

/// A function that runs on every device of a mesh, created by [`DeviceMesh::pmap`] and
/// [`DeviceMesh::pmap_scoped`].
///
/// # Determinism
///
/// Results are joined in the order of the mesh, independently of the order in which devices finish.
///
/// # References
///
/// JAX's `pmap` and `shard_map`. As in `shard_map`, a mapped dimension is cut into shards and stays
/// a dimension, where `pmap` would remove it: a batch of 8 on 2 devices becomes two batches of 4.
pub struct PMap<I, O, F> {
    mesh: DeviceMesh,
    f: Arc<F>,
    /// The function that runs the replicas and waits for them: [`Workers::run`] if `F` borrows
    /// nothing, otherwise [`Workers::run_scoped`].
    run_call: RunFunction<I, O, F>,
    in_axes: Specs,
    out_axes: Specs,
    uneven: Uneven,
    /// Whether each process passes its own part of the arguments.
    has_local_arguments: bool,
    /// Whether to skip the comparison of replicated results.
    trust: bool,
    seed: Seed,
    calls: AtomicU64,
    signature: PhantomData<fn(I) -> O>,
}

type RunFunction<I, O, F> =
    fn(&Workers, &Arc<PmapCall<I, O, F>>, &'static Location<'static>) -> Result<()>;

impl DeviceMesh {
    /// Returns a function that runs `f` on every device in parallel, each on its shard of the
    /// arguments.
    ///
    /// By default the first tensor of the arguments is cut in dimension 0 and all others are
    /// replicated, and results are concatenated in dimension 0; see [`PMap::in_axes`] and
    /// [`PMap::out_axes`]. The first argument of `f`, a [`Replica`], holds the slot and device, and
    /// runs collectives with the other replicas.
    ///
    /// `f` owns its captures, so that a call can return at its [deadline] even if a replica has not
    /// returned. For functions that borrow, see [`pmap_scoped`](Self::pmap_scoped).
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
    /// let total = mesh.pmap(|ctx, x: Tensor| ctx.psum(&x.sum_all()?, ALL)).out_axes(P::replicate());
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
        PMap::new(self.clone(), f, Workers::run::<PmapCall<I, O, F>>)
    }

    /// Returns a function like [`pmap`](Self::pmap), but `f` may borrow, like the closures of
    /// [`std::thread::scope`].
    ///
    /// A call waits for every replica that has begun, since a replica may use the borrowed data
    /// until it returns. On a mesh with a [deadline](crate::DeviceMeshBuilder::deadline), a replica
    /// that does not return in time therefore ends the **process**: the error is printed to
    /// standard error, and the exit code is 1. (A call of a `pmap` function would return the
    /// error.) Without a deadline the call waits indefinitely.
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
        PMap::new(self.clone(), f, Workers::run_scoped::<PmapCall<I, O, F>>)
    }
}

impl<I, O, F> PMap<I, O, F>
where
    I: TensorTree,
    O: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync,
{
    fn new(mesh: DeviceMesh, f: F, run_call: RunFunction<I, O, F>) -> Self {
        Self {
            mesh,
            f: Arc::new(f),
            run_call,
            in_axes: Specs::first_and_rest(P::shard(0, ALL), P::replicate()),
            out_axes: P::shard(0, ALL).into(),
            uneven: Uneven::default(),
            has_local_arguments: false,
            trust: false,
            seed: Seed::new(0),
            calls: AtomicU64::new(0),
            signature: PhantomData,
        }
    }

    /// Sets how the arguments are cut: one [`P`] for each tensor, one for each argument, or one for
    /// all tensors.
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
    /// // Each device gets some columns of `w`; the columns of the product are joined.
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

    /// Sets how the results are joined. By default they are concatenated in dimension 0 over all
    /// devices.
    #[must_use]
    pub fn out_axes(self, specs: impl Into<Specs>) -> Self {
        Self { out_axes: specs.into(), ..self }
    }

    /// Sets how to treat a dimension with a size that the devices do not divide. By default the
    /// call fails.
    ///
    /// # Examples
    ///
    /// With a batch of 5 on 2 devices, [`Replica::weight`] makes the mean of the replicas the mean
    /// of the full batch.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P, Uneven};
    ///
    /// let mean = DeviceMesh::cpu(2)?
    ///     .pmap(|ctx, x: Tensor| ctx.pmean(&(x.mean_all()? * ctx.weight())?, ALL))
    ///     .out_axes(P::replicate())
    ///     .uneven(Uneven::Balanced);
    /// let x = Tensor::new(&[1_f32, 2., 3., 4., 5.], &Device::Cpu)?;
    /// assert_eq!(mean.call(x)?.to_scalar::<f32>()?, 3.);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn uneven(self, uneven: Uneven) -> Self {
        Self { uneven, ..self }
    }

    /// Makes each process pass its own part of the arguments, which is cut over the slots of this
    /// process; the whole arguments are the parts of all processes in rank order. By default every
    /// process passes the whole arguments. In a single process this changes nothing.
    ///
    /// Parts may have different numbers of rows, which [`Replica::weight`] and
    /// [`Replica::batch_keys`] account for. An argument is cut along all axes, by [`ALL`](crate::ALL) or
    /// the name of the only axis, or replicated. Padding of a part stays in sharded results: cut it off
    /// by [`Replica::valid_len`].
    #[must_use]
    #[doc(alias = "make_array_from_process_local_data")]
    pub fn local_arguments(self) -> Self {
        Self { has_local_arguments: true, ..self }
    }

    /// Returns the first device's replicated results without a comparison.
    ///
    /// By default the bits of these results are compared with the results of the other devices,
    /// since the first of several different results would be arbitrary. The comparison reads all
    /// replicated results, and copies results on GPUs to the host: this is cheap for a loss, and
    /// expensive for the parameters of a model.
    ///
    /// Processes compare a 64-bit fingerprint of each result, in one small collective at the end of
    /// the call; the same collective sends joined results. All processes must agree on this
    /// setting: if all results are replicated, a process that trusts them skips this collective,
    /// and processes that do not trust them would wait for it.
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
    /// Arguments are not copied if they stay on their device and are replicated or cut in dimension
    /// 0. In-place writes of the function then change the caller's tensor, and other replicas see
    /// them.
    ///
    /// Arguments and results that change their device go through host memory. Pending work on all
    /// devices of the mesh finishes before the function runs, so captured tensors are complete.
    /// Captured tensors must be on [`Replica::device`], unless the function moves them there.
    ///
    /// No thread may [`set`](candle_core::Var::set) a variable while a replica computes with it:
    /// candle would deadlock in an operation such as `v * v`, which locks the variable twice.
    ///
    /// Gradients do not cross a call: arguments arrive detached from their graph, and so do
    /// results, since their graph would contain only one replica's part. Call `backward` inside the
    /// function and return the gradients of variables that it captures or creates.
    ///
    /// A call inside a replica fails with [`ReplicaError::Nested`]. This is detected only on the
    /// mesh's threads: if a replica starts a thread that calls the same mesh, and waits for that
    /// thread, the thread's call fails with [`ReplicaError::Stuck`] at the mesh's deadline. Without
    /// a deadline both calls wait for ever.
    ///
    /// # Errors
    ///
    /// Before a replica starts: [`Error::Specs`] with all faults of the arguments, and
    /// [`ReplicaError::Nested`]. From a replica: [`ReplicaError::Failed`],
    /// [`ReplicaError::Panicked`] and each [`CollectiveError`]; the mesh can be used again at once.
    /// Over several processes: [`ProcessError::WrongThread`] for a second calling thread. If a
    /// replica has not returned by the mesh's [deadline], the call returns without waiting for it,
    /// and all queued and later calls fail with [`ReplicaError::Stuck`] until the replica returns.
    /// So does a call that waits for its turn while another one runs for longer than the deadline.
    /// After the replicas: [`Error::Specs`], [`ValueError::OutputCount`],
    /// [`ValueError::NotReplicated`], [`ValueError::Gather`] and, over several processes,
    /// [`ValueError::OutAxes`], [`ProcessError::Exchange`] and [`ProcessError::Peer`].
    ///
    /// [deadline]: crate::DeviceMeshBuilder::deadline
    /// [`Error::Specs`]: crate::Error::Specs
    /// [`ProcessError::Exchange`]: crate::ProcessError::Exchange
    /// [`ProcessError::WrongThread`]: crate::ProcessError::WrongThread
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
        self.call_sharded(arguments)?.join(&self.out_axes, self.trust)
    }

    /// Runs the function as [`call`](Self::call) does, with step `step` for [`Replica::rng`]. Calls
    /// of other methods count their steps from 0, independently of `step`.
    ///
    /// # Errors
    ///
    /// The errors of [`call`](Self::call).
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are passed by value, as to the function itself"
    )]
    #[track_caller]
    pub fn call_at(&self, step: u64, arguments: I) -> Result<O> {
        Workers::check_not_nested()?;
        let results = self.run_on(step, self.shard(&arguments)?, Location::caller())?;
        results.join(&self.out_axes, self.trust)
    }

    /// Runs the function as [`call`](Self::call) does, and writes the results into the tensors of
    /// `out`.
    ///
    /// These tensors must be contiguous, have the shapes of the results, and be on the first device
    /// of the mesh. For large results this is faster than [`call`](Self::call), because allocating
    /// new memory costs more than copying.
    ///
    /// # Errors
    ///
    /// The errors of [`call`](Self::call). After an error the contents of `out` are unspecified.
    #[track_caller]
    pub fn call_into(&self, arguments: I, out: &O) -> Result<()> {
        self.call_sharded(arguments)?.join_into(&self.out_axes, out, self.trust)
    }

    /// Runs the function on every device and leaves the results on their devices.
    ///
    /// # Errors
    ///
    /// The errors of [`call`](Self::call) that precede gathering.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are passed by value, as to the function itself"
    )]
    #[track_caller]
    pub fn call_sharded(&self, arguments: I) -> Result<Sharded<O>> {
        Workers::check_not_nested()?;
        let arguments = self.shard(&arguments)?;
        self.run_on(self.next_step(), arguments, Location::caller())
    }

    /// Runs the function on values that are already on the devices.
    ///
    /// # Errors
    ///
    /// [`ValueError::MeshMismatch`](crate::ValueError::MeshMismatch) if the values are on another
    /// mesh, and the errors of [`call_sharded`](Self::call_sharded).
    #[track_caller]
    pub fn run(&self, arguments: Sharded<I>) -> Result<Sharded<O>> {
        Workers::check_not_nested()?;
        arguments.check_mesh(&self.mesh)?;
        self.run_on(self.next_step(), arguments, Location::caller())
    }

    fn shard(&self, arguments: &I) -> Result<Sharded<I>> {
        let Self { mesh, in_axes, uneven, .. } = self;
        if self.has_local_arguments {
            return Sharded::cut_local_part(mesh, arguments, in_axes, *uneven);
        }
        Sharded::cut(mesh, arguments, in_axes, *uneven)
    }

    /// Returns the step of a call without an explicit step.
    fn next_step(&self) -> u64 {
        // `Relaxed` suffices: the counter only assigns numbers, and publishes no other data.
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    fn run_on(
        &self,
        step: u64,
        arguments: Sharded<I>,
        location: &'static Location<'static>,
    ) -> Result<Sharded<O>> {
        self.mesh.check_caller_thread()?;
        self.mesh.synchronize_all()?;
        let engines = self.mesh.backend().begin();
        let Sharded { shards, first_cut, .. } = arguments;
        let inputs = shards.into_iter().zip(engines).zip(self.mesh.devices());
        let call = Arc::new(PmapCall {
            f: Arc::clone(&self.f),
            topology: self.mesh.topology_arc(),
            first_slot: self.mesh.local_slots().start,
            first_cut: first_cut.clone(),
            seed: self.seed.derive(step),
            location,
            slots: inputs
                .map(|((shard, engine), device)| SlotCall::new(device.clone(), engine, shard))
                .collect(),
        });
        (self.run_call)(self.mesh.workers(), &call, location)?;
        Ok(Sharded { mesh: self.mesh.clone(), shards: call.take_results()?, first_cut })
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
