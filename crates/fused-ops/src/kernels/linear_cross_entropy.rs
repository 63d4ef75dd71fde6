//! Cross-entropy of the products of rows with a weight, by blocks of rows.
//!
//! The logits of one block exist at a time, and their gradients replace them and are multiplied at
//! once, so neither are ever whole in memory (Liger Kernel, arXiv 2410.10989). All blocks share one
//! buffer. Rows of weight 0 are not multiplied.

use super::{
    cross_entropy::{self, LossRule, RowTarget},
    float::Float,
    matmul::{MatrixLayout, MatrixView, StoreMode, multiply_in_pool, product},
    parallel::{ELEMENTS_PER_BLOCK, map_chunks},
};

/// Logits per block: 8 MiB in single precision.
const LOGITS_PER_BLOCK: usize = 1 << 21;

/// The fewest rows per block. Each block reads the weight, and reads and writes its gradient, which
/// takes less time than the products of this many rows.
const FEWEST_ROWS: usize = 128;

/// Rows of hidden states before a head, with their targets.
#[derive(Clone, Debug)]
pub(crate) struct HeadRows<T> {
    /// The width of a row.
    pub(crate) hidden: usize,
    pub(crate) targets: Vec<RowTarget>,
    pub(crate) rule: LossRule<T>,
}

/// The gradients of the summed losses, if they are wanted.
#[derive(Debug)]
pub(crate) struct HeadGrads<T> {
    /// [rows, hidden]
    pub(crate) x: Option<Vec<T>>,
    /// [classes, hidden]
    pub(crate) weight: Option<Vec<T>>,
}

impl<T: Float> HeadRows<T> {
    /// Returns the sum of the rows' losses, and the gradients of `x` [rows, hidden] and `weight`
    /// [classes, hidden] if they are wanted.
    pub(crate) fn losses_and_grads(
        &self,
        x: &[T],
        weight: &[T],
        [wants_x, wants_weight]: [bool; 2],
    ) -> (f64, HeadGrads<T>) {
        let zeros = |is_wanted: bool, len| is_wanted.then(|| vec![T::ZERO; len]);
        let mut grads =
            HeadGrads { x: zeros(wants_x, x.len()), weight: zeros(wants_weight, weight.len()) };
        let weight = MatrixView::contiguous(weight, self.rule.classes, self.hidden);
        let counted: Vec<usize> =
            (0..self.targets.len()).filter(|&row| self.targets[row].weight != 0.0).collect();
        let block_rows = self.rows_per_block().min(counted.len());
        let mut logits = vec![T::ZERO; block_rows * self.rule.classes];
        let mut sum = 0.0;
        for rows in counted.chunks(block_rows.max(1)) {
            let x: Vec<&[T]> =
                rows.iter().map(|&row| &x[row * self.hidden..][..self.hidden]).collect();
            sum += self.add_block(rows, &x.concat(), weight, &mut logits, &mut grads);
        }
        (sum, grads)
    }

    /// Returns the sum of the losses of some rows `x`, and adds their gradients. Overwrites `logits`.
    fn add_block(
        &self,
        rows: &[usize],
        x: &[T],
        weight: MatrixView<'_, T>,
        logits: &mut [T],
        grads: &mut HeadGrads<T>,
    ) -> f64 {
        let classes = self.rule.classes;
        let targets: Vec<RowTarget> = rows.iter().map(|&row| self.targets[row]).collect();
        let x = MatrixView::contiguous(x, rows.len(), self.hidden);
        let layout = MatrixLayout::rows(rows.len(), classes, classes);
        multiply_in_pool(logits, layout, x, weight.t(), StoreMode::Set);
        let logits = &mut logits[..rows.len() * classes];
        let (sum, log_sums) = cross_entropy::forward(logits, &targets, &self.rule);
        if grads.x.is_none() && grads.weight.is_none() {
            return sum;
        }
        cross_entropy::backward_in_place(logits, &targets, &log_sums, &self.rule);
        if let Some(all) = &mut grads.x {
            let block = product(MatrixView::contiguous(logits, rows.len(), classes), weight);
            for (grad, &row) in block.chunks(self.hidden.max(1)).zip(rows) {
                all[row * self.hidden..][..self.hidden].copy_from_slice(grad);
            }
        }
        if let Some(all) = &mut grads.weight {
            let layout = MatrixLayout::rows(classes, self.hidden, self.hidden);
            let grad = MatrixView::contiguous(logits, rows.len(), classes);
            multiply_in_pool(all, layout, grad.t(), x, StoreMode::Add);
        }
        sum
    }

    /// Returns the rows of a block, which depend on the shapes alone.
    fn rows_per_block(&self) -> usize {
        (LOGITS_PER_BLOCK / self.rule.classes.max(1)).max(FEWEST_ROWS)
    }
}

impl<T: Float> HeadGrads<T> {
    /// Multiplies both gradients by `factor`.
    pub(crate) fn scale(&mut self, factor: T) {
        for grads in [&mut self.x, &mut self.weight].into_iter().flatten() {
            map_chunks(grads, ELEMENTS_PER_BLOCK, |_, block| {
                for grad in block {
                    *grad *= factor;
                }
            });
        }
    }
}
