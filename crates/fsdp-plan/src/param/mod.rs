//! Metadata of a parameter: everything but its values.

pub(crate) mod groups;
pub(crate) mod name_index;
pub(crate) mod path;

use std::{borrow::Cow, ops::Not, sync::Arc};

use serde::{Deserialize, Serialize, Serializer};

use crate::{
    elem::ElemType,
    error::{Error, Result},
};

/// The metadata of one parameter of a model.
///
/// The **layer** follows from the name: the name up to its first numeric component
/// (`h.10.attn.c_attn.weight` belongs to `h.10`), else the name without its last component
/// (`wte.weight` belongs to `wte`), else the name itself.
/// [`with_layer_pattern`](Self::with_layer_pattern) overrides this rule.
///
/// The **unit** is the set of parameters that one collective gathers. Each numbered layer is a
/// unit, and all other parameters form the root unit, whose name is empty. PyTorch makes the same
/// units when `fully_shard` is applied to each block and then to the model.
/// [`with_unit`](Self::with_unit) overrides this rule.
///
/// # Examples
///
/// ```
/// # use fsdp_plan::{ElemType, ParameterInfo};
/// let weight = ParameterInfo::new("h.10.attn.c_attn.weight", [768, 2304], ElemType::F32)?;
/// assert_eq!((weight.layer(), weight.unit()), ("h.10", "h.10"));
/// assert_eq!((weight.numel(), weight.bytes()), (1_769_472, 7_077_888));
///
/// let embedding =
///     ParameterInfo::new("wte.weight", [50257, 768], ElemType::F32)?.with_always_gather(true);
/// assert_eq!((embedding.layer(), embedding.unit()), ("wte", ""));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "UncheckedParameter<'_>")]
pub struct ParameterInfo(
    /// Shared between clones, because every plan holds each parameter.
    Arc<ParameterData>,
);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ParameterData {
    name: Box<str>,
    name_hash: u64,
    shape: Vec<u64>,
    numel: u64,
    dtype: ElemType,
    requires_grad: bool,
    always_gather: bool,
    /// Whether the layer is a separate unit.
    is_block: bool,
    /// Length in bytes of the prefix of the name that is the layer by the rule.
    layer_len: usize,
    /// Boxed, because few parameters have overrides; this halves the memory of large models. `None`
    /// without overrides.
    overrides: Option<Box<Overrides>>,
}

/// Values that replace what the name implies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Overrides {
    layer: Option<String>,
    unit: Option<String>,
    tied_to: Option<String>,
}

impl ParameterData {
    /// Returns the layer that the name implies.
    fn implied_layer(&self) -> &str {
        &self.name[..self.layer_len]
    }

    fn set_layer(&mut self, layer: Option<String>) {
        let layer = layer.filter(|layer| layer != self.implied_layer());
        self.is_block = path::is_block(layer.as_deref().unwrap_or(self.implied_layer()));
        self.edit_overrides(|overrides| overrides.layer = layer);
    }

    fn edit_overrides(&mut self, edit: impl FnOnce(&mut Overrides)) {
        edit(self.overrides.get_or_insert_default());
        self.overrides.take_if(|overrides| **overrides == Overrides::default());
    }

    /// Returns the override that `field` selects.
    fn find_override(&self, field: impl Fn(&Overrides) -> &Option<String>) -> Option<&str> {
        self.overrides.as_deref().and_then(|overrides| field(overrides).as_deref())
    }
}

