//! The streaming order: a keyed permutation of any length that takes no memory.
//!
//! A position is split into two halves of about √N, and each half in turn is changed by a keyed hash of the other, as
//! in a Feistel network (Luby and Rackoff, 1988). The upper half l runs over the ⌈N / 2^k⌉ values it needs and changes
//! by addition modulo their number; the lower half r has k bits and changes by exclusive or. So the permuted set is
//! larger than N by less than 2^k ≈ √N, and the few positions that leave [0, N) walk on until they are inside (Black
//! and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Nothing divides, every step can be undone, and a
//! compiler turns a block of positions into vector instructions.
//!
//! Google's Grain uses a Feistel-like network for the same purpose. Its domain is a power of four, which it maps to
//! [0, N) in a way that is not one to one for N = 4^k + 1; ours is, for every N, by construction.
//!
//! Six rounds are told apart from a uniform shuffle by the tests in `quality.rs`, [`ROUNDS`] are not, and cost 7 % more in
//! bulk. With fewer than [`SHORTEST`] samples no number of rounds is enough, and below a few thousand so few of the N!
//! orders are reachable that the exact shuffle is the better choice.

#![allow(clippy::inline_always, reason = "a call in the middle of a block would keep it from becoming vectors")]

use core_types::Seed;

/// Rounds of the network.
const ROUNDS: usize = 8;

/// The fewest samples whose orders look random: shorter networks make even permutations only.
pub(super) const SHORTEST: u64 = 128;

/// Positions permuted together in the bulk path.
const BLOCK: usize = 128;

/// From this length on the halves are hashed in 64 bits: with 32, the hash would favor some of their values by more than
/// one in 4,096.
const WIDE_FROM: u64 = 1 << 40;

/// A permutation of [0, `len`), `len` from 1 to 2^63.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Streaming {
    Narrow(Network<u32, ROUNDS>),
    Wide(Network<u64, ROUNDS>),
}

impl Streaming {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        if len < WIDE_FROM { Self::Narrow(Network::new(len, seed)) } else { Self::Wide(Network::new(len, seed)) }
    }

    /// The sample at `position`, which must be below the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Narrow(network) => network.get(position),
            Self::Wide(network) => network.get(position),
        }
    }

    /// The position of `sample`, which must be below the length: the inverse of [`get`](Self::get).
    pub(crate) fn position(&self, sample: u64) -> u64 {
        match self {
            Self::Narrow(network) => network.position(sample),
            Self::Wide(network) => network.position(sample),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, … .
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Narrow(network) => vector::fill(network, first, step, out),
            Self::Wide(network) => network.fill(first, step, out),
        }
    }
}

/// The arithmetic of one half; [`u32`] and [`u64`].
pub(crate) trait Word: Copy + Ord + Default {
    /// Cuts a number to this size.
    fn cut(number: u64) -> Self;
    fn widen(self) -> u64;
    /// A keyed hash whose upper bits depend on all bits of `self`.
    fn hash(self, key: Self) -> Self;
    /// `self` as a fraction of 2^bits, times `n`: maps a hash evenly to [0, n).
    fn scale(self, n: Self) -> Self;
    /// `self` + `other` modulo `n`, both below `n`, which is at most half of the range.
    fn add(self, other: Self, n: Self) -> Self;
    /// `self` − `other` modulo `n`, both below `n`.
    fn sub(self, other: Self, n: Self) -> Self;
    /// `self` xor the upper `bits` bits of `other`.
    fn xor_upper(self, other: Self, bits: u32) -> Self;
}

