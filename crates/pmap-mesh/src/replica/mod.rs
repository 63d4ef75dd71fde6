//! What a replica knows of itself, and what it can ask of the others.

mod alone;
pub(crate) mod collectives;
pub(crate) mod pending;
pub(crate) mod rng;
mod runs;
mod transpose;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use core_types::Seed;

use crate::{
    axes::{AxisSet, MeshAxes},
    engine::Site,
    grid::Topology,
    reduce::Reduction,
    replica::{
        collectives::{Collectives, even_parts},
        pending::Pending,
        rng::{BatchKeys, ReplicaRng},
        transpose::Transpose,
    },
    spec::{
        cut::Valid,
        normalize,
        tree::{TensorTree, leaves, with_leaves},
    },
};

/// The running copy of a parallel function on one device: its place in the mesh, and collectives
/// with the others.
///
/// # Collectives
///
/// Every collective runs over some axes of the mesh: `"data"`, `["data", "model"]`, or
/// [`ALL`](crate::ALL). All replicas that differ in these coordinates only form a group, and each
/// member must call the same collectives in the same order, with tensors of equal type and shape.
/// If one does not, the call ends with an error that names both sides; if one fails or returns
/// early, the others get an error instead of waiting for ever.
///
/// Sums are formed in rank order, whichever replica comes first, in single precision for halves;
/// integers wrap.
///
/// On a processor the replicas of a group may share one result: what one of them writes into it in
/// place, with `slice_set`, all of them see. Write into a copy.
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
/// The result of `psum` is one value that all replicas hold, so its gradient is that value's and
/// not a sum of theirs. Where a value that all hold enters work that differs by replica,
/// [`pvary`](Self::pvary) marks the place: its backward adds up what the replicas found.
/// (Megatron-LM, arXiv 1909.08053, calls the two g and f; JAX's `shard_map` has the same pair.)
/// Since a collective also runs in `backward`, all replicas must call `backward` alike, and what
/// one of them passes to a collective must have a gradient on all of them or on none. (candle ends
/// a gradient at a multiplication by 0: to switch a replica's part off, multiply by a tensor of
/// zeros.)
///
/// # After the call
///
/// A replica belongs to one call. On one that is kept longer, collectives fail, and so does a
/// `backward` through them: the others have returned.
#[derive(Clone, Debug)]
pub struct Replica(Arc<Identity>);

/// What a replica knows of itself and of the call it runs in.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) slot: usize,
    /// Its place among the slots of its process.
    pub(crate) local_index: usize,
    pub(crate) device: Device,
    pub(crate) topology: Arc<Topology>,
    pub(crate) collectives: Collectives,
    /// The real rows of its shard, if an argument was cut.
    pub(crate) valid: Option<Valid>,
    /// The seed of the call, the same for all replicas.
    pub(crate) seed: Seed,
}

/// The stream that all replicas share, beside those of the slots, which are numbered from 0.
const WHOLE_BATCH: u64 = u64::MAX;

impl Replica {
    pub(crate) fn new(identity: Identity) -> Self {
        Self(Arc::new(identity))
    }

    /// Its slot in the mesh, from 0, counted along the last axis first.
    pub fn slot(&self) -> usize {
        self.0.slot
    }

    /// The number of replicas.
    pub fn count(&self) -> usize {
        self.0.topology.slots()
    }

    /// The device it runs on, where its inputs lie.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its rank along `axes`, from 0: its place in the group of those that differ from it along
    /// these axes only.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis; as in a collective, that ends the call for all replicas.
    pub fn axis_index(&self, axes: impl Into<MeshAxes>) -> Result<usize> {
        let set = self.set(&axes.into())?;
        Ok(self.0.topology.groups(set).place(self.0.slot).rank)
    }

    /// The number of replicas along `axes`.
    ///
    /// # Errors
    ///
    /// As [`axis_index`](Self::axis_index).
    pub fn axis_size(&self, axes: impl Into<MeshAxes>) -> Result<usize> {
        Ok(self.0.topology.size(self.set(&axes.into())?))
    }

