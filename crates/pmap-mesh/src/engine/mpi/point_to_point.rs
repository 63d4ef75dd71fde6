//! Collectives that move tensors.

use std::slice;

use candle_core::{Result, Tensor};

use super::{
    bytes::{Buffer, buffer, with_all_bytes},
    sums::split,
    transfer::{Call, Kind},
    wire::Header,
};

/// Nobody, as the rank in a header that a member wants to receive from.
const NOBODY: u64 = u64::MAX;

impl Call<'_> {
    /// The items of all members by rank, and the shape of what each has; `bytes` are those of
    /// `host`.
    pub(super) fn gather(&self, host: &Tensor, bytes: &[u8]) -> Result<(Tensor, Vec<Vec<usize>>)> {
        let own_size = match self.site.call.free_dim {
            Some(dim) => host.dims()[dim] as u64,
            None => 0,
        };
        let received = self.exchange_headers(slice::from_ref(host), own_size, bytes)?;
        let shapes: Vec<Vec<usize>> = received
            .headers
            .iter()
            .map(|header| self.shape(host, header))
            .collect::<Result<_>>()?;
        let n_items = |shape: &Vec<usize>| shape.iter().product::<usize>();
        let total = shapes.iter().map(n_items).sum();
        let mut all = buffer(host.dtype(), total)?;
        let item_bytes = host.dtype().size_in_bytes();
        let parts = split(all.bytes_mut(), shapes.iter().map(|shape| n_items(shape) * item_bytes));
        let mut late = Vec::new();
        for (rank, part) in parts.into_iter().enumerate() {
            if rank == self.site.rank {
                part.copy_from_slice(bytes);
            } else if received.headers[rank].inline {
                part.copy_from_slice(received.inline(rank));
            } else {
                late.push((rank, Kind::Data, part));
            }
        }
        let own = if received.headers[self.site.rank].inline { &[] } else { bytes };
        self.transfer(late, self.others().map(|to| (to, Kind::Data, own)));
        Ok((all.tensor(&[total])?, shapes))
    }

    /// The shape of what the member with this header contributes to a gathering.
    fn shape(&self, own: &Tensor, header: &Header) -> Result<Vec<usize>> {
        let mut dims = own.dims().to_vec();
        if let Some(dim) = self.site.call.free_dim {
            dims[dim] = usize::try_from(header.aux)?;
        }
        Ok(dims)
    }

    /// Sends `parts[n]` to each rank n; returns what all have for this one, by rank.
    pub(super) fn swap(&self, parts: &[Tensor]) -> Result<Vec<Tensor>> {
        self.exchange_headers(parts, 0, &[])?;
        let own_rank = self.site.rank;
        let own = &parts[own_rank];
        let mut arrived: Vec<Box<dyn Buffer>> =
            parts.iter().map(|_| buffer(own.dtype(), own.elem_count())).collect::<Result<_>>()?;
        with_all_bytes(parts, |bytes| {
            arrived[own_rank].bytes_mut().copy_from_slice(bytes[own_rank]);
            let places = arrived.iter_mut().enumerate().filter(|(from, _)| *from != own_rank);
            self.transfer(
                places.map(|(from, part)| (from, Kind::Data, part.bytes_mut())),
                self.others().map(|to| (to, Kind::Data, bytes[to])),
            );
            Ok(())
        })?;
        arrived.into_iter().map(|part| part.tensor(own.dims())).collect()
    }

    /// What rank `from` sends, if this one is to receive anything; `bytes` are what it sends
    /// itself, of the type and shape of `x`.
    pub(super) fn receive(
        &self,
        x: &Tensor,
        bytes: &[u8],
        from: Option<usize>,
    ) -> Result<Option<Tensor>> {
        let sender = match from {
            Some(rank) => rank as u64,
            None => NOBODY,
        };
        let received = self.exchange_headers(slice::from_ref(x), sender, bytes)?;
        let mut arrived = buffer(x.dtype(), if from.is_some() { x.elem_count() } else { 0 })?;
        let into = arrived.bytes_mut();
        match from {
            Some(from) if from == self.site.rank => into.copy_from_slice(bytes),
            Some(from) if received.headers[from].inline => {
                into.copy_from_slice(received.inline(from));
            }
            Some(_) | None => {}
        }
        self.deliver(&received.headers, bytes, into, from);
        from.map(|_| arrived.tensor(x.dims())).transpose()
    }

    /// Sends `bytes` to the ranks that want them, and receives from rank `from`, unless they have
    /// travelled with the headers.
    fn deliver(&self, headers: &[Header], bytes: &[u8], into: &mut [u8], from: Option<usize>) {
        let own_rank = self.site.rank;
        let is_broadcast = headers.iter().all(|header| header.aux == headers[0].aux);
        match from {
            Some(root) if is_broadcast && headers.len() > 2 => {
                if !headers[root].inline {
                    // A tree, instead of one that sends to all.
                    self.broadcast(into, root);
                }
            }
            Some(_) | None => {
                let from = from.filter(|&from| from != own_rank && !headers[from].inline);
                let to = self
                    .others()
                    .filter(|&to| headers[to].aux == own_rank as u64 && !headers[own_rank].inline);
                self.transfer(
                    from.map(|from| (from, Kind::Data, into)),
                    to.map(|to| (to, Kind::Data, bytes)),
                );
            }
        }
    }
}
