//! What optimizers remember from step to step.

use crate::elem::ElemType;

/// Elements that share a scale in 8-bit states.
const BLOCK_8BIT: u128 = 256;

/// Tensors smaller than this keep their 8-bit states in 32 bits.
const MIN_8BIT_NUMEL: u128 = 4096;

/// What the optimizer remembers from step to step, for each tensor it is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam and `AdamW` as in PyTorch: two moments in the dtype of the parameter, and a 4-byte step
    /// count.
    #[default]
    Adam,
    /// Adam in mixed precision, as in Megatron-LM and `DeepSpeed`: a copy of the parameter and two
    /// moments, all in [`ElemType::F32`], and a 4-byte step count.
    AdamMixed,
    /// Adam with 8-bit states, as in bitsandbytes from 0.44 on: two moments of one byte per
    /// element, and 4 bytes for the scale of each 256; tensors of fewer than 4,096 elements have
    /// moments of 4 bytes. (T. Dettmers and others, "8-bit Optimizers via Block-wise Quantization",
    /// arXiv 2110.02861.) The 2 KiB of quantization maps, which all tensors share, are not counted.
    Adam8bit,
    /// Gradient descent with momentum: one buffer in the dtype of the parameter.
    Sgd,
    /// Nothing, as for gradient descent without momentum.
    None,
}

impl Optimizer {
    /// The bytes for a tensor of `numel` elements that is held as `dtype`.
    pub(super) fn state_bytes(self, dtype: ElemType, numel: u128) -> u128 {
        let f32_bytes = |n_buffers| n_buffers * ElemType::F32.bytes(numel);
        match self {
            Self::Adam => 2 * dtype.bytes(numel) + 4,
            Self::AdamMixed => f32_bytes(3) + 4,
            Self::Adam8bit if numel < MIN_8BIT_NUMEL => f32_bytes(2),
            Self::Adam8bit => 2 * (numel + 4 * numel.div_ceil(BLOCK_8BIT)),
            Self::Sgd => dtype.bytes(numel),
            Self::None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_a_tensor() {
        for (optimizer, of_1000, of_4097) in [
            (Optimizer::Adam, 4004, 16_392),
            (Optimizer::AdamMixed, 12_004, 49_168),
            (Optimizer::Adam8bit, 8000, 8194 + 2 * 17 * 4),
            (Optimizer::Sgd, 2000, 8194),
            (Optimizer::None, 0, 0),
        ] {
            let bytes = |numel| optimizer.state_bytes(ElemType::Bf16, numel);
            assert_eq!((bytes(1000), bytes(4097)), (of_1000, of_4097), "{optimizer:?}");
        }
    }
}
