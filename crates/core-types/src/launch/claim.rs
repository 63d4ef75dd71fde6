//! What one launcher says about this process.

use super::{
    LaunchEnv,
    error::{Error, Result},
    launcher::Launcher,
    vars::{Number, Vars},
};
use crate::rank::{Placement, WorldSize};

/// What one launcher's variables say, some of which may be absent.
pub(super) struct Claim {
    pub(super) launcher: Launcher,
    pub(super) rank: Option<Number>,
    pub(super) size: Option<Number>,
    pub(super) local_rank: Option<Number>,
    pub(super) local_size: Option<Number>,
    /// The variables that are named as missing where only one of the two is set.
    pub(super) rank_name: &'static str,
    pub(super) size_name: &'static str,
}

impl Claim {
    /// The claim of `launcher`, whose variables are called rank, size, local rank and local size in
    /// this order.
    fn read(vars: &Vars<'_>, launcher: Launcher, names: [&'static str; 4]) -> Result<Self> {
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

    /// What torchrun, or somebody in its place, says.
    pub(super) fn torch(vars: &Vars<'_>) -> Result<Self> {
        let by_agent = vars.text("TORCHELASTIC_RUN_ID")?.is_some();
        let launcher = if by_agent { Launcher::Torchrun } else { Launcher::TorchEnv };
        Self::read(vars, launcher, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    }

    pub(super) fn open_mpi(vars: &Vars<'_>) -> Result<Self> {
        let names = [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ];
        Self::read(vars, Launcher::OpenMpi, names)
    }

    pub(super) fn pmi(vars: &Vars<'_>) -> Result<Self> {
        let names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
        Self::read(vars, Launcher::Pmi, names)
    }

    /// What it says, checked, if rank and size are both there.
    pub(super) fn complete(&self) -> Result<Option<LaunchEnv>> {
        let (Some(rank), Some(size)) = (self.rank, self.size) else { return Ok(None) };
        let world_size = size.size(WorldSize::MAX)?;
        let rank = rank.rank_below(size)?;
        let local_world_size = self.local_size.map(|local| local.size(world_size)).transpose()?;
        // There are no more local ranks than ranks, whether or not the launcher says how many.
        let n_local = self.local_size.unwrap_or(size);
        let local_rank = self.local_rank.map(|local| local.rank_below(n_local)).transpose()?;
        Ok(Some(LaunchEnv {
            placement: Placement::of(rank, world_size),
            launcher: self.launcher,
            local_rank,
            local_world_size,
        }))
    }

    /// The error that half a claim is, unless `launched`, which is complete, says the same.
    pub(super) fn half_beside(&self, launched: Option<LaunchEnv>) -> Option<Error> {
        let (found, missing) = match (self.rank, self.size) {
            (Some(_), Some(_)) => return None,
            (Some(rank), None) => (rank, self.size_name),
            (None, Some(size)) => (size, self.rank_name),
            (None, None) => (self.local_rank.or(self.local_size)?, self.rank_name),
        };
        if launched.is_some_and(|launched| self.agrees_with(launched.placement)) {
            return None;
        }
        Some(Error::VariableMissing { name: missing, found: found.name, value: found.value })
    }

    /// Whether what there is of rank and size is that of `placement`.
    fn agrees_with(&self, placement: Placement) -> bool {
        self.rank.is_none_or(|rank| rank.value == placement.rank().as_u64())
            && self.size.is_none_or(|size| size.value == placement.world_size().as_u64())
    }
}
