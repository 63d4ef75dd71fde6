//! The data of one round, sent and received in chunks, so that buffers stay small for lists of any
//! size.

use std::ops::Range;

use candle_core::{Error, Result};
use ferrompi::{Communicator, PersistentRequest};

use super::{
    rounds::{MpiRound, ReceivedChunk},
    session::to_mpi_rank,
};

/// The bytes of one collective that are in flight in each direction. Chunks of a megabyte or more
/// are as fast as a single message, and chunks that fit a second-level cache are faster.
const WINDOW_BYTES: usize = 4 << 20;
/// The chunk size, in bytes, in a group of many ranks.
const MIN_CHUNK_BYTES: usize = 64 << 10;

/// The messages of one round of a collective. Their requests own the buffers, so that the messages
/// may outlive the code that started them.
pub(super) struct ChunkStream {
    sends: Vec<ChunkChannel>,
    /// One channel for each rank that sends words, in the order of ranks.
    receives: Vec<ChunkChannel>,
}

/// The words that this rank sends to or receives from another rank, in chunks of one size. The last
/// chunk is padded with words that the receiver ignores.
struct ChunkChannel {
    rank: usize,
    n_words: usize,
    request: PersistentRequest<u64>,
    chunk_words: usize,
    /// The first word of the chunk in flight.
    start: usize,
}

impl ChunkStream {
    /// Starts the messages of a round to and from `others`, in the order of these ranks.
    ///
    /// # Errors
    ///
    /// The errors of the round, and of MPI.
    pub(super) fn start(
        comm: &Communicator,
        tag: i32,
        others: impl Iterator<Item = usize> + Clone,
        round: &dyn MpiRound,
    ) -> Result<Self> {
        let incoming = others.clone().map(|from| (from, round.n_incoming(from)));
        let mut receives =
            channels(incoming, |span, from| comm.recv_init(span, to_mpi_rank(from), tag))?;
        let outgoing = others.map(|to| (to, round.n_outgoing(to)));
        let mut sends = channels(outgoing, |span, to| comm.send_init(span, to_mpi_rank(to), tag))?;
        receives.iter_mut().try_for_each(ChunkChannel::receive)?;
        sends.iter_mut().try_for_each(|channel| channel.send(round))?;
        Ok(Self { sends, receives })
    }

    /// Advances the messages without waiting; returns true if any chunk has been sent or received.
    ///
    /// # Errors
    ///
    /// The errors of the round, and of MPI.
    pub(super) fn advance(&mut self, round: &mut dyn MpiRound) -> Result<bool> {
        let mut has_moved = false;
        while self.consume(round)? {
            has_moved = true;
        }
        for channel in &mut self.sends {
            while !channel.is_over() && channel.is_chunk_done()? {
                channel.start += channel.chunk_words;
                channel.send(round)?;
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    /// Returns true if everything has been sent and received.
    pub(super) fn is_over(&self) -> bool {
        self.unfinished_ranks().next().is_none()
    }

    /// Returns the ranks with unfinished messages.
    pub(super) fn unfinished_ranks(&self) -> impl Iterator<Item = usize> {
        let channels = self.receives.iter().chain(&self.sends);
        channels.filter(|channel| !channel.is_over()).map(|channel| channel.rank)
    }

    /// Passes the next chunk of each open channel to the round, if all of these have arrived.
    /// Returns true if so.
    fn consume(&mut self, round: &mut dyn MpiRound) -> Result<bool> {
        if self.receives.iter().all(ChunkChannel::is_over) {
            return Ok(false);
        }
        let mut have_arrived = true;
        for channel in self.receives.iter_mut().filter(|channel| !channel.is_over()) {
            have_arrived &= channel.is_chunk_done()?;
        }
        if !have_arrived {
            return Ok(false);
        }
        let open = self.receives.iter().filter(|channel| !channel.is_over());
        let chunks: Vec<ReceivedChunk<'_>> =
            open.map(ChunkChannel::chunk).collect::<Result<_>>()?;
        round.consume(&chunks)?;
        for channel in self.receives.iter_mut().filter(|channel| !channel.is_over()) {
            channel.start += channel.chunk_words;
            channel.receive()?;
        }
        Ok(true)
    }
}

/// Returns a channel for each rank with a positive number of words, given pairs of a rank and its
/// number of words. `new_request` takes a buffer for one chunk, and the rank.
fn channels(
    words_by_rank: impl Iterator<Item = (usize, usize)> + Clone,
    new_request: impl Fn(Vec<u64>, usize) -> ferrompi::Result<PersistentRequest<u64>>,
) -> Result<Vec<ChunkChannel>> {
    let most = max_chunk_words(words_by_rank.clone().count());
    words_by_rank
        .filter(|(_, n_words)| *n_words > 0)
        .map(|(rank, n_words)| {
            let chunk_words = chunk_words(n_words, most);
            let request = new_request(vec![0; chunk_words], rank).map_err(Error::wrap)?;
            Ok(ChunkChannel { rank, n_words, request, chunk_words, start: 0 })
        })
        .collect()
}

/// Returns the largest chunk, in words, for transfers with this many ranks.
fn max_chunk_words(n_ranks: usize) -> usize {
    (WINDOW_BYTES / n_ranks.max(1)).max(MIN_CHUNK_BYTES) / size_of::<u64>()
}

/// Returns the chunk size for `n_words` words. There are as few chunks of at most `most` words as
/// possible, and all have one size, so that the last chunk has little padding.
fn chunk_words(n_words: usize, most: usize) -> usize {
    n_words.div_ceil(n_words.div_ceil(most))
}

impl ChunkChannel {
    /// Returns true if all chunks have been sent or received.
    fn is_over(&self) -> bool {
        self.start >= self.n_words
    }

    /// Returns the words of the chunk in flight.
    fn words(&self) -> Range<usize> {
        self.start..self.n_words.min(self.start + self.chunk_words)
    }

    /// Returns true if the chunk in flight has been sent or received.
    fn is_chunk_done(&mut self) -> Result<bool> {
        Ok(self.request.test().map_err(Error::wrap)?.is_some())
    }

    /// Returns the chunk that has been received.
    fn chunk(&self) -> Result<ReceivedChunk<'_>> {
        let range = self.words();
        let words = &self.request.buffer().map_err(Error::wrap)?[..range.len()];
        Ok(ReceivedChunk { from: self.rank, range, words })
    }

    /// Receives the next chunk, if there is one.
    fn receive(&mut self) -> Result<()> {
        if self.is_over() {
            return Ok(());
        }
        self.request.start().map_err(Error::wrap)
    }

    /// Sends the next chunk, if there is one.
    fn send(&mut self, round: &dyn MpiRound) -> Result<()> {
        if self.is_over() {
            return Ok(());
        }
        let words = self.words();
        let span = self.request.buffer_mut().map_err(Error::wrap)?;
        round.pack(self.rank, words.clone(), &mut span[..words.len()])?;
        self.request.start().map_err(Error::wrap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_little_padding() {
        for n_words in 1..200 {
            for most in 1..50 {
                let chunk = chunk_words(n_words, most);
                let n_chunks = n_words.div_ceil(chunk);
                assert!(chunk <= most && n_chunks == n_words.div_ceil(most));
                assert!(n_chunks * chunk - n_words < n_chunks, "{n_words} in chunks of {most}");
            }
        }
    }

    #[test]
    fn large_groups_use_smaller_chunks() {
        assert_eq!([1, 3].map(max_chunk_words), [512 << 10, 174_762]);
        assert_eq!(max_chunk_words(1000), 8 << 10);
    }
}
