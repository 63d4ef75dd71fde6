//! Shuffles of batches.

use core_types::Seed;

/// Shuffles `items` reproducibly for a seed.
///
/// Each position has a separate draw from the seed, and positions are filled from the last to the
/// first. [`core_types::shuffle`] fills them from the first to the last, so items are reversed
/// before and after it.
pub(crate) fn shuffle<T>(items: &mut [T], seed: Seed) {
    items.reverse();
    core_types::shuffle(items, |n| n - 1 - draw(seed, n));
    items.reverse();
}

/// Returns a number less than `n`.
fn draw(seed: Seed, n: u64) -> u64 {
    // The upper half of the product is uniform, with an error below n / 2^64.
    let product = u128::from(seed.derive(n - 1).as_u64()) * u128::from(n);
    (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_pinned() {
        let mut items: Vec<u32> = (0..10).collect();
        shuffle(&mut items, Seed::new(42));
        assert_eq!(items, [9, 5, 4, 8, 1, 3, 6, 7, 0, 2]);
    }

    #[test]
    fn shuffle_is_uniform() {
        let mut counts = std::collections::BTreeMap::<[u8; 4], u32>::new();
        for seed in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            shuffle(&mut items, Seed::new(seed));
            *counts.entry(items).or_default() += 1;
        }
        // 1000 each; with 23 degrees of freedom the statistic exceeds 60 once in 30,000 seeds.
        let squares: f64 =
            counts.values().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(counts.len() == 24 && squares < 60.0, "{squares}: {counts:?}");
    }
}
