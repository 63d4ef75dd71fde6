//! Which parameters of a model form which unit.

use std::collections::BTreeMap;

use fsdp_plan::ParameterInfo;

use crate::error::sharding::ShardingError;

/// Which parameters of a model form which [unit](crate::Units::unit).
///
/// Numbered blocks are units of their own, with their names: `h.3.attn.weight` and `h.3.mlp.weight`
/// belong to the unit `h.3`. All others are put into units by the beginnings of their names. (PyTorch
/// calls `fully_shard` on each module that is to be a unit, and leaves what remains to the root.)
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
    /// The units with the beginnings of their variables' names, in the order in which they were
    /// named.
    named: Vec<(String, Vec<String>)>,
}

/// A parameter of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// What the unit's builder calls it.
    pub(crate) inner_name: String,
}

impl UnitRules {
    /// Numbered blocks alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts the parameters whose names begin with the components of a prefix into the unit `name`:
    /// `norm` means `norm.weight`, not `norm2.weight`.
    ///
    /// If all of them lie under the unit's own name, its builder has them without that, as those of
    /// a block: what is put together of several places keeps its full names.
    ///
    /// A parameter may be in several units, such as an embedding that the head uses again: it is
    /// gathered for each of them, and its gradients are added up.
    pub fn unit<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        prefixes: impl IntoIterator<Item = S>,
    ) -> Self {
        self.named.push((name.into(), prefixes.into_iter().map(Into::into).collect()));
        self
    }

    /// The units of a model, in the order in which their parameters first occur.
    ///
    /// # Errors
    ///
    /// [`ShardingError::SameUnit`], [`ShardingError::UnmatchedPrefix`], and
    /// [`ShardingError::NoUnit`] if a parameter is in none.
    pub(crate) fn units(
        &self,
        parameters: &[ParameterInfo],
    ) -> Result<Vec<(String, Vec<Member>)>, ShardingError> {
        self.check(parameters)?;
        let mut order: Vec<&str> = Vec::new();
        let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut homeless = Vec::new();
        for parameter in parameters {
            let units = self.units_of(parameter);
            if units.is_empty() {
                homeless.push(parameter.name().to_owned());
            }
            for unit in units {
                let members = names.entry(unit).or_default();
                if members.is_empty() {
                    order.push(unit);
                }
                members.push(parameter.name());
            }
        }
        if !homeless.is_empty() {
            return Err(ShardingError::NoUnit { parameters: homeless });
        }
        Ok(order.into_iter().map(|unit| (unit.to_owned(), members(unit, &names[unit]))).collect())
    }

    /// The units that a parameter is in: the first is the one that a plan counts it for.
    pub(crate) fn units_of<'a>(&'a self, parameter: &'a ParameterInfo) -> Vec<&'a str> {
        let has = |(_, prefixes): &&(String, Vec<String>)| is_under_any(parameter.name(), prefixes);
        let named: Vec<&str> =
            self.named.iter().filter(has).map(|(unit, _)| unit.as_str()).collect();
        match named[..] {
            // The planner's rule for numbered layers; it has the others in its root unit.
            [] => Some(parameter.unit()).filter(|unit| !unit.is_empty()).into_iter().collect(),
            _ => named,
        }
    }

    /// The variables among `names` of a unit: of one that no rule names, those under its own name.
    pub(crate) fn members<'a>(
        &self,
        unit: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Vec<Member> {
        let own = [unit.to_owned()];
        let rule = self.named.iter().find(|(name, _)| name == unit);
        let prefixes = rule.map_or(&own[..], |(_, prefixes)| prefixes);
        let of_unit: Vec<&str> = names.filter(|name| is_under_any(name, prefixes)).collect();
        members(unit, &of_unit)
    }

    fn check(&self, parameters: &[ParameterInfo]) -> Result<(), ShardingError> {
        for (position, (unit, prefixes)) in self.named.iter().enumerate() {
            if self.named[..position].iter().any(|(other, _)| other == unit) {
                return Err(ShardingError::SameUnit { unit: unit.clone() });
            }
            let matches_none = |prefix: &&String| {
                !parameters.iter().any(|parameter| inner_name(parameter.name(), prefix).is_some())
            };
            if let Some(prefix) = prefixes.iter().find(matches_none) {
                return Err(ShardingError::UnmatchedPrefix {
                    unit: unit.clone(),
                    prefix: prefix.clone(),
                });
            }
        }
        Ok(())
    }
}

fn members(unit: &str, names: &[&str]) -> Vec<Member> {
    let inner: Option<Vec<&str>> = names.iter().map(|name| inner_name(name, unit)).collect();
    let member = |(&name, &inner_name): (&&str, &&str)| Member {
        name: name.to_owned(),
        inner_name: inner_name.to_owned(),
    };
    // A variable with the very name of the unit has none inside.
    let inner = inner.filter(|inner| inner.iter().all(|name| !name.is_empty()));
    names.iter().zip(inner.as_deref().unwrap_or(names)).map(member).collect()
}

fn is_under_any(name: &str, prefixes: &[String]) -> bool {
    prefixes.iter().any(|prefix| inner_name(name, prefix).is_some())
}

/// What follows the components of `prefix` in a name that begins with them.
fn inner_name<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = name.strip_prefix(prefix)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

#[cfg(test)]
mod tests {
    use fsdp_plan::ElemType;

    use super::*;

    fn infos(names: &[&str]) -> Vec<ParameterInfo> {
        let info = |name: &&str| ParameterInfo::new(*name, [2], ElemType::F32).unwrap();
        names.iter().map(info).collect()
    }

    /// The units with their members, as `name=inner name`.
    fn units(rules: &UnitRules, names: &[&str]) -> Result<Vec<String>, ShardingError> {
        let text = |(unit, members): (String, Vec<Member>)| {
            let member = |member: &Member| format!("{}={}", member.name, member.inner_name);
            format!("{unit}: {}", members.iter().map(member).collect::<Vec<_>>().join(" "))
        };
        Ok(rules.units(&infos(names))?.into_iter().map(text).collect())
    }

    const NAMES: [&str; 6] =
        ["tokens.weight", "h.0.w", "h.0.attn.w", "h.1.w", "norm.weight", "head.weight"];

    #[test]
    fn blocks_are_units_and_others_are_put_together_by_prefixes() {
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
    fn rules_go_before_numbers() {
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
    fn what_cannot_be_meant_is_refused() {
        let refused = |rules: UnitRules| units(&rules, &NAMES).unwrap_err();
        let parameters = ["tokens.weight", "norm.weight", "head.weight"].map(str::to_owned);
        assert_eq!(
            refused(UnitRules::new()),
            ShardingError::NoUnit { parameters: parameters.to_vec() }
        );
        let (unit, prefix) = ("e".to_owned(), "token".to_owned());
        let expected = ShardingError::UnmatchedPrefix { unit: unit.clone(), prefix };
        assert_eq!(refused(UnitRules::new().unit("e", ["token"])), expected);
        let twice = UnitRules::new().unit("e", ["tokens"]).unit("e", ["head"]);
        assert_eq!(refused(twice), ShardingError::SameUnit { unit });
    }
}
