//! Quality of the streaming order.
//!
//! The tests check, for every length, that the order is a permutation with an inverse, and that
//! single and bulk reads agree. A battery of statistics compares it with the exact shuffle and
//! finds no difference. The same battery detects networks of fewer rounds and an affine order.
//!
//! # Thresholds
//!
//! Every statistic is a z-score. For the exact shuffle, its tails satisfy
//!
//! P(|z| ≥ t) ≤ 2 exp(−t² / 2).
//!
//! For a count of rare events (Poisson) and for a sum of squares (chi-square) this is Chernoff's
//! bound if z is the signed root of the deviance: [`z_of_count`], [`z_of_squares`]. By Bonferroni's
//! inequality, all n statistics of a battery stay below √(2 ln(2n / α)) except with probability α,
//! even if they depend on each other: [`threshold`]. The seeds are fixed, so the result is the same
//! in every run.
//!
//! # Number of rounds
//!
//! Take two positions with equal lower halves and a difference δ between their upper halves. If the
//! hashes of the upper halves agree, which happens about once in √N times, the pair keeps δ for two
//! rounds. So it keeps δ for r rounds with probability N^(−r/4). A random permutation gives the
//! pair the difference δ with probability 1 / N. After r rounds δ is therefore too frequent by a
//! share of N^(1−r/4): 1 after 4 rounds, 1 / √N after 6, 1 / N after 8. One epoch has about √N / 2
//! such pairs. To see the share at 5 standard deviations takes 50·√N epochs after 6 rounds and
//! 50·N^1.5 epochs after 8. A count of only these pairs in 20,000 epochs of 2^14 samples gave
//! z = 9.4 with 6 rounds and z = 0.0 with 8. The battery detects 6 rounds at N = 128 in 2,343 epochs:
//! [`six_rounds_fail`].
//!
//! Below about 60 samples no number of rounds is enough: a network is an even permutation if the
//! upper half takes an odd number of values and the lower half more than two. In a longer order
//! only the complete list of samples shows the parity.
#![expect(clippy::cast_possible_truncation, reason = "tables of orders are short")]

use std::{collections::BTreeMap, fmt};

use core_types::Seed;

use super::{FeistelNetwork, StreamingOrder};
use crate::order::{exact, table};

/// Probability α of a false alarm of one battery when constants or seeds change.
const FALSE_ALARM: f64 = 1e-3;

/// Maps each position to its sample.
type SampleOrder = Box<dyn Fn(u64) -> u64>;

/// Creates the order of [0, length) for a seed.
type OrderFamily = fn(u64, Seed) -> SampleOrder;

fn streaming(len: u64, seed: Seed) -> SampleOrder {
    let streaming = StreamingOrder::new(len, seed);
    Box::new(move |position| streaming.get(position))
}

/// Creates an order with 32-bit words, which the sampler uses for long orders, at any length.
fn streaming_32_bits(len: u64, seed: Seed) -> SampleOrder {
    let streaming = StreamingOrder::Bits32(FeistelNetwork::new(len, seed));
    Box::new(move |position| streaming.get(position))
}

fn streaming_64_bits(len: u64, seed: Seed) -> SampleOrder {
    let streaming = StreamingOrder::Bits64(FeistelNetwork::new(len, seed));
    Box::new(move |position| streaming.get(position))
}

fn rounds<const N: usize>(len: u64, seed: Seed) -> SampleOrder {
    let network = FeistelNetwork::<u16, N>::new(len, seed);
    Box::new(move |position| network.get(position))
}

fn fisher_yates(len: u64, seed: Seed) -> SampleOrder {
    let mut table = table::allocate(len).unwrap();
    exact::shuffle(&mut table, len, seed);
    Box::new(move |position| u64::from(table[position as usize]))
}

