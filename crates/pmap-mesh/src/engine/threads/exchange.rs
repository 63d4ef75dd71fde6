//! One collective of one group: the contributions of its members, and the shared work on them.

use std::{collections::BTreeMap, sync::OnceLock};

use candle_core::Tensor;

use crate::{axes::AxisSet, reduce::shared_work::SharedWork};

/// The tensors that one member contributes to a collective. Other members read them from the
/// arrival of the last member until this member leaves the collective.
pub(super) type Contribution = Vec<Tensor>;

/// The shared work of one collective of lists.
#[derive(Debug)]
pub(super) struct ListWork {
    pub(super) work: SharedWork,
    /// The index of each reduced run's output; empty for a concatenation.
    pub(super) outputs: BTreeMap<RunKey, usize>,
}

/// The tensor, the first item and the end of a run.
pub(super) type RunKey = (usize, usize, usize);

/// Plans the shared work of a group, given the contributions of its members by rank; returns `None`
/// if each member computes its results alone.
pub(super) type WorkPlanner<'a> =
    &'a dyn Fn(&[Contribution]) -> Option<candle_core::Result<ListWork>>;

/// The key of a collective in a call: the axes of its group, the index of the group along these
/// axes, and the number of the collective in the group.
pub(super) type CollectiveKey = (AxisSet, usize, u64);

/// The shared state of one collective of a group.
#[derive(Debug)]
pub(super) struct GroupExchange {
    key: CollectiveKey,
    /// The contributions and the work; set when all members have arrived.
    published: OnceLock<CompleteExchange>,
}

#[derive(Debug)]
struct CompleteExchange {
    /// The contributions, by rank.
    contributions: Vec<Contribution>,
    /// The shared work or its error; `None` if each member computes alone.
    work: Option<Result<ListWork, String>>,
}

impl GroupExchange {
    pub(super) fn new(key: CollectiveKey) -> Self {
        Self { key, published: OnceLock::new() }
    }

    pub(super) fn key(&self) -> CollectiveKey {
        self.key
    }

    /// Returns true if all members have arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.published.get().is_some()
    }

    /// Plans the shared work, and publishes it and all contributions to the members. Called by the
    /// last member to arrive.
    #[expect(clippy::expect_used, reason = "only the last member completes an exchange")]
    pub(super) fn complete(&self, contributions: Vec<Contribution>, plan: Option<WorkPlanner<'_>>) {
        let planned = plan.and_then(|plan| plan(&contributions));
        let work = planned.map(|result| result.map_err(|error| error.to_string()));
        self.published
            .set(CompleteExchange { contributions, work })
            .expect("an exchange is completed once");
    }

    #[expect(clippy::expect_used, reason = "members read an exchange only after it is complete")]
    fn get(&self) -> &CompleteExchange {
        self.published.get().expect("all members have arrived")
    }

    /// Returns the contributions, by rank.
    pub(super) fn contributions(&self) -> &[Contribution] {
        &self.get().contributions
    }

    /// Returns the single tensor that this rank contributed.
    pub(super) fn only_tensor(&self, rank: usize) -> &Tensor {
        &self.contributions()[rank][0]
    }

    /// Returns tensor number `n` of each member.
    pub(super) fn nth_of_each_member(&self, n: usize) -> Vec<Tensor> {
        nth_of_each_member(self.contributions(), n)
    }

    /// Returns the shared work, or `None` if each member computes its results alone.
    ///
    /// # Errors
    ///
    /// The reason why the work cannot be planned.
    pub(super) fn work(&self) -> candle_core::Result<Option<&ListWork>> {
        match &self.get().work {
            None => Ok(None),
            Some(Ok(work)) => Ok(Some(work)),
            Some(Err(reason)) => Err(candle_core::Error::msg(reason)),
        }
    }
}

/// Returns tensor number `n` of each member.
pub(super) fn nth_of_each_member(contributions: &[Contribution], n: usize) -> Vec<Tensor> {
    contributions.iter().map(|contribution| contribution[n].clone()).collect()
}
