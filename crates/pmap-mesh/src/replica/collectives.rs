//! The collectives without their gradients: what an engine is asked for, and what is made of its
//! answer.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use crate::{
    engine::{Engine, Site},
    reduce::Reduction,
};

/// One replica's engine.
#[derive(Clone, Debug)]
pub(crate) struct Collectives(pub(crate) Arc<dyn Engine>);

impl Collectives {
    pub(crate) fn all_reduce(
        &self,
        site: &Site,
        x: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        // A group of one gets a copy, as others do: the result must not change when the argument is
        // set.
        if site.size == 1 {
            x.detach().force_contiguous()
        } else {
            self.0.all_reduce(site, &x.detach(), reduction)
        }
    }

    pub(crate) fn gather(&self, site: &Site, x: &Tensor, dim: usize) -> Result<Tensor> {
        cat(self.0.all_gather(site, &x.detach())?, dim)
    }

    /// The part of the sum that belongs to this position, if position n gets `sizes[n]` rows.
    pub(crate) fn sum_and_scatter(
        &self,
        site: &Site,
        x: &Tensor,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Tensor> {
        let sum = self.all_reduce(site, x, Reduction::Sum)?;
        let start = sizes[..site.position].iter().sum();
        sum.narrow(dim, start, sizes[site.position])?.contiguous()
    }

    pub(crate) fn permute(
        &self,
        site: &Site,
        x: &Tensor,
        pairs: &[(usize, usize)],
    ) -> Result<Tensor> {
        let from = pairs.iter().find(|(_, to)| *to == site.position).map(|(from, _)| *from);
        let received = self.0.receive(site, &x.detach(), from)?;
        received.map_or_else(|| x.zeros_like(), Ok)
    }

    pub(crate) fn exchange(
        &self,
        site: &Site,
        x: &Tensor,
        split: usize,
        concat: usize,
    ) -> Result<Tensor> {
        let rows = even_parts(x, split, site)?[0];
        let parts = (0..site.size)
            .map(|n| x.detach().narrow(split, n * rows, rows))
            .collect::<Result<_>>()?;
        cat(self.0.all_to_all(site, parts)?, concat)
    }
}

/// The size of each position's part, all equal.
pub(crate) fn even_parts(x: &Tensor, dim: usize, site: &Site) -> Result<Vec<usize>> {
    let rows = x.dims()[dim];
    if !rows.is_multiple_of(site.size) {
        let (op, shape) = (site.call.op, x.dims());
        bail!(
            "{op}: dimension {dim} of shape {shape:?} does not split evenly over {} replicas",
            site.size
        );
    }
    Ok(vec![rows / site.size; site.size])
}

pub(crate) fn cat(parts: Vec<Tensor>, dim: usize) -> Result<Tensor> {
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, dim),
    }
}
