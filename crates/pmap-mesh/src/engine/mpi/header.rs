//! The header that each member of a group sends before any other data. Small data are sent with the
//! header.

use std::sync::MutexGuard;

use bytemuck::{cast_slice, cast_slice_mut, pod_read_unaligned};
use candle_core::{Result, Tensor};

use super::{
    session::to_mpi_rank,
    transfer::{AwaitedMessages, IncomingMessage, MessageKind, MpiCall},
};
use crate::{
    engine::processes::{TEXT_BYTES, call_hash, description, disagreement},
    sync::lock,
};

/// The largest data, in bytes, that a member sends with its header. Every member then reduces all
/// data alone, which costs less than a second exchange of messages.
pub(super) const SMALL_BYTES: usize = 16 << 10;
/// The largest part of inline data in the first message. With the header it is below the 4 KB that
/// Open MPI sends without a handshake.
const INLINE_BYTES: usize = 3584;
const HEADER_WORDS: usize = 4;
const HEADER_BYTES: usize = HEADER_WORDS * size_of::<u64>();
/// The longest first message, in bytes.
pub(super) const FIRST_BYTES: usize = HEADER_BYTES + INLINE_BYTES;
/// The bytes of the inbox for each rank.
const RANK_BYTES: usize = HEADER_BYTES + SMALL_BYTES;

/// The header of one member's collective.
#[derive(Clone, Copy)]
pub(super) struct MemberHeader {
    /// A hash of everything that must agree.
    pub(super) hash: u64,
    /// The number of bytes that the member contributes.
    n_bytes: u64,
    /// Whether the data are sent with the header.
    pub(super) is_inline: bool,
    /// The member's size in the free dimension of a gather, or the rank from which the member
    /// receives; 0 in other collectives.
    pub(super) size_or_sender: u64,
}

impl MemberHeader {
    fn words(&self) -> [u64; HEADER_WORDS] {
        [self.hash, self.n_bytes, u64::from(self.is_inline), self.size_or_sender]
    }

    /// Returns the header of a collective that sends all data after its headers.
    pub(super) fn without_data(hash: u64) -> Self {
        Self { hash, n_bytes: 0, is_inline: true, size_or_sender: 0 }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        cast_slice(&self.words()).to_vec()
    }

    pub(super) fn read(bytes: &[u8]) -> Self {
        let [hash, n_bytes, is_inline, size_or_sender]: [u64; HEADER_WORDS] =
            pod_read_unaligned(&bytes[..HEADER_BYTES]);
        Self { hash, n_bytes, is_inline: is_inline != 0, size_or_sender }
    }

    /// Returns the number of bytes of inline data.
    #[expect(clippy::cast_possible_truncation, reason = "the number is at most `SMALL_BYTES`")]
    fn n_inline_bytes(&self) -> usize {
        if self.is_inline { self.n_bytes.min(SMALL_BYTES as u64) as usize } else { 0 }
    }

    /// Returns the number of bytes of inline data in the second message.
    pub(super) fn n_rest_bytes(&self) -> usize {
        self.n_inline_bytes().saturating_sub(INLINE_BYTES)
    }
}

/// The headers and inline data of all members of a group.
pub(super) struct ReceivedHeaders<'a> {
    /// The headers, by rank.
    pub(super) headers: Vec<MemberHeader>,
    inbox: MutexGuard<'a, Vec<u64>>,
}

impl ReceivedHeaders<'_> {
    /// Returns the data that another rank sent with its header.
    pub(super) fn inline_data(&self, rank: usize) -> &[u8] {
        let start = rank * RANK_BYTES + HEADER_BYTES;
        &cast_slice(&self.inbox)[start..][..self.headers[rank].n_inline_bytes()]
    }

    /// Returns the inline data of all ranks, by rank; `own` are this rank's data.
    pub(super) fn all_inline_data<'b>(&'b self, own: &'b [u8], own_rank: usize) -> Vec<&'b [u8]> {
        (0..self.headers.len())
            .map(|rank| if rank == own_rank { own } else { self.inline_data(rank) })
            .collect()
    }
}

