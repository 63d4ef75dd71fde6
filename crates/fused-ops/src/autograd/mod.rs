//! How a result that was computed here gets a place in candle's graph.
//!
//! candle's custom operations compute when they are applied. Ours have computed before: the
//! operation that candle sees only hands over the result, and knows its backward.

mod multi;
mod node;

use std::sync::Mutex;

use candle_core::{Device, Layout, Shape, Storage, StorageRef, Tensor};

pub(crate) use self::multi::{MultiBackward, record_copy, record_many, seeded};
use self::node::{Node, Output};
use crate::{error::Result, kernels::float::Float};

/// How the gradient of a result becomes those of its inputs.
pub(crate) trait Backward: Send + Sync + 'static {
    /// What candle calls the operation in its messages.
    const NAME: &'static str;

    /// The gradients of the inputs, in their order, where `grad` is that of `output`.
    ///
    /// An input that [`tracks`](Tensor::track_op) must get one, zeros if need be: candle panics
    /// otherwise.
    fn backward(
        &self,
        inputs: &[&Tensor],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// A tensor of `output`, joined to the graph of one to three inputs if any of them is in one.
pub(crate) fn record<T: Float>(
    inputs: &[&Tensor],
    output: Vec<T>,
    shape: Shape,
    backward: impl Backward,
) -> Result<Tensor> {
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(Tensor::from_vec(output, shape, &Device::Cpu)?);
    }
    let output = Output::Computed(Mutex::new(Some(T::to_cpu_storage_owned(output))));
    Node { output, shape, backward }.apply(inputs)
}

/// A tensor on the processor whose elements are being read.
///
/// It holds the storage's lock: let go of it before candle takes the lock again, or a thread that
/// waits for writing would make both wait for ever.
pub(crate) struct Reading<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Reading<'a> {
    pub(crate) fn new(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout }
    }

    /// All elements of the storage from the tensor's first on.
    pub(crate) fn rest<T: Float>(&self) -> Result<&[T]> {
        let Storage::Cpu(storage) = &*self.storage else {
            return Err(
                candle_core::Error::msg("a tensor of another device was routed here").into()
            );
        };
        Ok(&T::cpu_storage_as_slice(storage)?[self.layout.start_offset()..])
    }

    /// The elements of a contiguous tensor.
    pub(crate) fn all<T: Float>(&self) -> Result<&[T]> {
        Ok(&self.rest()?[..self.layout.shape().elem_count()])
    }
}

/// A tensor on the processor without a history: a gradient.
pub(crate) fn tensor<T: Float>(data: Vec<T>, shape: &Shape) -> Result<Tensor> {
    Ok(Tensor::from_vec(data, shape, &Device::Cpu)?)
}
