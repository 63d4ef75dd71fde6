//! Messages whose buffers their requests own, so that they may outlive the collective call that
//! started them.

use std::collections::BTreeMap;

use ferrompi::{Communicator, MpiDatatype, PersistentRequest, Result};

use super::transfer::{MESSAGE_BYTES, rank_of};

/// Messages to and from the other members of a group.
pub(super) struct Messages<T> {
    sends: Vec<(usize, PersistentRequest<T>)>,
    /// By rank, those of one rank in their order.
    receives: Vec<(usize, PersistentRequest<T>)>,
}

impl<T: MpiDatatype + Clone + Default> Messages<T> {
    /// Starts to send to and receive from these ranks: so many items from each, or fewer.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn start(
        comm: &Communicator,
        tag: i32,
        incoming: impl IntoIterator<Item = (usize, usize)>,
        outgoing: impl IntoIterator<Item = (usize, Vec<T>)>,
    ) -> Result<Self> {
        let longest = MESSAGE_BYTES / size_of::<T>();
        let mut receives = Vec::new();
        for (from, n_items) in incoming {
            for start in (0..n_items).step_by(longest) {
                let place = vec![T::default(); longest.min(n_items - start)];
                receives.push((from, comm.recv_init(place, rank_of(from), tag)?));
            }
        }
        let mut sends = Vec::new();
        for (to, items) in outgoing {
            // One message as it is, unless it is too long for one.
            let parts = if items.len() <= longest {
                vec![items]
            } else {
                items.chunks(longest).map(<[T]>::to_vec).collect()
            };
            for part in parts.into_iter().filter(|part| !part.is_empty()) {
                sends.push((to, comm.send_init(part, rank_of(to), tag)?));
            }
        }
        for (_, request) in receives.iter_mut().chain(&mut sends) {
            request.start()?;
        }
        Ok(Self { sends, receives })
    }

    /// Whether all have arrived, here and there.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn have_arrived(&mut self) -> Result<bool> {
        let mut all = true;
        for (_, request) in self.receives.iter_mut().chain(&mut self.sends) {
            if request.is_active() && request.test()?.is_none() {
                all = false;
            }
        }
        Ok(all)
    }

    /// The ranks to or from which something is still on its way.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let requests = self.receives.iter().chain(&self.sends);
        requests.filter(|(_, request)| request.is_active()).map(|(rank, _)| *rank)
    }

    /// What has come from each rank that was to send something, when all have arrived.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn arrived(self) -> Result<BTreeMap<usize, Vec<T>>> {
        let mut arrived: BTreeMap<usize, Vec<T>> = BTreeMap::new();
        for (from, request) in self.receives {
            let items = request.into_buffer()?;
            let of_rank = arrived.entry(from).or_default();
            if of_rank.is_empty() {
                *of_rank = items;
            } else {
                of_rank.extend(items);
            }
        }
        Ok(arrived)
    }
}
