//! Values that stay on their devices.

use crate::{
    error::{Error, Result},
    mesh::DeviceMesh,
    spec::{
        self, Specs,
        cut::{self, Cut, Rows, Uneven},
        fault::Side,
        join::Join,
        tree::{self, TensorTree},
    },
};

/// A value that lies in shards on the devices of a mesh; one call's results are the next call's
/// arguments.
///
/// Made by [`DeviceMesh::shard`], [`PMap::call_sharded`](crate::PMap::call_sharded) and
/// [`PMap::run`](crate::PMap::run). Cloning copies no tensor.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use pmap_mesh::{ALL, DeviceMesh, P};
///
/// let mesh = DeviceMesh::cpu(2)?;
/// let double = mesh.pmap(|_, x: Tensor| x * 2.);
/// let mut x = mesh.shard(Tensor::arange(0_f32, 6., &Device::Cpu)?, P::shard(0, ALL))?;
/// for _ in 0..3 {
///     x = double.run(x)?; // nothing is gathered or cut in between
/// }
/// assert_eq!(x.gather(P::shard(0, ALL))?.to_vec1::<f32>()?, [0., 8., 16., 24., 32., 40.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sharded<T> {
    mesh: DeviceMesh,
    shards: Vec<T>,
    rows: Option<Rows>,
}

impl DeviceMesh {
    /// Cuts a value and moves the shards to their devices, to be passed to [`PMap::run`].
    ///
    /// # Errors
    ///
    /// [`Error::Specs`], [`Error::SpecCount`] and [`Error::Shard`], as in [`PMap::call`].
    #[allow(
        clippy::needless_pass_by_value,
        reason = "arguments are given away, as to any function of tensors"
    )]
    pub fn shard<T: TensorTree>(&self, value: T, specs: impl Into<Specs>) -> Result<Sharded<T>> {
        let (shards, rows) = self::shard(self, &value, &specs.into(), Uneven::Refuse)?;
        let placed = shards.iter().zip(self.devices()).map(|(shard, device)| {
            let mut index = 0..;
            shard.try_map(&mut |tensor| {
                let index = index.next().unwrap_or_default();
                cut::place(tensor, device).map_err(|source| Error::Shard { index, source })
            })
        });
        Ok(Sharded::new(self.clone(), placed.collect::<Result<_>>()?, rows))
    }
}

impl<T: TensorTree> Sharded<T> {
    pub(crate) fn new(mesh: DeviceMesh, shards: Vec<T>, rows: Option<Rows>) -> Self {
        Self { mesh, shards, rows }
    }

    /// What lies on each device of this process, in the order of the mesh.
    pub fn shards(&self) -> &[T] {
        &self.shards
    }

    /// The shards, for a mesh that must be this one's.
    pub(crate) fn into_shards(self, mesh: &DeviceMesh) -> Result<(Vec<T>, Option<Rows>)> {
        if self.mesh.is(mesh) { Ok((self.shards, self.rows)) } else { Err(Error::OtherMesh) }
    }

    /// Both values as one argument, so that what stays on the devices can be passed together with
    /// what is new.
    ///
    /// Rows are those of the other value, if it was cut and this was not: parameters first, then
    /// the batch.
    ///
    /// # Errors
    ///
    /// [`Error::OtherMesh`] if they lie on different meshes.
    pub fn zip<U: TensorTree>(self, other: Sharded<U>) -> Result<Sharded<(T, U)>> {
        let (others, rows) = other.into_shards(&self.mesh)?;
        let shards = self.shards.into_iter().zip(others).collect();
        Ok(Sharded { mesh: self.mesh, shards, rows: self.rows.or(rows) })
    }

    /// Puts the shards together on the first device of the mesh.
    ///
    /// # Errors
    ///
    /// As the errors of [`PMap::call`](crate::PMap::call) after the replicas have run.
    pub fn gather(&self, specs: impl Into<Specs>) -> Result<T> {
        self.joined(&specs.into())
    }

