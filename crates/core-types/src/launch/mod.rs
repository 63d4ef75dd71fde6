//! Which rank this process is, according to the launcher that started it.
//!
//! Each launcher makes a claim through its variables; this module decides between the claims.

mod claim;
mod error;
mod launcher;
mod slurm;
#[cfg(test)]
mod tests;
mod vars;

use std::{env, ffi::OsString};

use claim::Claim;
pub use error::Error;
use error::Result;
pub use launcher::Launcher;
use vars::Vars;

#[cfg(feature = "serde")]
use crate::rank;
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked", into = "Unchecked"))]
pub struct LaunchEnv {
    placement: Placement,
    launcher: Launcher,
    local_rank: Option<Rank>,
    local_world_size: Option<WorldSize>,
}

impl LaunchEnv {
    /// Reads the rank of this process from the environment; `None` if no launcher has set one.
    ///
    /// This is for programs, at their start. A library takes a [`Placement`] instead, so that equal
    /// arguments give equal results. On `None` the program runs alone: [`Placement::SINGLE`].
    ///
    /// # Variables
    ///
    /// The launchers name rank and size in variables of their own:
    ///
    /// | launcher | rank, size | on this machine: rank, size |
    /// |---|---|---|
    /// | [torchrun], `env://` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    /// | [Open MPI] | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` |
    /// | MPICH's [Hydra], Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    /// | [Slurm], in a step of `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or else `SLURM_NTASKS` | `SLURM_LOCALID`, the entry of `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
    ///
    /// Slurm's are believed only inside a step: a batch script and a shell of `salloc` see the
    /// job's variables too, with a `SLURM_PROCID` of 0 and the size of a world that nobody has
    /// started. `SLURM_STEP_ID` is absent there, or one of the ids above `SLURM_MAX_NORMAL_STEP_ID`
    /// (`slurm.h`); 4294967290 is the shell of `salloc`, which is a step by `use_interactive_step`.
    /// The step's own count comes first because `srun --preserve-env` leaves the job's in
    /// `SLURM_NTASKS`. `SLURM_NTASKS_PER_NODE` is not read: it is what was asked for, an upper
    /// bound on what a node got.
    ///
    /// `MASTER_ADDR` and `MASTER_PORT` say where the ranks find each other, not which of them this
    /// one is, and are not read either.
    ///
    /// # Several launchers
    ///
    /// If all launchers whose variables are complete name the same rank and size, the innermost is
    /// reported: torchrun or `env://`, Open MPI, PMI, Slurm. What it does not say about its machine
    /// is taken from the next one that agrees. If launchers contradict each other, the innermost is
    /// believed only where one commonly starts the other: torchrun (which `TORCHELASTIC_RUN_ID`
    /// tells from variables set by hand) inside MPI or Slurm, and MPI inside Slurm. The inner world
    /// must then be at least as large as the outer one, since each outer task starts one rank or
    /// more. If it is smaller, it was inherited from somewhere else, or each task has started a
    /// world of its own; both are errors.
    ///
    /// Half a pair is an error too, unless a complete launcher says the same: scripts that export
    /// `WORLD_SIZE` alone and take the rank from Slurm are common.
    ///
    /// # Errors
    ///
    /// - [`Error::VariableNotUnicode`], [`Error::VariableUnreadable`] if a value is not what it
    ///   should be. An empty value is an error too: `RANK=$UNSET` must not make every process the
    ///   only one.
    /// - [`Error::VariableMissing`] if there is a rank without a size, a size without a rank, or a
    ///   local rank or size without both.
    /// - [`Error::SizeVariableOutOfRange`], [`Error::RankVariableOutOfRange`] if there is no such
    ///   world, or no such rank in it; the same for the part of it on this machine.
    /// - [`Error::LaunchersDisagree`] if launchers contradict each other in any other way than
    ///   those above.
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
    /// The variables are those of the launchers' manuals: [torchrun], [Open MPI], [Hydra] and Intel
    /// MPI, [Slurm]. Unlike PyTorch's `env://` and JAX's cluster detection, nothing is guessed when
    /// a part of them is absent.
    ///
    /// [torchrun]: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    /// [Open MPI]: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    /// [Hydra]:
    /// https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    /// [Slurm]: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    pub fn from_env() -> Result<Option<Self>> {
        from_lookup(&|name| env::var_os(name))
    }

    /// Returns the rank of this process, and the size of its world.
    pub fn placement(self) -> Placement {
        self.placement
    }

    /// Returns the launcher that assigned the rank; the innermost if several did.
    pub fn launcher(self) -> Launcher {
        self.launcher
    }

    /// Returns the rank of this process on its machine, if a launcher assigned one: the device to use.
    pub fn local_rank(self) -> Option<Rank> {
        self.local_rank
    }

    /// Returns the number of this world's processes on this machine, if a launcher set it.
    pub fn local_world_size(self) -> Option<WorldSize> {
        self.local_world_size
    }

    /// Whether a contradiction with `outer` is harmless, because `outer` has started this launcher.
    fn runs_inside(&self, outer: &Self) -> bool {
        self.launcher.runs_inside(outer.launcher)
            && self.placement.world_size() >= outer.placement.world_size()
    }
}

