//! Which slot updates and saves which variable.

use core_types::{WorldSize, balance};

/// The positions in `sizes` of what each of `n_owners` slots gets, so that none has much more to do
/// than another.
pub(crate) fn divide(sizes: &[u64], n_owners: usize) -> Vec<Vec<usize>> {
    #[expect(clippy::expect_used, reason = "owners are slots of one mesh: 1 to 1024 of them")]
    let owners = WorldSize::new(n_owners as u64).expect("the slots of a mesh are a world");
    let mut owned = vec![Vec::new(); n_owners];
    for (var, owner) in balance::longest_first(sizes, owners).into_iter().enumerate() {
        owned[owner].push(var);
    }
    owned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_one_owner_and_sums_are_even() {
        assert_eq!(divide(&[5, 1, 9, 3, 3, 1], 2), [vec![1, 2, 5], vec![0, 3, 4]]);
        assert_eq!(divide(&[1], 3), [vec![0], vec![], vec![]]);
        assert_eq!(divide(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
    }
}
