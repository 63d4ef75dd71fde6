//! What the tensors of a checkpoint are called.

use std::fmt;

/// What a model's variables are called among the kinds of tensors; an optimizer names its own.
pub(crate) const MODEL: &str = "model";

/// What a tensor of a checkpoint is: a run of the items that belong to a parameter, or a scalar
/// that does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorKey<'a> {
    /// [`MODEL`], or what the optimizer calls it.
    pub(crate) kind: &'a str,
    pub(crate) parameter: &'a str,
    /// The first item, in row-major order.
    pub(crate) start: usize,
}

impl<'a> TensorKey<'a> {
    /// A parameter, from its item `start` on.
    pub(crate) fn model(parameter: &'a str, start: usize) -> Self {
        Self { kind: MODEL, parameter, start }
    }

    /// Reads a name, as it is displayed.
    pub(super) fn parse(key: &'a str) -> Option<Self> {
        let (kind, rest) = key.split_once('/')?;
        let (parameter, start) = rest.rsplit_once('@')?;
        Some(Self { kind, parameter, start: start.parse().ok()? })
    }

    /// What it is a part of.
    pub(super) fn owner(self) -> Owner {
        (self.kind.to_owned(), self.parameter.to_owned())
    }
}

impl fmt::Display for TensorKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.kind, self.parameter, self.start)
    }
}

/// What a tensor belongs to: its kind, and the parameter.
pub(super) type Owner = (String, String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let key = TensorKey { kind: "exp_avg", parameter: "a/b@c.weight", start: 12 };
        assert_eq!(key.to_string(), "exp_avg/a/b@c.weight@12");
        assert_eq!(TensorKey::parse(&key.to_string()), Some(key));
        for other in ["weight", "model/weight", "weight@3", "model/weight@", "model/weight@-1"] {
            assert_eq!(TensorKey::parse(other), None, "{other}");
        }
    }
}
