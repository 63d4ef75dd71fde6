//! Messages between the members of a group during a collective.

use ferrompi::{Communicator, Request};

use super::{
    MpiInner,
    backoff::{PauseOutcome, TransferProgress, WaitBackoff},
    session::{exit_all, to_mpi_rank},
};
use crate::{
    engine::{GroupContext, processes::CallGuard},
    error::CollectiveError,
};

/// The longest single message, in bytes: MPI counts in 32 bits before version 4.
pub(super) const MESSAGE_BYTES: usize = 1 << 30;
/// The most requests of all collectives in flight. A running call may use as many in addition.
/// ferrompi holds twice this number for a process, and aborts the process beyond it.
pub(super) const MAX_REQUESTS: usize = 8192;
/// The number of polls between two readings of the clock. A poll takes some 100 ns, so a message
/// that arrives within microseconds finds its receiver awake.
pub(super) const POLLS: u32 = 64;

/// The kind of a message. Messages of one kind between two processes arrive in order.
#[derive(Clone, Copy)]
pub(super) enum MessageKind {
    Header = 1,
    Rest,
    Data,
    Text,
}

/// A message to receive: the rank, the kind, and the destination.
pub(super) type IncomingMessage<'a> = (usize, MessageKind, &'a mut [u8]);
/// A message to send: the rank, the kind, and the bytes.
pub(super) type OutgoingMessage<'a> = (usize, MessageKind, &'a [u8]);

/// The messages that a wait is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AwaitedMessages {
    /// The first messages of a collective. The wait may be long, since members call the collective
    /// at different times.
    Headers,
    /// Messages that follow the headers.
    Data,
}

/// A running collective of this slot.
pub(super) struct MpiCall<'a> {
    pub(super) engine: &'a MpiInner,
    pub(super) ctx: &'a GroupContext,
    pub(super) comm: &'a Communicator,
    pub(super) _guard: CallGuard<'a>,
}

impl MpiCall<'_> {
    /// Returns the ranks of the other members, beginning with the rank after this one, so that not
    /// all members send to the same rank first.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.ctx.size();
        let rank = self.ctx.rank;
        (1..size).map(move |step| (rank + step) % size)
    }

    /// Receives and sends messages, and waits for all of them. Empty messages are not sent.
    ///
    /// An error of MPI ends the program, because started messages cannot be cancelled.
    pub(super) fn transfer<'t>(
        &self,
        incoming: impl IntoIterator<Item = IncomingMessage<'t>>,
        outgoing: impl IntoIterator<Item = OutgoingMessage<'t>>,
    ) {
        self.transfer_messages(incoming, outgoing, AwaitedMessages::Data);
    }

    /// Transfers the first messages of a collective like [`transfer`](Self::transfer), but with the
    /// backoff for a long wait.
    pub(super) fn transfer_headers<'t>(
        &self,
        incoming: impl IntoIterator<Item = IncomingMessage<'t>>,
        outgoing: impl IntoIterator<Item = OutgoingMessage<'t>>,
    ) {
        self.transfer_messages(incoming, outgoing, AwaitedMessages::Headers);
    }

    fn transfer_messages<'t>(
        &self,
        incoming: impl IntoIterator<Item = IncomingMessage<'t>>,
        outgoing: impl IntoIterator<Item = OutgoingMessage<'t>>,
        awaited: AwaitedMessages,
    ) {
        let done = ferrompi::scope(|scope| {
            let mut requests = Vec::new();
            for (from, kind, bytes) in incoming {
                for chunk in bytes.chunks_mut(MESSAGE_BYTES) {
                    let request = self.comm.irecv(scope, chunk, to_mpi_rank(from), kind as i32);
                    requests.push((from, self.or_exit(request)));
                }
            }
            for (to, kind, bytes) in outgoing {
                for chunk in bytes.chunks(MESSAGE_BYTES) {
                    let request = self.comm.isend(scope, chunk, to_mpi_rank(to), kind as i32);
                    requests.push((to, self.or_exit(request)));
                }
            }
            self.wait(requests, awaited);
            Ok(())
        });
        self.or_exit(done);
    }

    /// Broadcasts the `bytes` of rank `root` to all members through a tree.
    pub(super) fn broadcast(&self, bytes: &mut [u8], root: usize) {
        let done = ferrompi::scope(|scope| {
            let requests = bytes.chunks_mut(MESSAGE_BYTES).map(|chunk| {
                (root, self.or_exit(self.comm.ibroadcast(scope, chunk, to_mpi_rank(root))))
            });
            self.wait(requests.collect(), AwaitedMessages::Data);
            Ok(())
        });
        self.or_exit(done);
    }

    /// Waits until the messages of some requests, each with the rank of its peer, have been sent
    /// and received. Ends all processes at the deadline.
    pub(super) fn wait(&self, mut requests: Vec<(usize, Request<'_>)>, awaited: AwaitedMessages) {
        let mut backoff = WaitBackoff::new(self.engine.deadline);
        loop {
            let n_requests = requests.len();
            for _ in 0..POLLS {
                requests.retain_mut(|(_, request)| self.or_exit(request.test()).is_none());
                if requests.is_empty() {
                    return;
                }
            }
            let mut progress = self.engine.progress();
            progress.has_moved |= requests.len() < n_requests;
            progress.is_moving |= awaited == AwaitedMessages::Data;
            self.engine.pause(self.ctx, &mut backoff, progress, || {
                requests.iter().map(|(rank, _)| *rank).collect()
            });
        }
    }

    /// Returns the value of a result like [`MpiInner::or_exit`].
    pub(super) fn or_exit<T>(&self, result: ferrompi::Result<T>) -> T {
        self.engine.or_exit(self.ctx, result)
    }
}