    /// How many rows of its shard are real, if a batch was padded or cut into uneven parts.
    ///
    /// Counted along the dimension in which the first sharded argument is cut; `None` if no
    /// argument is.
    pub fn valid_len(&self) -> Option<usize> {
        self.0.valid.map(|valid| valid.len)
    }

    /// The part of the whole batch that is here, times the number of parts: 1 where all parts are
    /// equal.
    ///
    /// The mean over replicas of `weight × (mean over the shard's real rows)` is the mean over the
    /// whole batch, however unevenly it was cut.
    pub fn weight(&self) -> f64 {
        match self.0.valid {
            // Of an empty batch all parts are equal, too.
            Some(Valid { len, total, parts, .. }) if total > 0 => {
                (len * parts) as f64 / total as f64
            }
            _ => 1.0,
        }
    }

    /// Random numbers of this replica alone: they depend on the function's seed, the number of the
    /// call and the replica's place, and on nothing else. Every call of this method starts the same
    /// stream.
    ///
    /// candle's own generator has no seed on a processor, and all replicas share it.
    pub fn rng(&self) -> ReplicaRng {
        ReplicaRng::new(self.0.seed.derive(self.0.slot as u64), self.0.device.clone())
    }

    /// Keys for random numbers of the whole batch, of which this replica draws those of its rows:
    /// dropout that is the same on any number of devices.
    ///
    /// Every call of this method starts the same keys, so make it once and pass it through the
    /// model. If no argument is cut, all replicas draw the same.
    pub fn batch_keys(&self) -> BatchKeys {
        BatchKeys::new(self.0.seed.derive(WHOLE_BATCH), self.0.valid)
    }

