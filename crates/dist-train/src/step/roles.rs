//! Roles of a model's variables: trained in a group, frozen, or a buffer.

use std::collections::BTreeMap;

use fsdp_plan::Pattern;

use crate::error::{Result, training::TrainingError};

/// The group of variables that match no other group.
pub(crate) const DEFAULT_GROUP: &str = "default";

/// Names of buffers in common layers, anywhere in a model.
const BUFFERS: [&str; 3] = ["**.running_mean", "**.running_var", "**.num_batches_tracked"];

/// Patterns of variable names in the options of a builder.
#[derive(Clone, Debug, Default)]
pub(crate) struct RolePatterns {
    /// Trained variables; if not empty, all other variables are frozen and left out of checkpoints.
    pub(crate) trained: Vec<String>,
    pub(crate) frozen: Vec<String>,
    pub(crate) unused: Vec<String>,
    pub(crate) buffers: Vec<String>,
    /// Parameters that pretrained weights may lack.
    pub(crate) missing: Vec<String>,
    /// Tensors of pretrained weights that the model may lack.
    pub(crate) unexpected: Vec<String>,
    pub(crate) groups: Vec<(String, Vec<String>)>,
}

/// The role of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Updated by the optimizer of the group with this index.
    Trained(usize),
    /// Never changed.
    Frozen,
    /// Changed by the forward pass; each slot has its own copy.
    Buffer,
}

/// The roles of all variables, in the order of the `names` in [`RolePatterns::roles`].
#[derive(Debug)]
pub(crate) struct Roles {
    pub(crate) by_variable: Vec<Role>,
    /// For each variable, whether it may have no gradient.
    pub(crate) may_be_unused: Vec<bool>,
    /// Whether checkpoints leave out frozen variables.
    pub(crate) leaves_out_frozen: bool,
    /// Names of the groups with variables; [`Role::Trained`] has an index in this list.
    pub(crate) groups: Vec<String>,
}

impl RolePatterns {
    /// Resolves the patterns to a role for each of the `names`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Plan`](crate::Error::Plan) for an invalid pattern, and [`TrainingError`]
    /// for a pattern without a match and for overlapping groups.
    pub(crate) fn roles(&self, names: &[&str]) -> Result<Roles> {
        let trained = PatternSelection::new("train_only", &self.trained, names)?;
        let frozen = PatternSelection::new("freeze", &self.frozen, names)?;
        let unused = PatternSelection::new("allow_unused", &self.unused, names)?;
        let mut buffers = PatternSelection::new("buffers", &self.buffers, names)?;
        for pattern in BUFFERS {
            buffers.0.push(pattern.parse()?);
        }
        let mut groups = vec![(DEFAULT_GROUP, PatternSelection(Vec::new()))];
        for (name, patterns) in &self.groups {
            if groups.iter().any(|(other, _)| other == name) {
                let reason = format!("there are two groups named {name:?}");
                return Err(TrainingError::option("group", reason).into());
            }
            groups.push((name, PatternSelection::new("group", patterns, names)?));
        }
        // Without patterns of trained variables, all variables are trained except the frozen ones.
        let leaves_out_frozen = !self.trained.is_empty();
        let mut by_variable = Vec::with_capacity(names.len());
        for &name in names {
            by_variable.push(if buffers.has(name) {
                Role::Buffer
            } else if frozen.has(name) || (leaves_out_frozen && !trained.has(name)) {
                Role::Frozen
            } else {
                Role::Trained(group_of(name, &groups)?)
            });
        }
        let may_be_unused = names.iter().map(|name| unused.has(name)).collect();
        let groups = groups.into_iter().map(|(name, _)| name.to_owned()).collect();
        Roles { by_variable, may_be_unused, leaves_out_frozen, groups }.with_used_groups()
    }

    /// Returns the patterns of parameters that pretrained weights may lack.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`roles`](Self::roles) about patterns.
    pub(crate) fn missing(&self, names: &[&str]) -> Result<Vec<Pattern>> {
        Ok(PatternSelection::new("allow_missing", &self.missing, names)?.0)
    }

