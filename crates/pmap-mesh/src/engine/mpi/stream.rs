//! Words that a job sends and receives, a piece at a time, so that what is on its way takes little
//! memory however long the lists are.

use std::ops::Range;

use candle_core::{Error, Result};
use ferrompi::{Communicator, PersistentRequest};

use super::{
    jobs::{Job, Piece},
    session::rank_of,
};

/// How much a collective has on its way in each direction. Pieces of a megabyte and more are as fast
/// as one message of everything, and those that a second cache holds are faster.
const WINDOW_BYTES: usize = 4 << 20;
/// The smallest piece, in a large group.
const LEAST_BYTES: usize = 64 << 10;

/// The messages of one round of a collective. Their requests own the buffers, so that they may
/// outlive whoever has started them.
pub(super) struct Stream {
    sends: Vec<Channel>,
    /// By rank.
    receives: Vec<Channel>,
}

/// Words on their way between this rank and another one, in pieces of one size; after the last of
/// them the last piece is filled up with words that nobody reads.
struct Channel {
    rank: usize,
    n_words: usize,
    request: PersistentRequest<u64>,
    piece_words: usize,
    /// The first word of the piece that is on its way.
    start: usize,
}

impl Stream {
    /// Starts to send to and receive from these ranks, in their order, what a job has for them.
    ///
    /// # Errors
    ///
    /// The job's, and MPI's.
    pub(super) fn start(
        comm: &Communicator,
        tag: i32,
        others: impl Iterator<Item = usize> + Clone,
        job: &dyn Job,
    ) -> Result<Self> {
        let incoming = others.clone().map(|from| (from, job.n_incoming(from)));
        let mut receives =
            channels(incoming, |place, from| comm.recv_init(place, rank_of(from), tag))?;
        let outgoing = others.map(|to| (to, job.n_outgoing(to)));
        let mut sends = channels(outgoing, |place, to| comm.send_init(place, rank_of(to), tag))?;
        receives.iter_mut().try_for_each(Channel::receive)?;
        sends.iter_mut().try_for_each(|channel| channel.send(job))?;
        Ok(Self { sends, receives })
    }

    /// Carries the messages on as far as it goes without waiting; returns whether any piece has
    /// arrived, here or there.
    ///
    /// # Errors
    ///
    /// The job's, and MPI's.
    pub(super) fn advance(&mut self, job: &mut dyn Job) -> Result<bool> {
        let mut has_moved = false;
        while self.take(job)? {
            has_moved = true;
        }
        for channel in &mut self.sends {
            while !channel.is_over() && channel.has_arrived()? {
                channel.start += channel.piece_words;
                channel.send(job)?;
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    /// Whether everything has arrived, here and there.
    pub(super) fn is_over(&self) -> bool {
        self.missing().next().is_none()
    }

    /// The ranks to or from which something is still on its way.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let channels = self.receives.iter().chain(&self.sends);
        channels.filter(|channel| !channel.is_over()).map(|channel| channel.rank)
    }

    /// Hands the job a piece of each rank that has more, if all of these have arrived.
    fn take(&mut self, job: &mut dyn Job) -> Result<bool> {
        let mut is_complete = !self.receives.iter().all(Channel::is_over);
        for channel in self.receives.iter_mut().filter(|channel| !channel.is_over()) {
            is_complete &= channel.has_arrived()?;
        }
        if is_complete {
            let open = self.receives.iter().filter(|channel| !channel.is_over());
            let pieces: Vec<Piece<'_>> = open.map(Channel::piece).collect::<Result<_>>()?;
            job.take(&pieces)?;
            for channel in self.receives.iter_mut().filter(|channel| !channel.is_over()) {
                channel.start += channel.piece_words;
                channel.receive()?;
            }
        }
        Ok(is_complete)
    }
}

/// Returns a channel for each rank, given the number of words that go over it.
fn channels(
    n_words: impl Iterator<Item = (usize, usize)> + Clone,
    request: impl Fn(Vec<u64>, usize) -> ferrompi::Result<PersistentRequest<u64>>,
) -> Result<Vec<Channel>> {
    let most = most_words(n_words.clone().count());
    let channel = |(rank, n_words): (usize, usize)| {
        let piece_words = piece_words(n_words, most);
        let request = request(vec![0; piece_words], rank).map_err(Error::wrap)?;
        Ok(Channel { rank, n_words, request, piece_words, start: 0 })
    };
    n_words.filter(|(_, n_words)| *n_words > 0).map(channel).collect()
}

/// How many words the pieces to or from each of so many ranks may have.
fn most_words(n_ranks: usize) -> usize {
    (WINDOW_BYTES / n_ranks.max(1)).max(LEAST_BYTES) / size_of::<u64>()
}

/// The size of the pieces of so many words: equal ones, as few as there may be, so that the last one
/// is hardly filled up.
fn piece_words(n_words: usize, most: usize) -> usize {
    n_words.div_ceil(n_words.div_ceil(most))
}

impl Channel {
    fn is_over(&self) -> bool {
        self.start >= self.n_words
    }

    /// Which words the piece has that is on its way.
    fn words(&self) -> Range<usize> {
        self.start..self.n_words.min(self.start + self.piece_words)
    }

    fn has_arrived(&mut self) -> Result<bool> {
        Ok(self.request.test().map_err(Error::wrap)?.is_some())
    }

    /// What has arrived.
    fn piece(&self) -> Result<Piece<'_>> {
        let words = self.words();
        let items = &self.request.buffer().map_err(Error::wrap)?[..words.len()];
        Ok(Piece { from: self.rank, words, items })
    }

    /// Receives the next piece, if there is one.
    fn receive(&mut self) -> Result<()> {
        if self.is_over() {
            return Ok(());
        }
        self.request.start().map_err(Error::wrap)
    }

    /// Sends the next piece, if there is one.
    fn send(&mut self, job: &dyn Job) -> Result<()> {
        if self.is_over() {
            return Ok(());
        }
        let words = self.words();
        let place = self.request.buffer_mut().map_err(Error::wrap)?;
        job.pack(self.rank, words.clone(), &mut place[..words.len()])?;
        self.request.start().map_err(Error::wrap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_equal_and_hardly_filled_up() {
        for n_words in 1..200 {
            for most in 1..50 {
                let piece = piece_words(n_words, most);
                let n_pieces = n_words.div_ceil(piece);
                assert!(piece <= most && n_pieces == n_words.div_ceil(most));
                assert!(n_pieces * piece - n_words < n_pieces, "{n_words} in pieces of {most}");
            }
        }
    }

    #[test]
    fn a_large_group_has_more_on_its_way_in_all_and_less_for_each() {
        assert_eq!([1, 3].map(most_words), [512 << 10, 174_762]);
        assert_eq!(most_words(1000), 8 << 10);
    }
}
