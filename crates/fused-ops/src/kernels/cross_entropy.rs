//! Cross-entropy of rows of logits, with its gradient.
//!
//! For the backward pass, one number per row is stored, the logarithm of its sum of exponentials.
//! The backward pass recomputes the probabilities.

use pulp::NullaryFnOnce;

use super::{
    exponential::exp_in_place,
    float::Float,
    lanes::{max, sum1, sum2},
    memory::{FillBlock, vec_of_blocks},
    parallel::{ELEMENTS_PER_BLOCK, block_of, map_chunks, rows_per_block},
    softcap::{capped, slope_of_cap},
    vectorized,
};

/// The target of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTarget {
    pub(crate) class: usize,
    /// The weight of the row's loss; a row of weight 0 is not read.
    pub(crate) weight: f64,
}

/// The parameters that all rows share.
#[derive(Clone, Debug)]
pub(crate) struct LossRule<T> {
    pub(crate) classes: usize,
    /// The part of a target that is spread over all classes.
    pub(crate) smoothing: f64,
    /// The weights of the classes.
    pub(crate) class_weights: Option<Vec<T>>,
    /// The function of the logits before the loss; `None` if it changes nothing.
    pub(crate) map: Option<LogitMap<T>>,
}

/// A function of logits: softcap(scale · logit).
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitMap<T> {
    pub(crate) scale: Option<T>,
    pub(crate) softcap: Option<T>,
}

impl LogitMap<f64> {
    /// Returns the function in type `T`, or `None` if it changes nothing.
    pub(crate) fn round<T: Float>(self) -> Option<LogitMap<T>> {
        let Self { scale, softcap } = self;
        let [scale, softcap] = [scale, softcap].map(|number| number.map(T::round_from_f64));
        (scale.is_some() || softcap.is_some()).then_some(LogitMap { scale, softcap })
    }
}

impl<T: Float> LogitMap<T> {
    /// Replaces each logit by its value.
    pub(crate) fn apply(self, logits: &mut [T]) {
        map_chunks(logits, ELEMENTS_PER_BLOCK, |_, logits| {
            vectorized(MapLogits { map: self, logits });
        });
    }

    /// Returns the slope at a logit with this value.
    #[inline(always)]
    fn slope(self, value: T) -> T {
        let slope = self.softcap.map_or(T::ONE, |cap| slope_of_cap(value, cap));
        self.scale.map_or(slope, |scale| slope * scale)
    }
}

struct MapLogits<'a, T> {
    map: LogitMap<T>,
    logits: &'a mut [T],
}

impl<T: Float> NullaryFnOnce for MapLogits<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let LogitMap { scale, softcap } = self.map;
        if let Some(scale) = scale {
            self.logits.iter_mut().for_each(|logit| *logit *= scale);
        }
        if let Some(cap) = softcap {
            self.logits.iter_mut().for_each(|logit| *logit = capped(*logit, cap));
        }
    }
}

impl<T: Float> LossRule<T> {
    fn class_weight(&self, class: usize) -> f64 {
        self.class_weights.as_ref().map_or(1.0, |weights| weights[class].to_f64())
    }

    fn total_class_weight(&self) -> f64 {
        match &self.class_weights {
            None => self.classes as f64,
            Some(weights) => weights.iter().map(|weight| weight.to_f64()).sum(),
        }
    }

    fn rows_per_block(&self) -> usize {
        rows_per_block(self.classes)
    }

    /// Returns the values of logits, or `None` if they are the logits.
    pub(crate) fn map_logits(&self, logits: &[T]) -> Option<Vec<T>> {
        let map = self.map?;
        let mut values = logits.to_vec();
        map.apply(&mut values);
        Some(values)
    }
}

/// Returns the sum of the losses of rows of logits, after their [`LogitMap`], and the logarithm of each
/// row's sum of exponentials.
pub(crate) fn forward<T: Float>(
    x: &[T],
    targets: &[RowTarget],
    rule: &LossRule<T>,
) -> (f64, Vec<T>) {
    let rows = rule.rows_per_block();
    let (log_sums, losses) = vec_of_blocks(targets.len(), rows, |block, out| {
        let x = block_of(x, block, rows * rule.classes);
        let targets = block_of(targets, block, rows);
        vectorized(ForwardKernel { x, targets, rule, out })
    });
    (losses.into_iter().sum(), log_sums)
}

