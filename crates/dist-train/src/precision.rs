//! The compute dtype of a model, and the reduce dtype of its gradients.

use candle_core::DType;
use dist_checkpoint::support::elem_of;
use fsdp_plan::cost::{CostModel, Runtime};

use crate::error::training::TrainingError;

/// Maps the storage dtype of a parameter to its compute dtype and to the reduce dtype of its
/// gradients. The default is without mixed precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Precision(Option<MixedDtypes>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MixedDtypes {
    param_dtype: DType,
    reduce_dtype: DType,
}

impl Precision {
    pub(crate) fn mixed(param_dtype: DType, reduce_dtype: DType) -> Self {
        Self(Some(MixedDtypes { param_dtype, reduce_dtype }))
    }

    /// Returns the compute dtype of a parameter stored as `stored`.
    pub(crate) fn compute_dtype(self, stored: DType) -> DType {
        match self.0 {
            Some(mixed) if is_trainable_float(stored) => mixed.param_dtype,
            _ => stored,
        }
    }

    /// Returns the reduce dtype of a parameter stored as `stored`.
    pub(crate) fn reduce_dtype(self, stored: DType) -> DType {
        match self.0 {
            Some(mixed) if is_trainable_float(stored) => mixed.reduce_dtype,
            _ => widened_dtype(stored),
        }
    }

    /// Returns the cost model of the candle runtime with these dtypes.
    #[expect(clippy::expect_used, reason = "`check` accepts only dtypes that the planner knows")]
    pub(crate) fn cost_model(self) -> CostModel {
        let elem = |dtype| elem_of(dtype).expect("the planner knows all floating-point dtypes");
        let mixed_precision = self.0.map(|MixedDtypes { param_dtype, reduce_dtype }| {
            (elem(param_dtype), elem(reduce_dtype))
        });
        CostModel { runtime: Runtime::Candle, mixed_precision, ..CostModel::default() }
    }

    /// Rejects dtypes that cannot train a model. f16 needs `allow_non_finite`, so that
    /// the caller can scale losses, so that small gradients do not vanish.
    pub(crate) fn check(self, allow_non_finite: bool) -> Result<(), TrainingError> {
        let Some(MixedDtypes { param_dtype, reduce_dtype }) = self.0 else { return Ok(()) };
        for (option, dtype) in [("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)] {
            let hint = match dtype {
                _ if !is_trainable_float(dtype) => TRAINABLE_FLOATS,
                DType::F16 if !allow_non_finite => SCALE,
                _ => continue,
            };
            let reason = format!("`mixed_precision` has {} as {option}: {hint}", dtype.as_str());
            return Err(TrainingError::option("mixed_precision", reason));
        }
        Ok(())
    }
}

/// Returns the accumulation dtype of gradients of `dtype`: single precision for half
/// precision.
pub(crate) fn widened_dtype(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

fn is_trainable_float(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16 | DType::F32 | DType::F64)
}

const TRAINABLE_FLOATS: &str = "it must be bf16, f16, f32 or f64";

const SCALE: &str = "gradients below 6e-8 vanish in it: use bf16, or scale the loss up and the \
                     gradients down, and set `allow_non_finite`";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_floats_are_converted() {
        let mixed = Precision::mixed(DType::BF16, DType::F32);
        assert_eq!(mixed.compute_dtype(DType::F64), DType::BF16);
        assert_eq!(mixed.reduce_dtype(DType::F64), DType::F32);
        assert_eq!(mixed.compute_dtype(DType::U8), DType::U8);
        let none = Precision::default();
        assert_eq!(none.compute_dtype(DType::F16), DType::F16);
        assert_eq!(none.reduce_dtype(DType::F16), DType::F32);
    }

    #[test]
    fn untrainable_dtypes_are_rejected() {
        let refused = |param, reduce| Precision::mixed(param, reduce).check(false).unwrap_err();
        let of = |option, dtype, hint| {
            let reason = format!("`mixed_precision` has {dtype} as {option}: {hint}");
            TrainingError::option("mixed_precision", reason)
        };
        assert_eq!(refused(DType::F16, DType::F32), of("param_dtype", "f16", SCALE));
        assert_eq!(refused(DType::BF16, DType::F16), of("reduce_dtype", "f16", SCALE));
        assert_eq!(refused(DType::U8, DType::F32), of("param_dtype", "u8", TRAINABLE_FLOATS));
        Precision::mixed(DType::F16, DType::F32).check(true).unwrap();
        Precision::mixed(DType::BF16, DType::BF16).check(false).unwrap();
    }
}
