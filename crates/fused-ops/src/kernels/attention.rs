//! Attention, block by block: softmax(q·kᵀ·scale + mask)·v for each head, without the matrix of all
//! scores.
//!
//! A task computes one head of one sequence, in blocks of queries and blocks of keys. In the
//! forward pass, a block of scores becomes weights relative to the largest score so far; a larger
//! score shrinks the earlier sums (Milakov and Gimelshein, "Online normalizer calculation for
//! softmax", arXiv 1805.02867; Dao et al., "FlashAttention", arXiv 2205.14135). For the backward
//! pass it keeps one number per query, the logarithm of its sum of exponentials, and recomputes the
//! weights from it.
//!
//! The keys of a causal query end at its position, so later blocks are not computed: half of the
//! work.

#![allow(unsafe_code, reason = "tasks write disjoint heads of one vector with interleaved rows")]

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{
    float::Float,
    lanes::{max, sum1, sum2},
    matmul::{MatrixLayout, MatrixView, ProductThreads, StoreMode, multiply, multiply_into},
    memory::vec_written_by,
    vectorized,
};

/// Queries per block.
const QUERIES: usize = 64;

/// Keys per block: the scores of a block and their gradients fit into a core's second-level cache.
const KEYS: usize = 256;

/// The layout of [batch, length, heads, size]; the elements of a head's row are adjacent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLayout {
    /// Of the first element.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) count: usize,
    pub(crate) size: usize,
    pub(crate) batch_stride: usize,
    pub(crate) row_stride: usize,
    pub(crate) head_stride: usize,
}

impl HeadLayout {
    /// Returns the layout of heads in rows of `width` elements; the heads begin at column `column`.
    pub(crate) fn packed(
        length: usize,
        count: usize,
        size: usize,
        width: usize,
        column: usize,
    ) -> Self {
        let batch_stride = length * width;
        Self {
            offset: column,
            length,
            count,
            size,
            batch_stride,
            row_stride: width,
            head_stride: size,
        }
    }

    /// Returns the first element of a head's row.
    fn start(self, (batch, head): (usize, usize), row: usize) -> usize {
        self.offset + batch * self.batch_stride + head * self.head_stride + row * self.row_stride
    }

    /// Returns the layout of `rows` rows of a head.
    fn place(self, rows: usize) -> MatrixLayout {
        MatrixLayout::rows(rows, self.size, self.row_stride)
    }

    /// `rows` rows of a head from row `first` on.
    fn matrix<T: Float>(
        self,
        data: &[T],
        head: (usize, usize),
        first: usize,
        rows: usize,
    ) -> MatrixView<'_, T> {
        MatrixView::new(&data[self.start(head, first)..], self.place(rows))
    }

    fn row<T>(self, data: &[T], head: (usize, usize), row: usize) -> &[T] {
        &data[self.start(head, row)..][..self.size]
    }
}

/// The mask to add to the scores: [batch, heads, queries, keys], with strides of 0 for broadcast
/// dimensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreMask<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) strides: [usize; 4],
}

impl<T: Float> ScoreMask<'_, T> {
    /// Adds the mask of a query to its scores of the keys from `key` on.
    #[inline(always)]
    fn add(self, (batch, head): (usize, usize), query: usize, key: usize, scores: &mut [T]) {
        let [of_batch, of_head, of_query, of_key] = self.strides;
        let start = batch * of_batch + head * of_head + query * of_query + key * of_key;
        if of_key == 1 {
            for (score, &mask) in scores.iter_mut().zip(&self.data[start..]) {
                *score += mask;
            }
        } else {
            for (index, score) in scores.iter_mut().enumerate() {
                *score += self.data[start + index * of_key];
            }
        }
    }
}

