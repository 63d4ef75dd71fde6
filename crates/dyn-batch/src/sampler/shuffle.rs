//! A random order of batches.

use core_types::Seed;

/// Brings `items` into a random order, the same one for the same seed.
///
/// The draw for each place is derived from the seed by itself, and places are filled from the last
/// one down: the mirror image of [`core_types::shuffle`], so items are turned round before and
/// after it.
pub(crate) fn shuffle<T>(items: &mut [T], seed: Seed) {
    items.reverse();
    core_types::shuffle(items, |n| n - 1 - draw(seed, n));
    items.reverse();
}

/// A number below `n`.
fn draw(seed: Seed, n: u64) -> u64 {
    // The upper half of the product: even but for one in 2^64 / n.
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
    fn every_order_of_four_comes_as_often() {
        let mut counts = std::collections::BTreeMap::<[u8; 4], u32>::new();
        for seed in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            shuffle(&mut items, Seed::new(seed));
            *counts.entry(items).or_default() += 1;
        }
        // 1000 each; 23 degrees of freedom stay below 60 but for one time in 30,000.
        let squares: f64 =
            counts.values().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(counts.len() == 24 && squares < 60.0, "{squares}: {counts:?}");
    }
}
