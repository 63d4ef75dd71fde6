//! Collectives of tensors of which each replica owns runs of items, many tensors at a time.

use candle_core::{Result, Tensor, Var, bail};

use crate::{
    axes::MeshAxes,
    engine::{Site, layout::RunLayout},
    replica::{Replica, pending::Pending},
};

#[doc(hidden)]
impl Replica {
    /// The tensors of a layout, put together of the runs that each replica along `axes` owns: many
    /// parameters in one collective, each a tensor of its own.
    ///
    /// `own` are this replica's runs, in the order of the layout, of any shapes. Each result is a
    /// variable, so that `backward` finds its gradient, which
    /// [`reduce_runs`](Self::reduce_runs) hands to the owners of its parts; no gradient flows to
    /// `own`. On a processor the replicas of the group share one copy of every result.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum); if the layout is of another number of ranks than the group, or
    /// `own` is not as it says.
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
        let site = self.runs_site("gather_runs", layout, axes.into())?;
        check_own(&site, &own, layout)?;
        variables(self.0.collectives.gather_runs(&site, own, layout, &self.0.device)?)
    }

    /// Starts [`gather_runs`](Self::gather_runs): hands in `own` and does not wait for the others.
    ///
    /// # Errors
    ///
    /// As [`gather_runs`](Self::gather_runs), as far as it can be known before the others come.
    #[track_caller]
    pub fn start_gather_runs(
        &self,
        own: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Pending<Vec<Var>>> {
        let site = self.runs_site("start_gather_runs", layout, axes.into())?;
        check_own(&site, &own, layout)?;
        let underway = self.0.collectives.start_gather_runs(&site, own, layout, &self.0.device)?;
        Ok(Pending::new(underway, variables))
    }

    /// The runs of a layout that this replica owns, each summed over the replicas along `axes`:
    /// many gradients in one collective.
    ///
    /// `list` are this replica's tensors of the layout's shapes. Each result has one dimension, in
    /// the order of [`RunLayout::runs`]. Sums are formed in rank order, as by
    /// [`psum`](Self::psum), to the bit. Gradients do not pass.
    ///
    /// # Errors
    ///
    /// As [`psum`](Self::psum); if the layout is of another number of ranks than the group, or
    /// `list` is not as it says.
    #[track_caller]
    pub fn reduce_runs(
        &self,
        list: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Vec<Tensor>> {
        let site = self.runs_site("reduce_runs", layout, axes.into())?;
        check_list(&site, &list, layout)?;
        self.0.collectives.reduce_runs(&site, list, layout)
    }

    /// Starts [`reduce_runs`](Self::reduce_runs): hands in the list and does not wait for the
    /// others.
    ///
    /// # Errors
    ///
    /// As [`reduce_runs`](Self::reduce_runs), as far as it can be known before the others come.
    #[track_caller]
    pub fn start_reduce_runs(
        &self,
        list: Vec<Tensor>,
        layout: &RunLayout,
        axes: impl Into<MeshAxes>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let site = self.runs_site("start_reduce_runs", layout, axes.into())?;
        check_list(&site, &list, layout)?;
        Ok(Pending::new(self.0.collectives.start_reduce_runs(&site, list, layout)?, Ok))
    }

    #[track_caller]
    fn runs_site(&self, op: &'static str, layout: &RunLayout, axes: MeshAxes) -> Result<Site> {
        let site = self.site(op, None, axes)?.with_detail(layout.detail().to_owned());
        if layout.ranks() != site.size() {
            bail!(
                "{op}({}): a layout of {} ranks in a group of {}",
                layout.name(),
                layout.ranks(),
                site.size()
            );
        }
        Ok(site)
    }
}

/// The gathered leaves: they are variables, and `from_tensor` returns those as they are.
fn variables(leaves: Vec<Tensor>) -> Result<Vec<Var>> {
    leaves.into_iter().map(|leaf| Var::from_tensor(&leaf)).collect()
}

fn check_own(site: &Site, own: &[Tensor], layout: &RunLayout) -> Result<()> {
    let runs = layout.runs(site.rank);
    if own.len() != runs.len() {
        bail!(
            "{}({}): {} tensors for the {} runs of rank {}",
            site.call.op,
            layout.name(),
            own.len(),
            runs.len(),
            site.rank
        );
    }
    for (n, (x, run)) in own.iter().zip(runs).enumerate() {
        let dtype = layout.tensors()[run.tensor].1;
        if x.dtype() != dtype || x.elem_count() != run.items.len() {
            bail!(
                "{}({}): run {n} of rank {} is {} items of {}, the layout says {} of {}",
                site.call.op,
                layout.name(),
                site.rank,
                x.elem_count(),
                x.dtype().as_str(),
                run.items.len(),
                dtype.as_str()
            );
        }
    }
    Ok(())
}

fn check_list(site: &Site, list: &[Tensor], layout: &RunLayout) -> Result<()> {
    let tensors = layout.tensors();
    if list.len() != tensors.len() {
        bail!(
            "{}({}): {} tensors for a layout of {}",
            site.call.op,
            layout.name(),
            list.len(),
            tensors.len()
        );
    }
    for (n, (x, (shape, dtype))) in list.iter().zip(tensors).enumerate() {
        if x.dtype() != *dtype || x.shape() != shape {
            bail!(
                "{}({}): tensor {n} is {} {:?}, the layout says {} {:?}",
                site.call.op,
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