impl ParameterInfo {
    /// Describes the parameter `name`.
    ///
    /// A parameter of a float type requires gradients. It is not always gathered.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidParameter`] if the number of elements or bytes exceeds 64 bits, or if the elements do not form
    /// whole blocks of the dtype. Dims of size zero do not hide the others: `[0, 2^40, 2^40]` is rejected, so that no
    /// product of some of the dims can overflow later.
    pub fn new(
        name: impl Into<String>,
        shape: impl Into<Vec<u64>>,
        dtype: ElemType,
    ) -> Result<Self> {
        let name = name.into();
        let shape = shape.into();
        if !fits_into_64_bits(&shape, dtype) {
            return Err(invalid_shape(name, &shape, dtype, "exceeds 18446744073709551615 bytes"));
        }
        let numel = shape.iter().product();
        if numel % dtype.block_numel() > 0 {
            let reason = "is not a whole number of blocks of this dtype";
            return Err(invalid_shape(name, &shape, dtype, reason));
        }
        let layer = path::implied_layer(&name);
        let data = ParameterData {
            name_hash: name_index::hash(&name),
            layer_len: layer.len(),
            is_block: path::is_block(layer),
            name: name.into(),
            shape,
            numel,
            dtype,
            requires_grad: dtype.is_trainable(),
            always_gather: false,
            overrides: None,
        };
        Ok(Self(Arc::new(data)))
    }

    /// Applies `edit` to a copy, or in place if no clone shares the data.
    fn with_edit(mut self, edit: impl FnOnce(&mut ParameterData)) -> Self {
        edit(Arc::make_mut(&mut self.0));
        self
    }

    /// Sets the layer, and the unit with it unless the unit was set explicitly. Default: from the
    /// name.
    #[must_use]
    pub(crate) fn with_layer(self, layer: impl Into<String>) -> Self {
        self.with_edit(|data| data.set_layer(Some(layer.into())))
    }

    /// Sets the unit; an empty name means the root unit. Default: from the layer.
    #[must_use]
    pub fn with_unit(self, unit: impl Into<String>) -> Self {
        self.with_edit(|data| data.edit_overrides(|overrides| overrides.unit = Some(unit.into())))
    }

    /// Sets whether the parameter is trained. Default: yes for floats of at least 8 bits; other
    /// types are never trained.
    #[must_use]
    pub fn with_requires_grad(self, requires_grad: bool) -> Self {
        self.with_edit(|data| data.requires_grad = requires_grad && data.dtype.is_trainable())
    }

    /// Sets whether every rank keeps a full copy of the parameter, regardless of the strategy.
    /// Default: no.
    #[must_use]
    pub fn with_always_gather(self, always_gather: bool) -> Self {
        self.with_edit(|data| data.always_gather = always_gather)
    }

    /// Ties this parameter to the parameter `name`: both names share one set of values, stored
    /// under `name`.
    ///
    /// Both must have the same shape, dtype and unit. Default: untied.
    #[must_use]
    pub fn with_tied_to(self, name: impl Into<String>) -> Self {
        self.with_edit(|data| {
            data.edit_overrides(|overrides| overrides.tied_to = Some(name.into()));
        })
    }

    /// Returns the full name, unique in its model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the hash of the name, for lookups.
    pub(crate) fn name_hash(&self) -> u64 {
        self.0.name_hash
    }

