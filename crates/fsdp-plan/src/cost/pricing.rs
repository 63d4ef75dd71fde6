//! What the elements of a parameter cost, looked up once for all of its parts.

use super::{CostModel, Optimizer, loads::Load};
use crate::{elem::ElemType, param::ParameterInfo};

/// What the elements of one parameter cost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pricing {
    held: ElemType,
    pub(super) gather: ElemType,
    pub(super) reduce: ElemType,
    /// The dtype in which gradients are held once they are reduced, if they are.
    grad: Option<ElemType>,
    /// `None` if the parameter is not trained.
    optimizer: Option<Optimizer>,
}

impl Pricing {
    pub(super) fn of(model: &CostModel, info: &ParameterInfo) -> Self {
        let (gather, reduce) = model.wire_dtypes(info);
        let held = model.held_dtype(info);
        let grad = (!model.optimizer_in_backward).then(|| model.grad_dtype(info));
        let optimizer = info.requires_grad().then_some(model.optimizer);
        Self { held, gather, reduce, grad, optimizer }
    }

    /// The load of a tensor of `numel` elements that is all a member has of the parameter.
    pub(super) fn piece(self, numel: u64) -> Load {
        let owned = signed(self.held.bytes(numel.into()));
        match self.optimizer {
            None => Load { owned, stored: owned, ..Load::default() },
            Some(optimizer) => {
                let grad = self.grad.map_or(0, |grad| signed(grad.bytes(numel.into())));
                let optimizer = signed(optimizer.state_bytes(self.held, numel.into()));
                Load { owned, stored: owned, grad, optimizer }
            }
        }
    }

    /// The bytes of gradients of `numel` elements as they travel.
    pub(super) fn reduced_bytes(self, numel: u128) -> u128 {
        if self.optimizer.is_some() { self.reduce.bytes(numel) } else { 0 }
    }
}

fn signed(bytes: u128) -> i128 {
    #[expect(clippy::expect_used, reason = "2^64 elements of the widest block, a few times")]
    let bytes = i128::try_from(bytes).expect("at most 2^72");
    bytes
}
