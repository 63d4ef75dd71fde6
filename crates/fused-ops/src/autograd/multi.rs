//! Operations with any number of inputs and outputs.
//!
//! candle's operations have at most three inputs and one output. Here a chain of [`InputNode`]s
//! joins the inputs to one *token*, a few zeros without meaning, and an [`OutputNode`] for each
//! output starts from the token. In the backward pass candle calls the output nodes, which leave
//! the gradients of the outputs in a [`Mailbox`]. Then it calls the last input node, which computes
//! the gradients of all inputs, and then the other input nodes. Each returns the gradients of its
//! inputs to candle. The gradient of a token holds the tickets of the mailbox.

use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{Shape, Tensor};

use super::{
    Backward,
    mailbox::Mailbox,
    node::{NodeOutput, PrecomputedNode},
};
use crate::{error::Result, kernels::float::Float};

/// The backward of an operation with any number of inputs and outputs.
pub(crate) trait MultiBackward<const OUTPUTS: usize>: Send + Sync + 'static {
    /// The name of the operation in candle's messages.
    const NAME: &'static str;

    /// As in [`Backward`].
    const ARE_GRADS_OWN: bool = true;

    /// Returns the gradients of the inputs, in their order. An output that the pass did not use has no
    /// gradient.
    ///
    /// Every input for which [`Tensor::track_op`] is true must get a gradient, at least zeros: candle
    /// panics without one.
    fn backward(
        &self,
        outputs: &[Tensor; OUTPUTS],
        grads: [Option<Tensor>; OUTPUTS],
    ) -> Result<Vec<Option<Tensor>>>;
}

/// Makes tensors of `outputs` on the processor, all of one shape, and records them.
pub(crate) fn record_many<T: Float, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    outputs: [Vec<T>; OUTPUTS],
    shape: &Shape,
    backward: impl MultiBackward<OUTPUTS>,
) -> Result<[Tensor; OUTPUTS]> {
    let outputs = outputs.map(|output| {
        let output = Mutex::new(Some(T::to_cpu_storage_owned(output)));
        (NodeOutput::Computed(output), shape.clone())
    });
    record_outputs(inputs, outputs, backward)
}

/// Copies `output`, on any device, and records the copy.
pub(crate) fn record_copy(
    inputs: &[&Tensor],
    output: &Tensor,
    backward: impl MultiBackward<1>,
) -> Result<Tensor> {
    let shape = output.shape().clone();
    let output = NodeOutput::Copy(Mutex::new(Some(output.detach())));
    let [output] = record_outputs(inputs, [(output, shape)], backward)?;
    Ok(output)
}

/// Returns a scalar from which a backward pass can begin: the pass gives `y` the gradient `grad`.
pub(crate) fn scalar_with_grad(y: &Tensor, grad: Tensor) -> Result<Tensor> {
    PrecomputedNode { output: NodeOutput::Token, shape: Shape::from(()), backward: TokenSeed(grad) }
        .apply(&[y])
}

struct TokenSeed(Tensor);

impl Backward for TokenSeed {
    const NAME: &'static str = "seed";
    const ARE_GRADS_OWN: bool = false;

    fn backward(&self, _: &[&Tensor], _: &Tensor, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.0.clone())])
    }
}

fn record_outputs<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    outputs: [(NodeOutput, Shape); OUTPUTS],
    backward: B,
) -> Result<[Tensor; OUTPUTS]> {
    let shared = Arc::new(SharedGradients {
        backward,
        outputs: OnceLock::new(),
        output_grads: Mailbox::default(),
        input_grads: Mailbox::default(),
    });
    let token = join_inputs(inputs, &shared)?;
    let mut results = Vec::with_capacity(OUTPUTS);
    for (index, (output, shape)) in outputs.into_iter().enumerate() {
        let backward = OutputNode { shared: Arc::clone(&shared), index };
        results.push(PrecomputedNode { output, shape, backward }.apply(&[&token])?);
    }
    let results: [Tensor; OUTPUTS] =
        results.try_into().map_err(|_| candle_core::Error::msg("an output is missing"))?;
    // Store the outputs without their history, since a history would refer back to them and never
    // be freed.
    shared.outputs.get_or_init(|| results.each_ref().map(Tensor::detach));
    Ok(results)
}