/// The inputs. There are as many queries as results; several heads of the queries may share one of
/// the keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionInputs<'a, T> {
    pub(crate) batch: usize,
    pub(crate) query: (&'a [T], HeadLayout),
    pub(crate) key: (&'a [T], HeadLayout),
    pub(crate) value: (&'a [T], HeadLayout),
    pub(crate) scale: T,
    pub(crate) causal: bool,
    /// The number of keys of each sequence, from 1 to the length of the keys.
    pub(crate) key_lengths: Option<&'a [usize]>,
    pub(crate) mask: Option<ScoreMask<'a, T>>,
}

/// The numbers of keys that the queries of one sequence see.
#[derive(Clone, Copy, Debug)]
struct VisibleKeys {
    keys: usize,
    /// The number of keys that the first query sees, if queries do not see later keys.
    first: Option<usize>,
}

impl VisibleKeys {
    #[inline(always)]
    fn count(self, query: usize) -> usize {
        self.first.map_or(self.keys, |first| (first + query).min(self.keys))
    }
}

impl<T: Float> AttentionInputs<'_, T> {
    /// Returns the number of query heads that share one head of the keys.
    fn group(&self) -> usize {
        self.query.1.count / self.key.1.count
    }

    fn visible(&self, batch: usize) -> VisibleKeys {
        let keys = self.key_lengths.map_or(self.key.1.length, |lengths| lengths[batch]);
        // The last query has the position of the last key, so queries of a cached sequence see all
        // earlier keys.
        let first = self.causal.then(|| self.key.1.length - self.query.1.length + 1);
        VisibleKeys { keys, first }
    }

    /// Computes the scores of a block, in rows with an element for each key.
    fn scores(&self, block: &ScoreBlock, out: &mut [T]) {
        let ScoreBlock { head: (batch, head), first_query, queries, first_key, keys, .. } = *block;
        let query = self.query.1.matrix(self.query.0, (batch, head), first_query, queries);
        let key = self.key.1.matrix(self.key.0, block.key_head(self), first_key, keys);
        let place = MatrixLayout::rows(queries, keys, keys);
        multiply_into(out, place, query, key.t(), StoreMode::Set, self.scale);
        if let Some(mask) = self.mask {
            for (row, scores) in out.chunks_exact_mut(keys).take(queries).enumerate() {
                mask.add((batch, head), first_query + row, first_key, scores);
            }
        }
    }
}

/// Some queries of one head, and some keys.
#[derive(Clone, Copy, Debug)]
struct ScoreBlock {
    /// The sequence, and the head of the queries.
    head: (usize, usize),
    visible: VisibleKeys,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
}

impl ScoreBlock {
    fn key_head<T: Float>(&self, inputs: &AttentionInputs<'_, T>) -> (usize, usize) {
        (self.head.0, self.head.1 / inputs.group())
    }

    /// Returns the number of the block's keys that a row of it sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        self.visible.count(self.first_query + row).saturating_sub(self.first_key).min(self.keys)
    }
}

/// Returns the blocks of a query head with visible keys, ordered by queries.
fn blocks<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    head: (usize, usize),
) -> impl Iterator<Item = ScoreBlock> {
    let length = inputs.query.1.length;
    let visible = inputs.visible(head.0);
    (0..length).step_by(QUERIES).flat_map(move |first_query| {
        let queries = QUERIES.min(length - first_query);
        let end = visible.count(first_query + queries - 1);
        (0..end).step_by(KEYS).map(move |first_key| {
            let keys = KEYS.min(end - first_key);
            ScoreBlock { head, visible, first_query, queries, first_key, keys }
        })
    })
}

/// Elements of the scores of the largest block.
fn block_elements<T: Float>(inputs: &AttentionInputs<'_, T>) -> usize {
    QUERIES.min(inputs.query.1.length) * KEYS.min(inputs.key.1.length)
}

/// A vector that several tasks write, each its own heads.
struct SharedOutput<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: An address and a length; only `unsafe` methods use them, on heads that belong to one
// task.
unsafe impl<T: Send> Send for SharedOutput<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedOutput<T> {}

