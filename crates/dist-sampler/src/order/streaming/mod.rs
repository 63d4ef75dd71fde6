//! The streaming order: a keyed permutation of any length that needs no memory.
//!
//! A position is split into two halves of about √N values, and a keyed hash of each half changes
//! the other in turn, as in a Feistel network (Luby and Rackoff, 1988). The upper half has ⌈N /
//! 2^k⌉ values and changes by addition modulo their number; the lower half has k bits and changes
//! by exclusive or. So the permuted set exceeds N by less than 2^k ≈ √N. The few positions that
//! leave [0, N) are permuted again until they are inside (Black and Rogaway, "Ciphers with
//! Arbitrary Finite Domains", 2002). The network has no division, every step is invertible, and the
//! compiler vectorizes a block of positions.
//!
//! Google's Grain uses a similar network. Its domain is a power of four, and its mapping to [0, N)
//! is not one to one for N = 4^k + 1; the network here is one to one for every N by construction.
//!
//! The tests in `quality.rs` distinguish six rounds from a uniform shuffle, but not [`ROUNDS`],
//! which cost 7 % more in bulk. Below [`SHORTEST`] samples no number of rounds suffices, and below
//! a few thousand so few of the N! orders are reachable that the exact shuffle is better.

#![expect(clippy::inline_always, reason = "a call within a block would prevent vectorization")]

#[cfg(test)]
mod quality;

use std::hint::black_box;

use core_types::Seed;

/// Rounds of the network. If two positions have one equal half, r rounds keep their difference too
/// often, by a fraction of N^(1 − r/4): 1/√N for six rounds, 1/N for eight.
const ROUNDS: usize = 8;

/// Smallest number of samples with random-looking orders: smaller networks make only even
/// permutations.
pub(super) const SHORTEST: u64 = 128;

/// Positions permuted together in the bulk path: enough that the compiler keeps each round a loop,
/// which the processor then overlaps.
const BLOCK: usize = 256;

/// Length below which halves are hashed in 16 bits, many of which fit into a vector: 0.74 ns per
/// index instead of 1.8 (AMD EPYC).
///
/// One such hash favors some values of a half. After eight rounds the largest of 96 statistics was
/// 2.7 standard deviations off, about as good as 32 bits (2.2); after six rounds it was 33.
const LEN_OF_16_BITS: u64 = 1 << 30;

/// Length below which halves are hashed in 32 bits, which favor some values by at most one in
/// 4,096.
const LEN_OF_32_BITS: u64 = 1 << 40;

/// A permutation of [0, `len`), for `len` from 1 to 2^63, by the word size of the halves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamingOrder {
    Bits16(FeistelNetwork<u16, ROUNDS>),
    Bits32(FeistelNetwork<u32, ROUNDS>),
    Bits64(FeistelNetwork<u64, ROUNDS>),
}

impl StreamingOrder {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        match len {
            ..LEN_OF_16_BITS => Self::Bits16(FeistelNetwork::new(len, seed)),
            LEN_OF_16_BITS..LEN_OF_32_BITS => Self::Bits32(FeistelNetwork::new(len, seed)),
            _ => Self::Bits64(FeistelNetwork::new(len, seed)),
        }
    }

    /// Returns the sample at `position`, which must be less than the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Bits16(network) => network.get(position),
            Self::Bits32(network) => network.get(position),
            Self::Bits64(network) => network.get(position),
        }
    }

    /// Returns the position of `sample`, which must be less than the length: the inverse of
    /// [`get`](Self::get).
    pub(crate) fn position(&self, sample: u64) -> u64 {
        match self {
            Self::Bits16(network) => network.position(sample),
            Self::Bits32(network) => network.position(sample),
            Self::Bits64(network) => network.position(sample),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, ….
    pub(crate) fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        match self {
            Self::Bits16(network) => vector::fill(network, first, step, out),
            Self::Bits32(network) => vector::fill(network, first, step, out),
            Self::Bits64(network) => network.fill(first, step, out),
        }
    }
}

