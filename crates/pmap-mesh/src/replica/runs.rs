//! Collectives on many tensors, whose items are divided among the replicas in ranges.

use candle_core::{Result, Tensor, Var, bail};

use crate::{
    axes::MeshAxes,
    engine::{GroupContext, layout::RunLayout},
    replica::{Replica, pending::Pending},
};

#[doc(hidden)]
impl Replica {
    /// Gathers the tensors of a layout from the runs that each replica along `axes` owns. One
    /// collective gathers many parameters, and returns each parameter as a separate tensor.
    ///
    /// `own` are this replica's runs, in the order of the layout, of any shapes. Each result is a
    /// variable, so that `backward` finds its gradient; [`reduce_runs`](Self::reduce_runs) sums
    /// such gradients and returns the runs to their owners. No gradient flows to `own`. On the
    /// CPU, the replicas of the group share one copy of every result.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if the layout has a different number of
    /// ranks than the group, or `own` does not match it.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use pmap_mesh::{ALL, DeviceMesh, support::{Run, RunLayout}};
    ///
    /// let layout = RunLayout::new(
    ///     "layer",
    ///     [(vec![3, 2], DType::F32), (vec![2], DType::F32)],
    ///     [
    ///         vec![Run { tensor: 0, items: 0..4 }],
    ///         vec![Run { tensor: 0, items: 4..6 }, Run { tensor: 1, items: 0..2 }],
    ///     ],
    /// )?;
    /// let sums = DeviceMesh::cpu(2)?.pmap(move |ctx, _: ()| {
    ///     let run = |len: usize| Tensor::full(ctx.slot() as f32, len, &Device::Cpu);
    ///     let own = if ctx.slot() == 0 { vec![run(4)?] } else { vec![run(2)?, run(2)?] };
    ///     let whole = ctx.gather_runs(own, &layout, ALL)?;
    ///     assert_eq!(whole[0].to_vec2::<f32>()?, [[0., 0.], [0., 0.], [1., 1.]]);
    ///
    ///     let grads = whole[0].sqr()?.sum_all()?.backward()?;
    ///     let grad = grads.get(&whole[0]).cloned();
    ///     let grad = grad.ok_or_else(|| candle_core::Error::msg("unused"))?;
    ///     ctx.reduce_runs(vec![grad, whole[1].as_detached_tensor()], &layout, ALL)
    /// });
    /// let sums = sums.call_sharded(())?;
    /// assert_eq!(sums.shards()[0][0].to_vec1::<f32>()?, [0.; 4]);
    /// assert_eq!(sums.shards()[1][0].to_vec1::<f32>()?, [4.; 2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn gather_runs(
        &self,
        own: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Var>> {
        let ctx = self.layout_context("gather_runs", layout, axes.into())?;
        check_own(&ctx, &own, layout)?;
        let collectives = &self.0.collectives;
        let request = collectives.gather_request(&ctx, own, layout, &self.0.device);
        variables(collectives.run(&ctx, request)?)
    }