impl MpiInner {
    /// Pauses in a wait for messages from or to some ranks of a group.
    ///
    /// Ends all processes if the deadline has passed, or if one of these ranks has left.
    pub(super) fn pause(
        &self,
        ctx: &GroupContext,
        backoff: &mut WaitBackoff,
        progress: TransferProgress,
        ranks: impl FnOnce() -> Vec<usize>,
    ) {
        match backoff.pause(progress) {
            PauseOutcome::Short => {}
            PauseOutcome::Long => self.exit_if_left(ctx, backoff, &slots_of_ranks(ctx, ranks())),
            PauseOutcome::Over => self.exit_late(ctx, slots_of_ranks(ctx, ranks())),
        }
    }

    /// Ends all processes if the process of one of these slots has dropped its meshes.
    fn exit_if_left(&self, ctx: &GroupContext, backoff: &mut WaitBackoff, missing: &[usize]) {
        let Some(&slot) = missing.iter().find(|slot| self.has_left(**slot)) else { return };
        // Exit only if the same slot is missing in two pauses: a message that its process sent
        // before it left may have arrived after the last poll.
        if backoff.absent.replace(slot) == Some(slot) {
            let (waiting, call) = (ctx.slot(), &ctx.call);
            let reason = format!(
                "the process of replica {slot} has left while replica {waiting} waits for it in {call}"
            );
            exit_all(&self.session.world, &reason);
        }
    }

    /// Returns true if the process of `slot` has dropped its meshes.
    fn has_left(&self, slot: usize) -> bool {
        let answer = self.session.has_left(slot);
        answer.unwrap_or_else(|error| exit_all(&self.session.world, &error.to_string()))
    }

    /// Ends all processes because members missed the deadline.
    fn exit_late(&self, ctx: &GroupContext, missing: Vec<usize>) -> ! {
        let call = ctx.call.to_string();
        let limit = self.deadline;
        let late = CollectiveError::Deadline { slot: ctx.slot(), missing, call, limit };
        exit_all(&self.session.world, &late.to_string())
    }
}

/// Returns the slots of some ranks of a group, sorted by rank, each slot once.
fn slots_of_ranks(ctx: &GroupContext, mut ranks: Vec<usize>) -> Vec<usize> {
    ranks.sort_unstable();
    ranks.dedup();
    ranks.into_iter().map(|rank| ctx.members()[rank]).collect()
}
