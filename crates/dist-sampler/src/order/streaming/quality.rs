//! How good the streaming order is. For every length it is a permutation, can be undone, and is the
//! same one by one and in bulk. And a battery of statistics can't tell it from the exact shuffle,
//! while it tells apart networks of fewer rounds and an affine order.
//!
//! # Thresholds
//!
//! Every statistic is given as a z that the exact shuffle takes with probability
//!
//! P(|z| ≥ t) ≤ 2 exp(−t² / 2).
//!
//! For a count of rare events (Poisson) and for a sum of squares (chi-square) that is Chernoff's
//! bound, if z is the signed root of the deviance: [`z_of_count`], [`z_of_squares`]. Correlations,
//! standardized by their exact moments, are taken as normal. So all n statistics of a battery stay
//! below √(2 ln(2n / α)) together, whatever their dependence, except with probability α
//! (Bonferroni's inequality): [`threshold`]. Seeds are fixed, hence so is the outcome.
//!
//! # How many rounds
//!
//! Two positions with the same lower half, and δ between their upper ones, keep that difference for
//! two rounds if the hashes of the upper halves agree, about once in √N times; so they keep it for
//! r rounds with probability N^(−r/4). A random permutation gives them the difference δ with
//! probability 1 / N. After r rounds it is therefore too frequent by a share of N^(1−r/4): all of
//! it after 4 rounds, 1 / √N after 6, 1 / N after 8. An epoch shows some √N / 2 such pairs. So it
//! takes 50·√N epochs to see the share at 5 standard deviations after 6 rounds, and 50·N^1.5 after
//! 8. Counting just these pairs in 20,000 epochs of 2^14 samples gave z = 9.4 with 6 rounds and 0.0
//! with 8; the battery sees 6 rounds at N = 128 in 2,343: [`six_rounds_are_too_few`].
//!
//! Below some 60 samples no number of rounds is enough: a network is an even permutation if the
//! upper half takes an odd number of values, and the lower one more than two. In a longer order
//! that can be told only from all of its samples.
#![expect(clippy::cast_possible_truncation, reason = "tables of orders are short")]

use std::{collections::BTreeMap, fmt};

use core_types::Seed;

use super::{Network, Streaming};
use crate::order::{exact, table};

/// α: how often a battery raises a false alarm when constants or seeds change.
const ALARM: f64 = 1e-3;

/// The sample at each position.
type Order = Box<dyn Fn(u64) -> u64>;

/// The orders of [0, length) under every seed.
type Family = fn(u64, Seed) -> Order;

fn streaming(len: u64, seed: Seed) -> Order {
    let streaming = Streaming::new(len, seed);
    Box::new(move |position| streaming.get(position))
}

/// The networks for long orders, at any length.
fn of_32_bits(len: u64, seed: Seed) -> Order {
    let streaming = Streaming::Bits32(Network::new(len, seed));
    Box::new(move |position| streaming.get(position))
}

fn of_64_bits(len: u64, seed: Seed) -> Order {
    let streaming = Streaming::Bits64(Network::new(len, seed));
    Box::new(move |position| streaming.get(position))
}

fn rounds<const N: usize>(len: u64, seed: Seed) -> Order {
    let network = Network::<u16, N>::new(len, seed);
    Box::new(move |position| network.get(position))
}

fn fisher_yates(len: u64, seed: Seed) -> Order {
    let mut table = table::allocate(len).unwrap();
    exact::shuffle(&mut table, len, seed);
    Box::new(move |position| u64::from(table[position as usize]))
}

/// x → a·x + b modulo the length, the usual shortcut.
fn affine(len: u64, seed: Seed) -> Order {
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

/// A statistic, and how far it is from where the exact shuffle has it.
struct Finding {
    statistic: String,
    z: f64,
}

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: z = {:.1}", self.statistic, self.z)
    }
}

fn finding(statistic: impl Into<String>, z: f64) -> Finding {
    Finding { statistic: statistic.into(), z }
}

