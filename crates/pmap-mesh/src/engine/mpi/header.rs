//! The header that each member of a group sends before any data, together with the data if they are
//! small.

use std::sync::MutexGuard;

use bytemuck::{cast_slice, cast_slice_mut, pod_read_unaligned};
use candle_core::{Result, Tensor};

use super::{
    session::rank_of,
    transfer::{IncomingMessage, MessageKind, MpiCall},
};
use crate::{
    engine::processes::{TEXT_BYTES, call_hash, description, disagreement},
    sync::lock,
};

/// The most data that are sent with the header, and reduced by every member alone: that costs less
/// than the second message that it saves.
pub(super) const SMALL_BYTES: usize = 16 << 10;
/// The part of them in the first message: with the header less than the 4 KB that Open MPI sends
/// without a handshake.
const INLINE_BYTES: usize = 3584;
const HEADER_WORDS: usize = 4;
const HEADER_BYTES: usize = HEADER_WORDS * size_of::<u64>();
/// The longest first message.
pub(super) const FIRST_BYTES: usize = HEADER_BYTES + INLINE_BYTES;
/// One rank's part of the inbox.
const RANK_BYTES: usize = HEADER_BYTES + SMALL_BYTES;

/// The header of a member.
#[derive(Clone, Copy)]
pub(super) struct MemberHeader {
    /// A hash of everything that must agree.
    pub(super) hash: u64,
    /// The number of bytes that it contributes.
    bytes: u64,
    /// Whether the data are sent with the header.
    pub(super) inline: bool,
    /// The member's size in the free dimension, or the rank that it receives from.
    pub(super) aux: u64,
}

impl MemberHeader {
    fn words(&self) -> [u64; HEADER_WORDS] {
        [self.hash, self.bytes, u64::from(self.inline), self.aux]
    }

    /// Returns the header of a collective without inline data.
    pub(super) fn without_data(hash: u64) -> Self {
        Self { hash, bytes: 0, inline: true, aux: 0 }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        cast_slice(&self.words()).to_vec()
    }

    pub(super) fn read(bytes: &[u8]) -> Self {
        let [hash, bytes, inline, aux]: [u64; HEADER_WORDS] =
            pod_read_unaligned(&bytes[..HEADER_BYTES]);
        Self { hash, bytes, inline: inline != 0, aux }
    }

    /// Returns the number of bytes that are sent with the header.
    #[expect(clippy::cast_possible_truncation, reason = "not more than `SMALL_BYTES`")]
    fn inline_bytes(&self) -> usize {
        if self.inline { self.bytes.min(SMALL_BYTES as u64) as usize } else { 0 }
    }

    /// Returns how many of these bytes are in the second message.
    pub(super) fn rest_bytes(&self) -> usize {
        self.inline_bytes().saturating_sub(INLINE_BYTES)
    }
}

/// The headers and inline data of all members of a group.
pub(super) struct ReceivedHeaders<'a> {
    /// The headers, by rank.
    pub(super) headers: Vec<MemberHeader>,
    inbox: MutexGuard<'a, Vec<u64>>,
}

impl ReceivedHeaders<'_> {
    /// Returns the data that a rank sent with its header.
    pub(super) fn inline(&self, rank: usize) -> &[u8] {
        let from = rank * RANK_BYTES + HEADER_BYTES;
        &cast_slice(&self.inbox)[from..][..self.headers[rank].inline_bytes()]
    }

    /// Returns the data that all ranks sent with their headers; `own` are this rank's data.
    pub(super) fn all_inline<'b>(&'b self, own: &'b [u8], own_rank: usize) -> Vec<&'b [u8]> {
        (0..self.headers.len())
            .map(|rank| if rank == own_rank { own } else { self.inline(rank) })
            .collect()
    }
}

