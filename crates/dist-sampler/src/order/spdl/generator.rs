//! NumPy's default generator: `SeedSequence` and PCG64, as in `numpy.random.default_rng(seed)`.
//!
//! NumPy does not promise stable streams (NEP 19); golden tests compare this one with NumPy 2.4.6.

use rand::Rng;
use rand_pcg::Pcg64;

/// Number of 32-bit words of the entropy pool.
const POOL: usize = 4;

/// A stream of random numbers.
pub(super) struct NumpyGenerator {
    rng: Pcg64,
    /// Upper half of a drawn word, for the next 32-bit draw.
    half: Option<u32>,
}

impl NumpyGenerator {
    #[expect(clippy::cast_possible_truncation, reason = "the words of the seed")]
    pub(super) fn new(seed: u64) -> Self {
        let words = seed_words([seed as u32, (seed >> 32) as u32]);
        // The first word of a pair is the low half, and the first of two pairs the high half.
        let number = |first: usize| {
            let [w0, w1, w2, w3] = [0, 1, 2, 3].map(|n| u128::from(words[first + n]));
            (w1 << 96) | (w0 << 64) | (w3 << 32) | w2
        };
        Self { rng: Pcg64::new(number(0), number(POOL)), half: None }
    }

    /// Returns a number in [0, 1), a multiple of 2^-53.
    pub(super) fn unit(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number less than `n`, which is from 1 to 2^32: Lemire's method with 32-bit draws.
    #[expect(clippy::cast_possible_truncation, reason = "the method uses the halves of a product")]
    pub(super) fn below(&mut self, n: u64) -> u64 {
        if n == 1 {
            return 0;
        }
        // Reject 2^32 mod n of the 2^32 draws, which would favor some results.
        let favored = (1 << 32) % n;
        loop {
            let product = u64::from(self.draw_u32()) * n;
            if u64::from(product as u32) >= favored {
                return product >> 32;
            }
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
    fn draw_u32(&mut self) -> u32 {
        self.half.take().unwrap_or_else(|| {
            let word = self.rng.next_u64();
            self.half = Some((word >> 32) as u32);
            word as u32
        })
    }
}

/// Returns the words that `SeedSequence` generates from a seed of two words.
fn seed_words(seed: [u32; 2]) -> [u32; 2 * POOL] {
    let mut hash = WordHash { constant: 0x43b0_d7e5, multiplier: 0x931e_8875 };
    let mut pool = [seed[0], seed[1], 0, 0].map(|word| hash.apply(word));
    for source in 0..POOL {
        for target in (0..POOL).filter(|&target| target != source) {
            pool[target] = mix(pool[target], hash.apply(pool[source]));
        }
    }
    let mut hash = WordHash { constant: 0x8b51_f9dd, multiplier: 0x58f3_8ded };
    std::array::from_fn(|n| hash.apply(pool[n % POOL]))
}

/// A hash of words that changes with every word.
struct WordHash {
    constant: u32,
    multiplier: u32,
}

impl WordHash {
    fn apply(&mut self, word: u32) -> u32 {
        let word = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.multiplier);
        let word = word.wrapping_mul(self.constant);
        word ^ (word >> 16)
    }
}

fn mix(x: u32, y: u32) -> u32 {
    let word = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
    word ^ (word >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_matches_numpy() {
        let words = seed_words([0, 0]);
        assert_eq!(words[..4], [2_968_811_710, 3_677_149_159, 745_650_761, 2_884_920_346]);
        let mut generator = NumpyGenerator::new(0);
        assert_eq!(generator.rng.next_u64(), 11_749_869_230_777_074_271);
        let mut generator = NumpyGenerator::new(u64::MAX);
        assert_eq!(generator.rng.next_u64(), 12_544_278_110_101_001_871);
        assert_eq!(generator.rng.next_u64(), 15_593_249_672_699_323_225);
    }

    #[test]
    fn largest_bound_takes_whole_words() {
        let mut words = NumpyGenerator::new(7);
        let mut numbers = NumpyGenerator::new(7);
        for _ in 0..5 {
            assert_eq!(numbers.below(1 << 32), u64::from(words.draw_u32()));
            assert_eq!(numbers.below(1), 0, "no draw");
        }
    }
}