impl<T: Float> SharedOutput<T> {
    /// Writes or adds a product to rows of a head.
    ///
    /// # Safety
    ///
    /// No other thread may access this head meanwhile, and the rows must be initialized if the
    /// product is added to them.
    unsafe fn multiply(
        &self,
        heads: HeadLayout,
        (head, first): ((usize, usize), usize),
        a: MatrixView<'_, T>,
        b: MatrixView<'_, T>,
        store: StoreMode,
        rows: usize,
    ) {
        // SAFETY: All rows are inside, and no other thread accesses them, as the caller guarantees.
        // Rows of a head do not overlap: their stride is at least their size.
        unsafe {
            let out = self.row(heads, head, first, rows);
            multiply(out, heads.place(rows), a, b, store, T::ONE, ProductThreads::One);
        }
    }

    /// Returns the address of row `first` of a head, followed by `rows - 1` more rows.
    ///
    /// # Safety
    ///
    /// The conditions of [`multiply`](Self::multiply) apply to its use.
    unsafe fn row(
        &self,
        heads: HeadLayout,
        head: (usize, usize),
        first: usize,
        rows: usize,
    ) -> *mut T {
        let end = heads.start(head, first + rows - 1) + heads.size;
        assert!(end <= self.len, "a head reaches beyond its vector");
        // SAFETY: the start lies before the end, which is inside.
        unsafe { self.start.add(heads.start(head, first)) }
    }

    /// Returns row `row` of a head.
    ///
    /// # Safety
    ///
    /// No other thread may access this head meanwhile, and the row must be initialized.
    #[expect(clippy::mut_from_ref, reason = "the task that has the head is the only one to use it")]
    unsafe fn row_mut(&self, heads: HeadLayout, head: (usize, usize), row: usize) -> &mut [T] {
        // SAFETY: The row is inside, initialized, and not shared.
        unsafe { std::slice::from_raw_parts_mut(self.row(heads, head, row, 1), heads.size) }
    }

    /// Writes zeros to all rows of a head.
    ///
    /// # Safety
    ///
    /// No other thread may access this head meanwhile.
    unsafe fn clear(&self, heads: HeadLayout, head: (usize, usize)) {
        for row in 0..heads.length {
            // SAFETY: The row is inside and not shared, and zeros are written to all of it.
            unsafe { self.row(heads, head, row, 1).write_bytes(0, heads.size) };
        }
    }
}

/// Returns the results as [batch, queries, heads, size of the values]. Also returns, as [batch,
/// heads, queries], the logarithm of the sum of exponentials of each query's scores.
pub(crate) fn forward<T: Float>(inputs: &AttentionInputs<'_, T>) -> (Vec<T>, Vec<T>) {
    let place = place_of_results(inputs);
    let HeadLayout { length, count: heads, size, .. } = place;
    let mut log_sums = vec![T::ZERO; inputs.batch * heads * length];
    let len = log_sums.len() * size;
    // SAFETY: One task per head and sequence writes all of its rows: for each query the head has a
    // block with the first key, and this block writes the row.
    let out = unsafe {
        vec_written_by(len, |start| {
            let out = SharedOutput { start, len };
            log_sums.par_chunks_mut(length.max(1)).enumerate().for_each_init(
                || vec![T::ZERO; block_elements(inputs)],
                |scores, (task, log_sums)| {
                    forward_head(
                        inputs,
                        (task / heads, task % heads),
                        &out,
                        place,
                        scores,
                        log_sums,
                    );
                },
            );
        })
    };
    (out, log_sums)
}

/// Computes one head of one sequence.
fn forward_head<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    head: (usize, usize),
    out: &SharedOutput<T>,
    place: HeadLayout,
    scores: &mut [T],
    log_sums: &mut [T],
) {
    let mut rows = QueryState::new(log_sums.len());
    for block in blocks(inputs, head) {
        let ScoreBlock { first_query, queries, first_key, keys, .. } = block;
        inputs.scores(&block, scores);
        vectorized(WeighScores { block, scores, rows: &mut rows });
        let store = if first_key == 0 { StoreMode::Set } else { StoreMode::Add };
        let weights = MatrixView::contiguous(scores, queries, keys);
        let value = inputs.value.1.matrix(inputs.value.0, block.key_head(inputs), first_key, keys);
        // SAFETY: this head is this task's alone, and the block of the first keys has written these
        // rows before any that adds to them.
        unsafe {
            if store == StoreMode::Add {
                for query in first_query..first_query + queries {
                    let row = out.row_mut(place, head, query);
                    vectorized(ScaleAndAdd { row, factor: rows.shrink[query] });
                }
            }
            out.multiply(place, (head, first_query), weights, value, store, queries);
        }
    }
    for (query, log_sum) in log_sums.iter_mut().enumerate() {
        // SAFETY: this head is this task's alone, and all of its rows have been written above.
        let row = unsafe { out.row_mut(place, head, query) };
        vectorized(ScaleAndAdd { row, factor: T::ONE / rows.sum[query] });
        *log_sum = rows.top[query] + rows.sum[query].ln();
    }
}

