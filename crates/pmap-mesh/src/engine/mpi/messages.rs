//! Messages whose buffers their requests own, so that they may outlive the collective call that
//! started them.

use std::collections::BTreeMap;

use ferrompi::{Communicator, MpiDatatype, PersistentRequest, Result};

use super::transfer::{MESSAGE_BYTES, rank_of};

/// Messages to and from the other members of a group.
pub(super) struct Messages<T> {
    sends: Vec<(usize, PersistentRequest<T>)>,
    /// For each rank that something was asked of, if only nothing, the parts of it in order.
    receives: BTreeMap<usize, Vec<PersistentRequest<T>>>,
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
        let mut receives: BTreeMap<usize, Vec<PersistentRequest<T>>> = BTreeMap::new();
        for (from, n_items) in incoming {
            let parts = receives.entry(from).or_default();
            for start in (0..n_items).step_by(longest) {
                let place = vec![T::default(); longest.min(n_items - start)];
                parts.push(comm.recv_init(place, rank_of(from), tag)?);
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
        let mut messages = Self { sends, receives };
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
            if request.is_active() && request.test()?.is_none() {
                all = false;
            }
        }
        Ok(all)
    }

    fn requests(&mut self) -> impl Iterator<Item = &mut PersistentRequest<T>> {
        let sends = self.sends.iter_mut().map(|(_, request)| request);
        self.receives.values_mut().flatten().chain(sends)
    }

    /// The ranks to or from which something is still on its way.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let sends = self.sends.iter().map(|(to, request)| (*to, request));
        let receives = self
            .receives
            .iter()
            .flat_map(|(from, parts)| parts.iter().map(move |request| (*from, request)));
        let requests = receives.chain(sends);
        requests.filter(|(_, request)| request.is_active()).map(|(rank, _)| rank)
    }

    /// What has come from each rank that something was asked of, when all have arrived.
    ///
    /// # Errors
    ///
    /// MPI's.
    pub(super) fn arrived(self) -> Result<BTreeMap<usize, Vec<T>>> {
        self.receives.into_iter().map(|(from, parts)| Ok((from, joined(parts)?))).collect()
    }
}

/// The items of all parts; of one part, without a copy.
fn joined<T: Clone>(parts: Vec<PersistentRequest<T>>) -> Result<Vec<T>> {
    let mut items = Vec::new();
    for part in parts {
        let part = part.into_buffer()?;
        if items.is_empty() {
            items = part;
        } else {
            items.extend_from_slice(&part);
        }
    }
    Ok(items)
}