    /// The sum of `x` over the replicas along `axes`, the same on all of them; of a tree that of each
    /// of its tensors, in one collective.
    ///
    /// # Errors
    ///
    /// All collectives fail if the mesh has no such axis, if replicas of the group call different
    /// collectives or pass different types or shapes, if one of them fails or returns, and if the
    /// mesh's deadline passes.
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
        self.reduced("psum", x, axes.into(), Reduction::Sum, |_| Transpose::Identity)
    }

    /// The mean of `x` over the replicas along `axes`, the same on all of them; of a tree that of each
    /// of its tensors, in one collective.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and for integers, whose mean would have to be rounded.
    #[track_caller]
    pub fn pmean<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        if let Some(integers) = leaves(x).iter().find(|leaf| !leaf.dtype().is_float()) {
            bail!(
                "pmean of type {} is not possible, only floats have a mean; psum it",
                integers.dtype().as_str()
            );
        }
        let transpose = |size| Transpose::Scale(1.0 / size as f64);
        self.reduced("pmean", x, axes.into(), Reduction::Mean, transpose)
    }

    /// The largest of each element of `x`, a tensor or a tree, over the replicas along `axes`; NaN if
    /// one is.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum).
    #[track_caller]
    pub fn pmax<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        self.reduced("pmax", x, axes.into(), Reduction::Max, |_| Transpose::None("pmax"))
    }

    /// The smallest of each element of `x`, a tensor or a tree, over the replicas along `axes`; NaN if
    /// one is.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum).
    #[track_caller]
    pub fn pmin<T: TensorTree>(&self, x: &T, axes: impl Into<MeshAxes>) -> Result<T> {
        self.reduced("pmin", x, axes.into(), Reduction::Min, |_| Transpose::None("pmin"))
    }

    /// A tree with the reduction of each of its tensors; what runs backward is made of the number of
    /// replicas.
    #[track_caller]
    fn reduced<T: TensorTree>(
        &self,
        op: &'static str,
        tree: &T,
        axes: MeshAxes,
        reduction: Reduction,
        transpose: impl Fn(usize) -> Transpose,
    ) -> Result<T> {
        let list = leaves(tree);
        let (site, results) = if let [x] = &list[..] {
            let site = self.site(op, Some(x), axes)?;
            let result = self.0.collectives.all_reduce(&site, x, reduction)?;
            (site, vec![result])
        } else {
            let site =
                self.site(op, None, axes)?.with_detail(format!(" of {} tensors", list.len()));
            let results = self.0.collectives.reduce_list(&site, list.clone(), reduction)?;
            (site, results)
        };
        let linked = |(x, result): (&Tensor, Tensor)| {
            transpose::linked(x, result, || transpose(site.size()))
        };
        let linked: Vec<Tensor> = list.iter().zip(results).map(linked).collect::<Result<_>>()?;
        Ok(with_leaves(tree, &linked))
    }

    /// `x` itself, whose gradient will be summed over the replicas along `axes`.
    ///
    /// For a value that all of them hold and each uses in its own way; see
    /// [Gradients](Self#gradients).
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis; its backward as [`psum`](Self::psum).
    #[track_caller]
    pub fn pvary(&self, x: &Tensor, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let site = self.site("psum (backward of pvary)", Some(x), axes.into())?;
        transpose::linked(x, None, || Transpose::Psum(self.0.collectives.clone(), site))
    }

    /// The tensors of all replicas along `axes`, concatenated in dimension `dim` by rank.
    ///
    /// Sizes may differ in `dim` and must be equal elsewhere. Negative dimensions count from the
    /// last.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and if `x` has no such dimension.
    #[track_caller]
    pub fn all_gather(&self, x: &Tensor, dim: isize, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let dim = dim_of(x, dim, "all_gather")?;
        let site = self
            .site("all_gather", Some(x), axes.into())?
            .with_detail(format!("({dim})"))
            .with_free_dim(dim);
        let (gathered, sizes) = self.0.collectives.gather(&site, x, dim)?;
        transpose::linked(x, gathered, || {
            Transpose::PsumScatter(self.0.collectives.clone(), site, dim, sizes)
        })
    }

    /// The sum of `x` over the replicas along `axes`, of which each gets its part in dimension
    /// `dim`.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and if `x` has no such dimension or its size does not divide by the
    /// replicas.
    #[track_caller]
    pub fn psum_scatter(
        &self,
        x: &Tensor,
        dim: isize,
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let dim = dim_of(x, dim, "psum_scatter")?;
        let site = self.site("psum_scatter", Some(x), axes.into())?.with_detail(format!("({dim})"));
        let sizes = even_parts(x, dim, &site)?;
        let part = self.0.collectives.sum_and_scatter(&site, x, dim, &sizes)?;
        transpose::linked(x, part, || Transpose::AllGather(self.0.collectives.clone(), site, dim))
    }

    /// Sends `x` along `axes` from rank to rank: for each pair (from, to), rank `to` gets what rank
    /// `from` has.
    ///
    /// A rank that is sent nothing gets zeros. Each may send once and receive once.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and if a pair names a rank outside the group, or two name the
    /// same sender or receiver.
    #[track_caller]
    pub fn ppermute(
        &self,
        x: &Tensor,
        pairs: &[(usize, usize)],
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let site = self.site("ppermute", Some(x), axes.into())?.with_detail(format!("{pairs:?}"));
        check_pairs(pairs, site.size())?;
        let received = self.0.collectives.permute(&site, x, pairs)?;
        let inverse = pairs.iter().map(|&(from, to)| (to, from)).collect();
        transpose::linked(x, received, || {
            Transpose::Permute(self.0.collectives.clone(), site, inverse)
        })
    }

    /// Cuts `x` in dimension `split_dim`, sends part n to rank n along `axes`, and concatenates
    /// what arrives in dimension `concat_dim`.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and if `x` lacks one of the dimensions or its size does not divide
    /// by the replicas.
    #[track_caller]
    pub fn all_to_all(
        &self,
        x: &Tensor,
        split_dim: isize,
        concat_dim: isize,
        axes: impl Into<MeshAxes>,
    ) -> Result<Tensor> {
        let split = dim_of(x, split_dim, "all_to_all")?;
        let concat = dim_of(x, concat_dim, "all_to_all")?;
        let site = self
            .site("all_to_all", Some(x), axes.into())?
            .with_detail(format!("({split} to {concat})"));
        let exchanged = self.0.collectives.exchange(&site, x, split, concat)?;
        transpose::linked(x, exchanged, || {
            Transpose::AllToAll(self.0.collectives.clone(), site, concat, split)
        })
    }

    /// The `x` of rank `root` along `axes`; of what the others pass, only type and shape count, and
    /// whether it has a gradient.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), and if there is no such rank.
    #[track_caller]
    pub fn broadcast(&self, x: &Tensor, root: usize, axes: impl Into<MeshAxes>) -> Result<Tensor> {
        let site = self.site("broadcast", Some(x), axes.into())?.with_detail(format!("({root})"));
        if root >= site.size() {
            bail!("broadcast from rank {root} of a group of {}", site.size());
        }
        let received = self.0.collectives.broadcast(&site, x, root)?;
        transpose::linked(x, received, || Transpose::Reduce(self.0.collectives.clone(), site, root))
    }

    /// Returns when all replicas along `axes` have called it.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum).
    #[track_caller]
    pub fn barrier(&self, axes: impl Into<MeshAxes>) -> Result<()> {
        let site = self.site("barrier", None, axes.into())?;
        self.0.collectives.barrier(&site)
    }

    #[track_caller]
    fn sum_list(
        &self,
        detail: String,
        list: Vec<Tensor>,
        wanted: &[usize],
        axes: MeshAxes,
    ) -> Result<Vec<Tensor>> {
        let site = self.site("psum_list", None, axes)?.with_detail(detail);
        self.0.collectives.sum_list(&site, list, wanted)
    }

    /// Says how the function has ended here.
    pub(crate) fn end(&self, outcome: crate::error::Result<()>) {
        self.0.collectives.end(self.0.slot, outcome);
    }

    #[track_caller]
    fn site(&self, op: &'static str, x: Option<&Tensor>, axes: MeshAxes) -> Result<Site> {
        let site = Site::along(axes, &self.0.topology, self.0.slot, op, x);
        site.map_err(|error| self.0.collectives.refuse(error.into()))
    }

    fn set(&self, axes: &MeshAxes) -> Result<AxisSet> {
        let set = self.0.topology.set(axes);
        set.map_err(|error| self.0.collectives.refuse(error.into()))
    }
}

