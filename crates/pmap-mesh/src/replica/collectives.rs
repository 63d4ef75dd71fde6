//! The collectives without their gradients: what an engine is asked for, and what is made of its
//! answer.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use crate::{
    engine::{Engine, Site},
    error::Error,
    mesh::place::{copied, in_one_piece},
    reduce::Reduction,
};

/// What one replica asks of its engine, in one call.
#[derive(Clone, Debug)]
pub(crate) struct Collectives(Arc<dyn Engine>);

impl Collectives {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Self {
        Self(engine)
    }

    pub(crate) fn all_reduce(
        &self,
        site: &Site,
        x: &Tensor,
        reduction: Reduction,
    ) -> Result<Tensor> {
        // A group of one gets a copy, as others do: the result must not change when the argument is
        // set.
        if site.size() == 1 {
            copied(&x.detach())
        } else {
            self.0.all_reduce(site, &x.detach(), reduction)
        }
    }

    /// The sums of those of the list's tensors that are `wanted` here.
    pub(crate) fn sum_list(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
    ) -> Result<Vec<Tensor>> {
        self.0.reduce_lists(site, list, wanted, Reduction::Sum)
    }

    /// The tensors of all members by rank, concatenated, and the size of each in `dim`.
    pub(crate) fn gather(
        &self,
        site: &Site,
        x: &Tensor,
        dim: usize,
    ) -> Result<(Tensor, Vec<usize>)> {
        let parts = self.0.all_gather(site, &x.detach())?;
        let sizes = parts.iter().map(|part| part.dims()[dim]).collect();
        Ok((cat(parts, dim)?, sizes))
    }

    /// The part of the sum that belongs to this rank, if rank n gets `sizes[n]` rows.
    pub(crate) fn sum_and_scatter(
        &self,
        site: &Site,
        x: &Tensor,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Tensor> {
        let sum = self.all_reduce(site, x, Reduction::Sum)?;
        let start = sizes[..site.rank].iter().sum();
        in_one_piece(&sum.narrow(dim, start, sizes[site.rank])?)
    }

    pub(crate) fn permute(
        &self,
        site: &Site,
        x: &Tensor,
        pairs: &[(usize, usize)],
    ) -> Result<Tensor> {
        let from = pairs.iter().find(|(_, to)| *to == site.rank).map(|(from, _)| *from);
        match self.0.receive(site, &x.detach(), from)? {
            Some(received) => Ok(received),
            None => x.zeros_like(),
        }
    }

    /// The `x` of the member of rank `root`.
    #[expect(clippy::expect_used, reason = "an engine returns something from whom it is asked")]
    pub(crate) fn broadcast(&self, site: &Site, x: &Tensor, root: usize) -> Result<Tensor> {
        let received = self.0.receive(site, &x.detach(), Some(root))?;
        Ok(received.expect("the root has sent something"))
    }

    pub(crate) fn exchange(
        &self,
        site: &Site,
        x: &Tensor,
        split: usize,
        concat: usize,
    ) -> Result<Tensor> {
        let rows = even_parts(x, split, site)?[0];
        let parts = (0..site.size())
            .map(|rank| x.detach().narrow(split, rank * rows, rows))
            .collect::<Result<_>>()?;
        cat(self.0.all_to_all(site, parts)?, concat)
    }

    pub(crate) fn barrier(&self, site: &Site) -> Result<()> {
        self.0.barrier(site)
    }

    /// Says how the replica has ended.
    pub(crate) fn end(&self, outcome: crate::error::Result<()>) {
        match outcome {
            Ok(()) => self.0.finish(),
            Err(error) => self.0.fail(error),
        }
    }

    /// Ends the call for all with an error of its own kind, and returns what this replica is to
    /// return.
    pub(crate) fn refuse(&self, error: Error) -> candle_core::Error {
        let message = error.to_string();
        self.0.fail(error);
        candle_core::Error::msg(message)
    }
}

/// The size of each rank's part, all equal.
pub(crate) fn even_parts(x: &Tensor, dim: usize, site: &Site) -> Result<Vec<usize>> {
    let rows = x.dims()[dim];
    if !rows.is_multiple_of(site.size()) {
        bail!(
            "{}: dimension {dim} of shape {:?} does not split evenly over {} replicas",
            site.call.op,
            x.dims(),
            site.size()
        );
    }
    Ok(vec![rows / site.size(); site.size()])
}

fn cat(parts: Vec<Tensor>, dim: usize) -> Result<Tensor> {
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, dim),
    }
}
