//! What a planner must know of a parameter: everything but its values.

pub(crate) mod groups;
pub(crate) mod names;
pub(crate) mod path;

use std::{borrow::Cow, ops::Not, sync::Arc};

use serde::{Deserialize, Serialize, Serializer};

use crate::{
    elem::ElemType,
    error::{Error, ParameterError, Result},
};

/// The description of one parameter of a model.
///
/// The **layer** of a parameter is found from its name: the name up to and with its first component
/// that is a number (`h.10.attn.c_attn.weight` belongs to `h.10`), else the name without its last
/// component (`wte.weight` belongs to `wte`), else the name itself.
/// [`with_layer_pattern`](Self::with_layer_pattern) overrides the rule.
///
/// The **unit** of a parameter is what one collective gathers. Numbered layers are units of their
/// own, and all other parameters together form the root unit, whose name is empty: that is what
/// `fully_shard` makes of a model when it is applied to each block and then to the model.
/// [`with_unit`](Self::with_unit) overrides it.
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
#[serde(try_from = "Unchecked<'_>")]
pub struct ParameterInfo(
    /// Shared by clones, because every plan has one of each parameter.
    Arc<Description>,
);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Description {
    name: Box<str>,
    name_hash: u64,
    shape: Vec<u64>,
    numel: u64,
    dtype: ElemType,
    requires_grad: bool,
    always_gather: bool,
    /// Whether the layer is a unit of its own.
    is_block: bool,
    /// The bytes of the name that are the layer by the rule, from the first.
    layer_len: usize,
    /// What hardly any parameter has, apart, which halves the memory of large models. `None` if
    /// there is nothing.
    given: Option<Box<Given>>,
}

/// What is not as the name tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Given {
    layer: Option<String>,
    unit: Option<String>,
    tied_to: Option<String>,
}

impl Description {
    fn layer_by_rule(&self) -> &str {
        &self.name[..self.layer_len]
    }

    fn set_layer(&mut self, layer: Option<String>) {
        let layer = layer.filter(|layer| layer != self.layer_by_rule());
        self.is_block = path::is_block(layer.as_deref().unwrap_or(self.layer_by_rule()));
        self.give(|given| given.layer = layer);
    }

    fn give(&mut self, give: impl FnOnce(&mut Given)) {
        give(self.given.get_or_insert_default());
        self.given.take_if(|given| **given == Given::default());
    }

    /// One of the texts that were given.
    fn given(&self, text: impl Fn(&Given) -> &Option<String>) -> Option<&str> {
        self.given.as_deref().and_then(|given| text(given).as_deref())
    }
}

impl ParameterInfo {
    /// Describes the parameter `name`.
    ///
    /// It requires gradients if its type is a float, and is not always gathered.
    ///
    /// # Errors
    ///
    /// - [`ParameterError::TooLarge`] if the number of elements or bytes does not fit into 64 bits.
    ///   Dims of size zero do not hide the others: `[0, 2^40, 2^40]` is refused, so that no product
    ///   of some of the dims can overflow later.
    /// - [`ParameterError::PartialBlock`] if the elements are not whole blocks of the dtype.
    pub fn new(
        name: impl Into<String>,
        shape: impl Into<Vec<u64>>,
        dtype: ElemType,
    ) -> Result<Self> {
        let name = name.into();
        let shape = shape.into();
        if !fits(&shape, dtype) {
            return Err(Error::Parameters(ParameterError::TooLarge { name, shape, dtype }));
        }
        let numel = shape.iter().product();
        if numel % dtype.block_numel() > 0 {
            return Err(Error::Parameters(ParameterError::PartialBlock { name, shape, dtype }));
        }
        let layer = path::layer_of(&name);
        let described = Description {
            name_hash: names::hash(&name),
            layer_len: layer.len(),
            is_block: path::is_block(layer),
            name: name.into(),
            shape,
            numel,
            dtype,
            requires_grad: dtype.is_trainable(),
            always_gather: false,
            given: None,
        };
        Ok(Self(Arc::new(described)))
    }

    fn edited(mut self, edit: impl FnOnce(&mut Description)) -> Self {
        edit(Arc::make_mut(&mut self.0));
        self
    }

    /// Sets the layer, and with it the unit unless that was set by itself. Default: from the name.
    #[must_use]
    pub(crate) fn with_layer(self, layer: impl Into<String>) -> Self {
        self.edited(|described| described.set_layer(Some(layer.into())))
    }

    /// Sets the unit; an empty name means the root unit. Default: from the layer.
    #[must_use]
    pub fn with_unit(self, unit: impl Into<String>) -> Self {
        self.edited(|described| described.give(|given| given.unit = Some(unit.into())))
    }

