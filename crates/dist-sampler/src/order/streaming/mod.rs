//! The streaming order: a keyed permutation of any length that takes no memory.
//!
//! A position is split into two halves of about √N, and each half in turn is changed by a keyed
//! hash of the other, as in a Feistel network (Luby and Rackoff, 1988). The upper half l runs over
//! the ⌈N / 2^k⌉ values it needs and changes by addition modulo their number; the lower half r has
//! k bits and changes by exclusive or. So the permuted set is larger than N by less than 2^k ≈ √N,
//! and the few positions that leave [0, N) walk on until they are inside (Black and Rogaway,
//! "Ciphers with Arbitrary Finite Domains", 2002). Nothing divides, every step can be undone, and a
//! compiler turns a block of positions into vector instructions.
//!
//! Google's Grain uses a Feistel-like network for the same purpose. Its domain is a power of four,
//! which it maps to [0, N) in a way that is not one to one for N = 4^k + 1; ours is, for every N,
//! by construction.
//!
//! Six rounds are told apart from a uniform shuffle by the tests in `quality.rs`, [`ROUNDS`] are
//! not, and cost 7 % more in bulk. With fewer than [`SHORTEST`] samples no number of rounds is
//! enough, and below a few thousand so few of the N! orders are reachable that the exact shuffle is
//! the better choice.

#![expect(
    clippy::inline_always,
    reason = "a call in the middle of a block would keep it from becoming vectors"
)]

#[cfg(test)]
mod quality;

use std::hint::black_box;

use core_types::Seed;

/// Rounds of the network. After r rounds, positions with one equal half keep their difference too
/// often by a fraction of N^(1 − r/4): 1/√N after six rounds, 1/N after eight.
const ROUNDS: usize = 8;

/// The fewest samples whose orders look random: shorter networks make even permutations only.
pub(super) const SHORTEST: u64 = 128;

/// Positions permuted together in the bulk path: so many that the compiler keeps a round of all of
/// them a loop, whose steps the processor then overlaps.
const BLOCK: usize = 256;

/// Halves of shorter orders are hashed in 16 bits: 0.74 ns per index instead of 1.8 (AMD EPYC). One
/// such hash favors some values of a half. After eight rounds the largest of 96 statistics was 2.7
/// standard deviations off, as good as 32 bits (2.2); after six rounds it was 33.
const LEN_OF_16_BITS: u64 = 1 << 30;

/// Halves of shorter orders are hashed in 32 bits, which favor some values by no more than one in
/// 4,096.
const LEN_OF_32_BITS: u64 = 1 << 40;

/// A permutation of [0, `len`), `len` from 1 to 2^63, by the size of the words that hold a half.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Streaming {
    Bits16(Network<u16, ROUNDS>),
    Bits32(Network<u32, ROUNDS>),
    Bits64(Network<u64, ROUNDS>),
}

impl Streaming {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        match len {
            ..LEN_OF_16_BITS => Self::Bits16(Network::new(len, seed)),
            LEN_OF_16_BITS..LEN_OF_32_BITS => Self::Bits32(Network::new(len, seed)),
            _ => Self::Bits64(Network::new(len, seed)),
        }
    }

    /// The sample at `position`, which must be below the length.
    pub(crate) fn get(&self, position: u64) -> u64 {
        match self {
            Self::Bits16(network) => network.get(position),
            Self::Bits32(network) => network.get(position),
            Self::Bits64(network) => network.get(position),
        }
    }

    /// The position of `sample`, which must be below the length: the inverse of [`get`](Self::get).
    pub(crate) fn position(&self, sample: u64) -> u64 {
        match self {
            Self::Bits16(network) => network.position(sample),
            Self::Bits32(network) => network.position(sample),
            Self::Bits64(network) => network.position(sample),
        }
    }

    /// Writes the samples at `first`, `first` + `step`, … .
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
    /// A position or a sample, which two halves make up: the smallest type that holds it.
    type Number: Copy + Ord + Default + Into<u64>;

    /// Cuts a number to this size.
    fn cut(number: u64) -> Self;
    /// Cuts a position, a sample or a step to the size of one.
    fn number(number: u64) -> Self::Number;
    /// The upper and the lower half of a number.
    fn split(number: Self::Number, lower_bits: u32) -> (Self, Self);
    /// The number of an upper and a lower half.
    fn join(halves: (Self, Self), lower_bits: u32) -> Self::Number;
    /// `first` + `offset`, which may wrap around.
    fn advance(first: Self::Number, offset: Self::Number) -> Self::Number;
    /// A keyed hash whose upper bits depend on all bits of `self`.
    fn hash(self, key: Self) -> Self;
    /// `self` as a fraction of 2^bits, times `n`: maps a hash evenly to [0, n).
    fn scale(self, n: Self) -> Self;
    /// `self` + `other` modulo `n`, both below `n`, which is at most half of the range.
    fn add(self, other: Self, n: Self) -> Self;
    /// `self` − `other` modulo `n`, both below `n`.
    fn sub(self, other: Self, n: Self) -> Self;
    /// The upper `bits` bits of a hash; `len` is 2^`bits`.
    fn upper(self, bits: u32, len: Self) -> Self;
    /// `self` xor `other`.
    fn xor(self, other: Self) -> Self;
}

