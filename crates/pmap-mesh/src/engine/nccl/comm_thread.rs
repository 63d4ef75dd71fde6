//! The thread that carries out what was started, in that order, while the replica computes.

use std::{
    fmt,
    sync::mpsc,
    thread::{self, JoinHandle},
};

use candle_core::Result;

use super::jobs::Job;
use crate::sync::catch;

/// A thread beside that of the replica: what it waits for are messages of other processes.
pub(super) struct CommThread {
    tasks: Option<mpsc::Sender<Task>>,
    carrier: Option<JoinHandle<()>>,
}

type Task = Box<dyn FnOnce() + Send>;

/// A job on the lane; its transfers have been started when it comes back.
pub(super) type Started = mpsc::Receiver<Result<Job>>;

impl CommThread {
    pub(super) fn new() -> std::io::Result<Self> {
        let (tasks, queue) = mpsc::channel::<Task>();
        let carry = move || queue.into_iter().for_each(|task| task());
        let carrier = thread::Builder::new().name("nccl lane".into()).spawn(carry)?;
        Ok(Self { tasks: Some(tasks), carrier: Some(carrier) })
    }

    /// Has a job carried out after those that were given before; what one of them has left undone,
    /// its wire knows.
    pub(super) fn carry_out(
        &self,
        mut job: Job,
        start: impl FnOnce(&mut Job) -> Result<()> + Send + 'static,
    ) -> Started {
        let (reply, started) = mpsc::sync_channel(1);
        let task = move || {
            let outcome = catch(|| start(&mut job).map(|()| job));
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

impl fmt::Debug for CommThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommThread").finish_non_exhaustive()
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        drop(self.tasks.take());
        if let Some(carrier) = self.carrier.take() {
            drop(carrier.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{
        axes::ALL,
        engine::{Site, Wanted, Work, nccl::jobs::Transfers},
        grid::Topology,
        reduce::Reduction,
        sync::lock,
    };

    /// Of no tensors.
    fn job() -> Job {
        let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
        let site = Site::along(ALL, &topology, 0, "start_psum", None).unwrap();
        let reduction = Reduction::Sum;
        let work = Work::Reduce { list: Vec::new(), wanted: Wanted::Everything, reduction };
        Job::new(&site, work, Transfers::One).unwrap()
    }

    #[test]
    fn what_was_started_is_carried_out_in_order_whatever_becomes_of_it() {
        let done = Arc::<Mutex<Vec<usize>>>::default();
        let lane = CommThread::new().unwrap();
        let carry_out = |n: usize, start: fn() -> Result<()>| {
            let done = Arc::clone(&done);
            lane.carry_out(job(), move |_| {
                lock(&done).push(n);
                start()
            })
        };
        let started = [
            carry_out(0, || panic!("this one breaks")),
            carry_out(1, || candle_core::bail!("no more data")),
            carry_out(2, || Ok(())),
        ];
        // Nobody waits for this one.
        drop(carry_out(3, || Ok(())));
        let [panicked, failed, succeeded] = started.map(|started| started.recv().unwrap());
        assert!(panicked.unwrap_err().to_string().contains("this one breaks"));
        assert!(failed.unwrap_err().to_string().contains("no more data"));
        assert!(succeeded.unwrap().finish().unwrap().is_empty());
        drop(lane);
        assert_eq!(*lock(&done), [0, 1, 2, 3]);
    }
}
