//! Public names without a user in this workspace that stay, because users of PyTorch, JAX, TRL or
//! Hugging Face look for them.

use crate::tidy::{Violation, surface::UnusedName};

/// A crate's folder, a public name of it, and the reason to keep it. A type keeps its methods.
const SOUGHT: [(&str, &str, &str); 2] = [
    ("crates/fused-ops", "LayerNorm::new", "candle-nn's constructor"),
    ("crates/fused-ops", "RmsNorm::new", "candle-nn's constructor"),
];

/// Returns a violation for each unused name of the crate in `folder` that is not sought, and for each
/// sought name that has a user.
pub(super) fn check(folder: &str, unused: Vec<UnusedName>) -> Vec<Violation> {
    check_against(&SOUGHT, folder, unused)
}

fn check_against(
    sought: &[(&str, &str, &str)],
    folder: &str,
    unused: Vec<UnusedName>,
) -> Vec<Violation> {
    let names: Vec<&str> =
        sought.iter().filter(|(at, ..)| *at == folder).map(|(_, name, _)| *name).collect();
    let idle = names.iter().filter(|name| !unused.iter().any(|one| one.belongs_to(name)));
    let idle = idle.map(|name| {
        let rule = format!("`{name}` of {folder} has a user, or is gone");
        Violation::new("xtask/src/tidy/sought.rs", 1, rule)
    });
    let mut violations: Vec<_> = idle.collect();
    let is_lost = |one: &UnusedName| !names.iter().any(|name| one.belongs_to(name));
    violations.extend(unused.into_iter().filter(is_lost).map(UnusedName::into_violation));
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sought_name_needs_no_user() {
        let name = |name: &str| UnusedName { name: name.into(), file: "a.rs".into(), line: 1 };
        let unused = || vec![name("Lengths"), name("Lengths::new"), name("LengthsError")];
        let n_violations =
            |sought: &[(&str, &str, &str)]| check_against(sought, "a", unused()).len();
        assert_eq!(n_violations(&[]), 3);
        assert_eq!(n_violations(&[("a", "Lengths", "why")]), 1);
        assert_eq!(n_violations(&[("a", "Lengths::new", "why")]), 2);
        // Another crate's name, and a name with a user.
        assert_eq!(n_violations(&[("b", "Lengths", "why")]), 3);
        assert_eq!(n_violations(&[("a", "Used", "why")]), 4);
    }
}