/// The arithmetic of one half: [`u16`], [`u32`] and [`u64`].
pub(crate) trait Word: Copy + Ord + Default {
    /// The type of positions and samples, which have two halves.
    type Number: Copy + Ord + Default + Into<u64>;

    /// Truncates a number to this size.
    fn truncate(number: u64) -> Self;
    /// Truncates a position, a sample or a step to its size.
    fn truncate_number(number: u64) -> Self::Number;
    /// Splits a number into the upper and the lower half.
    fn split(number: Self::Number, lower_bits: u32) -> (Self, Self);
    /// Joins an upper and a lower half.
    fn join(halves: (Self, Self), lower_bits: u32) -> Self::Number;
    /// Returns `first` + `offset`, with wrapping.
    fn advance(first: Self::Number, offset: Self::Number) -> Self::Number;
    /// Returns a keyed hash with upper bits that depend on all bits of `self`.
    fn hash(self, key: Self) -> Self;
    /// Returns `self` / 2^bits · `n`: maps a hash evenly to [0, n).
    fn scale(self, n: Self) -> Self;
    /// Returns `self` + `other` modulo `n`; both must be less than `n`, which is at most half of
    /// the range.
    fn add(self, other: Self, n: Self) -> Self;
    /// Returns `self` − `other` modulo `n`; both must be less than `n`.
    fn sub(self, other: Self, n: Self) -> Self;
    /// Returns the upper `bits` bits of a hash; `len` is 2^`bits`.
    fn upper(self, bits: u32, len: Self) -> Self;
    /// Returns `self` xor `other`.
    fn xor(self, other: Self) -> Self;
}

macro_rules! word {
    ($word:ty, $double:ty, $number:ty, $multipliers:expr, $shift:literal, $upper:expr) => {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_lossless,
            reason = "the functions truncate on purpose"
        )]
        impl Word for $word {
            type Number = $number;

            #[inline(always)]
            fn truncate(number: u64) -> Self {
                number as Self
            }

            #[inline(always)]
            fn split(number: $number, lower_bits: u32) -> (Self, Self) {
                ((number >> lower_bits) as Self, (number & ((1 << lower_bits) - 1)) as Self)
            }

            #[inline(always)]
            fn join((upper, lower): (Self, Self), lower_bits: u32) -> $number {
                ((upper as $number) << lower_bits) | lower as $number
            }

            #[inline(always)]
            fn truncate_number(number: u64) -> $number {
                number as $number
            }

            #[inline(always)]
            fn advance(first: $number, offset: $number) -> $number {
                first.wrapping_add(offset)
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
                // A sum below n wraps around when n is subtracted, so the smaller value is correct,
                // without a branch. A sum that overflows a word belongs to a position beyond the
                // end, which is discarded.
                let sum = self.wrapping_add(other);
                sum.min(sum.wrapping_sub(n))
            }

            #[inline(always)]
            fn sub(self, other: Self, n: Self) -> Self {
                let difference = self.wrapping_sub(other);
                difference.min(difference.wrapping_add(n))
            }

            #[inline(always)]
            fn upper(self, bits: u32, len: Self) -> Self {
                $upper(self, bits, len)
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    };
}

// Before AVX-512 there is no vector shift of 16 bits by a variable count, but there is a
// multiplication.
word!(u16, u32, u32, [0x88b5_u16, 0xdb2d], 8, |hash: u16, _, len| hash.scale(len));
word!(u32, u64, u64, [0x7feb_352d_u32, 0x846c_a68b], 15, |hash: u32, bits, _| hash
    >> (u32::BITS - bits));
word!(
    u64,
    u128,
    u64,
    [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb],
    31,
    |hash: u64, bits, _| hash >> (u64::BITS - bits)
);

/// The network, with an even number of rounds over halves of type `W`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeistelNetwork<W, const N: usize> {
    len: u64,
    /// Bits of the lower half (k), at least 1.
    lower_bits: u32,
    /// Number of values of the upper half, and of the lower half, 2^k.
    lens: (W, W),
    keys: [W; N],
}

