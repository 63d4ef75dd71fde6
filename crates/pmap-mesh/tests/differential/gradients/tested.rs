//! The crate's gradients of a chain.

use std::sync::Arc;

use candle_core::{Result, Tensor, Var};
use pmap_mesh::{DeviceMesh, Replica};

use crate::differential::{
    array::Array,
    gradients::{Chain, ChainLink, SlotGradients, local},
};

/// Returns the gradients of this process's slots.
pub(crate) fn gradients(
    chain: &Chain,
    mesh: &DeviceMesh,
) -> std::result::Result<SlotGradients, String> {
    let chain = Arc::new(chain.clone());
    let gradients = mesh.pmap(move |ctx, ()| on_replica(&chain, ctx)).call_sharded(());
    let gradients = gradients.map_err(|error| format!("{error}: {error:?}"))?;
    Ok(gradients
        .shards()
        .iter()
        .map(|list| list.iter().map(Array::from_tensor).collect())
        .collect())
}

fn on_replica(chain: &Chain, ctx: &Replica) -> Result<Vec<Tensor>> {
    let variables: Vec<Var> = chain
        .variables
        .iter()
        .map(|variable| Var::from_tensor(&variable.on_slot(&chain.grid, ctx.slot()).tensor()))
        .collect::<Result<_>>()?;
    let mut values: Vec<Tensor> = variables.iter().map(|var| var.as_tensor().clone()).collect();
    for link in &chain.links {
        let value = value(chain, ctx, link, &values)?;
        values.push(value);
    }
    let losses: Vec<Tensor> = (chain.losses.iter())
        .map(|(value, weights)| {
            (&values[*value] * weights.on_slot(&chain.grid, ctx.slot()).tensor())?.sum_all()
        })
        .collect::<Result<_>>()?;
    let gradients = Tensor::stack(&losses, 0)?.sum_all()?.backward()?;
    variables
        .iter()
        .map(|var| gradients.get(var).map_or_else(|| var.zeros_like(), |found| Ok(found.clone())))
        .collect()
}

fn value(chain: &Chain, ctx: &Replica, link: &ChainLink, values: &[Tensor]) -> Result<Tensor> {
    match link {
        ChainLink::Collective { op, value, axes } => {
            op.run(ctx, &values[*value], chain.grid.named(axes))
        }
        ChainLink::Extreme { op, value, axes } => {
            op.run(ctx, &values[*value].detach(), chain.grid.named(axes))
        }
        _ => local(link, values),
    }
}
