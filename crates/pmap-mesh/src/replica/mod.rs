//! A replica: its position in the mesh, and its collectives with the other replicas.

pub(crate) mod collectives;
pub(crate) mod pending;
pub(crate) mod rng;
mod runs;
mod single;
mod transpose;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use core_types::Seed;

use crate::{
    axes::{AxisSet, MeshAxes},
    engine::GroupContext,
    grid::Topology,
    reduce::Reduction,
    replica::{
        collectives::{Collectives, even_parts},
        rng::{BatchKeys, ReplicaRng},
        transpose::Transpose,
    },
    spec::{
        cut::RealRows,
        normalize,
        tree::{TensorTree, leaves, with_leaves},
    },
};

/// The running copy of a parallel function on one device: its position in the mesh, and collectives
/// with the other replicas.
///
/// # Collectives
///
/// Every collective runs over some axes of the mesh: `"data"`, `["data", "model"]`, or
/// [`ALL`](crate::ALL). The replicas whose coordinates differ only along these axes form a group.
/// Each member must call the same collectives in the same order, with tensors of equal dtype and
/// shape. On a mismatch the call fails with an error that names both calls. If a replica fails or
/// returns early, the other replicas get an error instead of waiting forever.
///
/// Sums are formed in rank order, independently of the order in which replicas arrive. Halves are
/// summed in single precision; integers wrap.
///
/// On a processor the replicas of a group may share one result: if a replica writes into it in
/// place, with `slice_set`, the other replicas see the change. Write into a copy.
///
/// # Gradients
///
/// A gradient runs backward through a collective by its transpose:
///
/// | forward | backward |
/// |---|---|
/// | [`psum`](Self::psum), [`pmean`](Self::pmean) | identity (for the mean, over the group's size) |
/// | [`pvary`](Self::pvary) | `psum` |
/// | [`all_gather`](Self::all_gather) | `psum_scatter` |
/// | [`psum_scatter`](Self::psum_scatter) | `all_gather` |
/// | [`ppermute`](Self::ppermute) | the inverse permutation |
/// | [`all_to_all`](Self::all_to_all) | `all_to_all` with the dimensions exchanged |
/// | [`broadcast`](Self::broadcast) | a sum that only the root receives |
/// | [`pmax`](Self::pmax), [`pmin`](Self::pmin) | none: `backward` returns an error |
///
/// The result of `psum` is the same value on all replicas, so its gradient passes through
/// unchanged. Use [`pvary`](Self::pvary) where a replicated value enters work that differs by
/// replica: its backward sums the gradients of the replicas. (Megatron-LM, arXiv 1909.08053, calls
/// `psum` g and `pvary` f; JAX's `shard_map` has the same pair.) Since collectives also run in
/// `backward`, all replicas must call `backward` in the same order, and an argument of a collective
/// must have a gradient on all replicas or on none. (candle ends a gradient at a multiplication by
/// the number 0: to switch off a replica's part, multiply by a tensor of zeros.)
///
/// # After the call
///
/// A replica belongs to one call. If a program keeps it longer, collectives and a `backward`
/// through them fail, because the other replicas have returned.
#[derive(Clone, Debug)]
pub struct Replica(Arc<ReplicaContext>);

/// A replica's position and the context of its call.
#[derive(Debug)]
pub(crate) struct ReplicaContext {
    pub(crate) slot: usize,
    /// The index of the replica among the slots of its process.
    pub(crate) local_index: usize,
    pub(crate) device: Device,
    pub(crate) topology: Arc<Topology>,
    pub(crate) collectives: Collectives,
    /// The real rows of the replica's shard, if an argument was cut.
    pub(crate) real_rows: Option<RealRows>,
    /// The seed of the call, the same for all replicas.
    pub(crate) seed: Seed,
}

/// The number of the random stream that all replicas share. The stream of each slot has the slot's
/// number.
const BATCH_STREAM: u64 = u64::MAX;

impl Replica {
    pub(crate) fn new(context: ReplicaContext) -> Self {
        Self(Arc::new(context))
    }

    /// Returns the replica's slot in the mesh, from 0; the last axis varies fastest.
    pub fn slot(&self) -> usize {
        self.0.slot
    }

    /// Returns the number of replicas.
    pub fn count(&self) -> usize {
        self.0.topology.slots()
    }

    /// Returns the device of the replica and its inputs.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the replica's rank along `axes`, from 0: its index in the group of replicas that
    /// differ from it along these axes only.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis. As in a collective, this error fails the call for all
    /// replicas.
    pub fn axis_index(&self, axes: impl Into<MeshAxes>) -> Result<usize> {
        let set = self.set(&axes.into())?;
        Ok(self.0.topology.groups(set).position(self.0.slot).rank)
    }