fn threshold(n_statistics: usize) -> f64 {
    (2.0 * (2.0 * n_statistics as f64 / ALARM).ln()).sqrt()
}

fn worst(findings: &[Finding]) -> &Finding {
    findings.iter().max_by(|a, b| a.z.abs().total_cmp(&b.z.abs())).unwrap()
}

/// The z of a Poisson variable.
fn z_of_count(count: f64, mean: f64) -> f64 {
    let log_ratio = if count == 0.0 { 0.0 } else { (count / mean).ln() };
    signed_root(count - mean, 2.0 * (count * log_ratio - count + mean))
}

/// The z of a chi-square variable, whose mean is its degrees of freedom.
fn z_of_squares(squares: f64, mean: f64) -> f64 {
    signed_root(squares - mean, squares - mean - mean * (squares / mean).ln())
}

/// The z of the largest of `n` variables whose own is `z`, by their union bound.
fn z_of_largest(z: f64, n: f64) -> f64 {
    (z * z - 2.0 * n.ln()).max(0.0).sqrt()
}

fn signed_root(sign: f64, deviance: f64) -> f64 {
    deviance.max(0.0).sqrt().copysign(sign)
}

/// From this many on, the rarest number of fixed points is expected 5 times.
const MANY_EPOCHS: usize = 264;

/// The orders of successive epochs, in full.
struct Run {
    len: usize,
    epochs: Vec<Vec<u32>>,
}

impl Run {
    fn new(family: Family, len: u64, n_epochs: u64, seed: Seed) -> Self {
        let orders = (0..n_epochs).map(|epoch| family(len, seed.derive(epoch)));
        let epochs =
            orders.map(|order| (0..len).map(|position| order(position) as u32).collect()).collect();
        Self { len: len as usize, epochs }
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings = vec![self.fixed_points(), self.cycles(), self.first_cycle()];
        if self.epochs.len() >= MANY_EPOCHS {
            findings.push(self.distribution_of_fixed_points());
        }
        findings.extend([
            self.matches_of_epochs(),
            self.correlation_of_epochs(),
            self.correlation_with_positions(),
        ]);
        findings.extend(self.differences_of_epochs());
        findings.extend(self.displacements());
        findings.extend(
            strides(self.len as u64).into_iter().flat_map(|stride| self.neighbors(stride as usize)),
        );
        for cut in CUTS {
            findings.extend([2, 8].map(|world| self.spread_of_ranks(world, cut)));
            findings.push(self.landings(cut));
        }
        findings
    }

    fn n_epochs(&self) -> f64 {
        self.epochs.len() as f64
    }

    /// The sum of one standardized variable for each of `n` independent orders.
    fn z_of_sum(terms: impl ExactSizeIterator<Item = f64>) -> f64 {
        let n = terms.len() as f64;
        terms.sum::<f64>() / n.sqrt()
    }

    /// A random permutation has Poisson(1) fixed points, but for a part in N!.
    fn fixed_points(&self) -> Finding {
        let positions = identity(self.len);
        let n: usize = self.epochs.iter().map(|epoch| matches(epoch, &positions)).sum();
        finding("fixed points", z_of_count(n as f64, self.n_epochs()))
    }

    /// How many orders have 0, 1, 2, 3 or more fixed points: the last are the fewest, 1.9 %.
    fn distribution_of_fixed_points(&self) -> Finding {
        let (positions, mut counts) = (identity(self.len), [0.0; 5]);
        self.epochs.iter().for_each(|epoch| counts[matches(epoch, &positions).min(4)] += 1.0);
        let few = [1.0, 1.0, 1.0 / 2.0, 1.0 / 6.0].map(|weight| weight / std::f64::consts::E);
        let chances = few.into_iter().chain([1.0 - few.iter().sum::<f64>()]);
        let expected = chances.map(|chance| chance * self.n_epochs());
        let squares = counts
            .iter()
            .zip(expected)
            .map(|(count, expected)| (count - expected).powi(2) / expected)
            .sum();
        finding("distribution of fixed points", z_of_squares(squares, 4.0))
    }