impl<W: Word, const N: usize> FeistelNetwork<W, N> {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        let lower_bits = ((len - 1).checked_ilog2().map_or(0, |log| log + 1) / 2).max(1);
        let lens = (W::truncate(len.div_ceil(1 << lower_bits)), W::truncate(1 << lower_bits));
        let keys = std::array::from_fn(|round| W::truncate(seed.derive(round as u64).as_u64()));
        Self { len, lower_bits, lens, keys }
    }

    pub(super) fn get(&self, position: u64) -> u64 {
        self.permute_into_order(position, Self::forward)
    }

    fn position(&self, sample: u64) -> u64 {
        self.permute_into_order(sample, Self::backward)
    }

    /// Repeats `step` until the result is less than the length. The loop always ends, because
    /// repeated steps form a cycle.
    fn permute_into_order(&self, mut number: u64, step: impl Fn(&Self, (W, W)) -> (W, W)) -> u64 {
        loop {
            let halves = W::split(W::truncate_number(number), self.lower_bits);
            number = W::join(step(self, halves), self.lower_bits).into();
            if number < self.len {
                return number;
            }
        }
    }

    fn forward(&self, halves: (W, W)) -> (W, W) {
        self.keys
            .chunks_exact(2)
            .fold(halves, |halves, keys| self.two_rounds(halves, self.lens, keys))
    }

    #[inline(always)]
    fn two_rounds(&self, (upper, lower): (W, W), lens: (W, W), keys: &[W]) -> (W, W) {
        let upper = upper.add(lower.hash(keys[0]).scale(lens.0), lens.0);
        (upper, lower.xor(upper.hash(keys[1]).upper(self.lower_bits, lens.1)))
    }

    fn backward(&self, halves: (W, W)) -> (W, W) {
        self.keys.chunks_exact(2).rev().fold(halves, |(upper, lower), keys| {
            let lower = lower.xor(upper.hash(keys[1]).upper(self.lower_bits, self.lens.1));
            (upper.sub(lower.hash(keys[0]).scale(self.lens.0), self.lens.0), lower)
        })
    }

    /// Writes the samples at `first`, `first` + `step`, …, a block at a time.
    #[inline(always)]
    fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        // Products for positions beyond the end may wrap; their results are discarded.
        let offsets: [W::Number; BLOCK] =
            std::array::from_fn(|i| W::truncate_number(step.wrapping_mul(i as u64)));
        // Hide that all lengths are equal. Otherwise the compiler would widen the length once
        // before the loop, and miss that the upper 16 bits of a 16-bit product are one vector
        // instruction.
        let lens = black_box(([self.lens.0; BLOCK], [self.lens.1; BLOCK]));
        for (block, out) in (0..).zip(out.chunks_mut(BLOCK)) {
            let first = W::truncate_number(first + block * BLOCK as u64 * step);
            let numbers =
                self.permute_block(offsets.map(|offset| W::advance(first, offset)), &lens);
            for (sample, number) in out.iter_mut().zip(numbers) {
                *sample = number.into();
            }
            // Few numbers are outside of the order and permuted again, because the network permutes
            // hardly more numbers than there are samples.
            if numbers.into_iter().max().is_some_and(|largest| largest.into() >= self.len) {
                for number in out.iter_mut().filter(|number| **number >= self.len) {
                    *number = self.get(*number);
                }
            }
        }
    }

    /// Runs the network once for all positions of a block, in loops without branches that the
    /// compiler vectorizes.
    #[inline(always)]
    fn permute_block(
        &self,
        positions: [W::Number; BLOCK],
        lens: &([W; BLOCK], [W; BLOCK]),
    ) -> [W::Number; BLOCK] {
        let mut uppers = [W::default(); BLOCK];
        let mut lowers = [W::default(); BLOCK];
        for ((upper, lower), position) in uppers.iter_mut().zip(&mut lowers).zip(positions) {
            (*upper, *lower) = W::split(position, self.lower_bits);
        }
        for keys in self.keys.chunks_exact(2) {
            let halves = uppers.iter_mut().zip(&mut lowers);
            for ((upper, lower), lens) in halves.zip(lens.0.iter().zip(&lens.1)) {
                (*upper, *lower) = self.two_rounds((*upper, *lower), (*lens.0, *lens.1), keys);
            }
        }
        std::array::from_fn(|i| W::join((uppers[i], lowers[i]), self.lower_bits))
    }
}