    /// Sets whether the parameter is trained. Default: yes for [trainable
    /// types], others never are.
    #[must_use]
    pub fn with_requires_grad(self, requires_grad: bool) -> Self {
        self.edited(|described| {
            described.requires_grad = requires_grad && described.dtype.is_trainable();
        })
    }

    /// Sets whether every rank keeps the whole parameter, whatever the strategy. Default: no.
    #[must_use]
    pub fn with_always_gather(self, always_gather: bool) -> Self {
        self.edited(|described| described.always_gather = always_gather)
    }

    /// Makes this another name of the parameter `name`: the same values, held once and under that
    /// name.
    ///
    /// Both must have the same shape and dtype and be in one unit. Default: a parameter of its own.
    #[must_use]
    pub fn with_tied_to(self, name: impl Into<String>) -> Self {
        self.edited(|described| described.give(|given| given.tied_to = Some(name.into())))
    }

    /// The full name, unique in its model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The hash by which names are looked up.
    pub(crate) fn name_hash(&self) -> u64 {
        self.0.name_hash
    }

    /// The size of each dim.
    pub fn shape(&self) -> &[u64] {
        &self.0.shape
    }

    /// The type of an element.
    pub fn dtype(&self) -> ElemType {
        self.0.dtype
    }

    /// The layer it belongs to: what [`LayerWise`](crate::strategy::LayerWise) never parts.
    pub fn layer(&self) -> &str {
        self.0.given(|given| &given.layer).unwrap_or(self.0.layer_by_rule())
    }

    /// The unit it belongs to: what one collective gathers. Empty for the root unit.
    pub fn unit(&self) -> &str {
        let of_layer = if self.0.is_block { self.layer() } else { "" };
        self.0.given(|given| &given.unit).unwrap_or(of_layer)
    }

    /// Whether it is trained.
    pub fn requires_grad(&self) -> bool {
        self.0.requires_grad
    }

    /// Whether every rank keeps the whole of it.
    pub fn always_gather(&self) -> bool {
        self.0.always_gather
    }

    /// The parameter whose values these are, if it is another name of one.
    pub fn tied_to(&self) -> Option<&str> {
        self.0.given(|given| &given.tied_to)
    }

    /// The number of elements; 1 for a parameter without dims.
    pub fn numel(&self) -> u64 {
        self.0.numel
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self.0.dtype.bytes(self.numel().into());
        #[expect(clippy::expect_used, reason = "the constructor refuses larger parameters")]
        let bytes = u64::try_from(bytes).expect("the bytes of a parameter fit into 64 bits");
        bytes
    }

    /// The number of elements in one row, that is, in one step along dim 0.
    pub(crate) fn row_numel(&self) -> u64 {
        self.0.shape.iter().skip(1).product()
    }
}

/// Whether the bytes of the nonzero dims fit into 64 bits.
fn fits(shape: &[u64], dtype: ElemType) -> bool {
    let numel =
        shape.iter().filter(|&&dim| dim > 0).try_fold(1_u64, |numel, &dim| numel.checked_mul(dim));
    numel.is_some_and(|numel| dtype.bytes(numel.into()) <= u64::MAX.into())
}

/// The type that a file calls `dtype`, for its tensor `name`.
pub(crate) fn dtype_of(name: &str, dtype: &str) -> Result<ElemType> {
    let unknown = || {
        Error::Parameters(ParameterError::UnknownDtype {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
        })
    };
    ElemType::from_name(dtype).ok_or_else(unknown)
}

/// What a [`ParameterInfo`] looks like in a file.
#[derive(Serialize)]
struct Written<'a> {
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
        let written = Written {
            name: self.name(),
            shape: self.shape(),
            dtype: self.dtype(),
            layer: self.layer(),
            unit: self.0.given(|given| &given.unit),
            requires_grad: self.requires_grad(),
            always_gather: self.always_gather(),
            tied_to: self.tied_to(),
        };
        written.serialize(serializer)
    }
}

/// What a [`ParameterInfo`] looks like before it is checked: in a plan, and but for its name in a
/// manifest.
#[derive(Deserialize)]
pub(crate) struct Unchecked<'a> {
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

impl Unchecked<'_> {
    /// Gives it another name.
    pub(crate) fn with_name(self, name: String) -> Self {
        Self { name, ..self }
    }
}

impl TryFrom<Unchecked<'_>> for ParameterInfo {
    type Error = Error;

    fn try_from(raw: Unchecked<'_>) -> Result<Self> {
        let Unchecked { name, shape, dtype, layer, unit, requires_grad, always_gather, tied_to } =
            raw;
        let dtype = dtype_of(&name, &dtype)?;
        let edited = Self::new(name, shape, dtype)?.edited(|described| {
            described.set_layer(layer);
            described.give(|given| (given.unit, given.tied_to) = (unit, tied_to));
            described.requires_grad &= requires_grad.unwrap_or(true);
            described.always_gather = always_gather;
        });
        Ok(edited)
    }
}
