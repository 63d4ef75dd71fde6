//! One collective of one group: what its members contribute, and what they make of it together.

use std::sync::OnceLock;

use candle_core::Tensor;

use crate::engine::threads::lists::ListWork;

/// What one member contributes to a collective.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    /// They may be read until this member has left the collective, and by others only once all have
    /// come.
    pub(super) tensors: Vec<Tensor>,
    /// What it wants of a list, where each member says so itself.
    pub(super) wanted: Vec<usize>,
}

impl From<Tensor> for Contribution {
    fn from(tensor: Tensor) -> Self {
        Self { tensors: vec![tensor], wanted: Vec::new() }
    }
}

/// What all members of a group share in a collective.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// By rank; set by the member that came last.
    contributions: OnceLock<Vec<Contribution>>,
    /// What the members make together, laid out by the one that needs it first, or why it cannot
    /// be.
    work: OnceLock<Result<ListWork, String>>,
}

impl Exchange {
    /// Whether all members have come.
    pub(super) fn is_complete(&self) -> bool {
        self.contributions.get().is_some()
    }

    #[expect(clippy::expect_used, reason = "only the last member completes an exchange")]
    pub(super) fn complete(&self, contributions: Vec<Contribution>) {
        self.contributions.set(contributions).expect("an exchange is completed once");
    }

    /// What the members have contributed, by rank.
    #[expect(clippy::expect_used, reason = "exchanges are looked into when all have come")]
    pub(super) fn contributions(&self) -> &[Contribution] {
        self.contributions.get().expect("all members have come")
    }

    /// The one tensor that the member of this rank contributed.
    pub(super) fn first(&self, rank: usize) -> &Tensor {
        &self.contributions()[rank].tensors[0]
    }

    /// The one tensor of each member.
    pub(super) fn firsts(&self) -> Vec<Tensor> {
        self.nths(0)
    }

    /// The tensor number `index` of each member, all of which have one.
    pub(super) fn nths(&self, index: usize) -> Vec<Tensor> {
        self.contributions().iter().map(|of_rank| of_rank.tensors[index].clone()).collect()
    }

    /// What the members make together.
    pub(super) fn work(
        &self,
        lay_out: impl FnOnce() -> candle_core::Result<ListWork>,
    ) -> candle_core::Result<&ListWork> {
        let work = self.work.get_or_init(|| lay_out().map_err(|error| error.to_string()));
        work.as_ref().map_err(candle_core::Error::msg)
    }
}