macro_rules! word {
    ($word:ty, $double:ty, $multipliers:expr, $shift:literal) => {
        #[allow(clippy::cast_possible_truncation, clippy::cast_lossless, reason = "that is what the functions are for")]
        impl Word for $word {
            #[inline(always)]
            fn cut(number: u64) -> Self {
                number as Self
            }

            #[inline(always)]
            fn widen(self) -> u64 {
                self as u64
            }

            #[inline(always)]
            fn hash(self, key: Self) -> Self {
                let x = (self ^ key).wrapping_mul($multipliers[0]);
                (x ^ (x >> $shift)).wrapping_mul($multipliers[1])
            }

            #[inline(always)]
            fn scale(self, n: Self) -> Self {
                ((self as $double * n as $double) >> Self::BITS) as Self
            }

            #[inline(always)]
            fn add(self, other: Self, n: Self) -> Self {
                // What is below n wraps around when n is taken off, so the smaller one is right; there is no branch.
                let sum = self + other;
                sum.min(sum.wrapping_sub(n))
            }

            #[inline(always)]
            fn sub(self, other: Self, n: Self) -> Self {
                let difference = self.wrapping_sub(other);
                difference.min(difference.wrapping_add(n))
            }

            #[inline(always)]
            fn xor_upper(self, other: Self, bits: u32) -> Self {
                self ^ (other >> (Self::BITS - bits))
            }
        }
    };
}

word!(u32, u64, [0x7feb_352d_u32, 0x846c_a68b], 15);
word!(u64, u128, [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb], 31);

/// The network: an even number of rounds over halves of type `W`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network<W, const N: usize> {
    len: u64,
    /// k: the bits of the lower half, at least 1.
    lower_bits: u32,
    /// How many values the upper half takes.
    upper_len: W,
    keys: [W; N],
}

impl<W: Word, const N: usize> Network<W, N> {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        let lower_bits = ((len - 1).checked_ilog2().map_or(0, |log| log + 1) / 2).max(1);
        let upper_len = W::cut(len.div_ceil(1 << lower_bits));
        let keys = std::array::from_fn(|round| W::cut(seed.derive(round as u64).as_u64()));
        Self { len, lower_bits, upper_len, keys }
    }

    pub(super) fn get(&self, position: u64) -> u64 {
        self.inside(position, Self::forward)
    }

    fn position(&self, sample: u64) -> u64 {
        self.inside(sample, Self::backward)
    }

    /// Takes steps until one ends below the length; the first always exists, because the steps form cycles.
    fn inside(&self, mut number: u64, step: impl Fn(&Self, (W, W)) -> (W, W)) -> u64 {
        loop {
            number = self.join(step(self, self.split(number)));
            if number < self.len {
                return number;
            }
        }
    }

    #[inline(always)]
    fn split(&self, number: u64) -> (W, W) {
        (W::cut(number >> self.lower_bits), W::cut(number & ((1 << self.lower_bits) - 1)))
    }

    #[inline(always)]
    fn join(&self, (upper, lower): (W, W)) -> u64 {
        upper.widen() << self.lower_bits | lower.widen()
    }

    fn forward(&self, halves: (W, W)) -> (W, W) {
        self.keys.chunks_exact(2).fold(halves, |halves, keys| self.two_rounds(halves, keys))
    }

    #[inline(always)]
    fn two_rounds(&self, (upper, lower): (W, W), keys: &[W]) -> (W, W) {
        let upper = upper.add(lower.hash(keys[0]).scale(self.upper_len), self.upper_len);
        (upper, lower.xor_upper(upper.hash(keys[1]), self.lower_bits))
    }

    fn backward(&self, halves: (W, W)) -> (W, W) {
        self.keys.chunks_exact(2).rev().fold(halves, |(upper, lower), keys| {
            let lower = lower.xor_upper(upper.hash(keys[1]), self.lower_bits);
            (upper.sub(lower.hash(keys[0]).scale(self.upper_len), self.upper_len), lower)
        })
    }

    /// Writes the samples at `first`, `first` + `step`, … , a block at a time.
    #[inline(always)]
    fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        // Products of positions behind the last may wrap around: nobody reads what becomes of them.
        let offsets: [u64; BLOCK] = std::array::from_fn(|i| step.wrapping_mul(i as u64));
        for (block, out) in (0..).zip(out.chunks_mut(BLOCK)) {
            let first = first + block * BLOCK as u64 * step;
            self.fill_block(&offsets.map(|offset| first.wrapping_add(offset)), out);
            self.bring_inside(out);
        }
    }

    /// One step of the network for up to [`BLOCK`] positions; loops without branches, so that they become vectors.
    #[inline(always)]
    fn fill_block(&self, positions: &[u64; BLOCK], out: &mut [u64]) {
        let (mut uppers, mut lowers) = ([W::default(); BLOCK], [W::default(); BLOCK]);
        for ((upper, lower), position) in uppers.iter_mut().zip(&mut lowers).zip(positions) {
            (*upper, *lower) = self.split(*position);
        }
        for keys in self.keys.chunks_exact(2) {
            for (upper, lower) in uppers.iter_mut().zip(&mut lowers) {
                (*upper, *lower) = self.two_rounds((*upper, *lower), keys);
            }
        }
        // In full first: a loop over the part that is asked for would not become vectors.
        let numbers: [u64; BLOCK] = std::array::from_fn(|i| self.join((uppers[i], lowers[i])));
        out.copy_from_slice(&numbers[..out.len()]);
    }

    /// Lets the numbers that left the order walk on, which few do: the network permutes hardly more numbers than there
    /// are samples.
    #[inline(always)]
    fn bring_inside(&self, numbers: &mut [u64]) {
        let largest = numbers.iter().fold(0, |largest, &number| largest.max(number));
        if largest >= self.len {
            let outside = numbers.iter_mut().filter(|number| **number >= self.len);
            outside.for_each(|number| *number = self.get(*number));
        }
    }
}