/// Creates the affine order x → a·x + b modulo the length, the usual shortcut.
fn affine(len: u64, seed: Seed) -> SampleOrder {
    let draw = |label| seed.derive(label).as_u64() % len;
    let factor =
        (draw(0)..2 * len).find(|&factor| greatest_common_divisor(factor, len) == 1).unwrap();
    let offset = draw(u64::MAX);
    Box::new(move |position| {
        ((u128::from(factor) * u128::from(position) + u128::from(offset)) % u128::from(len)) as u64
    })
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// A statistic, and its distance from the expected value of the exact shuffle.
struct TestStatistic {
    statistic: String,
    z: f64,
}

impl fmt::Debug for TestStatistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: z = {:.1}", self.statistic, self.z)
    }
}

fn finding(statistic: impl Into<String>, z: f64) -> TestStatistic {
    TestStatistic { statistic: statistic.into(), z }
}

fn threshold(n_statistics: usize) -> f64 {
    (2.0 * (2.0 * n_statistics as f64 / FALSE_ALARM).ln()).sqrt()
}

fn worst(findings: &[TestStatistic]) -> &TestStatistic {
    findings.iter().max_by(|a, b| a.z.abs().total_cmp(&b.z.abs())).unwrap()
}

/// Computes the z of a Poisson variable.
fn z_of_count(count: f64, mean: f64) -> f64 {
    let log_ratio = if count == 0.0 { 0.0 } else { (count / mean).ln() };
    signed_root(count - mean, 2.0 * (count * log_ratio - count + mean))
}

/// Computes the z of a chi-square variable with `mean` degrees of freedom.
fn z_of_squares(squares: f64, mean: f64) -> f64 {
    signed_root(squares - mean, squares - mean - mean * (squares / mean).ln())
}

/// Computes the z of the maximum of `n` variables from the `z` of the largest, by the union bound.
fn z_of_largest(z: f64, n: f64) -> f64 {
    (z * z - 2.0 * n.ln()).max(0.0).sqrt()
}

fn signed_root(sign: f64, deviance: f64) -> f64 {
    deviance.max(0.0).sqrt().copysign(sign)
}

/// The complete orders of successive epochs.
struct EpochOrders {
    len: usize,
    epochs: Vec<Vec<u32>>,
}

impl EpochOrders {
    fn new(family: OrderFamily, len: u64, n_epochs: u64, seed: Seed) -> Self {
        let orders = (0..n_epochs).map(|epoch| family(len, seed.derive(epoch)));
        let epochs =
            orders.map(|order| (0..len).map(|position| order(position) as u32).collect()).collect();
        Self { len: len as usize, epochs }
    }

    fn findings(&self) -> Vec<TestStatistic> {
        let mut findings = Vec::from(self.differences_of_epochs());
        findings.extend(self.displacements());
        findings.extend(
            strides(self.len as u64).into_iter().flat_map(|stride| self.neighbors(stride as usize)),
        );
        for rules in PART_RULES {
            findings.extend([2, 8].map(|world| self.spread_over_ranks(world, rules)));
            findings.push(self.landings(rules));
        }
        findings
    }

    fn n_epochs(&self) -> f64 {
        self.epochs.len() as f64
    }

    fn differences_of_epochs(&self) -> [TestStatistic; 3] {
        let mut differences = DifferenceCounts::new(self.len, self.len);
        self.epochs.windows(2).for_each(|pair| differences.add(&pair[0], &pair[1]));
        differences.findings("next epoch")
    }

    fn displacements(&self) -> [TestStatistic; 3] {
        let mut differences = DifferenceCounts::new(self.len, self.len);
        let positions = identity(self.len);
        self.epochs.iter().for_each(|epoch| differences.add(&positions, epoch));
        differences.findings("position and sample")
    }

    /// Tests differences (never 0) of samples `stride` positions apart.
    fn neighbors(&self, stride: usize) -> [TestStatistic; 3] {
        let mut differences = DifferenceCounts::new(self.len, self.len - 1);
        self.epochs
            .iter()
            .for_each(|epoch| differences.add(&epoch[..self.len - stride], &epoch[stride..]));
        differences.findings(&format!("stride {stride}"))
    }