    pub(crate) fn joined(&self, specs: &Specs) -> Result<T> {
        let (mut leaves, specs) = self.leaves(specs)?;
        let join = self.join();
        let mut tensors = specs.iter().enumerate().rev().map(|(index, spec)| {
            let of_all = leaves.iter_mut().filter_map(Vec::pop).collect();
            join.join(index, of_all, spec)
        });
        let mut joined = tensors.by_ref().collect::<Result<Vec<_>>>()?;
        // The tree is walked once more, in its own order, to take the joined tensors.
        self.shards[0].try_map(&mut |tensor| Ok(joined.pop().unwrap_or_else(|| tensor.clone())))
    }

    /// Puts the shards together in tensors that are there already.
    pub(crate) fn joined_into(&self, specs: &Specs, kept: &T) -> Result<()> {
        let (mut leaves, specs) = self.leaves(specs)?;
        let kept = tree::leaves(kept);
        if kept.len() != specs.len() {
            return Err(Error::OutputsDiffer {
                index: 0,
                tensors: specs.len(),
                expected: kept.len(),
            });
        }
        let join = self.join();
        for (index, (spec, kept)) in specs.iter().zip(&kept).enumerate().rev() {
            let of_all = leaves.iter_mut().filter_map(Vec::pop).collect();
            join.join_into(index, of_all, spec, kept)?;
        }
        Ok(())
    }

    /// The tensors of every shard, and how each of them is treated.
    #[allow(clippy::type_complexity, reason = "named nowhere else")]
    fn leaves(
        &self,
        specs: &Specs,
    ) -> Result<(Vec<Vec<candle_core::Tensor>>, Vec<spec::Resolved>)> {
        let leaves: Vec<_> = self.shards.iter().map(tree::leaves).collect();
        let expected = leaves[0].len();
        if let Some(index) = leaves.iter().position(|leaves| leaves.len() != expected) {
            return Err(Error::OutputsDiffer { index, tensors: leaves[index].len(), expected });
        }
        let mut faults = Vec::new();
        let resolved =
            specs.resolve(Side::Out, &self.shards[0], self.mesh.topology(), &mut faults)?;
        spec::check(faults)?;
        // What is the same everywhere need not be fetched.
        let leaves = if resolved.iter().all(Vec::is_empty) {
            leaves
        } else {
            self.mesh.process_allgather(leaves)?
        };
        Ok((leaves, resolved))
    }

    fn join(&self) -> Join<'_> {
        Join { topology: self.mesh.topology(), home: &self.mesh.devices()[0], rows: self.rows }
    }
}

/// The arguments of this process's slots, as views, and how the rows of the first one that is cut
/// are dealt.
pub(crate) fn shard<I: TensorTree>(
    mesh: &DeviceMesh,
    arguments: &I,
    specs: &Specs,
    uneven: Uneven,
) -> Result<(Vec<I>, Option<Rows>)> {
    let topology = mesh.topology();
    let inputs = tree::leaves(arguments);
    let mut faults = Vec::new();
    let specs = specs.resolve(Side::In, arguments, topology, &mut faults)?;
    let cuts: Vec<Cut> = (inputs.iter().zip(&specs).enumerate())
        .map(|(index, (input, spec))| Cut::new(index, input, spec, uneven, topology, &mut faults))
        .collect();
    spec::check(faults)?;
    inputs.iter().enumerate().try_for_each(|(index, input)| cut::wait(index, input))?;
    let of_slot = |slot| {
        let mut cuts = cuts.iter().enumerate();
        arguments.try_map(&mut |input| match cuts.next() {
            Some((index, cut)) => {
                cut.view(input, slot, topology).map_err(|source| Error::Shard { index, source })
            }
            None => Ok(input.clone()),
        })
    };
    let shards = mesh.local_slots().map(of_slot).collect::<Result<_>>()?;
    Ok((shards, cuts.iter().find_map(Cut::rows)))
}