/// The state of a head's queries after some blocks of keys.
struct QueryState<T> {
    /// The largest score, or 0 if all were −∞.
    top: Vec<T>,
    /// The sum of exponentials of the scores less the largest.
    sum: Vec<T>,
    /// The factor by which the last block shrinks the earlier sums.
    shrink: Vec<T>,
}

impl<T: Float> QueryState<T> {
    fn new(len: usize) -> Self {
        Self { top: vec![-T::INFINITY; len], sum: vec![T::ZERO; len], shrink: vec![T::ONE; len] }
    }
}

/// Makes weights of the scores of a block.
struct WeighScores<'a, T> {
    block: ScoreBlock,
    scores: &'a mut [T],
    rows: &'a mut QueryState<T>,
}

impl<T: Float> NullaryFnOnce for WeighScores<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { block, scores, rows } = self;
        for (row, scores) in scores.chunks_exact_mut(block.keys).take(block.queries).enumerate() {
            let (seen, hidden) = scores.split_at_mut(block.visible(row));
            let query = block.first_query + row;
            let top = rows.top[query].max_known(max(seen));
            // With no score but −∞ so far, differences from the largest would be NaN for good.
            let base = if top == -T::INFINITY { T::ZERO } else { top };
            for score in &mut *seen {
                *score = (*score - base).exp();
            }
            hidden.fill(T::ZERO);
            rows.shrink[query] = (rows.top[query] - base).exp();
            rows.sum[query] = rows.sum[query] * rows.shrink[query] + sum1(seen, |weight| weight);
            rows.top[query] = top;
        }
    }
}

/// Multiplies a row.
struct ScaleAndAdd<'a, T> {
    row: &'a mut [T],
    factor: T,
}

impl<T: Float> NullaryFnOnce for ScaleAndAdd<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.row {
            *x *= self.factor;
        }
    }
}

/// The results of the forward pass and their gradient, all as [batch, queries, heads, size].
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionResults<'a, T> {
    pub(crate) out: &'a [T],
    pub(crate) grad: &'a [T],
    pub(crate) log_sums: &'a [T],
}

/// The positions of the gradients of query, key and value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientTargets {
    pub(crate) query: HeadLayout,
    pub(crate) key: HeadLayout,
    pub(crate) value: HeadLayout,
}

/// Returns the gradients of packed queries, keys and values, in one vector.
pub(crate) fn backward_packed<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    len: usize,
) -> Vec<T> {
    let targets =
        GradientTargets { query: inputs.query.1, key: inputs.key.1, value: inputs.value.1 };
    // SAFETY: Packed rows consist of the heads of queries, keys and values, and all of these are
    // written.
    unsafe {
        vec_written_by(len, |start| {
            let out = || SharedOutput { start, len };
            backward(inputs, results, targets, &[out(), out(), out()]);
        })
    }
}

