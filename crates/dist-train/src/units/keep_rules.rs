//! Data that a unit keeps between the forward and the backward pass.

use std::collections::BTreeMap;

use fsdp_plan::Pattern;

use crate::error::{Error, Result};

/// The data that a unit of a [sharded](crate::FullyShard) model keeps between the forward and the
/// backward pass.
///
/// Values and gradients have the same bits for every choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "reshard_after_forward")]
pub enum Keep {
    /// Inputs only: parameters are gathered twice, and the unit's function runs again in the
    /// backward pass. Needs the least memory, for about a third more computation.
    /// (`reshard_after_forward=True` with `checkpoint_wrapper` in PyTorch.)
    #[default]
    Inputs,
    /// The graph of the unit's function without the gathered parameters: their memory is freed
    /// after the forward pass, and refilled before the backward pass. Needs the least computation,
    /// and memory for all activations. (`reshard_after_forward=True` in PyTorch.)
    ///
    /// Views of parameters that the function returns are copied. A view passed out in another way,
    /// for example through a lock, cannot be read after the function returns; the first step
    /// [rejects](crate::TrainingError::ParameterOutsideUnit) it.
    Graph,
    /// The graph of the unit's function and the gathered parameters: nothing is gathered or
    /// computed twice. (`reshard_after_forward=False`, ZeRO stage 2.)
    Gathered,
}

/// The builder's rules for [`Keep`].
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepRules {
    default: Option<Keep>,
    /// Patterns of units; the last match wins.
    rules: Vec<(String, Keep)>,
}

impl KeepRules {
    pub(crate) fn set_default(&mut self, keep: Keep) {
        self.default = Some(keep);
    }

    pub(crate) fn add(&mut self, pattern: String, keep: Keep) {
        self.rules.push((pattern, keep));
    }

    /// Returns true if no default and no rule is set.
    pub(crate) fn is_empty(&self) -> bool {
        self.default.is_none() && self.rules.is_empty()
    }

    /// Returns the kept data of each unit.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Plan`] for an invalid pattern, and [`Error::Sharding`] for a pattern that
    /// matches no unit.
    pub(crate) fn unit_keeps(&self, units: &[&str]) -> Result<BTreeMap<String, Keep>> {
        let default = self.default.unwrap_or_default();
        let mut keeps: BTreeMap<String, Keep> =
            units.iter().map(|&unit| (unit.to_owned(), default)).collect();
        for (text, keep) in &self.rules {
            let pattern: Pattern = text.parse()?;
            let mut is_used = false;
            for (unit, unit_keep) in &mut keeps {
                if pattern.matches(unit) {
                    *unit_keep = *keep;
                    is_used = true;
                }
            }
            if !is_used {
                return Err(Error::sharding(format!(
                    "the pattern {text:?} of `keep_unit` matches none of the model's units"
                )));
            }
        }
        Ok(keeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_matching_pattern_wins() {
        let mut rules = KeepRules::default();
        rules.add("h.*".to_owned(), Keep::Gathered);
        rules.add("h.1".to_owned(), Keep::Inputs);
        let keeps = rules.unit_keeps(&["embed", "h.0", "h.1"]).unwrap();
        let found: Vec<Keep> = keeps.into_values().collect();
        assert_eq!(found, [Keep::Inputs, Keep::Gathered, Keep::Inputs]);
        rules.add("head".to_owned(), Keep::Inputs);
        let refused = rules.unit_keeps(&["embed", "h.0", "h.1"]);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("the pattern \"head\" of `keep_unit`"), "{error}");
    }
}
