//! Short messages whose buffers their requests own, so that they may outlive the collective call
//! that started them.

use std::collections::BTreeMap;

use ferrompi::{Communicator, PersistentRequest, Result};

use super::session::rank_of;

/// Messages to and from the other members of a group.
pub(super) struct Messages {
    sends: Vec<(usize, PersistentRequest<u8>)>,
    receives: Vec<(usize, PersistentRequest<u8>)>,
}

impl Messages {
    /// Starts to send to and receive from these ranks: so many bytes from each, or fewer. Of nothing
    /// there is no message.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn start(
        comm: &Communicator,
        tag: i32,
        incoming: impl IntoIterator<Item = (usize, usize)>,
        outgoing: impl IntoIterator<Item = (usize, Vec<u8>)>,
    ) -> Result<Self> {
        let receive =
            |(from, n_bytes)| Ok((from, comm.recv_init(vec![0; n_bytes], rank_of(from), tag)?));
        let send = |(to, bytes)| Ok((to, comm.send_init(bytes, rank_of(to), tag)?));
        let incoming = incoming.into_iter().filter(|(_, n_bytes)| *n_bytes > 0);
        let mut messages = Self {
            receives: incoming.map(receive).collect::<Result<_>>()?,
            sends: outgoing.into_iter().map(send).collect::<Result<_>>()?,
        };
        messages.requests().try_for_each(PersistentRequest::start)?;
        Ok(messages)
    }

    /// Whether all have arrived, here and there.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn have_arrived(&mut self) -> Result<bool> {
        let mut all = true;
        for request in self.requests() {
            all &= request.test()?.is_some();
        }
        Ok(all)
    }

    fn requests(&mut self) -> impl Iterator<Item = &mut PersistentRequest<u8>> {
        self.receives.iter_mut().chain(&mut self.sends).map(|(_, request)| request)
    }

    /// The ranks to or from which something is still on its way.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let requests = self.receives.iter().chain(&self.sends);
        requests.filter(|(_, request)| request.is_active()).map(|(rank, _)| *rank)
    }

    /// What has come from each rank, when all have arrived.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn arrived(self) -> Result<BTreeMap<usize, Vec<u8>>> {
        let received = self.receives.into_iter();
        received.map(|(from, request)| Ok((from, request.into_buffer()?))).collect()
    }
}
