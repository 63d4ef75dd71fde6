//! Collectives that move tensors without reducing them.

use std::slice;

use candle_core::{Result, Tensor};

use super::{
    bytes::{ReceiveBuffer, buffer, with_all_bytes},
    header::MemberHeader,
    sums::split,
    transfer::{MessageKind, MpiCall},
};

/// The sender rank in a header of a member that receives nothing.
const NO_SENDER: u64 = u64::MAX;

impl MpiCall<'_> {
    /// Returns the items of all members in one dimension, by rank, and the shape of each member's
    /// tensor. `bytes` are the bytes of `host`.
    pub(super) fn gather(&self, host: &Tensor, bytes: &[u8]) -> Result<(Tensor, Vec<Vec<usize>>)> {
        let own_size = match self.ctx.call.free_dim {
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
            if rank == self.ctx.rank {
                part.copy_from_slice(bytes);
            } else if received.headers[rank].is_inline {
                part.copy_from_slice(received.inline_data(rank));
            } else {
                late.push((rank, MessageKind::Data, part));
            }
        }
        let own = if received.headers[self.ctx.rank].is_inline { &[] } else { bytes };
        self.transfer(late, self.others().map(|to| (to, MessageKind::Data, own)));
        Ok((all.tensor(&[total])?, shapes))
    }

    /// Returns the shape of another member's tensor, given its header.
    fn shape(&self, own: &Tensor, header: &MemberHeader) -> Result<Vec<usize>> {
        let mut dims = own.dims().to_vec();
        if let Some(dim) = self.ctx.call.free_dim {
            dims[dim] = usize::try_from(header.size_or_sender)?;
        }
        Ok(dims)
    }

    /// Sends `parts[n]` to each rank n. Returns the part that each rank sends to this one, by rank.
    pub(super) fn swap(&self, parts: &[Tensor]) -> Result<Vec<Tensor>> {
        self.exchange_headers(parts, 0, &[])?;
        let own_rank = self.ctx.rank;
        let own = &parts[own_rank];
        let mut arrived: Vec<Box<dyn ReceiveBuffer>> =
            parts.iter().map(|_| buffer(own.dtype(), own.elem_count())).collect::<Result<_>>()?;
        with_all_bytes(parts, |bytes| {
            arrived[own_rank].bytes_mut().copy_from_slice(bytes[own_rank]);
            let places = arrived.iter_mut().enumerate().filter(|(from, _)| *from != own_rank);
            self.transfer(
                places.map(|(from, part)| (from, MessageKind::Data, part.bytes_mut())),
                self.others().map(|to| (to, MessageKind::Data, bytes[to])),
            );
            Ok(())
        })?;
        arrived.into_iter().map(|part| part.tensor(own.dims())).collect()
    }

    /// Sends `bytes` to the ranks that receive from this one, and returns the tensor of rank
    /// `from`, if any. All tensors have the dtype and shape of `x`.
    pub(super) fn receive(
        &self,
        x: &Tensor,
        bytes: &[u8],
        from: Option<usize>,
    ) -> Result<Option<Tensor>> {
        let sender = match from {
            Some(rank) => rank as u64,
            None => NO_SENDER,
        };
        let received = self.exchange_headers(slice::from_ref(x), sender, bytes)?;
        let mut arrived = buffer(x.dtype(), if from.is_some() { x.elem_count() } else { 0 })?;
        let into = arrived.bytes_mut();
        match from {
            Some(from) if from == self.ctx.rank => into.copy_from_slice(bytes),
            Some(from) if received.headers[from].is_inline => {
                into.copy_from_slice(received.inline_data(from));
            }
            Some(_) | None => {}
        }
        self.deliver(&received.headers, bytes, into, from);
        from.map(|_| arrived.tensor(x.dims())).transpose()
    }

    /// Sends `bytes` to the ranks that receive from this one, and receives the data of rank `from`
    /// into `into`. Data that came with a header are not sent again.
    fn deliver(
        &self,
        headers: &[MemberHeader],
        bytes: &[u8],
        into: &mut [u8],
        from: Option<usize>,
    ) {
        let own_rank = self.ctx.rank;
        let sender_of = |header: &MemberHeader| header.size_or_sender;
        let is_broadcast = headers.iter().all(|header| sender_of(header) == sender_of(&headers[0]));
        match from {
            Some(root) if is_broadcast && headers.len() > 2 => {
                if !headers[root].is_inline {
                    // A broadcast uses a tree, instead of one rank that sends to all.
                    self.broadcast(into, root);
                }
            }
            Some(_) | None => {
                let sender = from.filter(|&from| from != own_rank && !headers[from].is_inline);
                let receivers = self.others().filter(|&to| {
                    sender_of(&headers[to]) == own_rank as u64 && !headers[own_rank].is_inline
                });
                self.transfer(
                    sender.map(|from| (from, MessageKind::Data, into)),
                    receivers.map(|to| (to, MessageKind::Data, bytes)),
                );
            }
        }
    }
}
