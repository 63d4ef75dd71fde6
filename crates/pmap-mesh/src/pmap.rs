//! One program, many devices: cut the arguments, run everywhere at once, put the results together.

use std::{fmt, marker::PhantomData, sync::Arc};

use candle_core::Tensor;

use crate::{
    axes::{Axes, InAxis, OutAxis},
    error::{Error, Result},
    mesh::DeviceMesh,
    replica::Replica,
    shard::{self, Cut},
    tree::{self, TensorTree},
    worker::{Workers, panic_message},
};

/// A function that runs on every device of a mesh; made by [`DeviceMesh::pmap`].
///
/// # Determinism
///
/// Results are put together in the order of the mesh, whichever device finishes first.
///
/// # References
///
/// JAX's `pmap`, but a mapped axis is cut into shards and keeps its place, as in `shard_map`, where `pmap` would
/// remove it: a batch of 8 on 2 devices is two batches of 4.
pub struct PMap<I, O, F> {
    mesh: DeviceMesh,
    f: Arc<F>,
    in_axes: Axes<InAxis>,
    out_axes: Axes<OutAxis>,
    signature: PhantomData<fn(I) -> O>,
}

impl<I, O, F> PMap<I, O, F>
where
    I: TensorTree,
    O: TensorTree,
    F: Fn(&Replica, I) -> candle_core::Result<O> + Send + Sync + 'static,
{
    pub(crate) fn new(mesh: DeviceMesh, f: F) -> Self {
        let in_axes = Axes::first_and_rest(InAxis::Shard(0), InAxis::Replicate);
        Self { mesh, f: Arc::new(f), in_axes, out_axes: OutAxis::Gather(0).into(), signature: PhantomData }
    }

    /// Sets what each device gets of the arguments: one axis for each tensor, or one for all.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use pmap_mesh::{DeviceMesh, InAxis, OutAxis};
    ///
    /// let mesh = DeviceMesh::cpu(2)?;
    /// let (x, w) = (Tensor::ones((3, 4), candle_core::DType::F32, &Device::Cpu)?, Tensor::eye(4, candle_core::DType::F32, &Device::Cpu)?);
    ///
    /// // Columns of `w` on different devices: the columns of the product come back side by side.
    /// let matmul = mesh
    ///     .pmap(|_, (x, w): (Tensor, Tensor)| x.matmul(&w))
    ///     .in_axes([InAxis::Replicate, InAxis::Shard(-1)])
    ///     .out_axes(OutAxis::Gather(-1));
    /// assert_eq!(matmul.call((x.clone(), w))?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn in_axes(self, axes: impl Into<Axes<InAxis>>) -> Self {
        Self { in_axes: axes.into(), ..self }
    }

    /// Sets what becomes of the results: one axis for each tensor, or one for all.
    #[must_use]
    pub fn out_axes(self, axes: impl Into<Axes<OutAxis>>) -> Self {
        Self { out_axes: axes.into(), ..self }
    }

    /// Runs the function on every device and returns the results on the first device of the mesh.
    ///
    /// Shards are views of the argument where they lie on the same device and axis 0 is cut.
    ///
    /// # Errors
    ///
    /// Before a replica starts: [`Error::AxesCount`], [`Error::AxisOutOfRange`], [`Error::NotDivisible`],
    /// [`Error::Nested`]. From inside: [`Error::Replica`] and [`Error::Panicked`]; the mesh can be used again at once.
    /// Afterwards: [`Error::OutputsDiffer`], [`Error::AxisOutOfRange`],
    /// [`Error::MeanOfIntegers`] and [`Error::Gather`].
    #[allow(clippy::needless_pass_by_value, reason = "arguments are given away, as to any function of tensors")]
    pub fn call(&self, arguments: I) -> Result<O> {
        Workers::refuse_nesting()?;
        let shards = self.shard(&arguments)?;
        let jobs = shards.into_iter().enumerate().map(|(index, shard)| self.job(index, shard));
        let outcomes = self.mesh.workers().run(jobs);
        let outputs = outcomes.into_iter().enumerate().map(|(index, outcome)| {
            outcome.unwrap_or_else(|payload| Err(self.panicked(index, panic_message(&*payload))))
        });
        self.gather(&outputs.collect::<Result<Vec<O>>>()?)
    }

    /// The arguments of every replica, as views.
    fn shard(&self, arguments: &I) -> Result<Vec<I>> {
        let inputs = tree::leaves(arguments);
        let axes = self.in_axes.resolve(inputs.len(), "in")?;
        let cuts = inputs.iter().zip(axes).enumerate();
        let cuts: Vec<Cut> =
            cuts.map(|(index, (input, axis))| Cut::new(index, input, axis, self.mesh.len())).collect::<Result<_>>()?;
        inputs.iter().enumerate().try_for_each(|(index, input)| wait(input).map_err(|e| failed(index, e)))?;
        (0..self.mesh.len())
            .map(|replica| {
                let mut cuts = cuts.iter().enumerate();
                arguments.try_map(&mut |input| match cuts.next() {
                    Some((index, cut)) => cut.view(input, replica).map_err(|e| failed(index, e)),
                    None => Ok(input.clone()),
                })
            })
            .collect()
    }

    /// What the worker of one replica does.
    fn job(&self, index: usize, shard: I) -> impl FnOnce() -> Result<O> + Send + use<I, O, F> {
        let (replica, f) = (self.mesh.replica(index), Arc::clone(&self.f));
        move || {
            let run = || {
                let shard = shard.try_map(&mut |input| shard::place(input, replica.device()))?;
                let output = f(&replica, shard)?;
                replica.device().synchronize()?;
                Ok(output)
            };
            run().map_err(|source| Error::Replica { index, device: replica.device().clone(), source })
        }
    }

    fn gather(&self, outputs: &[O]) -> Result<O> {
        let leaves: Vec<Vec<Tensor>> = outputs.iter().map(tree::leaves).collect();
        let expected = leaves[0].len();
        if let Some(index) = leaves.iter().position(|leaves| leaves.len() != expected) {
            return Err(Error::OutputsDiffer { index, tensors: leaves[index].len(), expected });
        }
        let mut out_axes = self.out_axes.resolve(expected, "out")?.into_iter().enumerate();
        let home = &self.mesh.devices()[0];
        outputs[0].try_map(&mut |output| match out_axes.next() {
            Some((index, axis)) => {
                let of_all: Vec<Tensor> = leaves.iter().map(|leaves| leaves[index].clone()).collect();
                shard::gather(index, &of_all, axis, home)
            }
            None => Ok(output.clone()),
        })
    }

    fn panicked(&self, index: usize, message: String) -> Error {
        Error::Panicked { index, device: self.mesh.devices()[index].clone(), message }
    }
}

impl<I, O, F> fmt::Debug for PMap<I, O, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mesh, in_axes, out_axes, .. } = self;
        f.debug_struct("PMap")
            .field("mesh", mesh)
            .field("in_axes", in_axes)
            .field("out_axes", out_axes)
            .finish_non_exhaustive()
    }
}

/// Waits until an input is written: another thread's stream would not know of it.
fn wait(input: &Tensor) -> candle_core::Result<()> {
    input.device().synchronize()
}

fn failed(index: usize, source: candle_core::Error) -> Error {
    Error::Shard { index, source }
}