    /// Returns the number of replicas along `axes`.
    ///
    /// # Errors
    ///
    /// The errors of [`axis_index`](Self::axis_index).
    pub fn axis_size(&self, axes: impl Into<MeshAxes>) -> Result<usize> {
        Ok(self.0.topology.size(self.set(&axes.into())?))
    }

    /// Returns the number of real rows in the replica's shard, if a batch was padded or cut
    /// unevenly.
    ///
    /// The rows are those of the first argument that is cut, in the first dimension that is cut.
    /// Returns `None` if no argument is cut.
    pub fn valid_len(&self) -> Option<usize> {
        self.0.real_rows.map(|rows| rows.len)
    }

    /// Returns the position of the shard's first row in the whole batch, like
    /// [`valid_len`](Self::valid_len).
    #[doc(hidden)]
    pub fn row_start(&self) -> Option<usize> {
        self.0.real_rows.map(|rows| rows.start)
    }

    /// Returns the number of rows in the replica's shard, including padding, like
    /// [`valid_len`](Self::valid_len).
    #[doc(hidden)]
    pub fn padded_len(&self) -> Option<usize> {
        self.0.real_rows.map(|rows| rows.padded_len)
    }

    /// Returns the fraction of the batch in this shard, times the number of shards: 1 if all shards
    /// are equal.
    ///
    /// The mean over replicas of `weight × (mean over the shard's real rows)` is the mean over the
    /// full batch, even if the batch was cut unevenly.
    pub fn weight(&self) -> f64 {
        match self.0.real_rows {
            // An empty batch has equal shards too.
            Some(RealRows { len, total, parts, .. }) if total > 0 => {
                (len * parts) as f64 / total as f64
            }
            _ => 1.0,
        }
    }

    /// Returns a random generator for this replica. Its numbers depend only on the function's seed,
    /// the step of the call and the replica's slot. Every call of this method returns a generator
    /// at the start of the same stream.
    ///
    /// Do not use candle's generator instead: it cannot be seeded on a processor, and all replicas
    /// share it.
    pub fn rng(&self) -> ReplicaRng {
        ReplicaRng::new(self.0.seed.derive(self.0.slot as u64), self.0.device.clone())
    }

    /// Returns keys for random numbers of the full batch. Each replica draws only the numbers for
    /// its rows, so that dropout, for example, is the same on any number of devices.
    ///
    /// Every call of this method returns the same sequence of keys, so create it once and pass it
    /// through the model. If no argument is cut, all replicas draw the same numbers.
    pub fn batch_keys(&self) -> BatchKeys {
        BatchKeys::new(self.0.seed.derive(BATCH_STREAM), self.0.real_rows)
    }

