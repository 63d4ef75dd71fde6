//! The names of tensors in a checkpoint.

use std::fmt;

/// The key of a tensor in a checkpoint.
///
/// The tensor holds a range of a parameter's items, or of an optimizer state with an item for each
/// item of the parameter, or a scalar that belongs to the parameter.
///
/// # Examples
///
/// ```
/// use dist_checkpoint::TensorKey;
///
/// let key = TensorKey { kind: "exp_avg", parameter: "h.0.weight", start: 12 };
/// assert_eq!(key.to_string(), "exp_avg/h.0.weight@12");
/// assert_eq!(TensorKey::model("bias", 0).to_string(), "model/bias@0");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_structs,
    reason = "callers construct keys; a key will not get other fields"
)]
pub struct TensorKey<'a> {
    /// `model` for the parameter itself, or the name that an optimizer gives to its state.
    pub kind: &'a str,
    /// The name of the parameter.
    pub parameter: &'a str,
    /// The first item, in row-major order.
    pub start: usize,
}

impl<'a> TensorKey<'a> {
    /// Returns the key of a parameter's own items from `start` on, of the kind `model`. Optimizers
    /// name the other kinds.
    pub fn model(parameter: &'a str, start: usize) -> Self {
        Self { kind: "model", parameter, start }
    }

    /// Parses a displayed key.
    pub(super) fn parse(key: &'a str) -> Option<Self> {
        let (kind, rest) = key.split_once('/')?;
        let (parameter, start) = rest.rsplit_once('@')?;
        Some(Self { kind, parameter, start: start.parse().ok()? })
    }

    /// Returns the parameter and kind of the key.
    pub(super) fn parameter_and_kind(self) -> ParameterAndKind {
        (self.parameter.to_owned(), self.kind.to_owned())
    }
}

impl fmt::Display for TensorKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.kind, self.parameter, self.start)
    }
}

/// The parameter and the kind of a tensor.
pub(super) type ParameterAndKind = (String, String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip() {
        let key = TensorKey { kind: "exp_avg", parameter: "a/b@c.weight", start: 12 };
        assert_eq!(key.to_string(), "exp_avg/a/b@c.weight@12");
        assert_eq!(TensorKey::parse(&key.to_string()), Some(key));
        for other in ["weight", "model/weight", "weight@3", "model/weight@", "model/weight@-1"] {
            assert_eq!(TensorKey::parse(other), None, "{other}");
        }
    }
}