/// Joins all inputs to one token: the first three, then a token and two more, and so on.
fn join_inputs<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    shared: &Arc<SharedGradients<B, OUTPUTS>>,
) -> Result<Tensor> {
    let join = |first: usize, inputs: &[&Tensor], is_last| {
        // Every node but the first joins the token of the previous node.
        let joins_token = first > 0;
        let backward = InputNode { shared: Arc::clone(shared), first, joins_token, is_last };
        PrecomputedNode { output: NodeOutput::Token, shape: Shape::from(OUTPUTS), backward }
            .apply(inputs)
    };
    let (head, rest) = inputs.split_at(inputs.len().min(3));
    let mut token = join(0, head, rest.is_empty())?;
    let n_later_nodes = rest.len().div_ceil(2);
    for (index, pair) in rest.chunks(2).enumerate() {
        let node_inputs: Vec<_> = [&token].into_iter().chain(pair.iter().copied()).collect();
        token = join(head.len() + 2 * index, &node_inputs, index + 1 == n_later_nodes)?;
    }
    Ok(token)
}

/// Gradients in transit between the nodes of one operation.
struct SharedGradients<B, const OUTPUTS: usize> {
    backward: B,
    /// The outputs, set before any backward pass begins.
    outputs: OnceLock<[Tensor; OUTPUTS]>,
    /// Gradients of outputs, from the output nodes to the last input node.
    output_grads: Mailbox<Tensor>,
    /// Gradients of inputs, from each input node to the one before it.
    input_grads: Mailbox<Vec<Option<Tensor>>>,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> SharedGradients<B, OUTPUTS> {
    /// Computes the gradients of all inputs, where `token` is the gradient of the token.
    fn compute_input_grads(&self, token: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut grads = [const { None }; OUTPUTS];
        for (index, grad) in self.output_grads.take(token)? {
            grads[index] = Some(grad);
        }
        let outputs = self.outputs.get();
        let outputs = outputs.ok_or_else(|| candle_core::Error::msg("an output is missing"))?;
        self.backward.backward(outputs, grads)
    }

    /// Takes the gradients of inputs that the next node of the chain has left. The backward pass
    /// reaches that node first.
    fn take_input_grads(&self, token: &Tensor) -> Result<Vec<Option<Tensor>>> {
        match self.input_grads.take(token)?.pop() {
            Some((_, grads)) => Ok(grads),
            None => Err(candle_core::Error::msg("the gradients of inputs are missing").into()),
        }
    }
}

/// The node of an output; its only input is the token.
struct OutputNode<B, const OUTPUTS: usize> {
    shared: Arc<SharedGradients<B, OUTPUTS>>,
    index: usize,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> Backward for OutputNode<B, OUTPUTS> {
    const NAME: &'static str = B::NAME;

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.shared.output_grads.leave(self.index, grad.clone(), inputs[0])?)])
    }
}

/// A node that joins up to three tensors to a token.
struct InputNode<B, const OUTPUTS: usize> {
    shared: Arc<SharedGradients<B, OUTPUTS>>,
    /// The index of its first input among all inputs of the operation.
    first: usize,
    /// Whether its first input is the token of the previous node.
    joins_token: bool,
    /// Whether the outputs start from its token.
    is_last: bool,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> Backward for InputNode<B, OUTPUTS> {
    const NAME: &'static str = B::NAME;
    const ARE_GRADS_OWN: bool = B::ARE_GRADS_OWN;

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let shared = &self.shared;
        let mut grads = if self.is_last {
            shared.compute_input_grads(grad)?
        } else {
            shared.take_input_grads(grad)?
        };
        let own = grads.split_off(self.first.min(grads.len()));
        if !self.joins_token {
            return Ok(own);
        }
        let token = shared.input_grads.leave(0, grads, inputs[0])?;
        Ok([Some(token)].into_iter().chain(own).collect())
    }
}
