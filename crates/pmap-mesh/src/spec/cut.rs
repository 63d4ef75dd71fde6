//! Cutting arguments into shards.

use candle_core::{Device, Tensor};

use crate::{
    error::{Error, Result},
    mesh::{axes::AxisSet, topology::Topology},
    reduce::parts::balanced,
    spec::{
        self, Resolved, Treatment,
        fault::{Side, SpecFault},
    },
};

/// What happens to a dimension whose size the devices do not divide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Uneven {
    /// The call is refused; the default, as in JAX.
    #[default]
    Refuse,
    /// Shards are of equal size, the last ones filled up with zeros. Results that are put together
    /// from them in a dimension of that size are cut back.
    Pad,
    /// Sizes differ by at most one, the first shards are the larger ones. Every device needs at
    /// least one row.
    Balanced,
}

/// How the rows of the first sharded argument are dealt: what
/// [`Replica::valid_len`](crate::Replica::valid_len) tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) set: AxisSet,
    total: usize,
    parts: usize,
    uneven: Uneven,
}

/// The real rows of one shard, of how many, in how many shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Valid {
    pub(crate) len: usize,
    pub(crate) total: usize,
    pub(crate) parts: usize,
}

impl Rows {
    /// The rows at a position: where they begin and how many they are.
    fn at(&self, position: usize) -> (usize, usize) {
        if self.uneven == Uneven::Pad {
            let start = (position * self.padded()).min(self.total);
            return (start, self.padded().min(self.total - start));
        }
        let range = balanced(self.total, position, self.parts);
        (range.start, range.len())
    }

    /// The size of every shard after padding.
    fn padded(&self) -> usize {
        self.total.div_ceil(self.parts)
    }

    pub(crate) fn valid(&self, position: usize) -> Valid {
        Valid { len: self.at(position).1, total: self.total, parts: self.parts }
    }

    /// A result of a padded shard without its padding, if it still has it.
    pub(crate) fn trim(
        &self,
        result: &Tensor,
        dim: usize,
        position: usize,
    ) -> candle_core::Result<Tensor> {
        let padded = self.uneven == Uneven::Pad && result.dims()[dim] == self.padded();
        if padded { result.narrow(dim, 0, self.at(position).1) } else { Ok(result.clone()) }
    }
}

/// How one argument is cut: checked once, before any replica starts.
#[derive(Debug)]
pub(crate) struct Cut(Vec<(usize, Rows)>);

impl Cut {
    /// The cut of argument `index`; faults are added to `faults`.
    pub(crate) fn new(
        index: usize,
        input: &Tensor,
        spec: &Resolved,
        uneven: Uneven,
        topology: &Topology,
        faults: &mut Vec<SpecFault>,
    ) -> Self {
        let mut cuts: Vec<(usize, Rows)> = Vec::new();
        for &(set, treatment) in spec {
            let Treatment::Shard(dim) = treatment else { continue };
            let dim = match spec::find_dim(Side::In, index, dim, input) {
                Ok(dim) => dim,
                Err(fault) => {
                    faults.push(fault);
                    continue;
                }
            };
            let parts = topology.size(set);
            let earlier = cuts.iter().rev().find(|(cut, _)| *cut == dim);
            let total = earlier.map_or(input.dims()[dim], |(_, rows)| rows.total / rows.parts);
            let impossible = match uneven {
                _ if total.is_multiple_of(parts) => false,
                // Shards of different sizes cannot all be cut again.
                _ if earlier.is_some() => true,
                Uneven::Refuse => true,
                Uneven::Pad => total == 0,
                Uneven::Balanced => total < parts,
            };
            if impossible {
                faults.push(SpecFault::NotDivisible {
                    index,
                    dim,
                    size: total,
                    shape: input.dims().to_vec(),
                    parts,
                });
            }
            cuts.push((dim, Rows { set, total, parts, uneven }));
        }
        Self(cuts)
    }

    /// The rows of the first dimension that is cut.
    pub(crate) fn rows(&self) -> Option<Rows> {
        self.0.first().map(|(_, rows)| *rows)
    }

    /// The shard of a slot: a view, without a copy, unless it is padded.
    pub(crate) fn view(
        &self,
        input: &Tensor,
        slot: usize,
        topology: &Topology,
    ) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(input.clone(), |shard, (dim, rows)| {
            let (_, position) = topology.groups(rows.set).seat(slot);
            let (start, len) = rows.at(position);
            match rows.uneven {
                Uneven::Pad if len == 0 => zeros(&shard, *dim, rows.padded()),
                Uneven::Pad => {
                    shard.narrow(*dim, start, len)?.pad_with_zeros(*dim, 0, rows.padded() - len)
                }
                _ => shard.narrow(*dim, start, len),
            }
        })
    }
}

fn zeros(like: &Tensor, dim: usize, size: usize) -> candle_core::Result<Tensor> {
    let mut shape = like.dims().to_vec();
    shape[dim] = size;
    Tensor::zeros(shape, like.dtype(), like.device())
}

/// Moves a shard to the device of its replica.
///
/// A shard along an inner dimension is copied, because some of candle's operations refuse tensors
/// with gaps; one that leaves its device is copied first, because candle would move all of the
/// storage that the view looks at.
pub(crate) fn place(shard: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if shard.device().same_device(device) {
        shard.contiguous()
    } else {
        shard.force_contiguous()?.to_device(device)
    }
}

/// Waits until an argument is written: another thread's stream would not know of it.
pub(crate) fn wait(index: usize, input: &Tensor) -> Result<()> {
    input.device().synchronize().map_err(|source| Error::Shard { index, source })
}