/// The bulk path on processors with 256-bit vectors.
mod vector {
    use super::{Network, ROUNDS};

    pub(super) fn fill(network: &Network<u32, ROUNDS>, first: u64, step: u64, out: &mut [u64]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            #[allow(
                unsafe_code,
                reason = "a function for other processors than the compiler's target must be unsafe"
            )]
            // SAFETY: the processor has what the function was compiled for.
            return unsafe { fill_avx2(network, first, step, out) };
        }
        network.fill(first, step, out);
    }

    /// The same code as the safe path and the same result, four times as fast: x86-64 has no 32-bit vector multiplication
    /// before these instructions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    #[allow(unsafe_code, reason = "it must only be called where the processor has these instructions")]
    unsafe fn fill_avx2(network: &Network<u32, ROUNDS>, first: u64, step: u64, out: &mut [u64]) {
        network.fill(first, step, out);
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "tables of orders are short")]
mod tests {
    use super::*;

    /// Each sample is below the length and has the position it came from, so no two are the same and none is missing.
    fn check_permutes_and_undoes(order: &Streaming, len: u64) {
        let mut samples = vec![u64::MAX; len as usize];
        order.fill(0, 1, &mut samples);
        for (position, &sample) in (0..).zip(&samples) {
            assert!(sample < len && order.position(sample) == position, "{len}: {sample} at {position}");
        }
        for position in (0..len).step_by(len as usize / 16 + 1) {
            assert_eq!(order.get(position), samples[position as usize], "{len}: {position}");
        }
    }

    #[test]
    fn all_lengths_up_to_20_000_are_permuted() {
        // Two threads, because these are 200 million samples.
        std::thread::scope(|scope| {
            for half in 0..2 {
                scope.spawn(move || {
                    for len in (1 + half..=20_000).step_by(2) {
                        check_permutes_and_undoes(&Streaming::new(len, Seed::new(len)), len);
                    }
                });
            }
        });
    }

    #[test]
    fn lengths_beside_powers_of_four_are_permuted() {
        let powers = (0..=10).flat_map(|k| [4_u64.pow(k) - 1, 4_u64.pow(k), 4_u64.pow(k) + 1]);
        for len in powers.chain([99_991, 131_071, 524_287, 524_289, 1_000_003]).filter(|&len| len > 0) {
            check_permutes_and_undoes(&Streaming::new(len, Seed::new(1)), len);
            check_permutes_and_undoes(&Streaming::Wide(Network::new(len, Seed::new(2))), len);
        }
    }

