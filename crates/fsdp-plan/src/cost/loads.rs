//! Sums over all ranks that do not look at each of them for each parameter.
//!
//! A parameter loads a few runs of neighboring ranks equally. So it is enough to note where a load begins and ends, and
//! to add up once, from the first rank to the last: parameters + ranks steps instead of parameters × ranks, which would
//! be 744 million for DeepSeek-V3 on 16,384 ranks.

use std::ops::{AddAssign, Range, SubAssign};

use core_types::WorldSize;

use crate::{Cut, ElemType, ParameterInfo, ShardingPlan};

/// What one rank holds, in bytes, before it is known to fit into 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) owned: i128,
    pub(super) stored: i128,
    pub(super) grad: i128,
    /// Tensors that the optimizer keeps a state for.
    pub(super) n_trained: i128,
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.owned += other.owned;
        self.stored += other.stored;
        self.grad += other.grad;
        self.n_trained += other.n_trained;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, other: Self) {
        self.owned -= other.owned;
        self.stored -= other.stored;
        self.grad -= other.grad;
        self.n_trained -= other.n_trained;
    }
}

/// The loads of all ranks, as the change from each rank to the next.
pub(super) struct Loads {
    changes: Vec<Load>,
    world_size: WorldSize,
}

impl Loads {
    /// Adds up what the ranks hold under `plan`.
    pub(super) fn of(plan: &ShardingPlan) -> Self {
        let world_size = plan.world_size();
        let mut loads = Self { changes: vec![Load::default(); world_size.as_usize() + 1], world_size };
        for parameter in plan.parameters() {
            loads.add_parameter(parameter.info(), parameter.cut());
        }
        loads
    }

    /// The load of each rank, from the first to the last.
    pub(super) fn into_ranks(self) -> impl Iterator<Item = Load> {
        let changes = self.changes.into_iter().take(self.world_size.as_usize());
        changes.scan(Load::default(), |load, change| {
            *load += change;
            Some(*load)
        })
    }

    fn add_parameter(&mut self, info: &ParameterInfo, cut: Cut) {
        let everyone = 0..self.world_size.as_u64();
        match cut {
            Cut::Replicated => self.add(everyone, whole(info)),
            Cut::Whole { owner } => self.add(owner.as_u64()..owner.as_u64() + 1, whole(info)),
            Cut::Dim0 | Cut::Flat { .. } => self.add_cut(info, cut),
        }
    }

    fn add_cut(&mut self, info: &ParameterInfo, cut: Cut) {
        let Some(span) = cut.span(info) else { return };
        let is_flat = matches!(cut, Cut::Flat { .. });
        for (ranks, numel) in span.runs(self.world_size) {
            let owned = bytes(info.dtype(), numel);
            let grad = if is_flat { 0 } else { trained(info) * owned };
            self.add(ranks, Load { owned, grad, ..Load::default() });
        }
        // Padding is paid for once per flat unit, by the parameter it begins with, and that stands for the unit also
        // before the optimizer.
        if span.is_first() && info.numel() > 0 {
            let stored = bytes(info.dtype(), span.chunk_numel(self.world_size));
            let grad = if is_flat { trained(info) * stored } else { 0 };
            let everyone = 0..self.world_size.as_u64();
            self.add(everyone, Load { stored, grad, n_trained: trained(info), ..Load::default() });
        }
    }

    fn add(&mut self, ranks: Range<u64>, load: Load) {
        self.changes[index(ranks.start)] += load;
        self.changes[index(ranks.end)] -= load;
    }
}

/// The load of a whole parameter.
fn whole(info: &ParameterInfo) -> Load {
    let bytes = i128::from(info.bytes());
    let n_trained = if info.numel() > 0 { trained(info) } else { 0 };
    Load { owned: bytes, stored: bytes, grad: trained(info) * bytes, n_trained }
}

fn trained(info: &ParameterInfo) -> i128 {
    info.requires_grad().into()
}

fn bytes(dtype: ElemType, numel: u64) -> i128 {
    // At most 2^70.
    i128::try_from(dtype.bytes(numel.into())).unwrap_or(i128::MAX)
}

/// The position of a rank or of the end of the world; neither is above [`WorldSize::MAX`].
#[expect(clippy::cast_possible_truncation, reason = "2^20 fits into every usize")]
fn index(rank: u64) -> usize {
    rank as usize
}