/// Returns the gradients of queries, keys and values, each as [batch, length, heads, size].
pub(crate) fn backward_separate<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
) -> [Vec<T>; 3] {
    let dense = |heads: HeadLayout| {
        let HeadLayout { length, count, size, .. } = heads;
        HeadLayout::packed(length, count, size, count * size, 0)
    };
    let len = |heads: HeadLayout| inputs.batch * heads.length * heads.count * heads.size;
    let targets = GradientTargets {
        query: dense(inputs.query.1),
        key: dense(inputs.key.1),
        value: dense(inputs.value.1),
    };
    let query = len(targets.query);
    let key = len(targets.key);
    let value = len(targets.value);
    let mut gradients = [Vec::new(), Vec::new(), Vec::new()];
    // SAFETY: all heads of queries, keys and values are written.
    unsafe {
        gradients[0] = vec_written_by(query, |of_query| {
            gradients[1] = vec_written_by(key, |of_key| {
                gradients[2] = vec_written_by(value, |of_value| {
                    let out = [
                        SharedOutput { start: of_query, len: query },
                        SharedOutput { start: of_key, len: key },
                        SharedOutput { start: of_value, len: value },
                    ];
                    backward(inputs, results, targets, &out);
                });
            });
        });
    }
    gradients
}

/// Writes all heads of the gradients of queries, keys and values.
fn backward<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    targets: GradientTargets,
    out: &[SharedOutput<T>; 3],
) {
    let key_heads = inputs.key.1.count;
    (0..inputs.batch * key_heads).into_par_iter().for_each_init(
        || GradientScratch::new(block_elements(inputs)),
        |scratch, task| {
            let key_head = (task / key_heads, task % key_heads);
            // SAFETY: each head of the keys, and with it the heads of the queries that share it, is
            // one task's alone.
            unsafe { backward_head(inputs, results, targets, out, key_head, scratch) };
        },
    );
}

/// The weights of a block, and their gradients.
struct GradientScratch<T> {
    weights: Vec<T>,
    grads: Vec<T>,
}

impl<T: Float> GradientScratch<T> {
    fn new(elements: usize) -> Self {
        Self { weights: vec![T::ZERO; elements], grads: vec![T::ZERO; elements] }
    }
}

/// Computes the gradients of one key head of one sequence, and of the query heads that share it.
///
/// # Safety
///
/// No other thread may access these heads of the gradients meanwhile.
unsafe fn backward_head<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    targets: GradientTargets,
    out: &[SharedOutput<T>; 3],
    key_head: (usize, usize),
    scratch: &mut GradientScratch<T>,
) {
    let [_, of_key, of_value] = out;
    // SAFETY: the heads are this task's alone, as the caller promises.
    unsafe {
        of_key.clear(targets.key, key_head);
        of_value.clear(targets.value, key_head);
    }
    let HeadLayout { length, count: heads, .. } = inputs.query.1;
    let batch = key_head.0;
    let group = inputs.group();
    for head in key_head.1 * group..(key_head.1 + 1) * group {
        let weighted_sums = weighted_sums(inputs, results, (batch, head));
        let log_sums = &results.log_sums[(batch * heads + head) * length..][..length];
        for block in blocks(inputs, (batch, head)) {
            scratch.fill(inputs, results, block, log_sums, &weighted_sums);
            // SAFETY: The heads belong to this task, as the caller guarantees. The gradients of
            // keys and values were cleared. Among a query's blocks, the block of the first keys
            // comes first and writes; the others add.
            unsafe { add_block(inputs, results, targets, out, &block, scratch) };
        }
    }
}

/// Returns the layout of a head's results and their gradients.
fn place_of_results<T: Float>(inputs: &AttentionInputs<'_, T>) -> HeadLayout {
    let (HeadLayout { length, count, .. }, size) = (inputs.query.1, inputs.value.1.size);
    HeadLayout::packed(length, count, size, count * size, 0)
}

/// Returns for each query the sum of its weights times their gradients, which equals the sum of its
/// result times the result's gradient.
fn weighted_sums<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    head: (usize, usize),
) -> Vec<T> {
    let place = place_of_results(inputs);
    (0..place.length)
        .map(|row| {
            let x = place.row(results.out, head, row);
            let y = place.row(results.grad, head, row);
            vectorized(DotRow { x, y })
        })
        .collect()
}