macro_rules! word {
    ($word:ty, $double:ty, $number:ty, $multipliers:expr, $shift:literal, $upper:expr) => {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_lossless,
            reason = "that is what the functions are for"
        )]
        impl Word for $word {
            type Number = $number;

            #[inline(always)]
            fn cut(number: u64) -> Self {
                number as Self
            }

            #[inline(always)]
            fn split(number: $number, lower_bits: u32) -> (Self, Self) {
                ((number >> lower_bits) as Self, (number & ((1 << lower_bits) - 1)) as Self)
            }

            #[inline(always)]
            fn join((upper, lower): (Self, Self), lower_bits: u32) -> $number {
                (upper as $number) << lower_bits | lower as $number
            }

            #[inline(always)]
            fn number(number: u64) -> $number {
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
                // What is below n wraps around when n is taken off, so the smaller one is right;
                // there is no branch. A sum too large for a word is one of a position behind the
                // last, which nobody reads.
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

// There is no vector shift of 16 bits by a variable number before AVX-512, but a multiplication.
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

/// The network: an even number of rounds over halves of type `W`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network<W, const N: usize> {
    len: u64,
    /// k: the bits of the lower half, at least 1.
    lower_bits: u32,
    /// How many values the upper half takes, and how many the lower one, 2^k.
    lens: (W, W),
    keys: [W; N],
}

impl<W: Word, const N: usize> Network<W, N> {
    pub(crate) fn new(len: u64, seed: Seed) -> Self {
        let lower_bits = ((len - 1).checked_ilog2().map_or(0, |log| log + 1) / 2).max(1);
        let lens = (W::cut(len.div_ceil(1 << lower_bits)), W::cut(1 << lower_bits));
        let keys = std::array::from_fn(|round| W::cut(seed.derive(round as u64).as_u64()));
        Self { len, lower_bits, lens, keys }
    }

    pub(super) fn get(&self, position: u64) -> u64 {
        self.inside(position, Self::forward)
    }

    fn position(&self, sample: u64) -> u64 {
        self.inside(sample, Self::backward)
    }

    /// Takes steps until one ends below the length; the first always exists, because the steps form
    /// cycles.
    fn inside(&self, mut number: u64, step: impl Fn(&Self, (W, W)) -> (W, W)) -> u64 {
        loop {
            let halves = W::split(W::number(number), self.lower_bits);
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

    /// Writes the samples at `first`, `first` + `step`, … , a block at a time.
    #[inline(always)]
    fn fill(&self, first: u64, step: u64, out: &mut [u64]) {
        // Products of positions behind the last may wrap around: nobody reads what becomes of them.
        let offsets: [W::Number; BLOCK] =
            std::array::from_fn(|i| W::number(step.wrapping_mul(i as u64)));
        // One length for all, which the compiler must not know: it would widen it once before the
        // loop, and then no longer see that 16 bits times 16 bits, cut to the upper 16, are one
        // vector instruction.
        let lens = black_box(([self.lens.0; BLOCK], [self.lens.1; BLOCK]));
        for (block, out) in (0..).zip(out.chunks_mut(BLOCK)) {
            let first = W::number(first + block * BLOCK as u64 * step);
            let numbers = self.one_step(offsets.map(|offset| W::advance(first, offset)), &lens);
            out.iter_mut().zip(numbers).for_each(|(sample, number)| *sample = number.into());
            // Few leave the order and must walk on: the network permutes hardly more numbers than
            // there are samples.
            if numbers.into_iter().max().is_some_and(|largest| largest.into() >= self.len) {
                let outside = out.iter_mut().filter(|number| **number >= self.len);
                outside.for_each(|number| *number = self.get(*number));
            }
        }
    }

    /// One step of the network for all positions of a block: loops without branches, so that they
    /// become vectors.
    #[inline(always)]
    fn one_step(
        &self,
        positions: [W::Number; BLOCK],
        lens: &([W; BLOCK], [W; BLOCK]),
    ) -> [W::Number; BLOCK] {
        let (mut uppers, mut lowers) = ([W::default(); BLOCK], [W::default(); BLOCK]);
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
    use super::{Network, ROUNDS, Word};

    pub(super) fn fill<W: Word>(
        network: &Network<W, ROUNDS>,
        first: u64,
        step: u64,
        out: &mut [u64],
    ) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            #[expect(
                unsafe_code,
                reason = "a function for other processors than the compiler's target must be unsafe"
            )]
            // SAFETY: the processor has what the function was compiled for.
            return unsafe { fill_avx2(network, first, step, out) };
        }
        network.fill(first, step, out);
    }

    /// The same code as the safe path and the same result, four times as fast: x86-64 has no 32-bit
    /// vector multiplication before these instructions.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    #[expect(
        unsafe_code,
        reason = "it must only be called where the processor has these instructions"
    )]
    unsafe fn fill_avx2<W: Word>(
        network: &Network<W, ROUNDS>,
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

    /// Each sample is below the length and has the position it came from, so no two are the same
    /// and none is missing.
    fn check_permutes_and_undoes(order: &Streaming, len: u64) {
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
        for len in
            powers.chain([99_991, 131_071, 524_287, 524_289, 1_000_003]).filter(|&len| len > 0)
        {
            check_permutes_and_undoes(&Streaming::new(len, Seed::new(1)), len);
            check_permutes_and_undoes(&Streaming::Bits32(Network::new(len, Seed::new(2))), len);
            check_permutes_and_undoes(&Streaming::Bits64(Network::new(len, Seed::new(3))), len);
        }
    }

    #[test]
    fn long_orders_are_undone() {
        let powers = [29, 30, 31, 32, 40, 52, 62, 63].map(|log| 1_u64 << log);
        for len in powers
            .iter()
            .flat_map(|power| [power - 1, *power, power + 1])
            .filter(|&len| len <= 1 << 63)
        {
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
    fn check_bulk<W: Word>(network: Network<W, ROUNDS>, first: u64, step: u64, count: u64) {
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

    /// Of the networks of all words that are long enough.
    fn check_bulk_of_all(len: u64, first: u64, step: u64, count: u64) {
        let seed = Seed::new(len);
        if len < LEN_OF_16_BITS {
            check_bulk::<u16>(Network::new(len, seed), first, step, count);
        }
        check_bulk::<u32>(Network::new(len, seed), first, step, count);
        check_bulk::<u64>(Network::new(len, seed), first, step, count);
    }

    #[test]
    fn bulk_and_single_samples_agree() {
        // One more than a power of four leaves the most numbers outside, so that positions walk,
        // several times even.
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
                    check_bulk_of_all(len, 0, step, count);
                    check_bulk_of_all(len, (len - 1) - (count.max(1) - 1) * step, step, count);
                }
            }
        }
    }

    #[test]
    fn bulk_and_single_samples_of_the_longest_order_agree() {
        for (first, step) in [(0, 1), (0, 1 << 55), ((1 << 63) - 200, 1), (12_345, (1 << 63) / 200)]
        {
            let order = Streaming::new(1 << 63, Seed::new(5));
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
        let order = |order: Streaming| move |position| order.get(position);
        let first = |len| [0, 1, 2, 3].map(order(Streaming::new(len, seed)));
        assert_eq!(
            (0..10).map(order(Streaming::new(10, seed))).collect::<Vec<_>>(),
            [6, 7, 0, 2, 8, 1, 4, 9, 3, 5]
        );
        assert_eq!(
            (0..10).map(order(Streaming::Bits64(Network::new(10, seed)))).collect::<Vec<_>>(),
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