    /// Returns the sum of `x` over the replicas along `axes`, the same sum on each of these
    /// replicas. Of a tree, each tensor is summed, all in one collective.
    ///
    /// # Errors
    ///
    /// Every collective fails if the mesh has no such axis, if replicas of the group call different
    /// collectives or pass different dtypes or shapes, if a replica fails or returns early, and if
    /// the mesh's deadline passes.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let normalize = mesh.pmap(|ctx, x: Tensor| x.broadcast_div(&ctx.psum(&x.sum_all()?, ALL)?));
    /// let x = Tensor::new(&[1_f32, 2., 3., 4.], &Device::Cpu)?;
    /// assert_eq!(normalize.call(x.clone())?.to_vec1::<f32>()?, [0.1, 0.2, 0.3, 0.4]);
    ///
    /// let moments = mesh.pmap(|ctx, x: Tensor| {
    ///     ctx.psum(&(x.sum_all()?, x.sqr()?.sum_all()?), ALL)
    /// });
    /// let (sum, squares) = moments.out_axes(P::replicate()).call(x)?;
    /// assert_eq!((sum.to_scalar::<f32>()?, squares.to_scalar::<f32>()?), (10., 30.));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn psum<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        self.reduce_tree("psum", x, axes.into(), Reduction::Sum, |_| Transpose::Identity)
    }

    /// Returns the mean of `x` over the replicas along `axes`, the same mean on each of these
    /// replicas. Of a tree, each tensor is averaged, all in one collective.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error for integers, which would need rounding.
    #[track_caller]
    pub fn pmean<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        if let Some(leaf) = leaves(x).iter().find(|leaf| !leaf.dtype().is_float()) {
            bail!(
                "pmean of type {} is not possible, only floats have a mean; psum it",
                leaf.dtype().as_str()
            );
        }
        self.reduce_tree("pmean", x, axes.into(), Reduction::Mean, |size| {
            Transpose::Scale(1.0 / size as f64)
        })
    }

    /// Returns the elementwise maximum of `x`, a tensor or a tree, over the replicas along `axes`.
    /// An element is NaN if it is NaN on any replica.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum).
    #[track_caller]
    pub fn pmax<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        self.reduce_tree("pmax", x, axes.into(), Reduction::Max, |_| Transpose::None("pmax"))
    }

    /// Returns the elementwise minimum of `x`, a tensor or a tree, over the replicas along `axes`.
    /// An element is NaN if it is NaN on any replica.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum).
    #[track_caller]
    pub fn pmin<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        self.reduce_tree("pmin", x, axes.into(), Reduction::Min, |_| Transpose::None("pmin"))
    }

    /// Reduces each tensor of a tree. `transpose` returns the backward operation, given the number
    /// of replicas.
    #[track_caller]
    fn reduce_tree<T: TensorTree>(
        &self,
        op: &'static str,
        tree: &T,
        axes: MeshAxes,
        reduction: Reduction,
        transpose: impl Fn(usize) -> Transpose,
    ) -> Result<T> {
        let list = leaves(tree);
        let detail = match list.len() {
            1 => String::new(),
            len => format!(" of {len} tensors"),
        };
        let ctx = self.list_context(op, &list, axes)?.with_detail(detail);
        let results = self.0.collectives.all_reduce(&ctx, &list, reduction)?;
        let mut linked = Vec::with_capacity(list.len());
        for (x, result) in list.iter().zip(results) {
            linked.push(transpose::link_gradient(x, result, || transpose(ctx.size()))?);
        }
        Ok(with_leaves(tree, &linked))
    }

    /// Returns `x` unchanged, with a backward that sums the gradient over the replicas along
    /// `axes`.
    ///
    /// Use it for a replicated value that each replica uses in a different way; see
    /// [Gradients](Self#gradients).
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis. The backward has the errors of [`psum`](Self::psum).
    #[track_caller]
    pub fn pvary(&self, x: &Tensor, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let ctx = self.context("psum (backward of pvary)", Some(x), axes.into())?;
        transpose::link_gradient(x, None, || Transpose::Psum(self.0.collectives.clone(), ctx))
    }

    /// Returns the tensors of all replicas along `axes`, concatenated in dimension `dim` by rank.
    ///
    /// Sizes may differ in `dim`, and must be equal in all other dimensions. Negative dimensions
    /// count from the last.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if `x` has no such dimension.
    #[track_caller]
    pub fn all_gather(&self, x: &Tensor, dim: isize, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let dim = find_dim(x, dim, "all_gather")?;
        let ctx = self
            .context("all_gather", Some(x), axes.into())?
            .with_detail(format!("({dim})"))
            .with_free_dim(dim);
        let (gathered, sizes) = self.0.collectives.gather(&ctx, x, dim)?;
        transpose::link_gradient(x, gathered, || {
            Transpose::PsumScatter(self.0.collectives.clone(), ctx, dim, sizes)
        })
    }

    /// Sums `x` over the replicas along `axes`, cuts the sum in dimension `dim`, and returns this
    /// replica's part.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if `x` has no such dimension or if the size
    /// of this dimension is not divisible by the number of replicas.
    #[track_caller]
    pub fn psum_scatter(
        &self,
        x: &Tensor,
        dim: isize,
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let dim = find_dim(x, dim, "psum_scatter")?;
        let ctx =
            self.context("psum_scatter", Some(x), axes.into())?.with_detail(format!("({dim})"));
        let sizes = even_parts(x, dim, &ctx)?;
        let part = self.0.collectives.sum_and_scatter(&ctx, x, dim, &sizes)?;
        transpose::link_gradient(x, part, || {
            Transpose::AllGather(self.0.collectives.clone(), ctx, dim)
        })
    }

    /// Sends `x` along `axes` from rank to rank: for each pair (from, to), rank `to` gets the
    /// tensor of rank `from`.
    ///
    /// A rank without a sender gets zeros. Each rank may send once and receive once.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if a pair names a rank outside the group,
    /// or two pairs have the same sender or receiver.
    #[track_caller]
    pub fn ppermute(
        &self,
        x: &Tensor,
        pairs: &[(usize, usize)],
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let ctx = self.context("ppermute", Some(x), axes.into())?.with_detail(format!("{pairs:?}"));
        check_pairs(pairs, ctx.size())?;
        let received = self.0.collectives.permute(&ctx, x, pairs)?;
        let inverse = pairs.iter().map(|&(from, to)| (to, from)).collect();
        transpose::link_gradient(x, received, || {
            Transpose::Permute(self.0.collectives.clone(), ctx, inverse)
        })
    }

    /// Cuts `x` in dimension `split_dim`, sends part n to rank n along `axes`, and concatenates the
    /// received parts in dimension `concat_dim`.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if `x` lacks one of the dimensions or if
    /// the size of `split_dim` is not divisible by the number of replicas.
    #[track_caller]
    pub fn all_to_all(
        &self,
        x: &Tensor,
        split_dim: isize,
        concat_dim: isize,
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let split = find_dim(x, split_dim, "all_to_all")?;
        let concat = find_dim(x, concat_dim, "all_to_all")?;
        let ctx = self
            .context("all_to_all", Some(x), axes.into())?
            .with_detail(format!("({split} to {concat})"));
        let result = self.0.collectives.exchange(&ctx, x, split, concat)?;
        transpose::link_gradient(x, result, || {
            Transpose::AllToAll(self.0.collectives.clone(), ctx, concat, split)
        })
    }

    /// Returns the `x` of rank `root` along `axes`. The other ranks pass a tensor of the same dtype
    /// and shape, which must have a gradient if the root's tensor has one.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if there is no such rank.
    #[track_caller]
    pub fn broadcast(&self, x: &Tensor, root: usize, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let ctx = self.context("broadcast", Some(x), axes.into())?.with_detail(format!("({root})"));
        if root >= ctx.size() {
            bail!("broadcast from rank {root} of a group of {}", ctx.size());
        }
        let received = self.0.collectives.broadcast(&ctx, x, root)?;
        transpose::link_gradient(x, received, || {
            Transpose::Reduce(self.0.collectives.clone(), ctx, root)
        })
    }

    /// Waits until all replicas along `axes` have called this method.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum).
    #[track_caller]
    pub fn barrier(&self, axes: impl Into<MeshAxes>) -> Result<()> {
        let ctx = self.context("barrier", None, axes.into())?;
        self.0.collectives.barrier(&ctx)
    }

    /// Records that the function has ended in this replica, with this outcome.
    pub(crate) fn record_end(&self, outcome: crate::error::Result<()>) {
        self.0.collectives.record_end(self.0.slot, outcome);
    }

    #[track_caller]
    fn context(
        &self,
        op: &'static str,
        x: Option<&Tensor>,
        axes: MeshAxes,
    ) -> Result<GroupContext> {
        let ctx = GroupContext::new(axes, &self.0.topology, self.0.slot, op, x);
        ctx.map_err(|error| self.0.collectives.fail_with(error.into()))
    }

    /// Returns the context of a collective on a list. A single tensor is a part of the call, so that
    /// a mismatch shows its dtype and shape.
    #[track_caller]
    fn list_context(
        &self,
        op: &'static str,
        list: &[Tensor],
        axes: MeshAxes,
    ) -> Result<GroupContext> {
        let only = if let [x] = list { Some(x) } else { None };
        self.context(op, only, axes)
    }

    fn set(&self, axes: &MeshAxes) -> Result<AxisSet> {
        let set = self.0.topology.set(axes);
        set.map_err(|error| self.0.collectives.fail_with(error.into()))
    }
}

