//! Launchers of the processes of a world.

use std::fmt;

/// The program that started a process and assigned its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// An agent of `torchrun` (torch elastic), which sets `TORCHELASTIC_RUN_ID` in addition to
    /// `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Another source of `RANK` and `WORLD_SIZE`, the variables of PyTorch's `env://`: a script,
    /// Kubernetes.
    TorchEnv,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// A launcher with PMI: Hydra of MPICH, Intel MPI, or `srun --mpi=pmi2`.
    Pmi,
    /// `srun` of Slurm.
    Slurm,
}

impl Launcher {
    /// Returns the variables for rank and world size.
    pub(super) fn variables(self) -> &'static str {
        match self {
            Self::Torchrun | Self::TorchEnv => "RANK, WORLD_SIZE",
            Self::OpenMpi => "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE",
            Self::Pmi => "PMI_RANK, PMI_SIZE",
            Self::Slurm => "SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
        }
    }

    /// Returns true if `outer` commonly starts this launcher, which then starts the ranks.
    ///
    /// `srun` or `mpirun` starts an agent of torchrun on each node; `mpirun` starts its daemons by
    /// `srun`, and its ranks inherit the daemon's variables (Open MPI #3999, #8424). Variables set
    /// by hand do not show an outer launcher.
    pub(super) fn runs_inside(self, outer: Self) -> bool {
        match self {
            Self::Torchrun => matches!(outer, Self::OpenMpi | Self::Pmi | Self::Slurm),
            Self::OpenMpi | Self::Pmi => outer == Self::Slurm,
            Self::TorchEnv | Self::Slurm => false,
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::TorchEnv => "env://",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
        })
    }
}