/// The bulk path on processors with 256-bit vectors.
mod vector {
    use super::{FeistelNetwork, ROUNDS, Word};

    pub(super) fn fill<W: Word>(
        network: &FeistelNetwork<W, ROUNDS>,
        first: u64,
        step: u64,
        out: &mut [u64],
    ) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            #[expect(
                unsafe_code,
                reason = "a function for processor features beyond the target must be unsafe"
            )]
            // SAFETY: the processor has the required feature, which was just detected.
            return unsafe { fill_avx2(network, first, step, out) };
        }
        network.fill(first, step, out);
    }

    /// Runs the portable code with AVX2, four times as fast: x86-64 without it has no 32-bit vector
    /// multiplication.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    #[expect(unsafe_code, reason = "it must only be called on processors with these instructions")]
    unsafe fn fill_avx2<W: Word>(
        network: &FeistelNetwork<W, ROUNDS>,
        first: u64,
        step: u64,
        out: &mut [u64],
    ) {
        network.fill(first, step, out);
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "tables of orders are short")]
mod tests {
    use super::*;

    /// Checks that each sample is less than the length and maps back to its position, so that
    /// samples are distinct and complete.
    fn check_permutes_and_undoes(order: &StreamingOrder, len: u64) {
        let mut samples = vec![u64::MAX; len as usize];
        order.fill(0, 1, &mut samples);
        for (position, &sample) in (0..).zip(&samples) {
            assert!(
                sample < len && order.position(sample) == position,
                "{len}: {sample} at {position}"
            );
        }
        for position in (0..len).step_by(len as usize / 16 + 1) {
            assert_eq!(order.get(position), samples[position as usize], "{len}: {position}");
        }
    }

    #[test]
    fn short_lengths_are_permuted() {
        // Two threads, because the test covers 200 million samples.
        std::thread::scope(|scope| {
            for half in 0..2 {
                scope.spawn(move || {
                    for len in (1 + half..=20_000).step_by(2) {
                        check_permutes_and_undoes(&StreamingOrder::new(len, Seed::new(len)), len);
                    }
                });
            }
        });
    }

    #[test]
    fn lengths_near_powers_are_permuted() {
        let powers = (0..=10).flat_map(|k| [4_u64.pow(k) - 1, 4_u64.pow(k), 4_u64.pow(k) + 1]);
        for len in
            powers.chain([99_991, 131_071, 524_287, 524_289, 1_000_003]).filter(|&len| len > 0)
        {
            check_permutes_and_undoes(&StreamingOrder::new(len, Seed::new(1)), len);
            check_permutes_and_undoes(
                &StreamingOrder::Bits32(FeistelNetwork::new(len, Seed::new(2))),
                len,
            );
            check_permutes_and_undoes(
                &StreamingOrder::Bits64(FeistelNetwork::new(len, Seed::new(3))),
                len,
            );
        }
    }

    #[test]
    fn long_orders_are_invertible() {
        let powers = [29, 30, 31, 32, 40, 52, 62, 63].map(|log| 1_u64 << log);
        for len in powers
            .iter()
            .flat_map(|power| [power - 1, *power, power + 1])
            .filter(|&len| len <= 1 << 63)
        {
            let order = StreamingOrder::new(len, Seed::new(len));
            let random = (0..2000).map(|label| Seed::new(3).derive(label).as_u64() % len);
            for number in random.chain([0, 1, len / 2, len - 2, len - 1]) {
                assert!(order.get(number) < len && order.position(number) < len, "{len}");
                assert_eq!(order.position(order.get(number)), number, "{len}");
                assert_eq!(order.get(order.position(number)), number, "{len}");
            }
        }
    }

