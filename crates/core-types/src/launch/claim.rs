//! The claim of one launcher: its rank and size for this process.

use super::{
    LaunchEnv,
    error::{Error, Result},
    launcher::Launcher,
    vars::{LaunchVars, NamedNumber},
};
use crate::rank::{Placement, WorldSize};

/// The values of one launcher's variables, some of which may be absent.
pub(super) struct LaunchClaim {
    pub(super) launcher: Launcher,
    pub(super) rank: Option<NamedNumber>,
    pub(super) size: Option<NamedNumber>,
    pub(super) local_rank: Option<NamedNumber>,
    pub(super) local_size: Option<NamedNumber>,
    /// Variable to report as missing if only the size is set.
    pub(super) rank_name: &'static str,
    /// Variable to report as missing if only the rank is set.
    pub(super) size_name: &'static str,
}

impl LaunchClaim {
    /// Reads the claim of `launcher` from its variables for rank, size, local rank and local size.
    fn read(vars: &LaunchVars<'_>, launcher: Launcher, names: [&'static str; 4]) -> Result<Self> {
        let [rank_name, size_name, local_rank, local_size] = names;
        Ok(Self {
            launcher,
            rank: vars.number(rank_name)?,
            size: vars.number(size_name)?,
            local_rank: vars.number(local_rank)?,
            local_size: vars.number(local_size)?,
            rank_name,
            size_name,
        })
    }

    /// Reads the claim of torchrun or of another source of its variables.
    pub(super) fn torch(vars: &LaunchVars<'_>) -> Result<Self> {
        let has_agent = vars.text("TORCHELASTIC_RUN_ID")?.is_some();
        let launcher = if has_agent { Launcher::Torchrun } else { Launcher::TorchEnv };
        Self::read(vars, launcher, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    }

    pub(super) fn open_mpi(vars: &LaunchVars<'_>) -> Result<Self> {
        let names = [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ];
        Self::read(vars, Launcher::OpenMpi, names)
    }

    pub(super) fn pmi(vars: &LaunchVars<'_>) -> Result<Self> {
        let names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
        Self::read(vars, Launcher::Pmi, names)
    }

    /// Validates the claim; returns `None` unless both rank and size are set.
    pub(super) fn to_env(&self) -> Result<Option<LaunchEnv>> {
        let (Some(rank), Some(size)) = (self.rank, self.size) else { return Ok(None) };
        let world_size = size.to_world_size(WorldSize::MAX)?;
        let placement = Placement::from_checked(rank.to_rank(size)?, world_size);
        let local_world_size =
            self.local_size.map(|local| local.to_world_size(world_size)).transpose()?;
        // Local ranks are also less than the world size, even if the local size is not set.
        let n_local = self.local_size.unwrap_or(size);
        let local_rank = self.local_rank.map(|local| local.to_rank(n_local)).transpose()?;
        Ok(Some(LaunchEnv { placement, launcher: self.launcher, local_rank, local_world_size }))
    }

    /// Checks that the claim is complete, is empty, or agrees with the complete claim `env`.
    pub(super) fn check_complete(&self, env: Option<LaunchEnv>) -> Result<()> {
        let (found, missing) = match (self.rank, self.size) {
            (Some(_), Some(_)) => return Ok(()),
            (Some(rank), None) => (rank, self.size_name),
            (None, Some(size)) => (size, self.rank_name),
            (None, None) => match self.local_rank.or(self.local_size) {
                Some(local) => (local, self.rank_name),
                None => return Ok(()),
            },
        };
        if env.is_some_and(|env| self.agrees_with(env.placement)) {
            return Ok(());
        }
        Err(Error::VariableMissing { name: missing, found: found.name, value: found.value })
    }

    /// Returns true if rank and size, as far as set, match `placement`.
    fn agrees_with(&self, placement: Placement) -> bool {
        self.rank.is_none_or(|rank| rank.value == placement.rank().as_u64())
            && self.size.is_none_or(|size| size.value == placement.world_size().as_u64())
    }
}