struct ForwardKernel<'a, 'b, T> {
    x: &'a [T],
    targets: &'a [RowTarget],
    rule: &'a LossRule<T>,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for ForwardKernel<'_, '_, T> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let mut sum = 0.0;
        let rows = self.x.chunks_exact(self.rule.classes).zip(self.targets);
        for (x, &RowTarget { class, weight }) in rows {
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

/// Returns the loss of a row.
#[inline(always)]
fn loss<T: Float>(x: &[T], class: usize, log_sum: f64, rule: &LossRule<T>) -> f64 {
    let own = rule.class_weight(class) * (log_sum - x[class].to_f64());
    if rule.smoothing == 0.0 {
        return own;
    }
    let logits = match &rule.class_weights {
        None => sum1(x, |x| x),
        Some(weights) => sum2(x, weights, |x, weight| x * weight),
    };
    let all = rule.total_class_weight() * log_sum - logits.to_f64();
    (1.0 - rule.smoothing) * own + rule.smoothing / rule.classes as f64 * all
}

/// Returns the gradient of the logits before their map, where `x` are their values, and `grad` is the
/// gradient of the sum.
pub(crate) fn backward<T: Float>(
    x: &[T],
    targets: &[RowTarget],
    log_sums: &[T],
    rule: &LossRule<T>,
    grad: f64,
) -> Vec<T> {
    let rows = rule.rows_per_block();
    let total_class_weight = rule.total_class_weight();
    let block_len = rows * rule.classes;
    let (grads, _) = vec_of_blocks(x.len(), block_len, |block, out: &mut FillBlock<'_, T>| {
        let x = block_of(x, block, block_len);
        let targets = block_of(targets, block, rows);
        let log_sums = block_of(log_sums, block, rows);
        vectorized(BackwardKernel { x, targets, log_sums, rule, total_class_weight, grad, out });
    });
    grads
}

/// The coefficients of a row's gradient: factors of the probabilities and of the class weights, and
/// what the target's own class subtracts.
struct RowFactors<T> {
    all: T,
    each: T,
    own: T,
}

impl<T: Float> RowFactors<T> {
    #[inline(always)]
    fn new(rule: &LossRule<T>, total_class_weight: f64, class: usize, weight: f64) -> Self {
        let own = weight * (1.0 - rule.smoothing) * rule.class_weight(class);
        let share = weight * rule.smoothing / rule.classes as f64;
        let all = T::round_from_f64(own + share * total_class_weight);
        Self { all, each: T::round_from_f64(share), own: T::round_from_f64(own) }
    }

    /// Replaces the logarithms of a row's probabilities by the gradients of its logits.
    #[inline(always)]
    fn replace(self, row: &mut [T], rule: &LossRule<T>, class: usize) {
        let Self { all, each, own } = self;
        exp_in_place(row);
        match &rule.class_weights {
            None => row.iter_mut().for_each(|x| *x = all * *x - each),
            Some(weights) => {
                for (x, &weight) in row.iter_mut().zip(weights) {
                    *x = all * *x - each * weight;
                }
            }
        }
        row[class] -= own;
    }
}

struct BackwardKernel<'a, 'b, T> {
    x: &'a [T],
    targets: &'a [RowTarget],
    log_sums: &'a [T],
    rule: &'a LossRule<T>,
    total_class_weight: f64,
    grad: f64,
    out: &'a mut FillBlock<'b, T>,
}

impl<T: Float> NullaryFnOnce for BackwardKernel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { rule, grad, total_class_weight, .. } = self;
        let rows = self.x.chunks_exact(rule.classes).zip(self.targets).zip(self.log_sums);
        for ((x, &RowTarget { class, weight }), &log_sum) in rows {
            let weight = weight * grad;
            if weight == 0.0 {
                self.out.push1(x, |_| T::ZERO);
                continue;
            }
            let factors = RowFactors::new(rule, total_class_weight, class, weight);
            let row = self.out.push1(x, |x| x - log_sum);
            factors.replace(row, rule, class);
            if let Some(map) = rule.map {
                row.iter_mut().zip(x).for_each(|(grad, &x)| *grad *= map.slope(x));
            }
        }
    }
}

/// Replaces the values of logits by the gradients of the logits, for a gradient of the sum of 1. No row
/// may have weight 0.
pub(crate) fn backward_in_place<T: Float>(
    x: &mut [T],
    targets: &[RowTarget],
    log_sums: &[T],
    rule: &LossRule<T>,
) {
    let rows = rule.rows_per_block();
    let total_class_weight = rule.total_class_weight();
    map_chunks(x, rows * rule.classes, |block, x| {
        let targets = block_of(targets, block, rows);
        let log_sums = block_of(log_sums, block, rows);
        vectorized(InPlaceKernel { x, targets, log_sums, rule, total_class_weight });
    });
}

struct InPlaceKernel<'a, T> {
    x: &'a mut [T],
    targets: &'a [RowTarget],
    log_sums: &'a [T],
    rule: &'a LossRule<T>,
    total_class_weight: f64,
}

impl<T: Float> NullaryFnOnce for InPlaceKernel<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { rule, total_class_weight, .. } = self;
        let rows = self.x.chunks_exact_mut(rule.classes).zip(self.targets).zip(self.log_sums);
        for ((x, &RowTarget { class, weight }), &log_sum) in rows {
            let slope = |map: LogitMap<T>| x.iter().map(|&x| map.slope(x)).collect::<Vec<_>>();
            let slopes = rule.map.map(slope).unwrap_or_default();
            for x in &mut *x {
                *x -= log_sum;
            }
            RowFactors::new(rule, total_class_weight, class, weight).replace(x, rule, class);
            x.iter_mut().zip(slopes).for_each(|(grad, slope)| *grad *= slope);
        }
    }
}