    /// The i-th choice of a next element closes a cycle with probability 1 / (N + 1 − i),
    /// independently of the others, and Chernoff's bound for Poisson variables holds for sums of
    /// independent events.
    fn cycles(&self) -> Finding {
        let mean: f64 = (1..=self.len).map(|left| 1.0 / left as f64).sum();
        let n: usize = self.epochs.iter().map(|epoch| n_cycles(epoch)).sum();
        finding("cycles", z_of_count(n as f64, self.n_epochs() * mean))
    }

    /// The cycle of 0 has every length from 1 to N with the same probability, and the tails of such
    /// a variable are below those of a normal one of the same variance.
    fn first_cycle(&self) -> Finding {
        let n = self.len as f64;
        let deviation = ((n * n - 1.0) / 12.0).sqrt();
        let lens = self.epochs.iter().map(|epoch| cycle_len(epoch, 0) as f64);
        finding(
            "length of the cycle of 0",
            Self::z_of_sum(lens.map(|len| (len - 0.5 - n / 2.0) / deviation)),
        )
    }

    /// Two independent orders match in as many positions as their quotient has fixed points.
    fn matches_of_epochs(&self) -> Finding {
        let n: usize = self.epochs.windows(2).map(|pair| matches(&pair[0], &pair[1])).sum();
        finding("matches with the next epoch", z_of_count(n as f64, self.n_epochs() - 1.0))
    }

    fn correlation_of_epochs(&self) -> Finding {
        let pairs = self.epochs.windows(2);
        finding(
            "rank correlation with the next epoch",
            Self::z_of_sum(pairs.map(|pair| z_of_ranks(&pair[0], &pair[1]))),
        )
    }

    fn correlation_with_positions(&self) -> Finding {
        let positions = identity(self.len);
        let correlations = self.epochs.iter().map(|epoch| z_of_ranks(epoch, &positions));
        finding("rank correlation with positions", Self::z_of_sum(correlations))
    }

    fn differences_of_epochs(&self) -> [Finding; 3] {
        let mut differences = Differences::new(self.len, self.len);
        self.epochs.windows(2).for_each(|pair| differences.add(&pair[0], &pair[1]));
        differences.findings("next epoch")
    }

    fn displacements(&self) -> [Finding; 3] {
        let mut differences = Differences::new(self.len, self.len);
        let positions = identity(self.len);
        self.epochs.iter().for_each(|epoch| differences.add(&positions, epoch));
        differences.findings("position and sample")
    }

    /// The differences of samples `stride` positions apart, never 0, and their correlation.
    fn neighbors(&self, stride: usize) -> Vec<Finding> {
        let mut differences = Differences::new(self.len, self.len - 1);
        self.epochs
            .iter()
            .for_each(|epoch| differences.add(&epoch[..self.len - stride], &epoch[stride..]));
        let mut findings = Vec::from(differences.findings(&format!("stride {stride}")));
        // At half the length each pair would count twice.
        if 2 * stride != self.len {
            let correlations =
                self.epochs.iter().map(|epoch| z_of_serial_correlation(epoch, stride));
            findings.push(finding(
                format!("stride {stride}: serial correlation"),
                Self::z_of_sum(correlations),
            ));
        }
        findings
    }

    /// How many samples of each part of the data set each of `world` ranks reads, epoch by epoch.
    fn spread_of_ranks(&self, world: usize, cut: Cut) -> Finding {
        let table = Table::new(self.len, world, cut);
        let squares: f64 = self.epochs.chunks(1).map(|epoch| table.squares(epoch)).sum();
        finding(
            format!("{world} ranks, {}", cut.name),
            z_of_squares(squares, self.n_epochs() * table.mean()),
        )
    }

