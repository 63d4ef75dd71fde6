//! Cross-entropy of rows of logits, with its gradient.
//!
//! Kept for the backward pass is one number per row, the logarithm of its sum of exponentials; the
//! probabilities are computed again.

use pulp::NullaryFnOnce;

use super::{
    float::Float,
    lanes::{max, sum1, sum2},
    memory::{Fill, vec_of_blocks},
    parallel::{block_of, rows_per_block},
    vectorized,
};

/// What a row should have been.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) class: usize,
    /// What the row's loss is multiplied by; a row of weight 0 is not read.
    pub(crate) weight: f64,
}

/// What all rows have in common.
#[derive(Clone, Debug)]
pub(crate) struct Rule<T> {
    pub(crate) classes: usize,
    /// The part of a target that is spread over all classes.
    pub(crate) smoothing: f64,
    /// The weights of the classes.
    pub(crate) class_weights: Option<Vec<T>>,
}

impl<T: Float> Rule<T> {
    fn weight_of(&self, class: usize) -> f64 {
        self.class_weights.as_ref().map_or(1.0, |weights| weights[class].to_f64())
    }

    fn weight_of_all(&self) -> f64 {
        match &self.class_weights {
            None => self.classes as f64,
            Some(weights) => weights.iter().map(|weight| weight.to_f64()).sum(),
        }
    }

    fn block(&self) -> usize {
        rows_per_block(self.classes)
    }
}

/// The sum of the rows' losses, and for each row the logarithm of its sum of exponentials.
pub(crate) fn forward<T: Float>(x: &[T], targets: &[Target], rule: &Rule<T>) -> (f64, Vec<T>) {
    let rows = rule.block();
    let (log_sums, losses) = vec_of_blocks(targets.len(), rows, |block, out| {
        let x = block_of(x, block, rows * rule.classes);
        let targets = block_of(targets, block, rows);
        vectorized(Forward { x, targets, rule, out })
    });
    (losses.into_iter().sum(), log_sums)
}

struct Forward<'a, 'b, T> {
    x: &'a [T],
    targets: &'a [Target],
    rule: &'a Rule<T>,
    out: &'a mut Fill<'b, T>,
}

impl<T: Float> NullaryFnOnce for Forward<'_, '_, T> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let mut sum = 0.0;
        let rows = self.x.chunks_exact(self.rule.classes).zip(self.targets);
        for (x, &Target { class, weight }) in rows {
            if weight == 0.0 {
                self.out.push1(&[T::ZERO], |zero| zero);
                continue;
            }
            let top = max(x);
            let log_sum = top + sum1(x, |x| (x - top).exp()).ln();
            self.out.push1(&[log_sum], |log_sum| log_sum);
            sum += weight * loss(x, class, log_sum.to_f64(), self.rule);
        }
        sum
    }
}

/// The loss of a row.
#[inline(always)]
fn loss<T: Float>(x: &[T], class: usize, log_sum: f64, rule: &Rule<T>) -> f64 {
    let own = rule.weight_of(class) * (log_sum - x[class].to_f64());
    if rule.smoothing == 0.0 {
        return own;
    }
    let logits = match &rule.class_weights {
        None => sum1(x, |x| x),
        Some(weights) => sum2(x, weights, |x, weight| x * weight),
    };
    let all = rule.weight_of_all() * log_sum - logits.to_f64();
    (1.0 - rule.smoothing) * own + rule.smoothing / rule.classes as f64 * all
}

/// The gradient of the logits, where `grad` is that of the sum.
pub(crate) fn backward<T: Float>(
    x: &[T],
    targets: &[Target],
    log_sums: &[T],
    rule: &Rule<T>,
    grad: f64,
) -> Vec<T> {
    let rows = rule.block();
    let weight_of_all = rule.weight_of_all();
    let block_len = rows * rule.classes;
    let write = |block, out: &mut Fill<'_, T>| {
        let x = block_of(x, block, block_len);
        let targets = block_of(targets, block, rows);
        let log_sums = block_of(log_sums, block, rows);
        vectorized(Backward { x, targets, log_sums, rule, weight_of_all, grad, out });
    };
    vec_of_blocks(x.len(), block_len, write).0
}

struct Backward<'a, 'b, T> {
    x: &'a [T],
    targets: &'a [Target],
    log_sums: &'a [T],
    rule: &'a Rule<T>,
    weight_of_all: f64,
    grad: f64,
    out: &'a mut Fill<'b, T>,
}

impl<T: Float> NullaryFnOnce for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { rule, grad, weight_of_all, .. } = self;
        let rows = self.x.chunks_exact(rule.classes).zip(self.targets).zip(self.log_sums);
        for ((x, &Target { class, weight }), &log_sum) in rows {
            let weight = weight * grad;
            if weight == 0.0 {
                self.out.push1(x, |_| T::ZERO);
                continue;
            }
            let own = weight * (1.0 - rule.smoothing) * rule.weight_of(class);
            let share = weight * rule.smoothing / rule.classes as f64;
            let all = T::of(own + share * weight_of_all);
            let each = T::of(share);
            let probability = |x: T| (x - log_sum).exp();
            let row = match &rule.class_weights {
                None => self.out.push1(x, |x| all * probability(x) - each),
                Some(weights) => {
                    self.out.push2(x, weights, |x, weight| all * probability(x) - each * weight)
                }
            };
            row[class] -= T::of(own);
        }
    }
}
