//! The variables of Slurm's `srun`.

use super::{
    claim::LaunchClaim,
    error::Result,
    launcher::Launcher,
    vars::{LaunchVars, NamedNumber, invalid, parse},
};

/// Largest id of a step that `srun` started; larger ids are batch scripts, shells of `salloc` and
/// the like (`SLURM_MAX_NORMAL_STEP_ID` in `slurm.h`).
const MAX_NORMAL_STEP_ID: u64 = 0xffff_fff0;

const EXPECTED_TASKS_PER_NODE: &str = "tasks per node, such as 2(x3),1";

/// Reads the claim of a step of `srun`. Returns `None` outside of a step, where the variables
/// describe the job instead of this process.
pub(super) fn claim(vars: &LaunchVars<'_>) -> Result<Option<LaunchClaim>> {
    if !in_step(vars)? {
        return Ok(None);
    }
    let size = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(size) => Some(size),
        None => vars.number("SLURM_NTASKS")?,
    };
    Ok(Some(LaunchClaim {
        launcher: Launcher::Slurm,
        rank: vars.number("SLURM_PROCID")?,
        size,
        local_rank: vars.number("SLURM_LOCALID")?,
        local_size: local_size(vars)?,
        rank_name: "SLURM_PROCID",
        size_name: "SLURM_NTASKS",
    }))
}

/// Returns true if this process is inside a step that `srun` started.
fn in_step(vars: &LaunchVars<'_>) -> Result<bool> {
    let name = "SLURM_STEP_ID";
    match vars.text(name)?.as_deref() {
        // `sacct` has these names for special steps, and some sites set them.
        None | Some("batch" | "extern" | "interactive") => Ok(false),
        Some(_) => Ok(vars.number(name)?.is_some_and(|step| step.value <= MAX_NORMAL_STEP_ID)),
    }
}

/// Returns the number of tasks of this step on this node.
fn local_size(vars: &LaunchVars<'_>) -> Result<Option<NamedNumber>> {
    let name = "SLURM_STEP_TASKS_PER_NODE";
    // `SLURM_NODEID` counts the nodes of all components of a heterogeneous job, but the list covers
    // one component.
    if vars.text("SLURM_HET_SIZE")?.is_some() {
        return Ok(None);
    }
    let (Some(node), Some(text)) = (vars.number("SLURM_NODEID")?, vars.text(name)?) else {
        return Ok(None);
    };
    let Some(runs) = parse_runs(&text) else {
        return Err(invalid(name, text, EXPECTED_TASKS_PER_NODE));
    };
    let own_run = runs.into_iter().find(|&(_, end)| node.value < end);
    Ok(own_run.map(|(n_tasks, _)| NamedNumber { name, value: n_tasks }))
}

/// Parses a list of tasks per node such as `2(x3),1`, which means 2, 2, 2, 1. Returns for each
/// entry the number of tasks and the first node after its nodes.
fn parse_runs(list: &str) -> Option<Vec<(u64, u64)>> {
    let mut runs = Vec::new();
    let mut end = 0_u64;
    for entry in list.split(',') {
        let (tasks, n_nodes) = match entry.split_once("(x") {
            Some((tasks, n_nodes)) => (tasks, parse(n_nodes.strip_suffix(')')?)?),
            None => (entry, 1),
        };
        end = end.checked_add(n_nodes)?;
        runs.push((parse(tasks)?, end));
    }
    Some(runs)
}
