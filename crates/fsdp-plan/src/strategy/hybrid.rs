//! Some layers cut, others whole, as two lists of path components say.

use core_types::WorldSize;

use super::{ShardingStrategy, assemble, divisible, layer_wise::Owners};
use crate::{Cut, ParameterInfo, ShardingPlan, error::Result, path};

/// Cuts the parameters that one list of patterns names like [`Full`](super::Full), and gives those that another list
/// names to ranks whole, like [`LayerWise`](super::LayerWise).
///
/// A pattern is one component of a dotted path or several side by side (`head`, `h.1`), and it names a parameter if it
/// occurs among the components of its name or of its layer. It matches whole components only: `layer1` does not name
/// `layer10.weight`. A parameter that both lists name is cut, and so is one that neither names.
///
/// # Examples
///
/// ```
/// use core_types::WorldSize;
/// use fsdp_plan::{Cut, ElemType, Hybrid, ParameterInfo, ShardingStrategy};
///
/// let parameters = [
///     ParameterInfo::new("transformer.h.0.weight", [8, 8], ElemType::F32)?,
///     ParameterInfo::new("lm_head.weight", [100, 8], ElemType::F32)?,
/// ];
/// let plan = Hybrid::new(["transformer"], ["lm_head"]).plan(&parameters, WorldSize::new(2)?)?;
/// assert_eq!(plan.parameters()[0].cut(), Cut::Dim0);
/// assert!(matches!(plan.parameters()[1].cut(), Cut::Whole { .. }));
/// # Ok::<(), fsdp_plan::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hybrid {
    full: Vec<String>,
    layer_wise: Vec<String>,
}

impl Hybrid {
    /// Cuts what a pattern of `full` names, and keeps whole what only a pattern of `layer_wise` names.
    pub fn new<F, L>(full: F, layer_wise: L) -> Self
    where
        F: IntoIterator<Item: Into<String>>,
        L: IntoIterator<Item: Into<String>>,
    {
        Self {
            full: full.into_iter().map(Into::into).collect(),
            layer_wise: layer_wise.into_iter().map(Into::into).collect(),
        }
    }

    fn is_layer_wise(&self, info: &ParameterInfo) -> bool {
        !names(&self.full, info) && names(&self.layer_wise, info)
    }
}

/// Cuts `transformer` and `attention`, keeps `classifier`, `head` and `lm_head` whole.
///
/// The last is how language models name their head, which a search for `head` within names would find as well.
impl Default for Hybrid {
    fn default() -> Self {
        Self::new(["transformer", "attention"], ["classifier", "head", "lm_head"])
    }
}

impl ShardingStrategy for Hybrid {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn plan(&self, parameters: &[ParameterInfo], world_size: WorldSize) -> Result<ShardingPlan> {
        let whole = divisible(parameters).filter(|info| self.is_layer_wise(info));
        let owners = Owners::choose(whole, world_size);
        assemble(self.name(), world_size, parameters, |info| {
            if self.is_layer_wise(info) { owners.cut(info) } else { Cut::Dim0 }
        })
    }
}

/// Whether one of `patterns` names `info`.
fn names(patterns: &[String], info: &ParameterInfo) -> bool {
    let found =
        |pattern: &String| path::has_components(info.name(), pattern) || path::has_components(info.layer(), pattern);
    patterns.iter().any(found)
}
