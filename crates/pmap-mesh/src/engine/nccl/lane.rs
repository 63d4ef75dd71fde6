//! The thread that carries out what was started, in that order, while the replica computes.

use std::{
    fmt,
    sync::mpsc,
    thread::{self, JoinHandle},
};

use candle_core::Result;

use super::jobs::Job;
use crate::mesh::workers;

/// A thread beside that of the replica: what it waits for are messages of other processes.
pub(super) struct Lane {
    tasks: Option<mpsc::Sender<Task>>,
    carrier: Option<JoinHandle<()>>,
}

type Task = Box<dyn FnOnce() + Send>;

/// A job on the lane; its transfers have been started when it comes back.
pub(super) type Started = mpsc::Receiver<Result<Job>>;

impl Lane {
    pub(super) fn new() -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<Task>();
        let carry = move || queue.into_iter().for_each(|task| task());
        let carrier = thread::Builder::new().name("nccl lane".into()).spawn(carry)?;
        Ok(Self { tasks: Some(tasks), carrier: Some(carrier) })
    }

    /// Has a job carried out after those that were given before.
    pub(super) fn carry_out(
        &self,
        mut job: Job,
        start: impl FnOnce(&mut Job) -> Result<()> + Send + 'static,
    ) -> Started {
        let (reply, started) = mpsc::sync_channel(1);
        let task = move || {
            let outcome = workers::catch(|| start(&mut job).map(|()| job));
            let outcome = outcome.unwrap_or_else(|reason| Err(candle_core::Error::msg(reason)));
            // Nobody waits for what was started by a replica that has failed.
            drop(reply.send(outcome));
        };
        if let Some(tasks) = &self.tasks {
            // If the thread is gone, `started` says so.
            drop(tasks.send(Box::new(task)));
        }
        started
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").finish_non_exhaustive()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        drop(self.tasks.take());
        if let Some(carrier) = self.carrier.take() {
            drop(carrier.join());
        }
    }
}