    /// Counts the samples of each part of the data set per rank and epoch.
    fn spread_over_ranks(&self, world: usize, rules: PartRules) -> TestStatistic {
        let table = ContingencyTable::new(self.len, world, rules);
        let squares: f64 = self.epochs.chunks(1).map(|epoch| table.squares(epoch)).sum();
        finding(
            format!("{world} ranks, {}", rules.name),
            z_of_squares(squares, self.n_epochs() * table.mean()),
        )
    }

    /// Counts over all epochs which samples appear in each of up to 64 parts of the positions.
    fn landings(&self, rules: PartRules) -> TestStatistic {
        let table = ContingencyTable::new(self.len, self.len.min(64), rules);
        finding(
            format!("landings, {}", rules.name),
            z_of_squares(table.squares(&self.epochs), table.mean()),
        )
    }
}

/// Returns distances of positions at which a network of halves might show: 2^k, √N and N / 2.
fn strides(len: u64) -> Vec<u64> {
    let powers = (0..63).map(|log| 1 << log).take_while(|&stride| stride < len / 2);
    let mut strides: Vec<u64> = powers.chain([len.isqrt(), len.isqrt() + 1, len / 2]).collect();
    strides.sort_unstable();
    strides.dedup();
    strides
}

fn identity(len: usize) -> Vec<u32> {
    (0..len as u32).collect()
}

/// Counts of each difference, modulo the length, between paired samples of many orders.
struct DifferenceCounts {
    len: usize,
    /// Number of possible differences; 0 is impossible between samples of one order.
    n_values: f64,
    n_orders: f64,
    pairs_per_order: f64,
    totals: Vec<u32>,
    /// Number of equal differences, as pairs, within one order.
    n_coincidences: u64,
    most_frequent: u32,
}

impl DifferenceCounts {
    fn new(len: usize, n_values: usize) -> Self {
        let n_values = n_values as f64;
        let totals = vec![0; len];
        Self {
            len,
            n_values,
            n_orders: 0.0,
            pairs_per_order: 0.0,
            totals,
            n_coincidences: 0,
            most_frequent: 0,
        }
    }

    fn add(&mut self, from: &[u32], to: &[u32]) {
        let len = self.len as u32;
        let mut counts = vec![0_u32; self.len];
        for (&a, &b) in from.iter().zip(to) {
            let difference = if b < a { b + len - a } else { b - a };
            self.n_coincidences += u64::from(counts[difference as usize]);
            counts[difference as usize] += 1;
        }
        self.n_orders += 1.0;
        self.pairs_per_order = from.len() as f64;
        self.most_frequent = self.most_frequent.max(counts.iter().copied().max().unwrap_or(0));
        self.totals.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
    }

    fn findings(&self, what: &str) -> [TestStatistic; 3] {
        [
            finding(format!("{what}: coincidences of differences"), self.z_of_coincidences()),
            finding(format!("{what}: differences of all keys"), self.z_of_totals()),
            finding(format!("{what}: most frequent difference"), self.z_of_most_frequent()),
        ]
    }

    /// Computes the z of equal differences within one order.
    ///
    /// One pair has a given difference of v possible ones with probability 1 / v. Two pairs have
    /// equal differences with probability 1 / (v − 1): given the first pair, the first sample of
    /// the second pair is free, and its other sample is one of the remaining samples.
    fn z_of_coincidences(&self) -> f64 {
        let pairs = self.pairs_per_order * (self.pairs_per_order - 1.0) / 2.0;
        z_of_count(self.n_coincidences as f64, self.n_orders * pairs / (self.n_values - 1.0))
    }

    /// Computes the z of the counts over all orders.
    ///
    /// The mean follows from the probability that differences coincide: as above in one order,
    /// 1 / v between two orders.
    fn z_of_totals(&self) -> f64 {
        let expected = self.n_orders * self.pairs_per_order / self.n_values;
        let mut squares = 0.0;
        for &total in &self.totals {
            squares += (f64::from(total) - expected).powi(2) / expected;
        }
        let unused = self.len as f64 - self.n_values;
        z_of_squares(
            squares - unused * expected,
            self.n_values + (self.pairs_per_order - self.n_values) / (self.n_values - 1.0),
        )
    }

