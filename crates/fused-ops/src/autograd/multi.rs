//! Operations with any number of inputs and outputs.
//!
//! candle's operations have at most three inputs and one output. Here a chain of [`InputNode`]s
//! joins the inputs to one *token*, a few zeros without meaning, and an [`OutputNode`] for each
//! output starts from the token. In the backward pass candle calls the output nodes, which leave
//! the gradients of the outputs in a [`Mailbox`]; an operation with the [link](OutputLink) of an output
//! leaves its gradient there itself. Then candle calls the last input node, which computes the gradients
//! of all inputs, and then the other input nodes. Each returns the gradients of its inputs to candle. The
//! gradient of a token holds the tickets of the mailbox: one for each output and one for each link.

use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{Shape, Tensor};

use super::{
    Backward,
    link::OutputLink,
    mailbox::Mailbox,
    node::{NodeOutput, PrecomputedNode},
};
use crate::{error::Result, kernels::float::Float};

/// The backward of an operation with any number of inputs and outputs.
pub(crate) trait MultiBackward<const OUTPUTS: usize>: Send + Sync + 'static {
    /// The name of the operation in candle's messages.
    const NAME: &'static str;

    /// As in [`Backward`].
    const GRADS_MAY_ALIAS: bool = false;

    /// Returns the gradients of the inputs, in their order. An output that the pass did not use has no
    /// gradient.
    ///
    /// An input with a true [`Tensor::track_op`] must get a gradient, at least zeros: candle
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
    const GRADS_MAY_ALIAS: bool = true;

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
        output_grads: Arc::default(),
        input_grads: Mailbox::default(),
    });
    let token = join_inputs(inputs, &shared)?;
    let mut results = Vec::with_capacity(OUTPUTS);
    for (index, (output, shape)) in outputs.into_iter().enumerate() {
        let link = OutputLink::new(&token, &shared.output_grads, index);
        let backward = OutputNode { link: Arc::clone(&link) };
        let output = PrecomputedNode { output, shape, backward }.apply(&[&token])?;
        link.offer(&output);
        results.push(output);
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
        // The operation of an output may keep the gradient for a variable.
        let take =
            |input: &&Tensor| if B::GRADS_MAY_ALIAS { None } else { OutputLink::take(input) };
        let links: Vec<_> = inputs.iter().map(take).collect();
        let inputs_and_links = inputs.iter().zip(&links);
        let inputs: Vec<Tensor> = inputs_and_links
            .map(|(&input, link)| link.as_ref().map_or(input, |link| link.token()).clone())
            .collect();
        let backward = InputNode { shared: Arc::clone(shared), first, links, joins_token, is_last };
        let shape = Shape::from(2 * OUTPUTS);
        PrecomputedNode { output: NodeOutput::Token, shape, backward }
            .apply(&inputs.iter().collect::<Vec<_>>())
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
    /// Gradients of outputs, from the output nodes and links to the last input node.
    output_grads: Arc<Mailbox<Tensor>>,
    /// Gradients of inputs, from each input node to the one before it.
    input_grads: Mailbox<Vec<Option<Tensor>>>,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> SharedGradients<B, OUTPUTS> {
    /// Computes the gradients of all inputs, where `token` is the gradient of the token.
    fn compute_input_grads(&self, token: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut grads = [const { None }; OUTPUTS];
        for (index, grad) in self.output_grads.take(token)? {
            let sum = &mut grads[index % OUTPUTS];
            *sum = Some(match sum.take() {
                Some(other) => (other + grad)?,
                None => grad,
            });
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
struct OutputNode {
    link: Arc<OutputLink>,
}

impl Backward for OutputNode {
    const NAME: &'static str = "fused-output";

    fn backward(&self, _: &[&Tensor], _: &Tensor, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.link.leave_from_candle(grad)?)])
    }
}

/// A node that joins up to three tensors to a token.
struct InputNode<B, const OUTPUTS: usize> {
    shared: Arc<SharedGradients<B, OUTPUTS>>,
    /// The index of its first input among all inputs of the operation.
    first: usize,
    /// The links of its inputs.
    links: Vec<Option<Arc<OutputLink>>>,
    /// Whether its first input is the token of the previous node.
    joins_token: bool,
    /// Whether the outputs start from its token.
    is_last: bool,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> Backward for InputNode<B, OUTPUTS> {
    const NAME: &'static str = B::NAME;
    const GRADS_MAY_ALIAS: bool = B::GRADS_MAY_ALIAS;

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
        let mut own = grads.split_off(self.first.min(grads.len()));
        if self.joins_token {
            own.insert(0, Some(shared.input_grads.leave(0, grads, inputs[0])?));
        }
        for (grad, link) in own.iter_mut().zip(&self.links) {
            if let (Some(grad), Some(link)) = (grad, link) {
                *grad = link.leave_from_user(grad)?;
            }
        }
        Ok(own)
    }
}
