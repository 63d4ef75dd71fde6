//! Values that stay sharded on their devices between calls.

use std::{ops::Range, sync::Arc};

use candle_core::Tensor;

use crate::{
    device::to_device::{shard_to_device, synchronize_all},
    error::{Error, ProcessError, Result, ValueError, fault::Side},
    grid::Topology,
    mesh::DeviceMesh,
    pmap::exchange::{ResultExchange, check_counts},
    spec::{
        FaultList, ResolvedSpec, Specs,
        cut::{ArgumentCuts, LocalPart, Uneven},
        join::{Comparison, ResultJoin},
        tree::{self, TensorTree},
    },
};

/// A value in shards on the devices of a mesh. The results of one call can be the arguments of the
/// next call without being gathered.
///
/// It is created by [`DeviceMesh::shard`], [`PMap::call_sharded`](crate::PMap::call_sharded) and
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
    pub(super) mesh: DeviceMesh,
    pub(super) shards: Vec<T>,
    /// The cuts of the first argument that was cut: they define the rows of a replica, and the
    /// padding of results.
    pub(super) first_cut: Option<Arc<ArgumentCuts>>,
}

impl DeviceMesh {
    /// Cuts a value and moves the shards to their devices, as an argument of
    /// [`PMap::run`](crate::PMap::run).
    ///
    /// # Errors
    ///
    /// [`Error::Specs`] and [`ValueError::Shard`].
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the value is passed by value, like an argument of a parallel function"
    )]
    pub fn shard<T: TensorTree>(&self, value: T, specs: impl Into<Specs>) -> Result<Sharded<T>> {
        let mut sharded = Sharded::cut(self, &value, &specs.into(), Uneven::Refuse)?;
        for (shard, device) in sharded.shards.iter_mut().zip(self.devices()) {
            *shard = tree::try_map_indexed(shard, |index, tensor| {
                shard_to_device(tensor, device).map_err(Error::shard(index))
            })?;
        }
        Ok(sharded)
    }
}

impl<T: TensorTree> Sharded<T> {
    /// Cuts arguments for the slots of this process. Shards stay on the device of their argument, and
    /// are views, unless they are padded.
    pub(super) fn cut(
        mesh: &DeviceMesh,
        arguments: &T,
        specs: &Specs,
        uneven: Uneven,
    ) -> Result<Self> {
        let cuts = plan_cuts(arguments, specs, uneven, mesh.topology())?;
        Self::from_cuts(mesh, arguments, mesh.local_slots(), cuts)
    }

    /// Cuts this process's part of the arguments over its slots. Every process makes this call.
    #[expect(clippy::cast_possible_truncation, reason = "numbers of rows that were `usize`")]
    pub(super) fn cut_local_part(
        mesh: &DeviceMesh,
        arguments: &T,
        specs: &Specs,
        uneven: Uneven,
    ) -> Result<Self> {
        if !mesh.spans_processes() {
            return Self::cut(mesh, arguments, specs, uneven);
        }
        let n_local = mesh.devices().len();
        let axis = match mesh.topology().axes() {
            [(name, _)] => name.clone(),
            // No axis of several is cut alone, so `ALL` names them.
            _ => DeviceMesh::AXIS.to_owned(),
        };
        let topology = Topology::new(vec![(axis, n_local)], n_local)?;
        let cuts = plan_cuts(arguments, specs, uneven, &topology);
        // A process whose arguments cannot be cut takes part, so that the others do not wait for it.
        let n_rows = cuts.as_ref().map_or(0, |cuts| {
            cuts.iter().find(|cut| !cut.is_uncut()).map_or(0, ArgumentCuts::n_rows)
        });
        let here = [u64::from(cuts.is_err()), n_rows as u64];
        let by_slot = mesh.gather_numbers(&vec![here; n_local])?;
        let cuts = cuts?;
        if let Some(slot) = by_slot.iter().position(|&[has_failed, _]| has_failed == 1) {
            let reason = "its part of the arguments cannot be cut".to_owned();
            return Err(ProcessError::Peer { slot, reason }.into());
        }
        // Every process has the same number of slots.
        let process_rows = by_slot.iter().step_by(n_local).map(|&[_, n_rows]| n_rows as usize);
        let first_slot = mesh.local_slots().start;
        let part = LocalPart {
            first_slot,
            n_slots: mesh.len(),
            start: process_rows.clone().take(first_slot / n_local).sum(),
            total: process_rows.sum(),
        };
        let cuts = cuts.into_iter().map(|cut| cut.with_local_part(part)).collect();
        Self::from_cuts(mesh, arguments, 0..n_local, cuts)
    }