impl<'a> MpiCall<'a> {
    /// Sends this rank's header to all members, and `bytes` if they are small. Returns the members'
    /// headers.
    ///
    /// # Errors
    ///
    /// A mismatch, on all members, if they do not agree.
    pub(super) fn exchange_headers(
        &self,
        tensors: &[Tensor],
        aux: u64,
        bytes: &[u8],
    ) -> Result<ReceivedHeaders<'a>> {
        let hash = call_hash(&self.ctx.call, tensors);
        let inline = bytes.len() <= SMALL_BYTES;
        let own = MemberHeader { hash, bytes: bytes.len() as u64, inline, aux };
        let mut inbox = lock(&self.engine.inbox);
        inbox.resize(self.ctx.size() * RANK_BYTES / size_of::<u64>(), 0);
        let places: &mut [u8] = cast_slice_mut(&mut inbox);
        self.fill_inbox(places, &own, if inline { bytes } else { &[] });
        places[self.ctx.rank * RANK_BYTES..][..HEADER_BYTES]
            .copy_from_slice(cast_slice(&own.words()));
        let headers: Vec<MemberHeader> =
            places.chunks_exact(RANK_BYTES).map(MemberHeader::read).collect();
        match headers.iter().position(|header| header.hash != headers[0].hash) {
            None => Ok(ReceivedHeaders { headers, inbox }),
            Some(other) => Err(self.mismatch(other, tensors)),
        }
    }

    /// Sends the header and the inline data to all members, and receives theirs.
    fn fill_inbox(&self, inbox: &mut [u8], own: &MemberHeader, bytes: &[u8]) {
        let (first, rest) = bytes.split_at(bytes.len().min(INLINE_BYTES));
        let message = [cast_slice(&own.words()), first].concat();
        let done = ferrompi::scope(|scope| {
            // These sends complete only after the receivers have read the length in the header, so
            // wait for them last.
            let mut late = Vec::new();
            for to in self.others().filter(|_| !rest.is_empty()) {
                let request = self.comm.isend(scope, rest, rank_of(to), MessageKind::Rest as i32);
                late.push((to, self.check(request)));
            }
            self.transfer_headers(
                places(inbox, RANK_BYTES, self.ctx.rank)
                    .map(|(from, span)| (from, MessageKind::Header, &mut span[..FIRST_BYTES])),
                self.others().map(|to| (to, MessageKind::Header, &message[..])),
            );
            let rests = places(inbox, RANK_BYTES, self.ctx.rank).map(|(from, span)| {
                let rest = MemberHeader::read(span).rest_bytes();
                (from, MessageKind::Rest, &mut span[FIRST_BYTES..][..rest])
            });
            self.transfer(rests, []);
            self.wait(late, true);
            Ok(())
        });
        self.check(done);
    }

    /// Returns the error for a group in which rank 0 and rank `other` do not agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> candle_core::Error {
        let own = description(&self.ctx.call, tensors);
        let mut texts = own.repeat(self.ctx.size());
        let incoming: Vec<IncomingMessage<'_>> = places(&mut texts, TEXT_BYTES, self.ctx.rank)
            .map(|(from, span)| (from, MessageKind::Text, span))
            .collect();
        self.transfer(incoming, self.others().map(|to| (to, MessageKind::Text, &own[..])));
        let error =
            disagreement(self.ctx, other, |rank| texts[rank * TEXT_BYTES..][..TEXT_BYTES].to_vec());
        *lock(&self.engine.disagreement) = Some(error.to_string());
        error
    }
}

/// Returns the other ranks' parts of a buffer.
fn places(
    buffer: &mut [u8],
    bytes: usize,
    own_rank: usize,
) -> impl Iterator<Item = (usize, &mut [u8])> {
    buffer.chunks_exact_mut(bytes).enumerate().filter(move |(rank, _)| *rank != own_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_read_at_any_alignment() {
        let header = MemberHeader { hash: u64::MAX, bytes: 9000, inline: true, aux: 7 };
        let bytes = [&[1_u8][..], cast_slice(&header.words())].concat();
        let read = MemberHeader::read(&bytes[1..]);
        assert_eq!(read.words(), header.words());
        assert_eq!((read.inline_bytes(), read.rest_bytes()), (9000, 9000 - INLINE_BYTES));
    }

    #[test]
    fn large_data_is_not_inline() {
        let header = MemberHeader { hash: 0, bytes: SMALL_BYTES as u64 + 1, inline: false, aux: 0 };
        assert_eq!(header.inline_bytes(), 0);
    }
}