    /// Returns the patterns of additional tensors in pretrained weights. They may match nothing,
    /// since weights differ.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Plan`](crate::Error::Plan) for an invalid pattern.
    pub(crate) fn unexpected(&self) -> Result<Vec<Pattern>> {
        parse_all(&self.unexpected)
    }
}

impl Roles {
    /// Removes groups without variables, and renumbers the others. Returns an error if no variable
    /// is trained.
    fn with_used_groups(self) -> Result<Self> {
        let used: Vec<usize> = (0..self.groups.len())
            .filter(|&group| self.by_variable.contains(&Role::Trained(group)))
            .collect();
        if used.is_empty() {
            let n = self.by_variable.len();
            let reason =
                format!("there is nothing to train: all {n} variables are frozen or buffers");
            return Err(TrainingError::option("freeze", reason).into());
        }
        let new_indices: BTreeMap<usize, usize> = used.iter().copied().zip(0..).collect();
        let mut by_variable = self.by_variable.clone();
        for role in &mut by_variable {
            if let Role::Trained(group) = role {
                *group = new_indices[&*group];
            }
        }
        Ok(Self {
            by_variable,
            groups: used.iter().map(|&group| self.groups[group].clone()).collect(),
            ..self
        })
    }

    /// Returns the indices of the trained variables.
    pub(crate) fn trained(&self) -> Vec<usize> {
        self.positions(|role| matches!(role, Role::Trained(_)))
    }

    /// Returns the indices of the variables of a group.
    pub(crate) fn trained_in(&self, group: usize) -> Vec<usize> {
        self.positions(|role| role == Role::Trained(group))
    }

    pub(crate) fn buffers(&self) -> Vec<usize> {
        self.positions(|role| role == Role::Buffer)
    }

    /// Returns true if checkpoints contain a variable.
    pub(crate) fn is_saved(&self, var: usize) -> bool {
        !(self.leaves_out_frozen && self.by_variable[var] == Role::Frozen)
    }

    fn positions(&self, is_selected: impl Fn(Role) -> bool) -> Vec<usize> {
        (0..self.by_variable.len()).filter(|&var| is_selected(self.by_variable[var])).collect()
    }
}

/// The patterns of one option.
struct PatternSelection(Vec<Pattern>);

