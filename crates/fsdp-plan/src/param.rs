//! What a planner must know of a parameter: everything but its values.

use std::ops::Not;

use serde::{Deserialize, Serialize};

use crate::{
    ElemType,
    error::{Error, Result},
    path,
};

/// The description of one parameter of a model.
///
/// The **layer** of a parameter is found from its name: the name up to and with its first component that is a number
/// (`h.10.attn.c_attn.weight` belongs to `h.10`), else the name without its last component (`wte.weight` belongs to
/// `wte`), else the name itself. [`with_layer`](Self::with_layer) overrides the rule.
///
/// The **unit** of a parameter is what one collective gathers. Numbered layers are units of their own, and all other
/// parameters together form the root unit, whose name is empty: that is what `fully_shard` makes of a model when it is
/// applied to each block and then to the model. [`with_unit`](Self::with_unit) overrides it.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::{ElemType, ParameterInfo};
/// let weight = ParameterInfo::new("h.10.attn.c_attn.weight", [768, 2304], ElemType::F32)?;
/// assert_eq!((weight.layer(), weight.unit()), ("h.10", "h.10"));
/// assert_eq!((weight.numel(), weight.bytes()), (1_769_472, 7_077_888));
///
/// let embedding = ParameterInfo::new("wte.weight", [50257, 768], ElemType::F32)?.with_always_gather(true);
/// assert_eq!((embedding.layer(), embedding.unit()), ("wte", ""));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct ParameterInfo {
    name: String,
    shape: Vec<u64>,
    dtype: ElemType,
    layer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<String>,
    #[serde(skip_serializing_if = "Clone::clone")]
    requires_grad: bool,
    #[serde(skip_serializing_if = "Not::not")]
    always_gather: bool,
}

impl ParameterInfo {
    /// Describes the parameter `name`.
    ///
    /// It requires gradients if its type is a float, and is not always gathered.
    ///
    /// # Errors
    ///
    /// [`Error::ParameterTooLarge`] if the number of elements or bytes does not fit into 64 bits. Dims of size zero do
    /// not hide the others: `[0, 2^40, 2^40]` is refused, so that no product of some of the dims can overflow later.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<u64>>, dtype: ElemType) -> Result<Self> {
        let (name, shape) = (name.into(), shape.into());
        if !fits(&shape, dtype) {
            return Err(Error::ParameterTooLarge { name, shape, dtype });
        }
        let layer = path::layer_of(&name).to_owned();
        Ok(Self { name, shape, dtype, layer, unit: None, requires_grad: dtype.is_float(), always_gather: false })
    }

    /// Sets the layer, and with it the unit unless that was set by itself. Default: from the name.
    #[must_use]
    pub fn with_layer(mut self, layer: impl Into<String>) -> Self {
        self.layer = layer.into();
        self
    }

    /// Sets the unit; an empty name means the root unit. Default: from the layer.
    #[must_use]
    pub fn with_unit(mut self, unit: impl Into<String>) -> Self {
        self.unit = Some(unit.into());
        self
    }

    /// Sets whether the parameter is trained. Default: yes for floats; other types never are.
    #[must_use]
    pub fn with_requires_grad(mut self, requires_grad: bool) -> Self {
        self.requires_grad = requires_grad && self.dtype.is_float();
        self
    }

    /// Sets whether every rank keeps the whole parameter, whatever the strategy. Default: no.
    #[must_use]
    pub fn with_always_gather(mut self, always_gather: bool) -> Self {
        self.always_gather = always_gather;
        self
    }

    /// The full name, unique in its model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size of each dim.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The type of an element.
    pub fn dtype(&self) -> ElemType {
        self.dtype
    }

    /// The layer it belongs to: what [`LayerWise`](crate::LayerWise) never parts.
    pub fn layer(&self) -> &str {
        &self.layer
    }

    /// The unit it belongs to: what one collective gathers. Empty for the root unit.
    pub fn unit(&self) -> &str {
        let of_layer = if path::is_block(&self.layer) { &self.layer } else { "" };
        self.unit.as_deref().unwrap_or(of_layer)
    }

    /// Whether it is trained.
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Whether every rank keeps the whole of it.
    pub fn always_gather(&self) -> bool {
        self.always_gather
    }

    /// The number of elements; 1 for a parameter without dims.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self.dtype.bytes(self.numel().into());
        u64::try_from(bytes).unwrap_or(u64::MAX) // never saturates: the constructor checked it
    }

    /// The number of elements in one row, that is, in one step along dim 0.
    pub(crate) fn row_numel(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }
}

/// Whether the bytes of the nonzero dims fit into 64 bits.
fn fits(shape: &[u64], dtype: ElemType) -> bool {
    let numel = shape.iter().filter(|&&dim| dim > 0).try_fold(1_u64, |numel, &dim| numel.checked_mul(dim));
    numel.is_some_and(|numel| dtype.bytes(numel.into()) <= u64::MAX.into())
}

/// What a [`ParameterInfo`] looks like before it is checked.
#[derive(Deserialize)]
struct Unchecked {
    name: String,
    shape: Vec<u64>,
    dtype: ElemType,
    layer: Option<String>,
    unit: Option<String>,
    requires_grad: Option<bool>,
    #[serde(default)]
    always_gather: bool,
}

impl TryFrom<Unchecked> for ParameterInfo {
    type Error = Error;

    fn try_from(raw: Unchecked) -> Result<Self> {
        let info = Self::new(raw.name, raw.shape, raw.dtype)?;
        let requires_grad = raw.requires_grad.unwrap_or(info.requires_grad) && info.requires_grad;
        let layer = raw.layer.unwrap_or_else(|| info.layer.clone());
        Ok(Self { layer, unit: raw.unit, requires_grad, always_gather: raw.always_gather, ..info })
    }
}
