//! What the members of a group tell each other before anything else is sent: a header each, with
//! the contents themselves if they are small.

use std::sync::MutexGuard;

use bytemuck::{cast_slice, cast_slice_mut, pod_read_unaligned};
use candle_core::{Result, Tensor};

use super::{
    session::rank_of,
    transfer::{Call, Incoming, Kind},
};
use crate::{
    engine::processes::{TEXT_BYTES, agreement, description, disagreement},
    sync::lock,
};

/// Up to how many bytes travel with the header, and are reduced by every member by itself: what
/// costs less than the second message that it spares.
pub(super) const SMALL_BYTES: usize = 16 << 10;
/// What of them goes into the first message: with its header less than the 4 KB that Open MPI sends
/// without asking.
const INLINE_BYTES: usize = 3584;
const HEADER_WORDS: usize = 4;
const HEADER_BYTES: usize = HEADER_WORDS * size_of::<u64>();
/// The longest first message.
pub(super) const FIRST_BYTES: usize = HEADER_BYTES + INLINE_BYTES;
/// One rank's part of the inbox.
const RANK_BYTES: usize = HEADER_BYTES + SMALL_BYTES;

/// What a member says of itself.
#[derive(Clone, Copy)]
pub(super) struct Header {
    /// Of all that must agree.
    pub(super) hash: u64,
    /// How many bytes it contributes.
    bytes: u64,
    /// Whether they travel with the header.
    pub(super) inline: bool,
    /// Its size in the free dimension, or the rank that it wants to receive from.
    pub(super) aux: u64,
}

impl Header {
    fn words(&self) -> [u64; HEADER_WORDS] {
        [self.hash, self.bytes, u64::from(self.inline), self.aux]
    }

    /// Of a collective whose contents do not travel with the header.
    pub(super) fn of(hash: u64) -> Self {
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

    /// How many bytes travel with the header.
    #[expect(clippy::cast_possible_truncation, reason = "not more than `SMALL_BYTES`")]
    fn inline_bytes(&self) -> usize {
        if self.inline { self.bytes.min(SMALL_BYTES as u64) as usize } else { 0 }
    }

    /// How many of them come in a second message.
    pub(super) fn rest_bytes(&self) -> usize {
        self.inline_bytes().saturating_sub(INLINE_BYTES)
    }
}

/// What all members of a group have told each other.
pub(super) struct Received<'a> {
    /// By rank.
    pub(super) headers: Vec<Header>,
    inbox: MutexGuard<'a, Vec<u64>>,
}

impl Received<'_> {
    /// What a rank sent with its header.
    pub(super) fn inline(&self, rank: usize) -> &[u8] {
        let from = rank * RANK_BYTES + HEADER_BYTES;
        &cast_slice(&self.inbox)[from..][..self.headers[rank].inline_bytes()]
    }

    /// What all ranks sent with their headers, `own` of this one's.
    pub(super) fn all_inline<'b>(&'b self, own: &'b [u8], own_rank: usize) -> Vec<&'b [u8]> {
        let of = |rank| if rank == own_rank { own } else { self.inline(rank) };
        (0..self.headers.len()).map(of).collect()
    }
}

impl<'a> Call<'a> {
    /// Tells all members what this one calls, and `bytes` if they are few; returns what they have
    /// told.
    ///
    /// # Errors
    ///
    /// On all members alike, if they do not agree.
    pub(super) fn exchange_headers(
        &self,
        tensors: &[Tensor],
        aux: u64,
        bytes: &[u8],
    ) -> Result<Received<'a>> {
        let hash = agreement(&self.site.call, tensors);
        let inline = bytes.len() <= SMALL_BYTES;
        let own = Header { hash, bytes: bytes.len() as u64, inline, aux };
        let mut inbox = lock(&self.engine.inbox);
        inbox.resize(self.site.size() * RANK_BYTES / size_of::<u64>(), 0);
        let places: &mut [u8] = cast_slice_mut(&mut inbox);
        self.fill_inbox(places, &own, if inline { bytes } else { &[] });
        places[self.site.rank * RANK_BYTES..][..HEADER_BYTES]
            .copy_from_slice(cast_slice(&own.words()));
        let headers: Vec<Header> = places.chunks_exact(RANK_BYTES).map(Header::read).collect();
        match headers.iter().position(|header| header.hash != headers[0].hash) {
            None => Ok(Received { headers, inbox }),
            Some(other) => Err(self.mismatch(other, tensors)),
        }
    }

    /// Sends the header and what travels with it to all members, and receives theirs.
    fn fill_inbox(&self, inbox: &mut [u8], own: &Header, bytes: &[u8]) {
        let (first, rest) = bytes.split_at(bytes.len().min(INLINE_BYTES));
        let message = [cast_slice(&own.words()), first].concat();
        let done = ferrompi::scope(|scope| {
            // These end when the others have read in the header how much there is; so they are
            // waited for last.
            let mut late = Vec::new();
            for to in self.others().filter(|_| !rest.is_empty()) {
                let request = self.comm.isend(scope, rest, rank_of(to), Kind::Rest as i32);
                late.push((to, self.check(request)));
            }
            self.transfer_headers(
                places(inbox, RANK_BYTES, self.site.rank)
                    .map(|(from, place)| (from, Kind::Header, &mut place[..FIRST_BYTES])),
                self.others().map(|to| (to, Kind::Header, &message[..])),
            );
            let rests = places(inbox, RANK_BYTES, self.site.rank).map(|(from, place)| {
                let rest = Header::read(place).rest_bytes();
                (from, Kind::Rest, &mut place[FIRST_BYTES..][..rest])
            });
            self.transfer(rests, []);
            self.wait(late, true);
            Ok(())
        });
        self.check(done);
    }

    /// What all members return if the first one and that of rank `other` do not agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> candle_core::Error {
        let own = description(&self.site.call, tensors);
        let mut texts = own.repeat(self.site.size());
        let incoming: Vec<Incoming<'_>> = places(&mut texts, TEXT_BYTES, self.site.rank)
            .map(|(from, place)| (from, Kind::Text, place))
            .collect();
        self.transfer(incoming, self.others().map(|to| (to, Kind::Text, &own[..])));
        let text = |rank| texts[rank * TEXT_BYTES..][..TEXT_BYTES].to_vec();
        let error = disagreement(self.site, other, text);
        *lock(&self.engine.disagreement) = Some(error.to_string());
        error
    }
}

/// The parts of a buffer that belong to the other ranks.
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
    fn a_header_is_read_as_it_was_written_wherever_it_lies() {
        let header = Header { hash: u64::MAX, bytes: 9000, inline: true, aux: 7 };
        let bytes = [&[1_u8][..], cast_slice(&header.words())].concat();
        let read = Header::read(&bytes[1..]);
        assert_eq!(read.words(), header.words());
        assert_eq!((read.inline_bytes(), read.rest_bytes()), (9000, 9000 - INLINE_BYTES));
    }

    #[test]
    fn what_is_large_does_not_travel_with_its_header() {
        let header = Header { hash: 0, bytes: SMALL_BYTES as u64 + 1, inline: false, aux: 0 };
        assert_eq!(header.inline_bytes(), 0);
    }
}