    fn z_of_most_frequent(&self) -> f64 {
        let z = z_of_count(f64::from(self.most_frequent), self.pairs_per_order / self.n_values);
        z_of_largest(z, self.n_values * self.n_orders)
    }
}

/// Maps an item of [0, `len`) to one of `n` parts.
type PartRule = fn(item: usize, len: usize, n: usize) -> usize;

fn chunk(item: usize, len: usize, n: usize) -> usize {
    item * n / len
}

fn stripe(item: usize, _: usize, n: usize) -> usize {
    item % n
}

/// Rules that divide positions, and samples, into parts.
#[derive(Clone, Copy)]
struct PartRules {
    name: &'static str,
    positions: PartRule,
    samples: PartRule,
}

const PART_RULES: [PartRules; 4] = [
    PartRules {
        name: "chunks of positions by chunks of samples",
        positions: chunk,
        samples: chunk,
    },
    PartRules {
        name: "chunks of positions by stripes of samples",
        positions: chunk,
        samples: stripe,
    },
    PartRules {
        name: "stripes of positions by chunks of samples",
        positions: stripe,
        samples: chunk,
    },
    PartRules {
        name: "stripes of positions by stripes of samples",
        positions: stripe,
        samples: stripe,
    },
];

/// Contingency table with fixed margins: parts of the positions × parts of the samples, `n` each.
struct ContingencyTable {
    n: usize,
    /// The part of each position, and of each sample.
    parts: [Vec<usize>; 2],
    /// The length of each part, for positions and for samples.
    lens: [Vec<f64>; 2],
}

impl ContingencyTable {
    fn new(len: usize, n: usize, rules: PartRules) -> Self {
        let parts = [rules.positions, rules.samples]
            .map(|part| (0..len).map(|item| part(item, len, n)).collect());
        let lens = parts.each_ref().map(|parts: &Vec<usize>| {
            let mut lens = vec![0.0; n];
            for &part in parts {
                lens[part] += 1.0;
            }
            lens
        });
        Self { n, parts, lens }
    }

    /// Computes Pearson's sum of squares over all `epochs`; each count is a hypergeometric
    /// variable.
    fn squares(&self, epochs: &[Vec<u32>]) -> f64 {
        let mut counts = vec![0_u32; self.n * self.n];
        for epoch in epochs {
            for (&row, &sample) in self.parts[0].iter().zip(epoch) {
                counts[row * self.n + self.parts[1][sample as usize]] += 1;
            }
        }
        let scale = epochs.len() as f64 / self.parts[0].len() as f64;
        let expected = self.lens[0]
            .iter()
            .flat_map(|row| self.lens[1].iter().map(move |column| scale * row * column));
        counts
            .iter()
            .zip(expected)
            .map(|(&count, expected)| (f64::from(count) - expected).powi(2) / expected)
            .sum()
    }

    /// Returns the mean of [`Self::squares`], for any number of epochs.
    ///
    /// Fixed margins change only the mean of the chi-square variable.
    fn mean(&self) -> f64 {
        let n_samples = self.parts[0].len() as f64;
        (self.n as f64 - 1.0).powi(2) * n_samples / (n_samples - 1.0)
    }
}

/// Computes the z of the spread of `numbers` over `n` parts of [0, `len`).
fn z_of_evenness(
    numbers: impl ExactSizeIterator<Item = u64>,
    len: u64,
    n: usize,
    part: fn(u64, u64, u64) -> u64,
) -> f64 {
    let expected = numbers.len() as f64 / n as f64;
    let mut counts = vec![0_u32; n];
    numbers.for_each(|number| counts[part(number, len, n as u64) as usize] += 1);
    let squares =
        counts.iter().map(|&count| (f64::from(count) - expected).powi(2) / expected).sum();
    z_of_squares(squares, n as f64 - 1.0)
}