    /// Checks that the vector path and the portable path agree with single samples.
    fn check_bulk<W: Word>(network: FeistelNetwork<W, ROUNDS>, first: u64, step: u64, count: u64) {
        let [mut vector, mut portable] = [(); 2].map(|()| vec![u64::MAX; count as usize]);
        vector::fill(&network, first, step, &mut vector);
        network.fill(first, step, &mut portable);
        let one_by_one: Vec<u64> = (0..count).map(|i| network.get(first + i * step)).collect();
        assert_eq!(
            (&vector, &portable),
            (&one_by_one, &one_by_one),
            "{}: {first} by {step}",
            network.len
        );
    }

    /// Checks the networks of all word sizes that are long enough.
    fn check_bulk_all_words(len: u64, first: u64, step: u64, count: u64) {
        let seed = Seed::new(len);
        if len < LEN_OF_16_BITS {
            check_bulk::<u16>(FeistelNetwork::new(len, seed), first, step, count);
        }
        check_bulk::<u32>(FeistelNetwork::new(len, seed), first, step, count);
        check_bulk::<u64>(FeistelNetwork::new(len, seed), first, step, count);
    }

    #[test]
    fn bulk_and_single_samples_agree() {
        // One more than a power of four leaves the most numbers outside, which are then permuted
        // again, some several times.
        for len in (1..=300).chain([
            1024,
            1025,
            4097,
            65_537,
            LEN_OF_16_BITS - 1,
            LEN_OF_16_BITS,
            (1 << 32) + 1,
            LEN_OF_32_BITS - 1,
        ]) {
            for step in [1, 2, 3, 7, 64, len / 2 + 1] {
                let available = (len - 1) / step + 1;
                for count in
                    [0, 1, 2, 255, 256, 257, 511, 512, 600].map(|count| available.min(count))
                {
                    check_bulk_all_words(len, 0, step, count);
                    check_bulk_all_words(len, (len - 1) - (count.max(1) - 1) * step, step, count);
                }
            }
        }
    }

    #[test]
    fn bulk_matches_single_samples_at_max_length() {
        for (first, step) in [(0, 1), (0, 1 << 55), ((1 << 63) - 200, 1), (12_345, (1 << 63) / 200)]
        {
            let order = StreamingOrder::new(1 << 63, Seed::new(5));
            let mut bulk = [0; 200];
            order.fill(first, step, &mut bulk);
            assert_eq!(
                bulk,
                std::array::from_fn(|i| order.get(first + i as u64 * step)),
                "{first} by {step}"
            );
        }
    }

    #[test]
    fn first_samples_are_pinned() {
        let seed = Seed::new(42);
        let order = |order: StreamingOrder| move |position| order.get(position);
        let first = |len| [0, 1, 2, 3].map(order(StreamingOrder::new(len, seed)));
        assert_eq!(
            (0..10).map(order(StreamingOrder::new(10, seed))).collect::<Vec<_>>(),
            [6, 7, 0, 2, 8, 1, 4, 9, 3, 5]
        );
        assert_eq!(
            (0..10)
                .map(order(StreamingOrder::Bits64(FeistelNetwork::new(10, seed))))
                .collect::<Vec<_>>(),
            [2, 8, 0, 9, 6, 5, 4, 1, 3, 7]
        );
        assert_eq!(first(1_000_000), [427_284, 376_716, 194_288, 219_612]);
        assert_eq!(first((1 << 30) - 1), [919_299_698, 172_501_882, 74_061_002, 74_321_840]);
        assert_eq!(first(1 << 30), [8_050_759, 33_392_780, 405_934_676, 923_171_620]);
        assert_eq!(
            first((1 << 40) - 1),
            [345_630_712_477, 67_264_762_984, 85_237_340_740, 867_117_962_293]
        );
        assert_eq!(
            first(1 << 40),
            [1_008_228_640_628, 1_024_663_449_142, 639_651_424_398, 226_028_886_687]
        );
        let longest =
            [521_885_898_262_347_866, 3_594_646_734_365_882_793, 5_924_328_233_435_336_982];
        assert_eq!(first(1 << 63)[..3], longest);
    }
}