impl<T: Float> GradientScratch<T> {
    /// Computes the weights of a block, and the gradients of q·kᵀ.
    fn fill(
        &mut self,
        inputs: &AttentionInputs<'_, T>,
        results: AttentionResults<'_, T>,
        block: ScoreBlock,
        log_sums: &[T],
        weighted_sums: &[T],
    ) {
        let ScoreBlock { head, first_query, queries, first_key, keys, .. } = block;
        inputs.scores(&block, &mut self.weights);
        let grad = place_of_results(inputs).matrix(results.grad, head, first_query, queries);
        let value = inputs.value.1.matrix(inputs.value.0, block.key_head(inputs), first_key, keys);
        let rows = MatrixLayout::rows(queries, keys, keys);
        multiply_into(&mut self.grads, rows, grad, value.t(), StoreMode::Set, T::ONE);
        let weights = &mut self.weights[..];
        let grads = &mut self.grads[..];
        let scale = inputs.scale;
        vectorized(UnweighScores { block, weights, grads, log_sums, weighted_sums, scale });
    }
}

/// Adds the contribution of a block to the gradients of its queries, keys and values.
///
/// # Safety
///
/// No other thread may access these heads of the gradients meanwhile. The gradients of keys and
/// values must be initialized, and the gradients of queries too, except for the block of the first
/// keys.
unsafe fn add_block<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    targets: GradientTargets,
    [of_query, of_key, of_value]: &[SharedOutput<T>; 3],
    block: &ScoreBlock,
    scratch: &GradientScratch<T>,
) {
    let ScoreBlock { head, first_query, queries, first_key, keys, .. } = *block;
    let key_head = block.key_head(inputs);
    let weights = MatrixView::contiguous(&scratch.weights, queries, keys).t();
    let grads = MatrixView::contiguous(&scratch.grads, queries, keys);
    let query = inputs.query.1.matrix(inputs.query.0, head, first_query, queries);
    let key = inputs.key.1.matrix(inputs.key.0, key_head, first_key, keys);
    let grad = place_of_results(inputs).matrix(results.grad, head, first_query, queries);
    let store = if first_key == 0 { StoreMode::Set } else { StoreMode::Add };
    let queries_at = (head, first_query);
    let keys_at = (key_head, first_key);
    // SAFETY: as the caller promises.
    unsafe {
        of_query.multiply(targets.query, queries_at, grads, key, store, queries);
        of_key.multiply(targets.key, keys_at, grads.t(), query, StoreMode::Add, keys);
        of_value.multiply(targets.value, keys_at, weights, grad, StoreMode::Add, keys);
    }
}

/// The sum of products of two rows.
struct DotRow<'a, T> {
    x: &'a [T],
    y: &'a [T],
}

impl<T: Float> NullaryFnOnce for DotRow<'_, T> {
    type Output = T;

    #[inline(always)]
    fn call(self) -> T {
        sum2(self.x, self.y, |x, y| x * y)
    }
}

/// Converts scores to weights, and gradients of weights to gradients of scores.
struct UnweighScores<'a, T> {
    block: ScoreBlock,
    /// Scores before, weights after.
    weights: &'a mut [T],
    /// Gradients of the weights before, of q·kᵀ after.
    grads: &'a mut [T],
    log_sums: &'a [T],
    /// See [`weighted_sums`].
    weighted_sums: &'a [T],
    scale: T,
}

impl<T: Float> NullaryFnOnce for UnweighScores<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let keys = self.block.keys;
        let rows = self.weights.chunks_exact_mut(keys).zip(self.grads.chunks_exact_mut(keys));
        for (row, (weights, grads)) in rows.take(self.block.queries).enumerate() {
            let query = self.block.first_query + row;
            let log_sum = self.log_sums[query];
            let weighted_sums = self.weighted_sums[query];
            let visible = self.block.visible(row);
            for (weight, grad) in weights[..visible].iter_mut().zip(&mut grads[..visible]) {
                *weight = (*weight - log_sum).exp();
                *grad = *weight * (*grad - weighted_sums) * self.scale;
            }
            weights[visible..].fill(T::ZERO);
            grads[visible..].fill(T::ZERO);
        }
    }
}