    /// Starts a [`gather_runs`](Self::gather_runs) without waiting for the other replicas.
    ///
    /// # Errors
    ///
    /// The errors of [`gather_runs`](Self::gather_runs) that can be detected before the other
    /// replicas arrive.
    #[track_caller]
    pub fn start_gather_runs(
        &self,
        own: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Pending<Vec<Var>>> {
        let ctx = self.layout_context("start_gather_runs", layout, axes.into())?;
        check_own(&ctx, &own, layout)?;
        let collectives = &self.0.collectives;
        let request = collectives.gather_request(&ctx, own, layout, &self.0.device);
        Ok(Pending::new(collectives.start(&ctx, request)?, variables))
    }

    /// Sums the tensors of a layout over the replicas along `axes`, and returns the sums of the
    /// runs that this replica owns. One collective reduces many gradients.
    ///
    /// `tensors` are this replica's, with the layout's shapes. The results are in the order of
    /// [`RunLayout::runs`], and each has one dimension. Sums are formed in rank order, and have the
    /// same bits as [`psum`](Self::psum). No gradient flows through this collective.
    ///
    /// # Errors
    ///
    /// The errors of [`psum`](Self::psum), and an error if the layout has a different number of
    /// ranks than the group, or `tensors` do not match it.
    #[track_caller]
    pub fn reduce_runs(
        &self,
        tensors: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Tensor>> {
        let ctx = self.layout_context("reduce_runs", layout, axes.into())?;
        check_tensors(&ctx, &tensors, layout)?;
        let collectives = &self.0.collectives;
        collectives.run(&ctx, collectives.reduce_request(&ctx, tensors, layout))
    }

    /// Starts a [`reduce_runs`](Self::reduce_runs) without waiting for the other replicas.
    ///
    /// # Errors
    ///
    /// The errors of [`reduce_runs`](Self::reduce_runs) that can be detected before the other
    /// replicas arrive.
    #[track_caller]
    pub fn start_reduce_runs(
        &self,
        tensors: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let ctx = self.layout_context("start_reduce_runs", layout, axes.into())?;
        check_tensors(&ctx, &tensors, layout)?;
        let collectives = &self.0.collectives;
        let request = collectives.reduce_request(&ctx, tensors, layout);
        Ok(Pending::new(collectives.start(&ctx, request)?, Ok))
    }

    #[track_caller]
    fn layout_context(
        &self,
        op: &'static str,
        layout: &RunLayout,
        axes: MeshAxes,
    ) -> Result<GroupContext> {
        let ctx = self.context(op, None, axes)?.with_detail(layout.call_detail().to_owned());
        if layout.ranks() != ctx.size() {
            bail!(
                "{op}({}): a layout of {} ranks in a group of {}",
                layout.name(),
                layout.ranks(),
                ctx.size()
            );
        }
        Ok(ctx)
    }
}

/// Converts gathered leaves to variables. `from_tensor` returns the leaves unchanged, because they
/// are variables already.
fn variables(leaves: Vec<Tensor>) -> Result<Vec<Var>> {
    leaves.into_iter().map(|leaf| Var::from_tensor(&leaf)).collect()
}

fn check_own(ctx: &GroupContext, own: &[Tensor], layout: &RunLayout) -> Result<()> {
    let runs = layout.runs(ctx.rank);
    if own.len() != runs.len() {
        bail!(
            "{}({}): {} tensors for the {} runs of rank {}",
            ctx.call.op,
            layout.name(),
            own.len(),
            runs.len(),
            ctx.rank
        );
    }
    for (n, (x, run)) in own.iter().zip(runs).enumerate() {
        let dtype = layout.tensors()[run.tensor].1;
        if x.dtype() != dtype || x.elem_count() != run.items.len() {
            bail!(
                "{}({}): run {n} of rank {} is {} items of {}, the layout says {} of {}",
                ctx.call.op,
                layout.name(),
                ctx.rank,
                x.elem_count(),
                x.dtype().as_str(),
                run.items.len(),
                dtype.as_str()
            );
        }
    }
    Ok(())
}

fn check_tensors(ctx: &GroupContext, tensors: &[Tensor], layout: &RunLayout) -> Result<()> {
    let expected = layout.tensors();
    if tensors.len() != expected.len() {
        bail!(
            "{}({}): {} tensors for a layout of {}",
            ctx.call.op,
            layout.name(),
            tensors.len(),
            expected.len()
        );
    }
    for (n, (x, (shape, dtype))) in tensors.iter().zip(expected).enumerate() {
        if x.dtype() != *dtype || x.shape() != shape {
            bail!(
                "{}({}): tensor {n} is {} {:?}, the layout says {} {:?}",
                ctx.call.op,
                layout.name(),
                x.dtype().as_str(),
                x.dims(),
                dtype.as_str(),
                shape.dims()
            );
        }
    }
    Ok(())
}