impl<'a> MpiCall<'a> {
    /// Exchanges headers with all members, and sends `bytes` with the header if they are small.
    /// Returns the headers and inline data of all members.
    ///
    /// # Errors
    ///
    /// On all members, a mismatch if the members call different collectives.
    pub(super) fn exchange_headers(
        &self,
        tensors: &[Tensor],
        size_or_sender: u64,
        bytes: &[u8],
    ) -> Result<ReceivedHeaders<'a>> {
        let hash = call_hash(&self.ctx.call, tensors);
        let is_inline = bytes.len() <= SMALL_BYTES;
        let own = MemberHeader { hash, n_bytes: bytes.len() as u64, is_inline, size_or_sender };
        let mut inbox = lock(&self.engine.inbox);
        inbox.resize(self.ctx.size() * RANK_BYTES / size_of::<u64>(), 0);
        let inbox_bytes: &mut [u8] = cast_slice_mut(&mut inbox);
        self.fill_inbox(inbox_bytes, &own, if is_inline { bytes } else { &[] });
        inbox_bytes[self.ctx.rank * RANK_BYTES..][..HEADER_BYTES]
            .copy_from_slice(cast_slice(&own.words()));
        let headers: Vec<MemberHeader> =
            inbox_bytes.chunks_exact(RANK_BYTES).map(MemberHeader::read).collect();
        match headers.iter().position(|header| header.hash != headers[0].hash) {
            None => Ok(ReceivedHeaders { headers, inbox }),
            Some(other) => Err(self.mismatch(other, tensors)),
        }
    }

    /// Sends the header and the inline data `bytes` to all members, and receives the members'
    /// headers and inline data.
    fn fill_inbox(&self, inbox: &mut [u8], own: &MemberHeader, bytes: &[u8]) {
        let (first, rest) = bytes.split_at(bytes.len().min(INLINE_BYTES));
        let message = [cast_slice(&own.words()), first].concat();
        let done = ferrompi::scope(|scope| {
            // Wait for these sends last: a receiver accepts the second message only after it has
            // read the length in the header.
            let mut rest_sends = Vec::new();
            if !rest.is_empty() {
                for to in self.others() {
                    let kind = MessageKind::Rest as i32;
                    let request = self.comm.isend(scope, rest, to_mpi_rank(to), kind);
                    rest_sends.push((to, self.or_exit(request)));
                }
            }
            self.transfer_headers(
                peer_spans(inbox, RANK_BYTES, self.ctx.rank)
                    .map(|(from, span)| (from, MessageKind::Header, &mut span[..FIRST_BYTES])),
                self.others().map(|to| (to, MessageKind::Header, &message[..])),
            );
            let rests = peer_spans(inbox, RANK_BYTES, self.ctx.rank).map(|(from, span)| {
                let n_bytes = MemberHeader::read(span).n_rest_bytes();
                (from, MessageKind::Rest, &mut span[FIRST_BYTES..][..n_bytes])
            });
            self.transfer(rests, []);
            self.wait(rest_sends, AwaitedMessages::Data);
            Ok(())
        });
        self.or_exit(done);
    }

    /// Exchanges descriptions, and returns the error for rank 0 and rank `other`, which do not
    /// agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> candle_core::Error {
        let own = description(&self.ctx.call, tensors);
        let mut texts = own.repeat(self.ctx.size());
        let incoming: Vec<IncomingMessage<'_>> = peer_spans(&mut texts, TEXT_BYTES, self.ctx.rank)
            .map(|(from, span)| (from, MessageKind::Text, span))
            .collect();
        self.transfer(incoming, self.others().map(|to| (to, MessageKind::Text, &own[..])));
        let error =
            disagreement(self.ctx, other, |rank| texts[rank * TEXT_BYTES..][..TEXT_BYTES].to_vec());
        *lock(&self.engine.disagreement) = Some(error.to_string());
        error
    }
}

/// Returns each other rank with its part of a buffer that has `rank_bytes` for each rank.
fn peer_spans(
    buffer: &mut [u8],
    rank_bytes: usize,
    own_rank: usize,
) -> impl Iterator<Item = (usize, &mut [u8])> {
    buffer.chunks_exact_mut(rank_bytes).enumerate().filter(move |(rank, _)| *rank != own_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_read_at_any_alignment() {
        let header =
            MemberHeader { hash: u64::MAX, n_bytes: 9000, is_inline: true, size_or_sender: 7 };
        let bytes = [&[1_u8][..], cast_slice(&header.words())].concat();
        let read = MemberHeader::read(&bytes[1..]);
        assert_eq!(read.words(), header.words());
        assert_eq!((read.n_inline_bytes(), read.n_rest_bytes()), (9000, 9000 - INLINE_BYTES));
    }

    #[test]
    fn large_data_is_not_inline() {
        let n_bytes = SMALL_BYTES as u64 + 1;
        let header = MemberHeader { hash: 0, n_bytes, is_inline: false, size_or_sender: 0 };
        assert_eq!(header.n_inline_bytes(), 0);
    }
}
