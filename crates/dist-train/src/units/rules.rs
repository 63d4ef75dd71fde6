//! Rules that assign parameters to units.

use std::collections::BTreeMap;

use dist_checkpoint::support::Listed;
use fsdp_plan::ParameterInfo;

use crate::error::{Error, Result};

/// Rules that assign a model's parameters to [units](crate::Units::unit).
///
/// Each numbered block is a unit with the block's name: `h.3.attn.weight` and `h.3.mlp.weight`
/// belong to the unit `h.3`. Other parameters are assigned by name prefixes. (In PyTorch,
/// `fully_shard` is called on each module that becomes a unit, and the rest belongs to the root.)
///
/// # Examples
///
/// ```
/// use dist_train::UnitRules;
///
/// let rules = UnitRules::new()
///     .unit("embed", ["tokens", "positions"])
///     .unit("head", ["norm", "lm_head"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct UnitRules {
    /// Names of units and prefixes of their parameters, in order of definition.
    named: Vec<(String, Vec<String>)>,
}

/// A parameter of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// The name in the unit's variable builder.
    pub(crate) inner_name: String,
}

impl UnitRules {
    /// Creates rules for numbered blocks only.
    pub fn new() -> Self {
        Self::default()
    }

    /// Assigns the parameters under a prefix of name components to the unit `name`: `norm` matches
    /// `norm.weight` but not `norm2.weight`.
    ///
    /// If the names of all its parameters begin with the unit's name, the unit's variable builder
    /// drops this prefix, as for a block. Otherwise it has full names.
    ///
    /// A parameter may be in several units, such as an embedding that the head uses too: each unit
    /// gathers it, and its gradients are added up.
    pub fn unit<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        prefixes: impl IntoIterator<Item = S>,
    ) -> Self {
        self.named.push((name.into(), prefixes.into_iter().map(Into::into).collect()));
        self
    }

    /// Returns the units of a model, in order of their first parameter.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Sharding`] for an invalid rule, and if a parameter is in no unit.
    pub(crate) fn units(&self, parameters: &[ParameterInfo]) -> Result<Vec<(String, Vec<Member>)>> {
        self.check(parameters)?;
        let mut order: Vec<&str> = Vec::new();
        let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut unassigned = Vec::new();
        for parameter in parameters {
            let units = self.units_of(parameter);
            if units.is_empty() {
                unassigned.push(parameter.name().to_owned());
            }
            for unit in units {
                let members = names.entry(unit).or_default();
                if members.is_empty() {
                    order.push(unit);
                }
                members.push(parameter.name());
            }
        }
        if !unassigned.is_empty() {
            return Err(Error::sharding(format!(
                "{} parameters are in no unit: {}. Numbered blocks are units automatically; assign \
                 others with `unit(name, prefixes)`",
                unassigned.len(),
                Listed(&unassigned)
            )));
        }
        Ok(order
            .into_iter()
            .map(|unit| (unit.to_owned(), unit_members(unit, &names[unit])))
            .collect())
    }

    /// Returns the units of a parameter; a plan counts it for the first one.
    pub(crate) fn units_of<'a>(&'a self, parameter: &'a ParameterInfo) -> Vec<&'a str> {
        let named: Vec<&str> = self
            .named
            .iter()
            .filter(|(_, prefixes)| is_under_any(parameter.name(), prefixes))
            .map(|(unit, _)| unit.as_str())
            .collect();
        match named[..] {
            // The planner's root unit has an empty name, and is not a unit here.
            [] if parameter.unit().is_empty() => Vec::new(),
            // The planner's rule for numbered layers.
            [] => vec![parameter.unit()],
            _ => named,
        }
    }

    /// Returns the variables of a unit among `names`; without a rule, the variables under the
    /// unit's name.
    pub(crate) fn members<'a>(
        &self,
        unit: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Vec<Member> {
        let own = [unit.to_owned()];
        let rule = self.named.iter().find(|(name, _)| name == unit);
        let prefixes = rule.map_or(&own[..], |(_, prefixes)| prefixes);
        let unit_names: Vec<&str> = names.filter(|name| is_under_any(name, prefixes)).collect();
        unit_members(unit, &unit_names)
    }

    fn check(&self, parameters: &[ParameterInfo]) -> Result<()> {
        for (position, (unit, prefixes)) in self.named.iter().enumerate() {
            if self.named[..position].iter().any(|(other, _)| other == unit) {
                return Err(Error::sharding(format!(
                    "there are two units named {unit:?}: name all prefixes of a unit at once"
                )));
            }
            let unmatched = prefixes.iter().find(|prefix| {
                !parameters.iter().any(|parameter| inner_name(parameter.name(), prefix).is_some())
            });
            if let Some(prefix) = unmatched {
                return Err(Error::sharding(format!(
                    "the prefix {prefix:?} of unit {unit:?} matches none of the model's parameters"
                )));
            }
        }
        Ok(())
    }
}

