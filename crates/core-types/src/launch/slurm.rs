//! What `srun` of Slurm says about this process.

use super::{
    claim::Claim,
    error::{Error, Result},
    launcher::Launcher,
    vars::{Number, Vars, parse},
};

/// The largest id of a step that `srun` started; those above name batch scripts, shells of `salloc`
/// and the like (`SLURM_MAX_NORMAL_STEP_ID` in `slurm.h`).
const MAX_NORMAL_STEP_ID: u64 = 0xffff_fff0;

const TASKS_PER_NODE: &str = "tasks per node, such as 2(x3),1";

/// What Slurm says inside a step of `srun`. Outside of one its variables are those of the job.
pub(super) fn claim(vars: &Vars<'_>) -> Result<Option<Claim>> {
    if !in_step(vars)? {
        return Ok(None);
    }
    let size = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(size) => Some(size),
        None => vars.number("SLURM_NTASKS")?,
    };
    Ok(Some(Claim {
        launcher: Launcher::Slurm,
        rank: vars.number("SLURM_PROCID")?,
        size,
        local_rank: vars.number("SLURM_LOCALID")?,
        local_size: local_size(vars)?,
        rank_name: "SLURM_PROCID",
        size_name: "SLURM_NTASKS",
    }))
}

/// Whether this process is inside a step that `srun` started.
fn in_step(vars: &Vars<'_>) -> Result<bool> {
    let name = "SLURM_STEP_ID";
    match vars.text(name)?.as_deref() {
        // `sacct` calls the special steps by these names, and some sites set them.
        None | Some("batch" | "extern" | "interactive") => Ok(false),
        Some(_) => Ok(vars.number(name)?.is_some_and(|step| step.value <= MAX_NORMAL_STEP_ID)),
    }
}

/// How many tasks of this step are on this node.
fn local_size(vars: &Vars<'_>) -> Result<Option<Number>> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    // `SLURM_NODEID` counts the nodes of all components of a heterogeneous job, but the list holds
    // those of one component.
    if vars.text("SLURM_HET_SIZE")?.is_some() {
        return Ok(None);
    }
    let (Some(node), Some(text)) = (vars.number("SLURM_NODEID")?, vars.text(name)?) else {
        return Ok(None);
    };
    let Some(runs) = runs_of_nodes(&text) else {
        return Err(Error::VariableUnreadable { name, value: text, expected: TASKS_PER_NODE });
    };
    let own = runs.into_iter().find(|&(_, end)| node.value < end);
    Ok(own.map(|(value, _)| Number { name, value }))
}

/// Reads a list such as `2(x3),1`, which stands for 2, 2, 2, 1: each number of tasks, and the node
/// at which its run has ended.
fn runs_of_nodes(list: &str) -> Option<Vec<(u64, u64)>> {
    let mut end = 0_u64;
    let run = |entry: &str| {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, parse(times.strip_suffix(')')?)?),
            None => (entry, 1),
        };
        end = end.checked_add(times)?;
        Some((parse(tasks)?, end))
    };
    list.split(',').map(run).collect()
}