/// Windows into successive epochs of an order that is too long for a table.
struct OrderWindows {
    len: u64,
    orders: Vec<SampleOrder>,
    starts: Vec<u64>,
}

/// Number of positions in a window.
const WINDOW: u64 = 1024;

impl OrderWindows {
    fn new(family: OrderFamily, len: u64, n_epochs: u64, seed: Seed) -> Self {
        let orders = (0..n_epochs).map(|epoch| family(len, seed.derive(epoch))).collect();
        // Half of the order follows the window, for the strides.
        let starts =
            (0..n_epochs).map(|epoch| seed.derive(!epoch).as_u64() % (len / 2 - WINDOW)).collect();
        Self { len, orders, starts }
    }

    fn findings(&self) -> Vec<TestStatistic> {
        let mut findings = self.test_differences("next epoch", |window, offset| {
            let next = &self.orders[(window + 1) % self.orders.len()];
            (self.sample(window, offset), next(self.starts[window] + offset))
        });
        findings.extend(self.test_differences("position and sample", |window, offset| {
            (self.starts[window] + offset, self.sample(window, offset))
        }));
        for stride in strides(self.len) {
            findings.extend(self.test_differences(
                &format!("stride {stride}"),
                |window, offset| {
                    (self.sample(window, offset), self.sample(window, offset + stride))
                },
            ));
        }
        findings.extend(self.landings());
        findings
    }

    fn sample(&self, window: usize, offset: u64) -> u64 {
        self.orders[window](self.starts[window] + offset)
    }

    fn landings(&self) -> [TestStatistic; 2] {
        let samples: Vec<u64> = self.pairs(|window, offset| self.sample(window, offset)).concat();
        self.evenness("samples", &samples)
    }

    /// Tests the differences between the numbers that `pair` returns for each position.
    ///
    /// In such long orders differences are nearly independent and uniform, so two of them are equal
    /// with probability 1 / N.
    fn test_differences(
        &self,
        what: &str,
        pair: impl Fn(usize, u64) -> (u64, u64),
    ) -> Vec<TestStatistic> {
        let mut windows = self.pairs(|window, offset| {
            let (a, b) = pair(window, offset);
            if b < a { b + (self.len - a) } else { b - a }
        });
        let n_coincidences: f64 =
            windows.iter_mut().map(|differences| n_equal_pairs(differences)).sum();
        let mean = (windows.len() as u64 * WINDOW * (WINDOW - 1) / 2) as f64 / self.len as f64;
        let mut findings =
            Vec::from(self.evenness(&format!("{what}: differences"), &windows.concat()));
        findings.push(finding(
            format!("{what}: coincidences of differences"),
            z_of_count(n_coincidences, mean),
        ));
        findings
    }

    fn pairs(&self, number: impl Fn(usize, u64) -> u64) -> Vec<Vec<u64>> {
        (0..self.orders.len())
            .map(|window| (0..WINDOW).map(|offset| number(window, offset)).collect())
            .collect()
    }

    /// Tests the leading digits of `numbers` by chunks, the trailing digits by stripes.
    fn evenness(&self, what: &str, numbers: &[u64]) -> [TestStatistic; 2] {
        let z = |part: fn(u64, u64, u64) -> u64| {
            z_of_evenness(numbers.iter().copied(), self.len, 256, part)
        };
        [
            finding(
                format!("{what} in chunks"),
                z(|number, len, n| (u128::from(number) * u128::from(n) / u128::from(len)) as u64),
            ),
            finding(format!("{what} in stripes"), z(|number, _, n| number % n)),
        ]
    }
}

/// Counts the equal pairs among `numbers`.
fn n_equal_pairs(numbers: &mut [u64]) -> f64 {
    numbers.sort_unstable();
    numbers.chunk_by(|a, b| a == b).map(|run| (run.len() * (run.len() - 1) / 2) as f64).sum()
}

/// Approximate number of samples in all epochs of one length.
const SAMPLES: u64 = 300_000;