    /// Returns the size of each dim.
    pub fn shape(&self) -> &[u64] {
        &self.0.shape
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> ElemType {
        self.0.dtype
    }

    /// Returns the layer. [`LayerWise`](crate::strategy::LayerWise) never splits a layer.
    pub fn layer(&self) -> &str {
        self.0.find_override(|overrides| &overrides.layer).unwrap_or(self.0.implied_layer())
    }

    /// Returns the unit, the parameters that one collective gathers. The root unit's name is empty.
    pub fn unit(&self) -> &str {
        let implied = if self.0.is_block { self.layer() } else { "" };
        self.0.find_override(|overrides| &overrides.unit).unwrap_or(implied)
    }

    /// Returns true if the parameter is trained.
    pub fn requires_grad(&self) -> bool {
        self.0.requires_grad
    }

    /// Returns true if every rank keeps a full copy.
    pub(crate) fn always_gather(&self) -> bool {
        self.0.always_gather
    }

    /// Returns the name of the parameter that this one is tied to.
    #[doc(hidden)]
    pub fn tied_to(&self) -> Option<&str> {
        self.0.find_override(|overrides| &overrides.tied_to)
    }

    /// Returns the number of elements; 1 for a parameter without dims.
    pub fn numel(&self) -> u64 {
        self.0.numel
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self.0.dtype.rounded_up_bytes(self.numel().into());
        #[expect(clippy::expect_used, reason = "the constructor rejects larger parameters")]
        let bytes = u64::try_from(bytes).expect("the bytes of a parameter fit into 64 bits");
        bytes
    }

    /// Returns the number of elements in a row, that is, in one step along dim 0.
    pub(crate) fn row_numel(&self) -> u64 {
        self.0.shape.iter().skip(1).product()
    }
}

fn invalid_shape(name: String, shape: &[u64], dtype: ElemType, reason: &str) -> Error {
    let reason = format!("of shape {shape:?} and dtype {dtype} {reason}");
    Error::InvalidParameter { name, reason }
}

/// Returns true if the bytes fit into 64 bits, even without the dims of size zero.
fn fits_into_64_bits(shape: &[u64], dtype: ElemType) -> bool {
    let numel =
        shape.iter().filter(|&&dim| dim > 0).try_fold(1_u64, |numel, &dim| numel.checked_mul(dim));
    numel.is_some_and(|numel| dtype.rounded_up_bytes(numel.into()) <= u64::MAX.into())
}

/// Parses the dtype of the tensor `name`.
pub(crate) fn parse_dtype(name: &str, dtype: &str) -> Result<ElemType> {
    ElemType::from_name(dtype).ok_or_else(|| {
        let name = name.to_owned();
        let dtype = dtype.to_owned();
        Error::UnknownDtype { name, dtype }
    })
}

/// The serialized form of a [`ParameterInfo`].
#[derive(Serialize)]
struct ParameterRecord<'a> {
    name: &'a str,
    shape: &'a [u64],
    dtype: ElemType,
    layer: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'a str>,
    #[serde(skip_serializing_if = "Clone::clone")]
    requires_grad: bool,
    #[serde(skip_serializing_if = "Not::not")]
    always_gather: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tied_to: Option<&'a str>,
}

impl Serialize for ParameterInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let record = ParameterRecord {
            name: self.name(),
            shape: self.shape(),
            dtype: self.dtype(),
            layer: self.layer(),
            unit: self.0.find_override(|overrides| &overrides.unit),
            requires_grad: self.requires_grad(),
            always_gather: self.always_gather(),
            tied_to: self.tied_to(),
        };
        record.serialize(serializer)
    }
}

/// An unvalidated [`ParameterInfo`]: an entry of a plan, or of a manifest, where the name comes
/// from the key.
#[derive(Deserialize)]
pub(crate) struct UncheckedParameter<'a> {
    #[serde(default)]
    name: String,
    shape: Vec<u64>,
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    layer: Option<String>,
    unit: Option<String>,
    requires_grad: Option<bool>,
    #[serde(default)]
    always_gather: bool,
    tied_to: Option<String>,
}

impl UncheckedParameter<'_> {
    /// Sets the name.
    pub(crate) fn with_name(self, name: String) -> Self {
        Self { name, ..self }
    }
}

impl TryFrom<UncheckedParameter<'_>> for ParameterInfo {
    type Error = Error;

    fn try_from(raw: UncheckedParameter<'_>) -> Result<Self> {
        let dtype = parse_dtype(&raw.name, &raw.dtype)?;
        let info = Self::new(raw.name, raw.shape, dtype)?;
        Ok(info.with_edit(|data| {
            data.set_layer(raw.layer);
            data.edit_overrides(|overrides| {
                overrides.unit = raw.unit;
                overrides.tied_to = raw.tied_to;
            });
            data.requires_grad &= raw.requires_grad.unwrap_or(true);
            data.always_gather = raw.always_gather;
        }))
    }
}