    /// Where the samples of up to 64 parts of the positions land, over all epochs.
    fn landings(&self, cut: Cut) -> Finding {
        let table = Table::new(self.len, self.len.min(64), cut);
        finding(
            format!("landings, {}", cut.name),
            z_of_squares(table.squares(&self.epochs), table.mean()),
        )
    }
}

/// Distances of positions at which a network of halves might show: 2^k, √N and N / 2.
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

fn matches(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).filter(|(a, b)| a == b).count()
}

fn n_cycles(order: &[u32]) -> usize {
    let mut is_seen = vec![false; order.len()];
    let mut n = 0;
    for start in 0..order.len() {
        n += usize::from(!is_seen[start]);
        let mut at = start;
        while !is_seen[at] {
            is_seen[at] = true;
            at = order[at] as usize;
        }
    }
    n
}

fn cycle_len(order: &[u32], start: u32) -> usize {
    1 + std::iter::successors(Some(order[start as usize]), |&at| Some(order[at as usize]))
        .take_while(|&at| at != start)
        .count()
}

/// Spearman's correlation of two orders has mean 0 and variance 1 / (N − 1).
fn z_of_ranks(one: &[u32], other: &[u32]) -> f64 {
    let n = one.len() as f64;
    let center = (n - 1.0) / 2.0;
    let products =
        one.iter().zip(other).map(|(&a, &b)| (f64::from(a) - center) * (f64::from(b) - center));
    products.sum::<f64>() / (n * (n * n - 1.0) / 12.0) * (n - 1.0).sqrt()
}

/// The circular correlation of an order with itself, `stride` on, by its exact moments (Wald and
/// Wolfowitz, "An Exact Test for Randomness in the Non-Parametric Case Based on Serial
/// Correlation", 1943).
fn z_of_serial_correlation(order: &[u32], stride: usize) -> f64 {
    let n = order.len() as f64;
    let center = (n - 1.0) / 2.0;
    let squares = n * (n * n - 1.0) / 12.0;
    let fourths = squares * (3.0 * n * n - 7.0) / 20.0;
    let mean = -squares / (n - 1.0);
    let overlapping = (squares * squares - fourths) / (n - 1.0);
    let disjoint = (squares * squares - 2.0 * fourths) / ((n - 1.0) * (n - 2.0));
    let ahead = order[stride..].iter().chain(&order[..stride]);
    let products =
        order.iter().zip(ahead).map(|(&a, &b)| (f64::from(a) - center) * (f64::from(b) - center));
    (products.sum::<f64>() - mean) / (overlapping + disjoint - mean * mean).sqrt()
}

/// How often each difference modulo the length occurs among pairs of samples, within each of many
/// orders.
struct Differences {
    len: usize,
    /// How many differences there can be: without 0 for samples of one order.
    n_values: f64,
    n_orders: f64,
    pairs_per_order: f64,
    totals: Vec<u32>,
    /// Pairs of pairs in one order that have the same difference.
    n_coincidences: u64,
    most_frequent: u32,
}

impl Differences {
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

    fn findings(&self, what: &str) -> [Finding; 3] {
        [
            finding(format!("{what}: coincidences of differences"), self.z_of_coincidences()),
            finding(format!("{what}: differences of all keys"), self.z_of_totals()),
            finding(format!("{what}: most frequent difference"), self.z_of_most_frequent()),
        ]
    }

    /// One pair has a given difference of v with probability 1 / v, two pairs have the same with 1
    /// / (v − 1): given the first, the first sample of the second is free, and its other is one of
    /// those that are left.
    fn z_of_coincidences(&self) -> f64 {
        let pairs = self.pairs_per_order * (self.pairs_per_order - 1.0) / 2.0;
        z_of_count(self.n_coincidences as f64, self.n_orders * pairs / (self.n_values - 1.0))
    }

