//! The thread that starts the transfers of pending collectives, in order, while the replica
//! computes.

use std::{
    fmt,
    sync::mpsc,
    thread::{self, JoinHandle},
};

use candle_core::Result;

use super::list_ops::NcclListOp;
use crate::sync::catch;

/// A second thread for a replica, which waits for messages of other processes.
pub(super) struct CommThread {
    tasks: Option<mpsc::Sender<CommTask>>,
    thread: Option<JoinHandle<()>>,
}

type CommTask = Box<dyn FnOnce() + Send>;

/// Receives a collective after the thread has started its transfers, or the error of the start.
pub(super) type StartedReceiver = mpsc::Receiver<Result<NcclListOp>>;

impl CommThread {
    pub(super) fn new() -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<CommTask>();
        let thread = thread::Builder::new()
            .name("nccl comm".into())
            .spawn(move || queue.into_iter().for_each(|task| task()))?;
        Ok(Self { tasks: Some(tasks), thread: Some(thread) })
    }

    /// Queues the start of a collective behind earlier ones. `start` starts the transfers; if it
    /// fails, the channel of the collective rejects all later collectives.
    pub(super) fn queue_start(
        &self,
        mut list_op: NcclListOp,
        start: impl FnOnce(&mut NcclListOp) -> Result<()> + Send + 'static,
    ) -> StartedReceiver {
        let (reply, started) = mpsc::sync_channel(1);
        if let Some(tasks) = &self.tasks {
            // `send` fails if the thread has ended; receiving from `started` then fails too.
            drop(tasks.send(Box::new(move || {
                let outcome = catch(|| start(&mut list_op).map(|()| list_op))
                    .unwrap_or_else(|panic| Err(candle_core::Error::msg(panic)));
                // `send` fails if the replica has failed and dropped the receiver.
                drop(reply.send(outcome));
            })));
        }
        started
    }
}

impl fmt::Debug for CommThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommThread").finish_non_exhaustive()
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        drop(self.tasks.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{
        axes::ALL,
        engine::{GroupContext, ListRequest},
        grid::Topology,
        sync::lock,
    };

    /// Returns a sum of no tensors.
    fn list_op() -> NcclListOp {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        let ctx = GroupContext::new(ALL, &topology, 0, "start_reduce_runs", None).unwrap();
        let runs_by_rank = [Vec::new(), Vec::new()].into();
        NcclListOp::new(&ctx, ListRequest::Sum { list: Vec::new(), runs_by_rank }).unwrap()
    }

    #[test]
    fn failed_starts_keep_the_order() {
        let done = Arc::<Mutex<Vec<usize>>>::default();
        let comm_thread = CommThread::new().unwrap();
        let carry_out = |n: usize, start: fn() -> Result<()>| {
            let done = Arc::clone(&done);
            comm_thread.queue_start(list_op(), move |_| {
                lock(&done).push(n);
                start()
            })
        };
        let started = [
            carry_out(0, || panic!("this one breaks")),
            carry_out(1, || candle_core::bail!("no more data")),
            carry_out(2, || Ok(())),
        ];
        // No receiver waits for this one.
        drop(carry_out(3, || Ok(())));
        let [panicked, failed, succeeded] = started.map(|started| started.recv().unwrap());
        assert!(panicked.unwrap_err().to_string().contains("this one breaks"));
        assert!(failed.unwrap_err().to_string().contains("no more data"));
        assert!(succeeded.unwrap().finish().unwrap().is_empty());
        drop(comm_thread);
        assert_eq!(*lock(&done), [0, 1, 2, 3]);
    }
}