    #[test]
    fn long_orders_are_undone() {
        let powers = [32, 40, 52, 62, 63].map(|log| 1_u64 << log);
        for len in powers.iter().flat_map(|power| [power - 1, *power, power + 1]).filter(|&len| len <= 1 << 63) {
            let order = Streaming::new(len, Seed::new(len));
            let random = (0..2000).map(|label| Seed::new(3).derive(label).as_u64() % len);
            for number in random.chain([0, 1, len / 2, len - 2, len - 1]) {
                assert!(order.get(number) < len && order.position(number) < len, "{len}");
                assert_eq!(order.position(order.get(number)), number, "{len}");
                assert_eq!(order.get(order.position(number)), number, "{len}");
            }
        }
    }

    /// Fills from `first` by `step`, by the vector path where there is one and by the portable one.
    fn check_bulk(len: u64, first: u64, step: u64, count: u64) {
        let (narrow, wide) = (Network::new(len, Seed::new(len)), Network::new(len, Seed::new(len)));
        let mut bulk = [(); 3].map(|()| vec![u64::MAX; count as usize]);
        let [vector, portable, of_wide] = &mut bulk;
        Streaming::Narrow(narrow).fill(first, step, vector);
        narrow.fill(first, step, portable);
        Streaming::Wide(wide).fill(first, step, of_wide);
        let positions = (0..count).map(|i| first + i * step);
        let one_by_one: Vec<u64> = positions.clone().map(|position| narrow.get(position)).collect();
        assert_eq!((&*vector, &*portable), (&one_by_one, &one_by_one), "{len}: {first} by {step}");
        assert_eq!(
            *of_wide,
            positions.map(|position| wide.get(position)).collect::<Vec<_>>(),
            "{len}: {first} by {step}"
        );
    }

    #[test]
    fn bulk_and_single_samples_agree() {
        // One more than a power of four leaves the most numbers outside, so that positions walk, several times even.
        for len in (1..=300).chain([1024, 1025, 4097, 65_537, 1 << 32, (1 << 40) - 1]) {
            for step in [1, 2, 3, 7, 64, len / 2 + 1] {
                let available = (len - 1) / step + 1;
                for count in [0, 1, 2, 127, 128, 129, 255, 256, 300].map(|count| available.min(count)) {
                    check_bulk(len, 0, step, count);
                    check_bulk(len, (len - 1) - (count.max(1) - 1) * step, step, count);
                }
            }
        }
    }

    #[test]
    fn bulk_and_single_samples_of_the_longest_order_agree() {
        for (first, step) in [(0, 1), (0, 1 << 55), ((1 << 63) - 200, 1), (12_345, (1 << 63) / 200)] {
            let order = Streaming::new(1 << 63, Seed::new(5));
            let mut bulk = [0; 200];
            order.fill(first, step, &mut bulk);
            assert_eq!(bulk, std::array::from_fn(|i| order.get(first + i as u64 * step)), "{first} by {step}");
        }
    }

    #[test]
    fn first_samples_are_pinned() {
        let seed = Seed::new(42);
        let order = |order: Streaming| move |position| order.get(position);
        let first = |len| [0, 1, 2, 3].map(order(Streaming::new(len, seed)));
        assert_eq!((0..10).map(order(Streaming::new(10, seed))).collect::<Vec<_>>(), [0, 9, 2, 6, 8, 7, 1, 5, 3, 4]);
        assert_eq!(
            (0..10).map(order(Streaming::Wide(Network::new(10, seed)))).collect::<Vec<_>>(),
            [2, 8, 0, 9, 6, 5, 4, 1, 3, 7]
        );
        assert_eq!(first(1_000_000), [304_845, 58_565, 254_932, 334_446]);
        assert_eq!(first((1 << 40) - 1), [345_630_712_477, 67_264_762_984, 85_237_340_740, 867_117_962_293]);
        assert_eq!(first(1 << 40), [1_008_228_640_628, 1_024_663_449_142, 639_651_424_398, 226_028_886_687]);
        let longest = [521_885_898_262_347_866, 3_594_646_734_365_882_793, 5_924_328_233_435_336_982];
        assert_eq!(first(1 << 63)[..3], longest);
    }
}
