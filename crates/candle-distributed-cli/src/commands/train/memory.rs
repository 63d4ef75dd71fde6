//! The memory of a run, checked before it starts.

use candle_distributed::{
    finetune::{
        PreparedRun,
        cost::{MemoryLimit, machine_bytes, system_limits},
    },
    mesh::DeviceMesh,
    types::human::HumanBytes,
};

use crate::{
    commands::train::Args,
    devices::Place,
    error::{Error, ErrorKind, Result},
    hint, output,
};

impl Args {
    /// Rejects a limit for a device with unknown use of memory.
    pub(super) fn check_limit(&self) -> Result<()> {
        if self.memory_limit.is_none() || self.devices.is_cpu() {
            return Ok(());
        }
        Err(Error::usage(
            "--memory-limit is for --device cpu, which uses the memory of the process: the use of \
             other devices is not known beforehand",
        ))
    }

    /// Checks that the memory that this process will probably take is there.
    pub(super) fn check_memory(&self, place: Place, run: &PreparedRun) -> Result<()> {
        // A mesh that is too large for any machine is refused when it is made.
        let n_devices = place.placement.world_size().as_usize();
        if !self.devices.is_cpu() || n_devices > DeviceMesh::MAX_DEVICES {
            return Ok(());
        }
        let steps = run.steps()?;
        let work = run.workload(&steps, place.ranks()).with_check(self.check);
        let needed = work.predict()?.total();
        tracing::info!("this process will take about {}", HumanBytes(needed.into()));
        if let Some(limit) = self.limit(place)
            && limit.share() < needed
        {
            let error = Error::from(ErrorKind::Memory { needed, limit });
            let is_sharded = run.sharding.is_some();
            return Err(if is_sharded { error.hinted(hint::MEMORY_OF_PARTS) } else { error });
        }
        // The run may still succeed: other processes may free memory, or swap may grow.
        let together = needed.saturating_mul(place.processes_here());
        if let Some(bytes) = machine_bytes().filter(|&bytes| bytes < together) {
            output::warning(format_args!(
                "the run will take about {} on this machine, which has {}",
                HumanBytes(together.into()),
                HumanBytes(bytes.into())
            ));
        }
        Ok(())
    }

    /// Returns the bytes of the model when it writes text, if they are too many for this process.
    pub(super) fn unwritten(&self, place: Place, run: &PreparedRun) -> Result<Option<u64>> {
        let steps = run.steps()?;
        let work = run.workload(&steps, place.ranks()).with_check(self.check);
        Ok(work.too_large_to_generate(self.limit(place).as_ref())?)
    }

    /// Returns the least of the limits of this process's memory, if there is one.
    fn limit(&self, place: Place) -> Option<MemoryLimit> {
        let limits = match self.memory_limit {
            Some(bytes) => vec![MemoryLimit::for_process(bytes, "--memory-limit")],
            None => system_limits(place.processes_here()),
        };
        limits.into_iter().min_by_key(MemoryLimit::share)
    }
}