/// Returns the members of a unit with these variables.
fn unit_members(unit: &str, names: &[&str]) -> Vec<Member> {
    let inner: Option<Vec<&str>> = names.iter().map(|name| inner_name(name, unit)).collect();
    // Use full names if a variable has exactly the unit's name, since its inner name would be
    // empty.
    let inner = inner.filter(|inner| inner.iter().all(|name| !name.is_empty()));
    names
        .iter()
        .zip(inner.as_deref().unwrap_or(names))
        .map(|(&name, &inner_name)| Member {
            name: name.to_owned(),
            inner_name: inner_name.to_owned(),
        })
        .collect()
}

fn is_under_any(name: &str, prefixes: &[String]) -> bool {
    prefixes.iter().any(|prefix| inner_name(name, prefix).is_some())
}

/// Returns the rest of a name after the components of `prefix`, or `None` if the name does not
/// begin with these components.
fn inner_name<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = name.strip_prefix(prefix)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

#[cfg(test)]
mod tests {
    use fsdp_plan::ElemType;

    use super::*;

    fn infos(names: &[&str]) -> Vec<ParameterInfo> {
        names.iter().map(|&name| ParameterInfo::new(name, [2], ElemType::F32).unwrap()).collect()
    }

    /// Returns the units with their members, as `name=inner name`.
    fn units(rules: &UnitRules, names: &[&str]) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        for (unit, members) in rules.units(&infos(names))? {
            let members: Vec<String> = members
                .iter()
                .map(|member| format!("{}={}", member.name, member.inner_name))
                .collect();
            texts.push(format!("{unit}: {}", members.join(" ")));
        }
        Ok(texts)
    }

    const NAMES: [&str; 6] =
        ["tokens.weight", "h.0.w", "h.0.attn.w", "h.1.w", "norm.weight", "head.weight"];

    #[test]
    fn blocks_and_prefixes_form_units() {
        let rules =
            UnitRules::new().unit("tokens", ["tokens"]).unit("last", ["norm.weight", "head"]);
        let expected = [
            "tokens: tokens.weight=weight",
            "h.0: h.0.w=w h.0.attn.w=attn.w",
            "h.1: h.1.w=w",
            "last: norm.weight=norm.weight head.weight=head.weight",
        ];
        assert_eq!(units(&rules, &NAMES).unwrap(), expected);
        let members = rules.members("h.0", NAMES.into_iter());
        let found: Vec<&str> = members.iter().map(|member| &*member.inner_name).collect();
        assert_eq!(found, ["w", "attn.w"]);
        assert!(rules.members("h", ["h2.w"].into_iter()).is_empty());
    }

    #[test]
    fn rules_override_numbered_blocks() {
        let rules = UnitRules::new().unit("all", ["h", "tokens", "norm", "head"]);
        assert_eq!(units(&rules, &NAMES).unwrap().len(), 1);
        let names = ["a", "a.b"];
        let rules = UnitRules::new().unit("a", ["a"]);
        assert_eq!(units(&rules, &names).unwrap(), ["a: a=a a.b=a.b"]);
    }

    #[test]
    fn a_parameter_may_be_in_several_units() {
        let rules =
            UnitRules::new().unit("embed", ["tokens"]).unit("last", ["norm", "tokens", "head"]);
        let units = units(&rules, &NAMES).unwrap();
        assert_eq!(units[0], "embed: tokens.weight=tokens.weight");
        let expected =
            "last: tokens.weight=tokens.weight norm.weight=norm.weight head.weight=head.weight";
        assert_eq!(units[1], expected);
        assert_eq!(rules.units_of(&infos(&NAMES)[0]), ["embed", "last"]);
    }

    #[test]
    fn invalid_rules_are_rejected() {
        let unmatched = UnitRules::new().unit("e", ["token"]);
        let twice = UnitRules::new().unit("e", ["tokens"]).unit("e", ["head"]);
        for (rules, expected) in [
            (UnitRules::new(), "3 parameters are in no unit: tokens.weight, norm.weight, head."),
            (unmatched, "prefix \"token\" of unit \"e\""),
            (twice, "two units"),
        ] {
            let error = units(&rules, &NAMES).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
