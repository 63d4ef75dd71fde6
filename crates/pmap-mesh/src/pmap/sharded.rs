//! Values that stay on their devices.

use std::sync::Arc;

use candle_core::Tensor;

use crate::{
    device::to_device::{place, synchronize_all},
    error::{Error, Result, ValueError, fault::Side},
    mesh::DeviceMesh,
    pmap::exchange::{Exchange, check_counts},
    spec::{
        Faults, Resolved, Specs,
        cut::{Cut, Uneven},
        join::{Comparison, Join},
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
#[doc(alias = "DTensor")]
pub struct Sharded<T> {
    mesh: DeviceMesh,
    shards: Vec<T>,
    /// How the first of the arguments was cut that was.
    cut: Option<Arc<Cut>>,
}

impl DeviceMesh {
    /// Cuts a value and moves the shards to their devices, to be passed to
    /// [`PMap::run`](crate::PMap::run).
    ///
    /// # Errors
    ///
    /// [`Error::Specs`] and [`ValueError::Shard`].
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments are given away, as to any function of tensors"
    )]
    pub fn shard<T: TensorTree>(&self, value: T, specs: impl Into<Specs>) -> Result<Sharded<T>> {
        let (shards, cut) = self::shard(self, &value, &specs.into(), Uneven::Refuse)?;
        let placed: Result<_> = shards
            .iter()
            .zip(self.devices())
            .map(|(shard, device)| {
                tree::try_map_indexed(shard, |index, tensor| {
                    place(tensor, device).map_err(Error::shard(index))
                })
            })
            .collect();
        Ok(Sharded::new(self.clone(), placed?, cut))
    }
}

impl<T: TensorTree> Sharded<T> {
    pub(crate) fn new(mesh: DeviceMesh, shards: Vec<T>, cut: Option<Arc<Cut>>) -> Self {
        Self { mesh, shards, cut }
    }

    /// What lies on each device of this process, in the order of the mesh.
    pub fn shards(&self) -> &[T] {
        &self.shards
    }

    /// The shards, for a mesh that must be this one's.
    pub(crate) fn into_shards(self, mesh: &DeviceMesh) -> Result<(Vec<T>, Option<Arc<Cut>>)> {
        if self.mesh.ptr_eq(mesh) {
            Ok((self.shards, self.cut))
        } else {
            Err(ValueError::OtherMesh.into())
        }
    }

    /// Both values as one argument, so that what stays on the devices can be passed together with
    /// what is new.
    ///
    /// Rows are those of the other value, if it was cut and this was not: parameters first, then
    /// the batch.
    ///
    /// # Errors
    ///
    /// [`ValueError::OtherMesh`] if they lie on different meshes.
    pub fn zip<U: TensorTree>(self, other: Sharded<U>) -> Result<Sharded<(T, U)>> {
        let (others, cut) = other.into_shards(&self.mesh)?;
        let shards = self.shards.into_iter().zip(others).collect();
        Ok(Sharded { mesh: self.mesh, shards, cut: self.cut.or(cut) })
    }

    /// Puts the shards together on the first device of the mesh. Over several processes, every
    /// process calls it.
    ///
    /// # Errors
    ///
    /// As the errors of [`PMap::call`](crate::PMap::call) after the replicas have run.
    pub fn gather(&self, specs: impl Into<Specs>) -> Result<T> {
        self.joined(&specs.into(), false)
    }

    /// `trust` says that replicated results are not compared.
    pub(crate) fn joined(&self, specs: &Specs, trust: bool) -> Result<T> {
        let Outputs { of_slots, specs, join } = self.outputs(specs, trust)?;
        let joined: Result<Vec<Tensor>> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| join.join(index, tensors_at(&of_slots, index), spec))
            .collect();
        Ok(tree::with_leaves(&self.shards[0], &joined?))
    }

    /// Puts the shards together in tensors that are there already.
    pub(crate) fn joined_into(&self, specs: &Specs, kept: &T, trust: bool) -> Result<()> {
        let Outputs { of_slots, specs, join } = self.outputs(specs, trust)?;
        let kept = tree::leaves(kept);
        if kept.len() != specs.len() {
            let expected = kept.len();
            return Err(ValueError::OutputCount { slot: 0, tensors: specs.len(), expected }.into());
        }
        for (index, (spec, kept)) in specs.iter().zip(&kept).enumerate() {
            join.join_into(index, tensors_at(&of_slots, index), spec, kept)?;
        }
        Ok(())
    }

    fn outputs(&self, specs: &Specs, trust: bool) -> Result<Outputs<'_>> {
        let own: Vec<Vec<Tensor>> = self.shards.iter().map(tree::leaves).collect();
        check_counts(&own)?;
        let resolved = self.resolved(specs);
        // The same on all processes, whatever their results are: all come to the exchange, or none.
        let is_exchanged = self.mesh.spans_processes() && !(trust && specs.are_replicated());
        let (of_slots, comparison) = if is_exchanged {
            let resolved = resolved.as_deref().ok();
            Exchange { mesh: &self.mesh, specs, resolved, trust }.run(&own)?
        } else {
            (own, if trust { Comparison::Trusted } else { Comparison::Bits })
        };
        let specs = resolved?;
        let join = Join {
            topology: self.mesh.topology(),
            home: &self.mesh.devices()[0],
            cut: self.cut.as_deref(),
            comparison,
        };
        Ok(Outputs { of_slots, specs, join })
    }

    /// How each result is treated.
    fn resolved(&self, specs: &Specs) -> Result<Vec<Resolved>> {
        let mut faults = Faults::default();
        let specs = specs.resolve(Side::Out, &self.shards[0], self.mesh.topology(), &mut faults)?;
        faults.check()?;
        Ok(specs)
    }
}

/// What is put together of the shards.
struct Outputs<'a> {
    /// For each slot its results.
    of_slots: Vec<Vec<Tensor>>,
    /// How each result is treated.
    specs: Vec<Resolved>,
    join: Join<'a>,
}

/// The tensor number `index` of each list.
fn tensors_at(lists: &[Vec<Tensor>], index: usize) -> Vec<Tensor> {
    lists.iter().map(|list| list[index].clone()).collect()
}

/// The arguments of this process's slots, as views, and how the first one is cut that is.
pub(crate) fn shard<I: TensorTree>(
    mesh: &DeviceMesh,
    arguments: &I,
    specs: &Specs,
    uneven: Uneven,
) -> Result<(Vec<I>, Option<Arc<Cut>>)> {
    let topology = mesh.topology();
    let inputs = tree::leaves(arguments);
    let mut faults = Faults::default();
    let specs = specs.resolve(Side::In, arguments, topology, &mut faults)?;
    let cuts: Vec<Cut> = (inputs.iter().zip(&specs).enumerate())
        .map(|(index, (input, spec))| Cut::new(index, input, spec, uneven, topology, &mut faults))
        .collect();
    faults.check()?;
    for (index, input) in inputs.iter().enumerate() {
        // Until an argument is written: another thread's stream would not know of it.
        synchronize_all(input.device()).map_err(Error::shard(index))?;
    }
    let of_slot = |slot| {
        tree::try_map_indexed(arguments, |index, input| {
            cuts[index].view(input, slot).map_err(Error::shard(index))
        })
    };
    let shards = mesh.local_slots().map(of_slot).collect::<Result<_>>()?;
    Ok((shards, cuts.into_iter().find(|cut| !cut.is_none()).map(Arc::new)))
}
