//! `train --dry-run`: two steps that write nothing, and what was predicted of them.

use std::{path::Path, sync::Arc};

use candle_distributed::{
    finetune::cost::Workload,
    mesh::DeviceMesh,
    train::{Checkpoints, peak_bytes},
};

use crate::{
    commands::train::{Args, start::Beginning, work_of},
    devices::Place,
    error::Result,
    train::{
        measured::{self, Comparison},
        trainer::{self, Job},
    },
};

impl Args {
    /// Trains two steps of a run that is never saved, and prints what they took and sent.
    pub(super) fn rehearse(
        &self,
        mesh: &DeviceMesh,
        place: Place,
        beginning: &Beginning,
    ) -> Result<()> {
        let Beginning { settings, sharding, data, schedule, held_out, folder, .. } = beginning;
        let job = Job {
            mesh,
            data,
            schedule,
            held_out: held_out.as_ref(),
            folder,
            settings,
            sharding: sharding.as_ref(),
            typed: "",
            checkpoint_every: self.checkpoint_every,
            check: false,
            path: Path::new(""),
            checkpoints: &Checkpoints::new(""),
            from: None,
            // Nothing is there to be saved: a signal ends it as it ends any program.
            stop: Arc::default(),
        };
        let counted = job.rehearse()?;
        let model = settings.trained_model()?;
        let parameters = model.parameters()?;
        let steps = beginning.steps()?;
        let work = work_of(beginning, &model, &parameters, &steps, place, false);
        // What is there before training differs from process to process.
        let base_bytes = largest_bytes(mesh, beginning.base_bytes)?.unwrap_or(0);
        let comparison = Comparison {
            memory: Workload { base_bytes, ..work }.predict_largest()?,
            peak_bytes: largest_bytes(mesh, peak_bytes())?,
            on_processors: self.devices.is_cpu(),
            planned: measured::planned(&work)?,
            counted,
        };
        place.print(|out| writeln!(out, "{comparison}"))
    }
}

/// The largest memory of any process in whole KiB, if all of their systems report it.
fn largest_bytes(mesh: &DeviceMesh, here: Option<u64>) -> Result<Option<u64>> {
    const KIB: u64 = 1024;
    let are_unknown = trainer::largest(mesh, here.is_none().into())?;
    let kib = here.map_or(0, |bytes| bytes / KIB);
    // 4 TiB and more are shown as 4 TiB.
    let largest = trainer::largest(mesh, u32::try_from(kib).unwrap_or(u32::MAX))?;
    Ok((are_unknown == 0).then_some(u64::from(largest) * KIB))
}