/// Small primes, powers of two and of four and their neighbors, and some other lengths.
const LENS: [u64; 10] = [61, 64, 65, 100, 127, 128, 1009, 4096, 4097, 65_537];

/// Lengths near the limits of each word size, and the longest.
const LONG_LENS: [u64; 9] = [
    1_000_003,
    100_000_000,
    (1 << 30) - 1,
    (1 << 30) + 1,
    (1 << 32) + 1,
    (1 << 40) - 1,
    1 << 40,
    (1 << 40) + 1,
    1 << 63,
];

fn battery(family: OrderFamily, lens: &[u64], seed: u64) -> Vec<TestStatistic> {
    let mut findings = Vec::new();
    for &len in lens {
        let orders = EpochOrders::new(family, len, SAMPLES / len, Seed::new(seed));
        findings.extend(with_len(len, orders.findings()));
    }
    findings
}

fn long_battery(family: OrderFamily, lens: &[u64]) -> Vec<TestStatistic> {
    let mut findings = Vec::new();
    for &len in lens {
        let windows = OrderWindows::new(family, len, 32, Seed::new(7));
        findings.extend(with_len(len, windows.findings()));
    }
    findings
}

/// Adds the length to the name of each statistic.
fn with_len(len: u64, findings: Vec<TestStatistic>) -> impl Iterator<Item = TestStatistic> {
    findings
        .into_iter()
        .map(move |TestStatistic { statistic, z }| finding(format!("length {len}, {statistic}"), z))
}

fn check_passes(findings: &[TestStatistic]) {
    assert!(worst(findings).z.abs() < threshold(findings.len()), "{:?}", worst(findings));
}

/// Checks that the battery detects `family` with most seeds.
fn check_fails(family: OrderFamily, lens: &[u64]) {
    for &len in lens {
        let n_seeds = (0..3).filter(|&seed| is_far_off(&battery(family, &[len], seed))).count();
        assert!(n_seeds >= 2, "{len}: {n_seeds} of 3 seeds");
    }
}

/// Returns true if a statistic is above twice its threshold.
fn is_far_off(findings: &[TestStatistic]) -> bool {
    worst(findings).z.abs() > 2.0 * threshold(findings.len())
}

#[test]
fn exact_shuffle_passes() {
    check_passes(&battery(fisher_yates, &LENS, 1));
}

#[test]
fn streaming_order_passes() {
    check_passes(&battery(streaming, &LENS, 2));
}

#[test]
fn longer_words_pass() {
    check_passes(&battery(streaming_32_bits, &LENS, 2));
    check_passes(&battery(streaming_64_bits, &LENS, 3));
}

#[test]
fn long_streaming_orders_pass() {
    check_passes(&long_battery(streaming, &LONG_LENS));
}

#[test]
fn four_rounds_fail() {
    check_fails(rounds::<4>, &[61, 128, 1009, 4096]);
}

#[test]
fn six_rounds_fail() {
    check_fails(rounds::<6>, &[127, 128]);
}

#[test]
fn affine_order_fails() {
    check_fails(affine, &[61, 128, 1009, 10_007]);
    let findings = long_battery(affine, &[1 << 40]);
    assert!(is_far_off(&findings), "{:?}", worst(&findings));
}

#[test]
fn four_samples_take_every_order() {
    for len in 1..=4 {
        let (n_orders, n_seeds) = ((1..=len).product::<u64>(), 24_000);
        let mut counts = BTreeMap::new();
        for seed in 0..n_seeds {
            let order = streaming(len, Seed::new(seed));
            *counts.entry((0..len).map(order).collect::<Vec<_>>()).or_insert(0.0) += 1.0;
        }
        assert_eq!(counts.len() as u64, n_orders);
        let expected = n_seeds as f64 / n_orders as f64;
        let squares: f64 =
            counts.values().map(|count: &f64| (count - expected).powi(2) / expected).sum();
        assert!(
            len == 1 || z_of_squares(squares, n_orders as f64 - 1.0) < threshold(3),
            "{counts:?}"
        );
    }
}
