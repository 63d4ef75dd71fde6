//! `train --dry-run`: predicts the memory and the traffic of a run, and measures them in two steps.

use candle_distributed::{finetune::PreparedRun, mesh::DeviceMesh, train::peak_bytes};

use crate::{
    commands::train::{Args, announce::write_mixture, memory::saved_without_clipping},
    devices::ProcessPlace,
    error::Result,
    train::comparison::{Comparison, Prediction},
};

impl Args {
    /// Trains two steps without writing files, and prints their predicted and measured memory and
    /// traffic.
    pub(super) fn rehearse(
        &self,
        mesh: &DeviceMesh,
        process: ProcessPlace,
        run: &PreparedRun,
    ) -> Result<()> {
        let counted = run.rehearse(mesh)?;
        let micro_batches = run.micro_batches()?;
        let mut workload = run.workload(&micro_batches, process.ranks());
        // The memory before training differs between processes, so the prediction uses the largest.
        workload.base_bytes = largest(mesh, run.base_bytes)?.unwrap_or(0);
        let comparison = Comparison {
            predicted: Prediction {
                memory: workload.predict_largest()?,
                traffic: workload.planned_traffic()?,
            },
            peak_bytes: largest(mesh, peak_bytes())?,
            on_processors: self.devices.is_cpu(),
            counted,
        };
        let saved = saved_without_clipping(&workload)?;
        process.print(|out| {
            write_mixture(&run.spec, out)?;
            writeln!(out, "{comparison}")?;
            saved.iter().try_for_each(|saved| writeln!(out, "{saved}"))
        })
    }
}

/// Returns the largest of the processes' bytes, or `None` if they are unknown for some process.
fn largest(mesh: &DeviceMesh, bytes: Option<u64>) -> Result<Option<u64>> {
    let numbers = [u64::from(bytes.is_none()), bytes.unwrap_or(0)];
    let all = mesh.gather_numbers(&vec![numbers; mesh.devices().len()])?;
    let is_known = all.iter().all(|&[is_unknown, _]| is_unknown == 0);
    Ok(is_known.then(|| all.iter().map(|&[_, bytes]| bytes).fold(0, u64::max)))
}