    /// Differences of one order coincide as above, of two orders with probability 1 / v: that makes
    /// the mean.
    fn z_of_totals(&self) -> f64 {
        let expected = self.n_orders * self.pairs_per_order / self.n_values;
        let square = |&total: &u32| (f64::from(total) - expected).powi(2) / expected;
        let unused = self.len as f64 - self.n_values;
        let squares = self.totals.iter().map(square).sum::<f64>() - unused * expected;
        z_of_squares(
            squares,
            self.n_values + (self.pairs_per_order - self.n_values) / (self.n_values - 1.0),
        )
    }

    fn z_of_most_frequent(&self) -> f64 {
        let z = z_of_count(f64::from(self.most_frequent), self.pairs_per_order / self.n_values);
        z_of_largest(z, self.n_values * self.n_orders)
    }
}

/// Which of `n` parts of [0, `len`) an item belongs to.
type Part = fn(item: usize, len: usize, n: usize) -> usize;

fn chunk(item: usize, len: usize, n: usize) -> usize {
    item * n / len
}

fn stripe(item: usize, _: usize, n: usize) -> usize {
    item % n
}

/// A way to cut positions, and samples, into parts.
#[derive(Clone, Copy)]
struct Cut {
    name: &'static str,
    positions: Part,
    samples: Part,
}

const CUTS: [Cut; 4] = [
    Cut { name: "chunks of positions by chunks of samples", positions: chunk, samples: chunk },
    Cut { name: "chunks of positions by stripes of samples", positions: chunk, samples: stripe },
    Cut { name: "stripes of positions by chunks of samples", positions: stripe, samples: chunk },
    Cut { name: "stripes of positions by stripes of samples", positions: stripe, samples: stripe },
];

/// How many samples of each of `n` parts stand at each of `n` parts of the positions: a table with
/// fixed margins.
struct Table {
    n: usize,
    /// The part of each position, and the part of each sample.
    parts: [Vec<usize>; 2],
    /// How long each of those parts is.
    lens: [Vec<f64>; 2],
}

impl Table {
    fn new(len: usize, n: usize, cut: Cut) -> Self {
        let parts = [cut.positions, cut.samples]
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

    /// Pearson's sum of squares of the counts over all `epochs`, each a hypergeometric variable.
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

    /// The mean of that sum under fixed margins, of one epoch as of many; otherwise it is
    /// chi-square.
    fn mean(&self) -> f64 {
        let n_samples = self.parts[0].len() as f64;
        (self.n as f64 - 1.0).powi(2) * n_samples / (n_samples - 1.0)
    }
}

/// The z of how evenly numbers spread over [0, `len`), by `n` parts.
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

/// Windows of successive epochs of an order too long to be written down.
struct Windows {
    len: u64,
    orders: Vec<Order>,
    starts: Vec<u64>,
}

/// Positions in a window.
const WINDOW: u64 = 1024;

impl Windows {
    fn new(family: Family, len: u64, n_epochs: u64, seed: Seed) -> Self {
        let orders = (0..n_epochs).map(|epoch| family(len, seed.derive(epoch))).collect();
        // Half of the order is left behind the window for the strides.
        let starts =
            (0..n_epochs).map(|epoch| seed.derive(!epoch).as_u64() % (len / 2 - WINDOW)).collect();
        Self { len, orders, starts }
    }

    fn findings(&self) -> Vec<Finding> {
        let mut findings = self.differences_of("next epoch", |window, offset| {
            let next = &self.orders[(window + 1) % self.orders.len()];
            (self.sample(window, offset), next(self.starts[window] + offset))
        });
        findings.extend(self.differences_of("position and sample", |window, offset| {
            (self.starts[window] + offset, self.sample(window, offset))
        }));
        for stride in strides(self.len) {
            findings.extend(self.differences_of(&format!("stride {stride}"), |window, offset| {
                (self.sample(window, offset), self.sample(window, offset + stride))
            }));
        }
        findings.extend(self.landings());
        findings
    }

