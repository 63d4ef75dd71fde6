//! Operations with any number of inputs and outputs.
//!
//! candle's operations have at most three inputs and one output. Here a chain of [`InputNode`]s
//! joins the inputs to one *token*, a scalar that nobody reads, and an [`OutputNode`] for each
//! output starts from the token. On the backward pass candle calls the output nodes, which leave
//! the gradients of the outputs in [`Shared`]; then the last input node, which has all gradients of
//! the inputs computed; then the other input nodes. Each hands the gradients of its own inputs to
//! candle.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{Shape, Tensor};

use super::{
    Backward,
    node::{Node, Output},
};
use crate::{error::Result, kernels::float::Float};

/// How the gradients of several results become those of any number of inputs.
pub(crate) trait MultiBackward<const OUTPUTS: usize>: Send + Sync + 'static {
    /// What candle calls the operation in its messages.
    const NAME: &'static str;

    /// The gradients of the inputs, in their order, from those of the outputs, of which one that
    /// was not used has none.
    ///
    /// An input that [`tracks`](Tensor::track_op) must get one, zeros if need be: candle panics
    /// otherwise.
    fn backward(
        &self,
        outputs: &[Tensor; OUTPUTS],
        grads: [Option<Tensor>; OUTPUTS],
    ) -> Result<Vec<Option<Tensor>>>;
}

/// Tensors of `outputs`, all of one shape, joined to the graph of the inputs, on the processor.
pub(crate) fn record_many<T: Float, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    outputs: [Vec<T>; OUTPUTS],
    shape: &Shape,
    backward: impl MultiBackward<OUTPUTS>,
) -> Result<[Tensor; OUTPUTS]> {
    let computed = |output| Output::Computed(Mutex::new(Some(T::to_cpu_storage_owned(output))));
    record_outputs(inputs, outputs.map(|output| (computed(output), shape.clone())), backward)
}

/// A copy of `output`, joined to the graph of the inputs, on any device.
pub(crate) fn record_copy(
    inputs: &[&Tensor],
    output: &Tensor,
    backward: impl MultiBackward<1>,
) -> Result<Tensor> {
    let shape = output.shape().clone();
    let output = Output::Copy(Mutex::new(Some(output.detach())));
    let [output] = record_outputs(inputs, [(output, shape)], backward)?;
    Ok(output)
}

/// A scalar that nobody reads, from which candle's backward starts with `grad` as the gradient of
/// `y`.
pub(crate) fn seeded(y: &Tensor, grad: Tensor) -> Result<Tensor> {
    Node { output: Output::Token, shape: Shape::from(()), backward: Seed(grad) }.apply(&[y])
}

struct Seed(Tensor);

impl Backward for Seed {
    const NAME: &'static str = "seed";

    fn backward(&self, _: &[&Tensor], _: &Tensor, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.0.clone())])
    }
}

fn record_outputs<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    outputs: [(Output, Shape); OUTPUTS],
    backward: B,
) -> Result<[Tensor; OUTPUTS]> {
    let shared = Arc::new(Shared { backward, outputs: OnceLock::new(), grads: Mutex::default() });
    let token = token_of(inputs, &shared)?;
    let results = outputs.into_iter().enumerate().map(|(index, (output, shape))| {
        let backward = OutputNode { shared: Arc::clone(&shared), index };
        Node { output, shape, backward }.apply(&[&token])
    });
    let results: Vec<_> = results.collect::<Result<_>>()?;
    let results: [Tensor; OUTPUTS] =
        results.try_into().map_err(|_| candle_core::Error::msg("an output is missing"))?;
    // Without a history, or each output would hold itself.
    shared.outputs.get_or_init(|| results.each_ref().map(Tensor::detach));
    Ok(results)
}

/// The token of all inputs: of the first three, then of a token and two more, and so on.
fn token_of<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize>(
    inputs: &[&Tensor],
    shared: &Arc<Shared<B, OUTPUTS>>,
) -> Result<Tensor> {
    let join = |first, inputs: &[&Tensor], follows, last| {
        let backward = InputNode { shared: Arc::clone(shared), first, follows, last };
        Node { output: Output::Token, shape: Shape::from(()), backward }.apply(inputs)
    };
    let (head, rest) = inputs.split_at(inputs.len().min(3));
    let mut token = join(0, head, false, rest.is_empty())?;
    let remaining = rest.len().div_ceil(2);
    for (index, pair) in rest.chunks(2).enumerate() {
        let joined: Vec<_> = [&token].into_iter().chain(pair.iter().copied()).collect();
        token = join(head.len() + 2 * index, &joined, true, index + 1 == remaining)?;
    }
    Ok(token)
}

/// What the nodes of one operation have in common.
struct Shared<B, const OUTPUTS: usize> {
    backward: B,
    /// There when the backward pass begins.
    outputs: OnceLock<[Tensor; OUTPUTS]>,
    grads: Mutex<Grads<OUTPUTS>>,
}

/// Gradients that wait until candle asks for them.
struct Grads<const OUTPUTS: usize> {
    /// Left by the output nodes, taken by the last input node.
    of_outputs: [Option<Tensor>; OUTPUTS],
    /// Left by the last input node, taken by each.
    of_inputs: Vec<Option<Tensor>>,
}

impl<const OUTPUTS: usize> Default for Grads<OUTPUTS> {
    fn default() -> Self {
        Self { of_outputs: [const { None }; OUTPUTS], of_inputs: Vec::new() }
    }
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> Shared<B, OUTPUTS> {
    fn grads(&self) -> MutexGuard<'_, Grads<OUTPUTS>> {
        self.grads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn compute(&self) -> Result<()> {
        let Grads { of_outputs, .. } = std::mem::take(&mut *self.grads());
        let outputs = self.outputs.get();
        let outputs = outputs.ok_or_else(|| candle_core::Error::msg("an output is missing"))?;
        // Without the lock, since it may run any operation.
        let of_inputs = self.backward.backward(outputs, of_outputs)?;
        self.grads().of_inputs = of_inputs;
        Ok(())
    }
}

/// Starts an output from the token.
struct OutputNode<B, const OUTPUTS: usize> {
    shared: Arc<Shared<B, OUTPUTS>>,
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
        self.shared.grads().of_outputs[self.index] = Some(grad.clone());
        Ok(vec![Some(inputs[0].zeros_like()?)])
    }
}

/// Joins inputs to a token.
struct InputNode<B, const OUTPUTS: usize> {
    shared: Arc<Shared<B, OUTPUTS>>,
    /// The number of its first input among all of the operation.
    first: usize,
    /// Whether a token stands before its inputs.
    follows: bool,
    /// Whether its token is the one that the outputs start from.
    last: bool,
}

impl<B: MultiBackward<OUTPUTS>, const OUTPUTS: usize> Backward for InputNode<B, OUTPUTS> {
    const NAME: &'static str = B::NAME;

    fn backward(&self, inputs: &[&Tensor], _: &Tensor, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if self.last {
            self.shared.compute()?;
        }
        let (tokens, inputs) = inputs.split_at(usize::from(self.follows));
        let mut grads: Vec<_> =
            tokens.iter().map(|token| Ok(Some(token.zeros_like()?))).collect::<Result<_>>()?;
        let mut shared = self.shared.grads();
        grads.extend((0..inputs.len()).map(|index| shared.of_inputs[self.first + index].take()));
        Ok(grads)
    }
}