#[doc(hidden)]
impl Replica {
    /// Returns the index of the replica among the replicas of its process.
    pub fn local_index(&self) -> usize {
        self.0.local_index
    }

    /// Returns the sums of the tensors of a list over the replicas along `axes`, in one collective.
    ///
    /// All replicas pass lists of the same dtypes and shapes, and the same `name` for the list, such
    /// as the name of a part of a model. No gradient flows through this collective.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum).
    #[track_caller]
    pub fn psum_list(
        &self,
        name: &str,
        list: &[Tensor],
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Tensor>> {
        let detail = format!(" of {} tensors of {name}", list.len());
        let ctx = self.list_context("psum_list", list, axes.into())?.with_detail(detail);
        self.0.collectives.all_reduce(&ctx, list, Reduction::Sum)
    }
}

fn find_dim(x: &Tensor, dim: isize, op: &str) -> Result<usize> {
    match normalize(dim, x.rank()) {
        Some(dim) => Ok(dim),
        None => bail!("{op}: dimension {dim} is out of range for shape {:?}", x.dims()),
    }
}

fn check_pairs(pairs: &[(usize, usize)], size: usize) -> Result<()> {
    for (n, &(from, to)) in pairs.iter().enumerate() {
        if from >= size || to >= size {
            bail!("ppermute: pair ({from}, {to}) names a rank outside a group of {size}");
        }
        if pairs[..n].iter().any(|&(other_from, other_to)| other_from == from || other_to == to) {
            bail!("ppermute: pair ({from}, {to}) sends or receives a second time");
        }
    }
    Ok(())
}