    fn sample(&self, window: usize, offset: u64) -> u64 {
        self.orders[window](self.starts[window] + offset)
    }

    fn landings(&self) -> [Finding; 2] {
        let samples: Vec<u64> = self.pairs(|window, offset| self.sample(window, offset)).concat();
        self.evenness("samples", &samples)
    }

    /// Differences are as good as independent and even here, so that pairs of them coincide once in
    /// N times.
    fn differences_of(&self, what: &str, pair: impl Fn(usize, u64) -> (u64, u64)) -> Vec<Finding> {
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

    /// By their leading and by their trailing digits.
    fn evenness(&self, what: &str, numbers: &[u64]) -> [Finding; 2] {
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

/// How many pairs of `numbers` are equal.
fn n_equal_pairs(numbers: &mut [u64]) -> f64 {
    numbers.sort_unstable();
    numbers.chunk_by(|a, b| a == b).map(|run| (run.len() * (run.len() - 1) / 2) as f64).sum()
}

/// About so many samples in all epochs of a run.
const SAMPLES: u64 = 300_000;

/// Small primes, powers of two and of four and their neighbors, and some without a pattern.
const LENS: [u64; 17] =
    [61, 63, 64, 65, 100, 127, 128, 129, 257, 1000, 1009, 4095, 4096, 4097, 10_007, 16_385, 65_537];

/// A few beside the changes between the sizes of words, and the longest.
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

fn battery(family: Family, lens: &[u64], seed: u64) -> Vec<Finding> {
    let run = |len| Run::new(family, len, SAMPLES / len, Seed::new(seed));
    lens.iter().flat_map(|&len| of_len(len, run(len).findings())).collect()
}

fn long_battery(family: Family, lens: &[u64]) -> Vec<Finding> {
    let windows = |len| Windows::new(family, len, 32, Seed::new(7));
    lens.iter().flat_map(|&len| of_len(len, windows(len).findings())).collect()
}

fn of_len(len: u64, findings: Vec<Finding>) -> impl Iterator<Item = Finding> {
    findings
        .into_iter()
        .map(move |Finding { statistic, z }| finding(format!("length {len}, {statistic}"), z))
}

fn check_passes(findings: &[Finding]) {
    assert!(worst(findings).z.abs() < threshold(findings.len()), "{:?}", worst(findings));
}

/// Most seeds give `family` away.
fn check_fails(family: Family, lens: &[u64]) {
    for &len in lens {
        let n_seeds = (0..5).filter(|&seed| is_far_off(&battery(family, &[len], seed))).count();
        assert!(n_seeds >= 3, "{len}: {n_seeds} of 5 seeds");
    }
}

/// One statistic is at twice its threshold.
fn is_far_off(findings: &[Finding]) -> bool {
    worst(findings).z.abs() > 2.0 * threshold(findings.len())
}

#[test]
fn the_exact_shuffle_passes() {
    check_passes(&battery(fisher_yates, &LENS, 1));
}

#[test]
fn the_streaming_order_passes() {
    check_passes(&battery(streaming, &LENS, 2));
}

#[test]
fn the_streaming_order_of_longer_words_passes() {
    check_passes(&battery(of_32_bits, &LENS, 2));
    check_passes(&battery(of_64_bits, &LENS, 3));
}

#[test]
fn long_streaming_orders_pass() {
    check_passes(&long_battery(streaming, &LONG_LENS));
}

#[test]
fn four_rounds_are_too_few() {
    check_fails(rounds::<4>, &[61, 128, 1009, 4096]);
}

#[test]
fn six_rounds_are_too_few() {
    check_fails(rounds::<6>, &[127, 128]);
}

#[test]
fn an_affine_order_fails() {
    check_fails(affine, &[61, 128, 1009, 10_007]);
    let findings = long_battery(affine, &[1 << 40]);
    assert!(is_far_off(&findings), "{:?}", worst(&findings));
}

#[test]
fn up_to_four_samples_come_in_every_order() {
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