    /// Returns the shards of some slots.
    fn from_cuts(
        mesh: &DeviceMesh,
        arguments: &T,
        slots: Range<usize>,
        cuts: Vec<ArgumentCuts>,
    ) -> Result<Self> {
        for (index, input) in tree::leaves(arguments).iter().enumerate() {
            // Wait until the argument is computed, since the streams of other threads would not
            // wait.
            synchronize_all(input.device()).map_err(Error::shard(index))?;
        }
        let mut shards = Vec::with_capacity(slots.len());
        for slot in slots {
            shards.push(tree::try_map_indexed(arguments, |index, input| {
                cuts[index].shard(input, slot).map_err(Error::shard(index))
            })?);
        }
        let first_cut = cuts.into_iter().find(|cut| !cut.is_uncut()).map(Arc::new);
        Ok(Self { mesh: mesh.clone(), shards, first_cut })
    }

    /// Returns the shards of this process's devices, in the order of the mesh.
    pub fn shards(&self) -> &[T] {
        &self.shards
    }

    /// Rejects a value that is not on `mesh`.
    pub(super) fn check_mesh(&self, mesh: &DeviceMesh) -> Result<(), ValueError> {
        if self.mesh.ptr_eq(mesh) { Ok(()) } else { Err(ValueError::MeshMismatch) }
    }

    /// Joins the shards on the first device of the mesh. Over several processes, every process
    /// makes this call.
    ///
    /// # Errors
    ///
    /// The errors of [`PMap::call`](crate::PMap::call) after the replicas have run.
    pub fn gather(&self, specs: impl Into<Specs>) -> Result<T> {
        self.join(&specs.into(), false)
    }

    /// Joins the shards; `trust` skips the comparison of replicated results.
    pub(crate) fn join(&self, specs: &Specs, trust: bool) -> Result<T> {
        let JoinInputs { per_slot, specs, join } = self.join_inputs(specs, trust)?;
        let joined: Result<Vec<Tensor>> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| join.join(index, tensors_at(&per_slot, index), spec))
            .collect();
        Ok(tree::with_leaves(&self.shards[0], &joined?))
    }

    /// Joins the shards into existing tensors.
    pub(crate) fn join_into(&self, specs: &Specs, out: &T, trust: bool) -> Result<()> {
        let JoinInputs { per_slot, specs, join } = self.join_inputs(specs, trust)?;
        let leaves = tree::leaves(out);
        if leaves.len() != specs.len() {
            let expected = leaves.len();
            return Err(ValueError::OutputCount { slot: 0, tensors: specs.len(), expected }.into());
        }
        for (index, (spec, leaf)) in specs.iter().zip(&leaves).enumerate() {
            join.join_into(index, tensors_at(&per_slot, index), spec, leaf)?;
        }
        Ok(())
    }

    /// Collects the results of all slots, if they must be joined across processes, and resolves the
    /// specs.
    fn join_inputs(&self, specs: &Specs, trust: bool) -> Result<JoinInputs<'_>> {
        let own: Vec<Vec<Tensor>> = self.shards.iter().map(tree::leaves).collect();
        check_counts(&own)?;
        let resolved = self.resolve(specs);
        // The condition must not depend on results, since either all processes exchange or none
        // does.
        let is_exchanged = self.mesh.spans_processes() && !(trust && specs.are_replicated());
        let (per_slot, comparison) = if is_exchanged {
            let resolved = resolved.as_deref().ok();
            ResultExchange { mesh: &self.mesh, specs, resolved, trust }.run(&own)?
        } else {
            (own, if trust { Comparison::Trusted } else { Comparison::Bits })
        };
        let specs = resolved?;
        let join = ResultJoin {
            topology: self.mesh.topology(),
            home: &self.mesh.devices()[0],
            first_cut: self.first_cut.as_deref(),
            comparison,
        };
        Ok(JoinInputs { per_slot, specs, join })
    }

    /// Returns the treatments of each result under `specs`.
    fn resolve(&self, specs: &Specs) -> Result<Vec<ResolvedSpec>> {
        let mut faults = FaultList::default();
        let specs = specs.resolve(Side::Out, &self.shards[0], self.mesh.topology(), &mut faults)?;
        faults.check()?;
        Ok(specs)
    }
}

/// The inputs of a join.
struct JoinInputs<'a> {
    /// The results of each slot.
    per_slot: Vec<Vec<Tensor>>,
    /// The treatments of each result.
    specs: Vec<ResolvedSpec>,
    join: ResultJoin<'a>,
}

/// Returns tensor number `index` of each list.
fn tensors_at(lists: &[Vec<Tensor>], index: usize) -> Vec<Tensor> {
    lists.iter().map(|list| list[index].clone()).collect()
}

/// Plans the cut of each argument over the slots of a topology.
fn plan_cuts(
    arguments: &impl TensorTree,
    specs: &Specs,
    uneven: Uneven,
    topology: &Topology,
) -> Result<Vec<ArgumentCuts>> {
    let mut faults = FaultList::default();
    let specs = specs.resolve(Side::In, arguments, topology, &mut faults)?;
    let inputs = tree::leaves(arguments);
    let mut cuts = Vec::with_capacity(inputs.len());
    for (index, (input, spec)) in inputs.iter().zip(&specs).enumerate() {
        cuts.push(ArgumentCuts::new(index, input, spec, uneven, topology, &mut faults));
    }
    faults.check()?;
    Ok(cuts)
}
