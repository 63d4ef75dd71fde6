//! The rank that a launcher assigned to this process.
//!
//! Each launcher sets variables of its own; this module reads the variables of all launchers and
//! resolves conflicts.

mod claim;
mod error;
mod launcher;
mod slurm;
#[cfg(test)]
mod tests;
mod vars;

use std::{env, ffi::OsString};

use claim::LaunchClaim;
pub use error::Error;
use error::Result;
pub use launcher::Launcher;
use vars::LaunchVars;

use crate::rank::{Placement, Rank, WorldSize};

/// The placement that a launcher assigned to this process, and its place on its machine.
///
/// # Examples
///
/// ```
/// use core_types::LaunchEnv;
///
/// if let Some(launched) = LaunchEnv::from_env()? {
///     let gpu = launched.local_rank().map_or(0, |rank| rank.as_usize());
///     println!("{} on GPU {gpu}, started by {}", launched.placement(), launched.launcher());
/// }
/// # Ok::<(), core_types::LaunchError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchEnv {
    placement: Placement,
    launcher: Launcher,
    local_rank: Option<Rank>,
    local_world_size: Option<WorldSize>,
}

impl LaunchEnv {
    /// Reads the rank of this process from the environment; `None` if no launcher has set one.
    ///
    /// Programs call it once, at their start. Libraries take a [`Placement`] instead, so that equal
    /// arguments give equal results. After `None` the program runs alone, as [`Placement::SINGLE`].
    ///
    /// # Variables
    ///
    /// Launchers set rank and size in different variables:
    ///
    /// | launcher | rank, size | on this machine: rank, size |
    /// |---|---|---|
    /// | [torchrun], `env://` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | [Open MPI] | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` |
    /// | MPICH's [Hydra], Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    /// | [Slurm], in a step of `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or else `SLURM_NTASKS` | `SLURM_LOCALID`, the entry of `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
    ///
    /// Slurm's variables count only inside a step: batch scripts and shells of `salloc` have the
    /// job's variables, too, with a `SLURM_PROCID` of 0 and the size of a world that was not
    /// started. There `SLURM_STEP_ID` is absent, or one of the ids above `SLURM_MAX_NORMAL_STEP_ID`
    /// (`slurm.h`); 4294967290 is the shell of `salloc`, which is a step with
    /// `use_interactive_step`. The count of the step comes first, because `srun --preserve-env`
    /// keeps the job's count in `SLURM_NTASKS`. `SLURM_NTASKS_PER_NODE` is ignored: it is a
    /// requested upper bound.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` are addresses, not ranks, and are ignored.
    ///
    /// # Several launchers
    ///
    /// If all launchers with complete variables agree on rank and size, the innermost is reported:
    /// torchrun or `env://`, Open MPI, PMI, Slurm. Its missing local values come from the next
    /// launcher that agrees. If launchers disagree, the innermost counts only if one commonly
    /// starts the other: torchrun (which sets `TORCHELASTIC_RUN_ID`) inside MPI or Slurm, and MPI
    /// inside Slurm. The inner world must then be at least as large as the outer one, because each
    /// outer task starts at least one rank. A smaller inner world was inherited, or each task
    /// started a separate world; both are errors.
    ///
    /// A rank without a size, or a size without a rank, is an error, too, unless a launcher with
    /// both agrees with it: scripts that export only `WORLD_SIZE` and take the rank from Slurm are
    /// common.
    ///
    /// # Errors
    ///
    /// - [`Error::VariableInvalid`] for a value that is no number, and for a world size, rank, local
    ///   size or local rank out of range. An empty value is an error, too: `RANK=$UNSET` must not
    ///   make every process the only one.
    /// - [`Error::VariableMissing`] for a rank without a size, a size without a rank, or a local
    ///   rank or size without both.
    /// - [`Error::LaunchersDisagree`] if launchers disagree and the rules above do not allow it.
    ///
    /// # Examples
    ///
    /// ```
    /// use core_types::{LaunchEnv, Placement};
    ///
    /// let me = LaunchEnv::from_env()?.map_or(Placement::SINGLE, LaunchEnv::placement);
    /// println!("{me}");
    /// # Ok::<(), core_types::LaunchError>(())
    /// ```
    ///
    /// # References
    ///
    /// The manuals of [torchrun], [Open MPI], [Hydra] and Intel MPI, and [Slurm] document the
    /// variables. Unlike PyTorch's `env://` and JAX's cluster detection, this function guesses
    /// nothing if some are absent.
    ///
    /// [torchrun]: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    /// [Open MPI]: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    /// [Hydra]:
    /// https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    ///
    /// [Slurm]: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    pub fn from_env() -> Result<Option<Self>> {
        from_lookup(&|name| env::var_os(name))
    }

    /// Returns the rank of this process and the size of its world.
    pub fn placement(self) -> Placement {
        self.placement
    }

    /// Returns the launcher that assigned the rank; the innermost one if there are several.
    pub fn launcher(self) -> Launcher {
        self.launcher
    }

    /// Returns the rank of this process on its machine, if set: the index of the device to use.
    pub fn local_rank(self) -> Option<Rank> {
        self.local_rank
    }

    /// Returns the number of this world's processes on this machine, if set.
    pub fn local_world_size(self) -> Option<WorldSize> {
        self.local_world_size
    }

    /// Returns true if a disagreement with `outer` is expected, because `outer` has started this
    /// launcher.
    fn runs_inside(&self, outer: &Self) -> bool {
        self.launcher.runs_inside(outer.launcher)
            && self.placement.world_size() >= outer.placement.world_size()
    }
}

/// Decides on the launcher, given the variables that `lookup` returns.
fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<LaunchEnv>> {
    let vars = LaunchVars(lookup);
    let mut claims =
        vec![LaunchClaim::torch(&vars)?, LaunchClaim::open_mpi(&vars)?, LaunchClaim::pmi(&vars)?];
    claims.extend(slurm::claim(&vars)?);
    let mut envs = Vec::with_capacity(claims.len());
    for claim in &claims {
        envs.extend(claim.to_env()?);
    }
    let innermost = select_innermost(&envs)?;
    for claim in &claims {
        claim.check_complete(innermost)?;
    }
    Ok(innermost)
}

/// Returns the first of `envs`, which are ordered from the innermost launcher to the outermost.
///
/// Its missing local values come from the next launcher that agrees with it. A launcher that
/// disagrees is an error, unless it has started one that agrees.
fn select_innermost(envs: &[LaunchEnv]) -> Result<Option<LaunchEnv>> {
    let Some(&first) = envs.first() else { return Ok(None) };
    let agreeing = || envs.iter().filter(|env| env.placement == first.placement);
    for other in envs {
        // `other` need not have started the first launcher itself: a script may set RANK to Open
        // MPI's rank, while Slurm, which has started Open MPI's daemons, numbers the daemons.
        if other.placement != first.placement && !agreeing().any(|env| env.runs_inside(other)) {
            return Err(Error::LaunchersDisagree {
                launcher: first.launcher,
                place: first.placement,
                other_launcher: other.launcher,
                other_place: other.placement,
            });
        }
    }
    // Local rank and local size must come from one launcher.
    let with_rank = agreeing().find(|env| env.local_rank.is_some());
    let local = with_rank.or_else(|| agreeing().find(|env| env.local_world_size.is_some()));
    Ok(Some(LaunchEnv {
        local_rank: local.and_then(|env| env.local_rank),
        local_world_size: local.and_then(|env| env.local_world_size),
        ..first
    }))
}
