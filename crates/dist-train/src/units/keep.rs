//! What a unit keeps between the forward and the backward pass.

use std::collections::BTreeMap;

use fsdp_plan::Pattern;

use crate::error::{Result, sharding::ShardingError};

/// What a unit of a [sharded](crate::FullyShard) model keeps between the forward and the backward
/// pass.
///
/// Values and gradients have the same bits either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "reshard_after_forward")]
pub enum Keep {
    /// Its inputs alone: parameters are gathered twice, and its function is run again in the
    /// backward pass. The least memory, for about a third more computation.
    /// (`reshard_after_forward=True` with `checkpoint_wrapper` in PyTorch.)
    #[default]
    Inputs,
    /// What its function has computed, and not its gathered parameters: their memory is freed after
    /// the forward pass, and they are gathered into it again before the backward pass. The least
    /// computation, and the memory of all activations. (`reshard_after_forward=True` in PyTorch.)
    ///
    /// A view of a parameter that the function returns is copied. One that it hands to others in
    /// another way, through a lock, say, cannot be read after it has returned: in the first step that
    /// is [refused](crate::TrainingError::ParameterOutsideUnit).
    Graph,
    /// Its gathered parameters and what its function has computed: nothing is gathered or computed
    /// twice. (`reshard_after_forward=False`, ZeRO stage 2.)
    Gathered,
}

/// What the builder says of units.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepRules {
    default: Option<Keep>,
    /// The last that matches decides.
    rules: Vec<(String, Keep)>,
}

impl KeepRules {
    pub(crate) fn set_default(&mut self, keep: Keep) {
        self.default = Some(keep);
    }

    pub(crate) fn add(&mut self, pattern: String, keep: Keep) {
        self.rules.push((pattern, keep));
    }

    /// Whether nothing was said.
    pub(crate) fn is_silent(&self) -> bool {
        self.default.is_none() && self.rules.is_empty()
    }

    /// What each unit keeps.
    ///
    /// # Errors
    ///
    /// [`Error::Plan`](crate::Error::Plan) for a pattern that is none,
    /// [`ShardingError::UnmatchedUnit`] for one that matches no unit.
    pub(crate) fn of_units(&self, units: &[&str]) -> Result<BTreeMap<String, Keep>> {
        let default = self.default.unwrap_or_default();
        let default = |&unit: &&str| (unit.to_owned(), default);
        let mut keeps: BTreeMap<String, Keep> = units.iter().map(default).collect();
        for (text, keep) in &self.rules {
            let pattern: Pattern = text.parse()?;
            let mut is_used = false;
            for (_, of_unit) in keeps.iter_mut().filter(|(unit, _)| pattern.matches(unit)) {
                *of_unit = *keep;
                is_used = true;
            }
            if !is_used {
                let pattern = text.clone();
                return Err(ShardingError::UnmatchedUnit { option: "keep_unit", pattern }.into());
            }
        }
        Ok(keeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn the_last_pattern_that_matches_decides() {
        let mut rules = KeepRules::default();
        rules.add("h.*".to_owned(), Keep::Gathered);
        rules.add("h.1".to_owned(), Keep::Inputs);
        let keeps = rules.of_units(&["embed", "h.0", "h.1"]).unwrap();
        let found: Vec<Keep> = keeps.into_values().collect();
        assert_eq!(found, [Keep::Inputs, Keep::Gathered, Keep::Inputs]);
        rules.add("head".to_owned(), Keep::Inputs);
        let refused = rules.of_units(&["embed", "h.0", "h.1"]);
        let is_refused = matches!(
            refused,
            Err(Error::Sharding(ShardingError::UnmatchedUnit { option: "keep_unit", pattern }))
                if pattern == "head"
        );
        assert!(is_refused);
    }
}