impl PatternSelection {
    fn new(option: &'static str, patterns: &[String], names: &[&str]) -> Result<Self> {
        let patterns = parse_all(patterns)?;
        let unmatched =
            patterns.iter().find(|pattern| !names.iter().any(|name| pattern.matches(name)));
        match unmatched {
            Some(pattern) => {
                let pattern = pattern.to_string();
                let reason = format!(
                    "the pattern {pattern:?} of `{option}` matches none of the model's variables"
                );
                Err(TrainingError::option(option, reason).into())
            }
            None => Ok(Self(patterns)),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }
}

fn parse_all(patterns: &[String]) -> Result<Vec<Pattern>> {
    Ok(patterns.iter().map(|text| text.parse()).collect::<fsdp_plan::Result<_>>()?)
}

/// Returns the index of the group that matches the variable, or 0, the default group, if no group
/// matches.
fn group_of(name: &str, groups: &[(&str, PatternSelection)]) -> Result<usize, TrainingError> {
    let mut matches = (0..groups.len()).filter(|&group| groups[group].1.has(name));
    match (matches.next(), matches.next()) {
        (None, _) => Ok(0),
        (Some(group), None) => Ok(group),
        (Some(first), Some(second)) => {
            let (first, second) = (groups[first].0, groups[second].0);
            let reason = format!("variable {name} is in group {first:?} and in group {second:?}");
            Err(TrainingError::option("group", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const NAMES: [&str; 6] =
        ["bn.running_mean", "bn.weight", "head.bias", "head.weight", "norm.bias", "running_var"];

    fn texts(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|&pattern| pattern.to_owned()).collect()
    }

    #[test]
    fn patterns_choose_roles() {
        let patterns = RolePatterns {
            frozen: texts(&["bn"]),
            unused: texts(&["head.*"]),
            groups: vec![("no_decay".to_owned(), texts(&["**.bias"]))],
            ..RolePatterns::default()
        };
        let roles = patterns.roles(&NAMES).unwrap();
        let (default, no_decay) = (Role::Trained(0), Role::Trained(1));
        let expected = [Role::Buffer, Role::Frozen, no_decay, default, no_decay, Role::Buffer];
        assert_eq!(roles.by_variable, expected);
        assert_eq!(roles.groups, ["default", "no_decay"]);
        assert_eq!(roles.may_be_unused, [false, false, true, true, false, false]);
        assert_eq!((roles.trained(), roles.trained_in(1)), (vec![2, 3, 4], vec![2, 4]));
    }

    #[test]
    fn untrained_variables_are_frozen_and_not_saved() {
        let patterns = RolePatterns { trained: texts(&["head", "bn"]), ..RolePatterns::default() };
        let roles = patterns.roles(&NAMES).unwrap();
        let (trained, buffer) = (Role::Trained(0), Role::Buffer);
        assert_eq!(roles.by_variable, [buffer, trained, trained, trained, Role::Frozen, buffer]);
        let saved: Vec<bool> = (0..NAMES.len()).map(|var| roles.is_saved(var)).collect();
        assert_eq!(saved, [true, true, true, true, false, true]);

        let patterns = RolePatterns { frozen: texts(&["bn"]), ..patterns };
        let roles = patterns.roles(&NAMES).unwrap();
        assert_eq!(
            roles.by_variable,
            [buffer, Role::Frozen, trained, trained, Role::Frozen, buffer]
        );
    }

    #[test]
    fn empty_groups_are_removed() {
        let all = ("all".to_owned(), texts(&["**"]));
        let patterns = RolePatterns { groups: vec![all], ..RolePatterns::default() };
        let roles = patterns.roles(&NAMES[1..5]).unwrap();
        assert_eq!(
            (roles.groups, roles.by_variable),
            (vec!["all".to_owned()], vec![Role::Trained(0); 4])
        );
    }

    #[test]
    fn invalid_patterns_are_rejected() {
        let group = |name: &str, pattern| (name.to_owned(), texts(&[pattern]));
        let groups = |groups: Vec<_>| RolePatterns { groups, ..RolePatterns::default() };
        let frozen = |pattern| RolePatterns { frozen: texts(&[pattern]), ..Default::default() };
        let unused = |pattern| RolePatterns { unused: texts(&[pattern]), ..Default::default() };
        let buffers = |pattern| RolePatterns { buffers: texts(&[pattern]), ..Default::default() };
        let overlap = groups(vec![group("a", "head"), group("b", "**.bias")]);
        for (patterns, option, message) in [
            (unused("haed"), "allow_unused", "of `allow_unused` matches none"),
            (buffers("haed"), "buffers", "of `buffers` matches none"),
            (groups(vec![group("a", "haed")]), "group", "of `group` matches none"),
            (frozen("haed.*"), "freeze", "the pattern \"haed.*\" of `freeze` matches none"),
            (overlap, "group", "head.bias is in group \"a\" and in group \"b\""),
            (groups(vec![group("default", "head")]), "group", "two groups named \"default\""),
            (frozen("**"), "freeze", "all 6 variables"),
        ] {
            let refused = patterns.roles(&NAMES);
            let Err(Error::Training(TrainingError::Option { option: found, reason })) = refused
            else {
                panic!("{refused:?}")
            };
            assert!(found == option && reason.contains(message), "{reason}");
        }

        let none = RolePatterns { unused: texts(&["a.["]), ..RolePatterns::default() };
        assert!(matches!(none.roles(&NAMES), Err(Error::Plan(_))));
    }
}
