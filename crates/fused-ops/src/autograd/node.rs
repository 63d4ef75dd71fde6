//! The nodes of an operation in candle's graph.

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Error, Layout, MetalStorage,
    Result, Shape, Storage, Tensor,
    backend::{BackendDevice, BackendStorage},
};

use super::{Backward, direct::keep_direct};

/// An operation with a precomputed result.
pub(super) struct PrecomputedNode<B> {
    pub(super) output: NodeOutput,
    pub(super) shape: Shape,
    pub(super) backward: B,
}

/// The result of an operation.
pub(super) enum NodeOutput {
    /// Elements computed by a kernel, until candle takes them.
    Computed(Mutex<Option<CpuStorage>>),
    /// A tensor on any device. candle takes a copy, and the tensor is dropped, since the graph
    /// would otherwise keep both.
    Copy(Mutex<Option<Tensor>>),
    /// Zeros without meaning, on the device of the first input.
    Token,
}

/// Returns the zeros of a token.
fn zeros<S: BackendStorage>(input: &S, shape: &Shape) -> Result<S>
where
    S::Device: BackendDevice<Storage = S>,
{
    input.device().zeros_impl(shape, DType::F32)
}

/// Takes an output, which can be taken only once.
fn take_output<T>(output: &Mutex<Option<T>>) -> Result<T> {
    let output = output.lock().unwrap_or_else(PoisonError::into_inner).take();
    output.ok_or_else(|| Error::msg("an operation ran twice"))
}

/// Copies the elements of a view to a contiguous storage.
fn copy<S: BackendStorage>(storage: &S, layout: &Layout) -> Result<S> {
    storage.to_dtype(layout, storage.dtype())
}

/// Implements the forward of a node for one kind of device: it only returns the result.
macro_rules! hand_over {
    ($name:ident, $storage:ident, $kind:ident, $computed:expr) => {
        fn $name(&self, input: &$storage) -> Result<($storage, Shape)> {
            let storage = match &self.output {
                NodeOutput::Computed(output) => $computed(output)?,
                NodeOutput::Token => zeros(input, &self.shape)?,
                NodeOutput::Copy(tensor) => {
                    let tensor = take_output(tensor)?;
                    let (storage, layout) = tensor.storage_and_layout();
                    match &*storage {
                        Storage::$kind(storage) => copy(storage, layout)?,
                        _ => return Err(Error::msg("inputs and result lie on different devices")),
                    }
                }
            };
            Ok((storage, self.shape.clone()))
        }
    };
}

impl<B: Backward> PrecomputedNode<B> {
    hand_over!(on_cpu, CpuStorage, Cpu, take_output);
    hand_over!(on_cuda, CudaStorage, Cuda, |_| Err(Error::msg("computed on the processor")));
    hand_over!(on_metal, MetalStorage, Metal, |_| Err(Error::msg("computed on the processor")));

    /// Records the result of one to three inputs.
    pub(super) fn apply(self, inputs: &[&Tensor]) -> crate::error::Result<Tensor> {
        Ok(match inputs {
            [a] => a.apply_op1(self)?,
            [a, b] => a.apply_op2(b, self)?,
            [a, b, c] => a.apply_op3(b, c, self)?,
            _ => return Err(Error::msg("a node has one to three inputs").into()),
        })
    }

    /// Returns the gradients of all inputs.
    fn input_grads<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let grad = grad.contiguous()?;
        let backward = || self.backward.backward(&inputs, output, &grad);
        let grads = keep_direct(&inputs, !B::GRADS_MAY_ALIAS, backward)?;
        grads.try_into().map_err(|_| Error::msg("a gradient is missing"))
    }
}

impl<B: Backward> CustomOp1 for PrecomputedNode<B> {
    fn name(&self) -> &'static str {
        B::NAME
    }

    fn cpu_fwd(&self, a: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu(a)
    }

    fn cuda_fwd(&self, a: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda(a)
    }

    fn metal_fwd(&self, a: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.on_metal(a)
    }

    fn bwd(&self, a: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.input_grads([a], y, grad)?;
        Ok(a)
    }
}

/// Implements the forward function of two inputs for one kind of device.
macro_rules! two_input_forward {
    ($name:ident, $storage:ident, $hand_over:ident) => {
        fn $name(
            &self,
            a: &$storage,
            _: &Layout,
            _: &$storage,
            _: &Layout,
        ) -> Result<($storage, Shape)> {
            self.$hand_over(a)
        }
    };
}

impl<B: Backward> CustomOp2 for PrecomputedNode<B> {
    fn name(&self) -> &'static str {
        B::NAME
    }

    two_input_forward!(cpu_fwd, CpuStorage, on_cpu);
    two_input_forward!(cuda_fwd, CudaStorage, on_cuda);
    two_input_forward!(metal_fwd, MetalStorage, on_metal);

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.input_grads([a, b], y, grad)?;
        Ok((a, b))
    }
}

/// Implements the forward function of three inputs for one kind of device.
macro_rules! three_input_forward {
    ($name:ident, $storage:ident, $hand_over:ident) => {
        fn $name(
            &self,
            a: &$storage,
            _: &Layout,
            _: &$storage,
            _: &Layout,
            _: &$storage,
            _: &Layout,
        ) -> Result<($storage, Shape)> {
            self.$hand_over(a)
        }
    };
}

impl<B: Backward> CustomOp3 for PrecomputedNode<B> {
    fn name(&self) -> &'static str {
        B::NAME
    }

    three_input_forward!(cpu_fwd, CpuStorage, on_cpu);
    three_input_forward!(cuda_fwd, CudaStorage, on_cuda);
    three_input_forward!(metal_fwd, MetalStorage, on_metal);

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.input_grads([a, b, c], y, grad)?;
        Ok((a, b, c))
    }
}