#[doc(hidden)]
impl Replica {
    /// Returns its place among the replicas of its process, from 0.
    pub fn local_index(&self) -> usize {
        self.0.local_index
    }

    /// Starts [`psum`](Self::psum): hands in `x` and does not wait for the others.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum), as far as it can be known before the others come.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, P};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let sums = mesh.pmap(|ctx, x: Tensor| {
    ///     let sum = ctx.start_psum(&x, ALL)?;
    ///     let squares = ctx.start_psum(&x.sqr()?, ALL)?; // while the others come to the first
    ///     squares.wait()? - sum.wait()?
    /// });
    /// let x = Tensor::new(&[1_f32, 2., 3., 4.], &Device::Cpu)?;
    /// assert_eq!(sums.out_axes(P::replicate()).call(x)?.to_vec1::<f32>()?, [6., 14.]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn start_psum(&self, x: &Tensor, axes: impl Into<MeshAxes>) -> Result<Pending<Tensor>> {
        let site = self.site("start_psum", Some(x), axes.into())?;
        let underway = self.0.collectives.start_sum(&site, x)?;
        let x = x.clone();
        let finish = move |mut sums: Vec<Tensor>| {
            transpose::linked(&x, sums.swap_remove(0), || Transpose::Identity)
        };
        Ok(Pending::new(underway, finish))
    }

    /// Returns sums over the replicas along `axes`, in one collective for a whole list: of
    /// `list[n]` for each n of `wanted`, in this order.
    ///
    /// All of them pass lists of the same types and shapes; what each wants is its own choice.
    /// Gradients do not pass.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum).
    #[track_caller]
    pub fn psum_list(
        &self,
        list: Vec<Tensor>,
        wanted: &[usize],
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Tensor>> {
        self.sum_list(format!(" of {} tensors", list.len()), list, wanted, axes.into())
    }

    /// [`psum_list`](Self::psum_list) of what has a name, such as a part of a model: replicas that sum
    /// something else of the same shapes are refused.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum).
    #[track_caller]
    pub fn psum_named(
        &self,
        name: &str,
        list: Vec<Tensor>,
        wanted: &[usize],
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Tensor>> {
        self.sum_list(format!(" of {} tensors of {name}", list.len()), list, wanted, axes.into())
    }
}

fn dim_of(x: &Tensor, dim: isize, op: &str) -> Result<usize> {
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
