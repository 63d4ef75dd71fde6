//! Checks of a run's memory before training.

use candle_distributed::{
    finetune::{
        PreparedRun,
        cost::{MemoryLimit, Workload, machine_bytes, system_limits},
    },
    mesh::DeviceMesh,
    types::human::HumanBytes,
};

use crate::{
    commands::train::Args,
    devices::ProcessPlace,
    error::{Error, ErrorKind, Result},
    hint, output,
};

impl Args {
    /// Rejects `--memory-limit` for devices other than CPUs, whose memory use cannot be predicted.
    pub(super) fn check_limit(&self) -> Result<()> {
        if self.memory_limit.is_none() || self.devices.is_cpu() {
            return Ok(());
        }
        Err(Error::usage(
            "--memory-limit is for --device cpu, which uses the memory of the process: the memory \
             use of other devices cannot be predicted",
        ))
    }

    /// Rejects a run whose memory may be above the limit of this process, and warns if it may be above
    /// the memory of this machine.
    pub(super) fn check_memory(&self, process: ProcessPlace, run: &PreparedRun) -> Result<()> {
        // Opening the mesh rejects a number of devices that is too large for any machine.
        let n_devices = process.placement.world_size().as_usize();
        if !self.devices.is_cpu() || n_devices > DeviceMesh::MAX_DEVICES {
            return Ok(());
        }
        let micro_batches = run.micro_batches()?;
        let mut workload = run.workload(&micro_batches, process.ranks());
        workload.check = self.check;
        let predicted = workload.predict()?;
        let needed = predicted.upper_bound();
        tracing::info!(
            "this process will take about {}, and at most {}",
            HumanBytes(predicted.total().into()),
            HumanBytes(needed.into())
        );
        if let Some(limit) = self.limit(process)
            && limit.share() < needed
        {
            let error = Error::from(ErrorKind::Memory { needed, limit });
            if run.sharding.is_none() {
                return Err(error);
            }
            let saved = saved_without_clipping(&workload)?;
            let hints = saved.into_iter().chain([hint::MEMORY_OF_SHARDED.to_owned()]);
            return Err(error.with_hint(hints.collect::<Vec<_>>().join("; ")));
        }
        // Only a warning: other processes may free memory, or swap may grow.
        let needed_here = needed.saturating_mul(process.processes_here());
        if let Some(available) = machine_bytes()
            && available < needed_here
        {
            output::warning(format_args!(
                "the run may take {} on this machine, which has {}",
                HumanBytes(needed_here.into()),
                HumanBytes(available.into())
            ));
        }
        Ok(())
    }

    /// Returns the bytes that the full model needs to generate a sample, or `None` if this process
    /// may use as many.
    pub(super) fn too_large_to_generate(
        &self,
        process: ProcessPlace,
        run: &PreparedRun,
    ) -> Result<Option<u64>> {
        let micro_batches = run.micro_batches()?;
        let mut workload = run.workload(&micro_batches, process.ranks());
        workload.check = self.check;
        Ok(workload.too_large_to_generate(self.limit(process).as_ref())?)
    }

    /// Returns the lowest memory limit of this process, if there is any. `--memory-limit` replaces
    /// the limits of the system.
    pub(super) fn limit(&self, process: ProcessPlace) -> Option<MemoryLimit> {
        let limits = match self.memory_limit {
            Some(bytes) => vec![MemoryLimit::for_process(bytes, "--memory-limit")],
            None => system_limits(process.processes_here()),
        };
        limits.into_iter().min_by_key(MemoryLimit::share)
    }
}

/// Returns a sentence on the memory that a sharded run saves if it does not clip gradients, or `None`
/// if it does not clip them.
pub(super) fn saved_without_clipping(workload: &Workload<'_>) -> Result<Option<String>> {
    let saved = workload.clipping_bytes()?.map(|bytes| HumanBytes(bytes.into()));
    Ok(saved.map(|saved| {
        format!("--max-grad-norm none saves {saved}, because gradients of one unit exist at a time")
    }))
}
