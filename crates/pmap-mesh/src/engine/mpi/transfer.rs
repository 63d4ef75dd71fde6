//! Messages between the members of a group, while they take part in a collective.

use std::sync::Arc;

use ferrompi::{Communicator, Request};

use super::{
    Inner,
    backoff::{Pause, TransferProgress, WaitBackoff},
    session::{end, rank_of},
};
use crate::{
    engine::{Site, processes::Guard},
    error::CollectiveError,
};

/// The longest single message: below version 4, MPI counts in 32 bits.
pub(super) const MESSAGE_BYTES: usize = 1 << 30;
/// How many requests the collectives that are under way may have, and the one that is not: half each
/// of what ferrompi holds for a process, which ends beyond.
pub(super) const MAX_REQUESTS: usize = 8192;
/// How often a wait looks for messages before it looks at the clock and gives way. A look takes
/// some 100 ns: what arrives within microseconds finds its receiver awake.
pub(super) const TRIES: u32 = 64;

/// What a message is; messages of one kind between two processes arrive in order.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Header = 1,
    Rest,
    Data,
    Text,
}

/// What is to arrive from a rank, and where.
pub(super) type Incoming<'a> = (usize, Kind, &'a mut [u8]);
/// What is to be sent to a rank.
pub(super) type Outgoing<'a> = (usize, Kind, &'a [u8]);

/// A collective while this slot takes part in it.
pub(super) struct Call<'a> {
    pub(super) engine: &'a Inner,
    pub(super) site: &'a Site,
    pub(super) comm: &'a Communicator,
    pub(super) _guard: Guard<'a>,
}

impl Call<'_> {
    /// The ranks of the other members, beginning with the next one, so that not all send to the
    /// same one first.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.site.size();
        let rank = self.site.rank;
        (1..size).map(move |step| (rank + step) % size)
    }

    /// Receives and sends all of these; nothing is sent where there is nothing to send.
    ///
    /// Whatever goes wrong in MPI ends the program: messages that were started could not be taken
    /// back.
    pub(super) fn transfer<'t>(
        &self,
        incoming: impl IntoIterator<Item = Incoming<'t>>,
        outgoing: impl IntoIterator<Item = Outgoing<'t>>,
    ) {
        self.carry_out(incoming, outgoing, true);
    }

    /// [`transfer`](Self::transfer) of the first messages of a collective, for which a member that
    /// has come early waits long.
    pub(super) fn transfer_headers<'t>(
        &self,
        incoming: impl IntoIterator<Item = Incoming<'t>>,
        outgoing: impl IntoIterator<Item = Outgoing<'t>>,
    ) {
        self.carry_out(incoming, outgoing, false);
    }

    fn carry_out<'t>(
        &self,
        incoming: impl IntoIterator<Item = Incoming<'t>>,
        outgoing: impl IntoIterator<Item = Outgoing<'t>>,
        are_data: bool,
    ) {
        let done = ferrompi::scope(|scope| {
            let mut requests = Vec::new();
            for (from, kind, bytes) in incoming {
                for piece in bytes.chunks_mut(MESSAGE_BYTES) {
                    let request = self.comm.irecv(scope, piece, rank_of(from), kind as i32);
                    requests.push((from, self.check(request)));
                }
            }
            for (to, kind, bytes) in outgoing {
                for piece in bytes.chunks(MESSAGE_BYTES) {
                    let request = self.comm.isend(scope, piece, rank_of(to), kind as i32);
                    requests.push((to, self.check(request)));
                }
            }
            self.wait(requests, are_data);
            Ok(())
        });
        self.check(done);
    }

    /// Sends what `root` has in `bytes` to all members, through a tree.
    pub(super) fn broadcast(&self, bytes: &mut [u8], root: usize) {
        let done = ferrompi::scope(|scope| {
            let start =
                |piece| (root, self.check(self.comm.ibroadcast(scope, piece, rank_of(root))));
            self.wait(bytes.chunks_mut(MESSAGE_BYTES).map(start).collect(), true);
            Ok(())
        });
        self.check(done);
    }

    /// Waits for messages from and to these ranks, until the deadline; they are data, or only tell
    /// that a member has come.
    pub(super) fn wait(&self, mut requests: Vec<(usize, Request<'_>)>, are_data: bool) {
        let mut patience = WaitBackoff::new(self.engine.deadline);
        loop {
            let n_requests = requests.len();
            for _ in 0..TRIES {
                requests.retain_mut(|(_, request)| self.check(request.test()).is_none());
                if requests.is_empty() {
                    return;
                }
            }
            let mut motion = self.engine.progress();
            motion.has_moved |= requests.len() < n_requests;
            motion.is_moving |= are_data;
            let ranks = || requests.iter().map(|(rank, _)| *rank).collect();
            self.engine.pause(self.site, &mut patience, motion, ranks);
        }
    }

    pub(super) fn check<T>(&self, result: ferrompi::Result<T>) -> T {
        match result {
            Ok(value) => value,
            Err(error) => {
                end(&self.engine.session.world, &format!("{error} in {}", self.site.call))
            }
        }
    }
}

impl Inner {
    /// Lets some time pass in a wait for members of some ranks.
    ///
    /// Ends all processes if their time is over, or if one of them will not come.
    pub(super) fn pause(
        &self,
        site: &Site,
        patience: &mut WaitBackoff,
        motion: TransferProgress,
        ranks: impl FnOnce() -> Vec<usize>,
    ) {
        match patience.pause(motion) {
            Pause::Short => {}
            Pause::Long => self.end_if_left(site, patience, &missing(site, ranks())),
            Pause::Over => self.end_late(site, missing(site, ranks())),
        }
    }

    /// Ends all processes if the process of one of these slots has dropped its meshes.
    fn end_if_left(&self, site: &Site, patience: &mut WaitBackoff, missing: &[usize]) {
        let has_left = |slot: &usize| {
            let has_left = self.session.has_left(*slot);
            has_left.unwrap_or_else(|error| end(&self.session.world, &error.to_string()))
        };
        let Some(&slot) = missing.iter().find(|slot| has_left(slot)) else { return };
        // What it sent before it left may have come since the last look: there is one more.
        if patience.absent.replace(slot) == Some(slot) {
            let (waiting, call) = (site.slot(), Arc::clone(&site.call));
            let left = CollectiveError::Left { slot, waiting, call };
            end(&self.session.world, &left.to_string());
        }
    }

    /// Ends all processes because members have not come in time.
    fn end_late(&self, site: &Site, missing: Vec<usize>) -> ! {
        let call = Arc::clone(&site.call);
        let after = self.deadline;
        let late = CollectiveError::Deadline { slot: site.slot(), missing, call, after };
        end(&self.session.world, &late.to_string())
    }
}

/// The slots of these ranks.
fn missing(site: &Site, mut ranks: Vec<usize>) -> Vec<usize> {
    ranks.sort_unstable();
    ranks.dedup();
    ranks.into_iter().map(|rank| site.members()[rank]).collect()
}