/// The whole decision, as a function of what `lookup` finds.
fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<LaunchEnv>> {
    let vars = Vars(lookup);
    let mut claims = vec![Claim::torch(&vars)?, Claim::open_mpi(&vars)?, Claim::pmi(&vars)?];
    claims.extend(slurm::claim(&vars)?);
    let mut complete = Vec::with_capacity(claims.len());
    for claim in &claims {
        complete.extend(claim.complete()?);
    }
    let launched = innermost(&complete)?;
    match claims.iter().find_map(|claim| claim.half_beside(launched)) {
        Some(error) => Err(error),
        None => Ok(launched),
    }
}

/// The first of `all`, which come from the inside out, if each of the others agrees with it or has
/// started it.
fn innermost(all: &[LaunchEnv]) -> Result<Option<LaunchEnv>> {
    let Some(&first) = all.first() else { return Ok(None) };
    let agree = || all.iter().filter(|one| one.placement == first.placement);
    for other in all {
        // Any that agrees may be the one inside `other`: a script sets RANK from Open MPI's rank,
        // while Slurm numbers the daemons.
        if other.placement != first.placement && !agree().any(|one| one.runs_inside(other)) {
            return Err(Error::LaunchersDisagree {
                launcher: first.launcher,
                place: first.placement,
                other_launcher: other.launcher,
                other_place: other.placement,
            });
        }
    }
    // Rank and size on a machine belong together, so both are those of one launcher.
    let by_rank = agree().find(|one| one.local_rank.is_some());
    let local = by_rank.or_else(|| agree().find(|one| one.local_world_size.is_some()));
    Ok(Some(LaunchEnv {
        local_rank: local.and_then(|one| one.local_rank),
        local_world_size: local.and_then(|one| one.local_world_size),
        ..first
    }))
}

/// What a [`LaunchEnv`] looks like before it is checked.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct Unchecked {
    placement: Placement,
    launcher: Launcher,
    local_rank: Option<Rank>,
    local_world_size: Option<WorldSize>,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for LaunchEnv {
    type Error = rank::Error;

    fn try_from(unchecked: Unchecked) -> rank::Result<Self> {
        let Unchecked { placement, launcher, local_rank, local_world_size } = unchecked;
        let world_size = placement.world_size();
        // The last rank of this machine is one of the world.
        if let Some(size) = local_world_size {
            Placement::new(size.as_u64() - 1, world_size.as_u64())?;
        }
        if let Some(rank) = local_rank {
            let n_local = local_world_size.unwrap_or(world_size);
            Placement::new(rank.as_u64(), n_local.as_u64())?;
        }
        Ok(Self { placement, launcher, local_rank, local_world_size })
    }
}

#[cfg(feature = "serde")]
impl From<LaunchEnv> for Unchecked {
    fn from(launched: LaunchEnv) -> Self {
        let LaunchEnv { placement, launcher, local_rank, local_world_size } = launched;
        Self { placement, launcher, local_rank, local_world_size }
    }
}
