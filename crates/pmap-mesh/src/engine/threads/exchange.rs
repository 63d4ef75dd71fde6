//! One collective of one group: what its members contribute, and what they make of it together.

use std::{collections::BTreeMap, sync::OnceLock};

use candle_core::Tensor;

use crate::{axes::AxisSet, reduce::joint::SharedWork};

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

/// What the members of a group make together of lists.
#[derive(Debug)]
pub(super) struct ListWork {
    pub(super) work: SharedWork,
    /// Which output is the reduction of a run, by its tensor, start and end.
    pub(super) outputs: BTreeMap<(usize, usize, usize), usize>,
}

/// Plans the shared work of a group from its contributions; `None` if each member makes its results
/// by itself.
pub(super) type WorkPlanner<'a> =
    &'a dyn Fn(&[Contribution]) -> Option<candle_core::Result<ListWork>>;

/// A collective among all of a call: its group, and which of the group's it is.
pub(super) type CollectiveKey = (AxisSet, usize, u64);

/// What all members of a group share in a collective.
#[derive(Debug)]
pub(super) struct Exchange {
    key: CollectiveKey,
    complete: OnceLock<Complete>,
}

#[derive(Debug)]
struct Complete {
    /// By rank.
    contributions: Vec<Contribution>,
    /// What the members make together, or why it cannot be.
    work: Option<Result<ListWork, String>>,
}

impl Exchange {
    pub(super) fn new(key: CollectiveKey) -> Self {
        Self { key, complete: OnceLock::new() }
    }

    pub(super) fn key(&self) -> CollectiveKey {
        self.key
    }

    /// Whether all members have come.
    pub(super) fn is_complete(&self) -> bool {
        self.complete.get().is_some()
    }

    /// Shows the others what all have contributed, when the last member has come.
    #[expect(clippy::expect_used, reason = "only the last member completes an exchange")]
    pub(super) fn complete(
        &self,
        contributions: Vec<Contribution>,
        lay_out: Option<WorkPlanner<'_>>,
    ) {
        let work = lay_out.and_then(|lay_out| lay_out(&contributions));
        let work = work.map(|work| work.map_err(|error| error.to_string()));
        self.complete.set(Complete { contributions, work }).expect("an exchange is completed once");
    }

    #[expect(clippy::expect_used, reason = "the last rank to arrive completes the exchange")]
    fn get(&self) -> &Complete {
        self.complete.get().expect("all members have come")
    }

    /// What the members have contributed, by rank.
    pub(super) fn contributions(&self) -> &[Contribution] {
        &self.get().contributions
    }

    /// The one tensor that the member of this rank contributed.
    pub(super) fn first(&self, rank: usize) -> &Tensor {
        &self.contributions()[rank].tensors[0]
    }

    /// The tensor number `index` of each member, all of which have one.
    pub(super) fn tensors_at(&self, index: usize) -> Vec<Tensor> {
        tensors_at(self.contributions(), index)
    }

    /// What the members make together, unless each makes its results by itself.
    ///
    /// # Errors
    ///
    /// Why it cannot be made.
    pub(super) fn work(&self) -> candle_core::Result<Option<&ListWork>> {
        match &self.get().work {
            None => Ok(None),
            Some(Ok(work)) => Ok(Some(work)),
            Some(Err(why)) => Err(candle_core::Error::msg(why)),
        }
    }
}

/// The tensor number `index` of each member, all of which have one.
pub(super) fn tensors_at(contributions: &[Contribution], index: usize) -> Vec<Tensor> {
    contributions.iter().map(|of_rank| of_rank.tensors[index].clone()).collect()
}
