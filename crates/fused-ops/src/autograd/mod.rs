//! Records the results of kernels in candle's graph.
//!
//! candle's custom operations compute when they are applied. Here a kernel computes first: the
//! operation in candle's graph only returns the finished result, and contains its backward. candle
//! allows three inputs and one output. An operation with more connects them through tokens: tensors
//! of zeros that no operation reads. The results of kernels are not copied; a result that candle
//! computed is ([`record_copy`]), because its own history would stay in the graph.
//!
//! The gradient of an output takes this way: candle gives it to the output's node, which leaves it in
//! the operation's [`Mailbox`] and returns only a ticket, as the gradient of the token. The first operation
//! of this crate that uses the output does the same itself, without candle (`link`). candle adds the tickets
//! and gives the sum to the node that made the token: the last of the nodes that join the inputs (`multi`).
//! That node takes the gradients with these tickets from the mailbox, computes the gradients of all inputs,
//! and returns those of its own inputs to candle; the others it leaves for the node before it.

mod direct;
mod link;
mod mailbox;
mod multi;
mod node;

use std::marker::PhantomData;

use candle_core::{Device, Layout, Shape, Storage, StorageRef, Tensor};

pub use self::direct::with_direct_grads;
pub(crate) use self::mailbox::Mailbox;
pub(crate) use self::multi::{MultiBackward, record_copy, record_many, scalar_with_grad};
use crate::{error::Result, kernels::float::Float};

/// The backward of an operation with one output.
pub(crate) trait Backward: Send + Sync + 'static {
    /// The name of the operation in candle's messages.
    const NAME: &'static str;

    /// Whether a gradient may share its storage with a variable, which an optimizer may change.
    const GRADS_MAY_ALIAS: bool = false;

    /// Returns the gradients of the inputs, in their order, where `grad` is the gradient of `output`.
    ///
    /// An input with a true [`Tensor::track_op`] must get a gradient, at least zeros: candle
    /// panics without one.
    fn backward(
        &self,
        inputs: &[&Tensor],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// Makes a tensor of `output`, and records it if one of the inputs is tracked.
pub(crate) fn record<T: Float>(
    inputs: &[&Tensor],
    output: Vec<T>,
    shape: Shape,
    backward: impl Backward,
) -> Result<Tensor> {
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(Tensor::from_vec(output, shape, &Device::Cpu)?);
    }
    let [output] = record_many(inputs, [output], &shape, OneOutput::new(inputs, backward))?;
    Ok(output)
}

/// Records a copy of `output`, of any type.
pub(crate) fn record_tensor(
    inputs: &[&Tensor],
    output: &Tensor,
    backward: impl Backward,
) -> Result<Tensor> {
    record_copy(inputs, output, OneOutput::new(inputs, backward))
}

/// The backward of an operation with one output, and the inputs that it reads.
struct OneOutput<B> {
    inputs: Vec<Tensor>,
    backward: B,
}

impl<B> OneOutput<B> {
    fn new(inputs: &[&Tensor], backward: B) -> Self {
        Self { inputs: inputs.iter().map(|&input| input.clone()).collect(), backward }
    }
}

impl<B: Backward> MultiBackward<1> for OneOutput<B> {
    const NAME: &'static str = B::NAME;
    const GRADS_MAY_ALIAS: bool = B::GRADS_MAY_ALIAS;

    fn backward(
        &self,
        [output]: &[Tensor; 1],
        [grad]: [Option<Tensor>; 1],
    ) -> Result<Vec<Option<Tensor>>> {
        let grad = grad.map_or_else(|| output.zeros_like(), Ok)?;
        self.backward.backward(&self.inputs.iter().collect::<Vec<_>>(), output, &grad)
    }
}

/// Calls [`record`] for an operation of one contiguous input. `backward` computes its gradient from
/// the elements of the input, of the output, and of the output's gradient.
pub(crate) fn record_unary<T, F>(
    x: &Tensor,
    output: Vec<T>,
    shape: Shape,
    backward: F,
) -> Result<Tensor>
where
    T: Float,
    F: Fn(&[T], &[T], &[T]) -> Result<Vec<T>> + Send + Sync + 'static,
{
    record(&[x], output, shape, UnaryBackward { backward, float: PhantomData })
}

struct UnaryBackward<T, F> {
    backward: F,
    float: PhantomData<T>,
}

impl<T, F> Backward for UnaryBackward<T, F>
where
    T: Float,
    F: Fn(&[T], &[T], &[T]) -> Result<Vec<T>> + Send + Sync + 'static,
{
    const NAME: &'static str = "fused-unary";

    fn backward(
        &self,
        inputs: &[&Tensor],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let [x, y, grad] = [inputs[0], output, grad].map(CpuSlice::new);
        let grad = (self.backward)(x.as_slice()?, y.as_slice()?, grad.as_slice()?)?;
        Ok(vec![Some(cpu_tensor(grad, inputs[0].shape())?)])
    }
}

/// The elements of a tensor on the processor, locked for reading.
///
/// Drop it before candle locks the storage again: with a waiting writer between the two locks, both
/// would deadlock.
pub(crate) struct CpuSlice<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> CpuSlice<'a> {
    pub(crate) fn new(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout }
    }

    /// Returns the elements of the storage, beginning with the tensor's first element.
    pub(crate) fn offset_slice<T: Float>(&self) -> Result<&[T]> {
        let Storage::Cpu(storage) = &*self.storage else {
            return Err(
                candle_core::Error::msg("a tensor of another device was routed here").into()
            );
        };
        // A view without elements may begin behind the end of its storage.
        if self.layout.shape().elem_count() == 0 {
            return Ok(&[]);
        }
        Ok(&T::cpu_storage_as_slice(storage)?[self.layout.start_offset()..])
    }

    /// Returns the elements of a contiguous tensor.
    pub(crate) fn as_slice<T: Float>(&self) -> Result<&[T]> {
        Ok(&self.offset_slice()?[..self.layout.shape().elem_count()])
    }
}

/// Makes a tensor on the processor, without a history.
pub(crate) fn cpu_tensor<T: Float>(data: Vec<T>, shape: &Shape) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, shape, &Device::Cpu)?)
}
