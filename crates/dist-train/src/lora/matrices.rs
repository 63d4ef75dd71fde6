//! The two matrices of an adapter: names, shapes, initial values and their sum with the weight.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, init::ZERO};

use crate::parameters::declare::Declared;

/// The file name of adapters in PEFT.
pub(crate) const FILE: &str = "adapter_model.safetensors";
/// The prefix that PEFT adds to names of the model.
pub(crate) const FILE_PREFIX: &str = "base_model.model.";

/// The starts of names in weight files that transformers replaces when it loads a model that also sees
/// images, and their replacements. PEFT knows only the names of loaded models.
const LOADED_NAMES: [(&str, &str); 2] =
    [("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")];

/// Returns PEFT's name for a layer or parameter, from its name in weight files.
pub(crate) fn peft_name(name: &str) -> String {
    let replaced = |(start, loaded): (&str, &str)| {
        name.strip_prefix(start).map(|rest| format!("{loaded}{rest}"))
    };
    LOADED_NAMES.into_iter().find_map(replaced).unwrap_or_else(|| name.to_owned())
}

/// The inner name of a layer's weight.
pub(crate) const WEIGHT: &str = "weight";
const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Returns the layer of a weight, which is the name without `.weight`, or `None` for a parameter
/// that is not a weight.
pub(crate) fn layer_of(name: &str) -> Option<&str> {
    if name == WEIGHT { Some("") } else { name.strip_suffix(WEIGHT)?.strip_suffix('.') }
}

/// Returns the names of the two matrices of a layer.
pub(crate) fn matrix_names(layer: &str) -> [String; 2] {
    [A, B].map(|inner| if layer.is_empty() { inner.to_owned() } else { format!("{layer}.{inner}") })
}

/// Returns the layer that a matrix adapts, and the dimension of the matrix with the LoRA rank as
/// its size; `None` if a parameter is not a matrix of an adapter.
pub(crate) fn adapted_by(name: &str) -> Option<(&str, usize)> {
    [(A, 0), (B, 1)].into_iter().find_map(|(inner, rank_dim)| {
        let before = name.strip_suffix(inner)?;
        let layer = if before.is_empty() { before } else { before.strip_suffix('.')? };
        Some((layer, rank_dim))
    })
}

/// Returns the storage and compute dtype of the matrices for a weight of `dtype`. It is
/// never half precision, which has too few digits for updates; PEFT does the same.
pub(crate) fn adapter_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Declares the matrices for a layer with a weight of shape [`n_out`, `n_in`].
pub(crate) fn declare_matrices(
    layer: &str,
    rank: usize,
    [n_out, n_in]: [usize; 2],
    dtype: DType,
) -> [Declared; 2] {
    // Kaiming's uniform distribution for a leaky slope of √5, like in PyTorch's linear layers.
    let bound = (n_in as f64).sqrt().recip();
    let [a, b] = matrix_names(layer);
    [
        Declared {
            name: a,
            shape: (rank, n_in).into(),
            dtype,
            init: Init::Uniform { lo: -bound, up: bound },
        },
        Declared { name: b, shape: (n_out, rank).into(), dtype, init: ZERO },
    ]
}

/// Returns `weight + scale · b · a`.
pub(crate) fn add_adapter(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    // A is scaled, which is smaller than the product, so that the graph contains fewer large
    // tensors.
    weight + b.matmul(&(a * scale)?)?
}

/// Like [`add_adapter`], for tensors without gradients; rounds only the result, to `dtype`.
pub(crate) fn merge_adapter(
    weight: &Tensor,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
    dtype: DType,
) -> Result<Tensor> {
    let computed = adapter_dtype(weight.dtype());
    let [weight, a, b] = [weight, a, b].map(|tensor| tensor.to_dtype(computed));
    add_adapter(&weight?, &a?, &b?, scale)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_peft() {
        let text_part = "language_model.model.layers.0.q";
        assert_eq!(peft_name(text_part), "model.language_model.layers.0.q");
        let names = ["language_model.lm_head.lora_A.weight", "lm_head", "model.layers.0.q"];
        let expected = ["lm_head.lora_A.weight", "lm_head", "model.layers.0.q"];
        assert_eq!(names.map(peft_name), expected);
        assert_eq!(layer_of("h.0.q.weight"), Some("h.0.q"));
        assert_eq!(
            [layer_of("weight"), layer_of("h.bias"), layer_of("h.overweight")],
            [Some(""), None, None]
        );
        assert_eq!(matrix_names("h.0.q"), ["h.0.q.lora_A.weight", "h.0.q.lora_B.weight"]);
        assert_eq!(matrix_names(""), ["lora_A.weight", "lora_B.weight"]);
        for (name, expected) in [
            ("q.lora_A.weight", true),
            ("lora_B.weight", true),
            ("flora_A.weight", false),
            ("q.weight", false),
        ] {
            assert_eq!(adapted_by(name).is_some(), expected, "{name}");
        }
    }
}
