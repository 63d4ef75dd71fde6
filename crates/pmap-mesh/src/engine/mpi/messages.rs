//! Short messages whose requests own the buffers, so that the messages may outlive the collective
//! call that started them.

use std::collections::BTreeMap;

use ferrompi::{Communicator, PersistentRequest, Result};

use super::session::to_mpi_rank;

/// Messages to and from the other members of a group.
pub(super) struct OwnedMessages {
    sends: Vec<(usize, PersistentRequest<u8>)>,
    receives: Vec<(usize, PersistentRequest<u8>)>,
}

impl OwnedMessages {
    /// Starts messages to and from some ranks. Each pair of `incoming` has a rank and a maximum
    /// length, and a message of length 0 is not received; each pair of `outgoing` has a rank and
    /// the bytes for it.
    ///
    /// # Errors
    ///
    /// The errors of MPI.
    pub(super) fn start(
        comm: &Communicator,
        tag: i32,
        incoming: impl IntoIterator<Item = (usize, usize)>,
        outgoing: impl IntoIterator<Item = (usize, Vec<u8>)>,
    ) -> Result<Self> {
        let mut messages = Self { sends: Vec::new(), receives: Vec::new() };
        for (from, n_bytes) in incoming.into_iter().filter(|(_, n_bytes)| *n_bytes > 0) {
            let receive = comm.recv_init(vec![0; n_bytes], to_mpi_rank(from), tag)?;
            messages.receives.push((from, receive));
        }
        for (to, bytes) in outgoing {
            messages.sends.push((to, comm.send_init(bytes, to_mpi_rank(to), tag)?));
        }
        messages.requests().try_for_each(PersistentRequest::start)?;
        Ok(messages)
    }

    /// Returns true if all messages have been sent and received.
    ///
    /// # Errors
    ///
    /// The errors of MPI.
    pub(super) fn are_complete(&mut self) -> Result<bool> {
        let mut are_complete = true;
        for request in self.requests() {
            are_complete &= request.test()?.is_some();
        }
        Ok(are_complete)
    }

    fn requests(&mut self) -> impl Iterator<Item = &mut PersistentRequest<u8>> {
        self.receives.iter_mut().chain(&mut self.sends).map(|(_, request)| request)
    }

    /// Returns the ranks with unfinished messages.
    pub(super) fn unfinished_ranks(&self) -> impl Iterator<Item = usize> {
        let requests = self.receives.iter().chain(&self.sends);
        requests.filter(|(_, request)| request.is_active()).map(|(rank, _)| *rank)
    }

    /// Returns the received messages by rank, after all messages are
    /// [complete](Self::are_complete).
    ///
    /// # Errors
    ///
    /// The errors of MPI.
    pub(super) fn into_received(self) -> Result<BTreeMap<usize, Vec<u8>>> {
        let received = self.receives.into_iter();
        received.map(|(from, request)| Ok((from, request.into_buffer()?))).collect()
    }
}
