//! Attention, block by block: softmax(q·kᵀ·scale + mask)·v for each head, without the matrix of all
//! scores.
//!
//! A task computes one head of one sequence, in blocks of queries and blocks of keys. In the
//! forward pass, a block of scores becomes weights relative to the largest score so far; a larger
//! score shrinks the earlier sums (Milakov and Gimelshein, "Online normalizer calculation for
//! softmax", arXiv 1805.02867; Dao et al., "FlashAttention", arXiv 2205.14135). For the backward
//! pass it stores one number per query, the logarithm of the query's sum of exponentials, from
//! which the weights are recomputed.
//!
//! A causal query sees no key after its own position, so blocks of later keys are skipped: about
//! half of the work. A window also hides the keys before it, and blocks before the window of a
//! block's first query are skipped: the work per query is that of its window.

#![allow(unsafe_code, reason = "tasks write disjoint heads of one vector with interleaved rows")]

use std::ops::Range;

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{
    exponential::exp_in_place,
    float::Float,
    lanes::{max, sum1, sum2},
    matmul::{MatrixLayout, MatrixView, ProductThreads, StoreMode, multiply, multiply_into},
    memory::{three_vecs_written_by, vec_written_by},
    softcap::{capped, slope_of_cap},
    vectorized,
};

/// Queries per block.
const QUERIES: usize = 64;

/// Keys per block: the scores of a block and their gradients fit into a core's second-level cache.
const KEYS: usize = 256;

/// A head of one sequence.
#[derive(Clone, Copy, Debug)]
struct HeadIndex {
    /// The index of the sequence in the batch.
    batch: usize,
    head: usize,
}

/// The layout of [batch, length, heads, size]; the elements of a head's row are adjacent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadLayout {
    /// The index of the first element.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    /// The number of heads.
    pub(crate) heads: usize,
    pub(crate) size: usize,
    pub(crate) batch_stride: usize,
    pub(crate) row_stride: usize,
    pub(crate) head_stride: usize,
}

impl HeadLayout {
    /// Returns the layout of heads in rows of `width` elements; the heads begin at column `column`.
    pub(crate) fn packed(
        length: usize,
        heads: usize,
        size: usize,
        width: usize,
        column: usize,
    ) -> Self {
        let batch_stride = length * width;
        Self {
            offset: column,
            length,
            heads,
            size,
            batch_stride,
            row_stride: width,
            head_stride: size,
        }
    }

    /// Returns the index of the first element of a head's row.
    fn row_start(self, HeadIndex { batch, head }: HeadIndex, row: usize) -> usize {
        self.offset + batch * self.batch_stride + head * self.head_stride + row * self.row_stride
    }

    /// Returns the layout of `rows` rows of a head.
    fn matrix_layout(self, rows: usize) -> MatrixLayout {
        MatrixLayout::rows(rows, self.size, self.row_stride)
    }

    /// Returns `rows` rows of a head, beginning with row `first`.
    fn matrix<T: Float>(
        self,
        data: &[T],
        head: HeadIndex,
        first: usize,
        rows: usize,
    ) -> MatrixView<'_, T> {
        MatrixView::new(&data[self.row_start(head, first)..], self.matrix_layout(rows))
    }

    fn row<T>(self, data: &[T], head: HeadIndex, row: usize) -> &[T] {
        &data[self.row_start(head, row)..][..self.size]
    }
}

/// The elements of heads, with their layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSlice<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) layout: HeadLayout,
}

impl<'a, T: Float> HeadSlice<'a, T> {
    /// Returns `rows` rows of a head, beginning with row `first`.
    fn matrix(self, head: HeadIndex, first: usize, rows: usize) -> MatrixView<'a, T> {
        self.layout.matrix(self.data, head, first, rows)
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
    /// Adds the mask of a query to its scores for key `key` and the following keys.
    #[inline(always)]
    fn add(self, HeadIndex { batch, head }: HeadIndex, query: usize, key: usize, scores: &mut [T]) {
        let [batch_stride, head_stride, query_stride, key_stride] = self.strides;
        let start =
            batch * batch_stride + head * head_stride + query * query_stride + key * key_stride;
        if key_stride == 1 {
            for (score, &mask) in scores.iter_mut().zip(&self.data[start..]) {
                *score += mask;
            }
        } else {
            for (index, score) in scores.iter_mut().enumerate() {
                *score += self.data[start + index * key_stride];
            }
        }
    }
}

/// The inputs of the kernels. There is one result for each query; several query heads may share one
/// key head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionInputs<'a, T> {
    pub(crate) batch: usize,
    pub(crate) query: HeadSlice<'a, T>,
    pub(crate) key: HeadSlice<'a, T>,
    pub(crate) value: HeadSlice<'a, T>,
    pub(crate) scale: T,
    pub(crate) causal: bool,
    /// The number of keys that a causal query sees, at most.
    pub(crate) window: Option<usize>,
    /// The number of keys of each sequence, from 1 to the length of the keys.
    pub(crate) key_lengths: Option<&'a [usize]>,
    pub(crate) mask: Option<ScoreMask<'a, T>>,
    pub(crate) softcap: Option<T>,
    /// One more score for each query head, whose weight is dropped.
    pub(crate) sinks: Option<&'a [T]>,
}

/// The keys that the queries of one sequence see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VisibleKeys {
    /// The number of keys of the sequence, at least 1.
    pub(crate) keys: usize,
    /// The number of keys up to the position of the first query; `None` if attention is not causal.
    pub(crate) keys_of_first_query: Option<usize>,
    pub(crate) window: Option<usize>,
}

impl VisibleKeys {
    /// Returns the keys that a query sees: at least one. A query of the padding whose window has no
    /// other keys sees the last key of its sequence.
    #[inline(always)]
    pub(crate) fn range(self, query: usize) -> Range<usize> {
        let Some(n_keys) = self.keys_of_first_query else { return 0..self.keys };
        let end = n_keys + query;
        let start = self.window.map_or(0, |window| end.saturating_sub(window));
        start.min(self.keys - 1)..end.min(self.keys)
    }
}

impl<T: Float> AttentionInputs<'_, T> {
    /// Returns the number of query heads that share one head of the keys.
    fn group_size(&self) -> usize {
        self.query.layout.heads / self.key.layout.heads
    }

    fn visible_keys(&self, batch: usize) -> VisibleKeys {
        let keys = self.key_lengths.map_or(self.key.layout.length, |lengths| lengths[batch]);
        // The last query has the position of the last key, so queries of a cached sequence see all
        // earlier keys.
        let keys_of_first_query =
            self.causal.then(|| self.key.layout.length - self.query.layout.length + 1);
        VisibleKeys { keys, keys_of_first_query, window: self.window }
    }

    /// Computes the scores of a block before the mask, in rows with an element for each key.
    fn compute_scores(&self, block: &ScoreBlock, out: &mut [T]) {
        let ScoreBlock { head, first_query, queries, first_key, keys, .. } = *block;
        let query = self.query.matrix(head, first_query, queries);
        let key = self.key.matrix(block.key_head(self), first_key, keys);
        let layout = MatrixLayout::rows(queries, keys, keys);
        multiply_into(out, layout, query, key.t(), StoreMode::Set, self.scale);
        if let Some(cap) = self.softcap {
            vectorized(CapScores { scores: &mut out[..queries * keys], cap });
        }
    }

    /// Adds the mask to the scores of a block.
    fn add_mask(&self, block: &ScoreBlock, scores: &mut [T]) {
        let Some(mask) = self.mask else { return };
        let rows = scores.chunks_exact_mut(block.keys).take(block.queries);
        for (row, scores) in rows.enumerate() {
            mask.add(block.head, block.first_query + row, block.first_key, scores);
        }
    }
}

/// A block of scores: some queries of one head, and some keys.
#[derive(Clone, Copy, Debug)]
struct ScoreBlock {
    /// The head of the queries.
    head: HeadIndex,
    visible: VisibleKeys,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
    /// Whether this is the first block of its queries.
    is_first: bool,
}

impl ScoreBlock {
    /// Returns the key head that the query head reads.
    fn key_head<T: Float>(&self, inputs: &AttentionInputs<'_, T>) -> HeadIndex {
        let HeadIndex { batch, head } = self.head;
        HeadIndex { batch, head: head / inputs.group_size() }
    }

    /// Splits a row of the block, of its query number `row`, into the parts before, in and after the
    /// query's visible keys. The query may see none of the block.
    #[inline(always)]
    fn split_row<'a, T>(&self, row: usize, elements: &'a mut [T]) -> [&'a mut [T]; 3] {
        let Range { start, end } = self.visible.range(self.first_query + row);
        let (elements, after) =
            elements.split_at_mut(end.saturating_sub(self.first_key).min(self.keys));
        let start = start.saturating_sub(self.first_key).min(elements.len());
        let (before, seen) = elements.split_at_mut(start);
        [before, seen, after]
    }

    /// Returns how the block's products are stored: the first block of some queries writes, and the
    /// others add.
    fn store(&self) -> StoreMode {
        if self.is_first { StoreMode::Set } else { StoreMode::Add }
    }
}

/// Returns the blocks of a query head with visible keys, ordered by queries. All queries have a first
/// block, since each sees a key.
fn blocks<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    head: HeadIndex,
) -> impl Iterator<Item = ScoreBlock> {
    let length = inputs.query.layout.length;
    let visible = inputs.visible_keys(head.batch);
    (0..length).step_by(QUERIES).flat_map(move |first_query| {
        let queries = QUERIES.min(length - first_query);
        let start = visible.range(first_query).start;
        let end = visible.range(first_query + queries - 1).end;
        (start..end).step_by(KEYS).map(move |first_key| {
            let (keys, is_first) = (KEYS.min(end - first_key), first_key == start);
            ScoreBlock { head, visible, first_query, queries, first_key, keys, is_first }
        })
    })
}

/// Returns the number of scores of the largest block.
fn max_block_elements<T: Float>(inputs: &AttentionInputs<'_, T>) -> usize {
    QUERIES.min(inputs.query.layout.length) * KEYS.min(inputs.key.layout.length)
}

/// A vector that several tasks write, each its own heads.
struct SharedOutput<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: The struct is an address and a length. Only `unsafe` methods access the memory, each for
// a head that belongs to one task.
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
        layout: HeadLayout,
        (head, rows): (HeadIndex, Range<usize>),
        a: MatrixView<'_, T>,
        b: MatrixView<'_, T>,
        store: StoreMode,
    ) {
        // SAFETY: All rows are inside, and no other thread accesses them, as the caller guarantees.
        // Rows of a head do not overlap: their stride is at least their size.
        unsafe {
            let out = self.row(layout, head, rows.start, rows.len());
            let matrix_layout = layout.matrix_layout(rows.len());
            multiply(out, matrix_layout, a, b, store, T::ONE, ProductThreads::One);
        }
    }

    /// Returns the address of row `first` of a head, followed by `rows - 1` more rows.
    ///
    /// # Safety
    ///
    /// The conditions of [`multiply`](Self::multiply) apply to every use of the address.
    unsafe fn row(&self, layout: HeadLayout, head: HeadIndex, first: usize, rows: usize) -> *mut T {
        let end = layout.row_start(head, first + rows - 1) + layout.size;
        assert!(end <= self.len, "a head reaches beyond its vector");
        // SAFETY: the start of the row is before its end, which is inside the vector.
        unsafe { self.start.add(layout.row_start(head, first)) }
    }

    /// Returns row `row` of a head.
    ///
    /// # Safety
    ///
    /// No other thread may access this head meanwhile, and the row must be initialized.
    #[expect(clippy::mut_from_ref, reason = "only the task that owns the head uses it")]
    unsafe fn row_mut(&self, layout: HeadLayout, head: HeadIndex, row: usize) -> &mut [T] {
        // SAFETY: The row is inside, initialized, and not shared.
        unsafe { std::slice::from_raw_parts_mut(self.row(layout, head, row, 1), layout.size) }
    }

    /// Writes zeros to all rows of a head.
    ///
    /// # Safety
    ///
    /// No other thread may access this head meanwhile.
    unsafe fn clear(&self, layout: HeadLayout, head: HeadIndex) {
        for row in 0..layout.length {
            // SAFETY: The row is inside and not shared, and zeros are written to all of it.
            unsafe { self.row(layout, head, row, 1).write_bytes(0, layout.size) };
        }
    }
}

/// Returns the results as [batch, queries, heads, size of the values]. Also returns, as [batch,
/// heads, queries], the logarithm of the sum of exponentials of each query's scores.
pub(crate) fn forward<T: Float>(inputs: &AttentionInputs<'_, T>) -> (Vec<T>, Vec<T>) {
    let layout = result_layout(inputs);
    let HeadLayout { length, heads, size, .. } = layout;
    let mut log_sums = vec![T::ZERO; inputs.batch * heads * length];
    let len = log_sums.len() * size;
    // SAFETY: One task per head and sequence writes all rows of the head: each query has a first
    // block, and this block writes the row of the query.
    let out = unsafe {
        vec_written_by(len, |start| {
            let out = SharedOutput { start, len };
            log_sums.par_chunks_mut(length.max(1)).enumerate().for_each_init(
                || vec![T::ZERO; max_block_elements(inputs)],
                |scores, (task, log_sums)| {
                    forward_head(
                        inputs,
                        HeadIndex { batch: task / heads, head: task % heads },
                        &out,
                        layout,
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
    head: HeadIndex,
    out: &SharedOutput<T>,
    layout: HeadLayout,
    scores: &mut [T],
    log_sums: &mut [T],
) {
    let mut state = QueryState::new(log_sums.len(), inputs.sinks.map(|sinks| sinks[head.head]));
    for block in blocks(inputs, head) {
        let ScoreBlock { first_query, queries, first_key, keys, .. } = block;
        inputs.compute_scores(&block, scores);
        inputs.add_mask(&block, scores);
        vectorized(WeighScores { block, scores, state: &mut state });
        let store = block.store();
        let weights = MatrixView::contiguous(scores, queries, keys);
        let value = inputs.value.matrix(block.key_head(inputs), first_key, keys);
        // SAFETY: The head belongs to this task alone. The first block of these queries writes their
        // rows before any other block adds to them.
        unsafe {
            if store == StoreMode::Add {
                for query in first_query..first_query + queries {
                    let row = out.row_mut(layout, head, query);
                    vectorized(ScaleRow { row, factor: state.shrink[query] });
                }
            }
            let rows = first_query..first_query + queries;
            out.multiply(layout, (head, rows), weights, value, store);
        }
    }
    for (query, log_sum) in log_sums.iter_mut().enumerate() {
        // SAFETY: The head belongs to this task alone, and all of its rows were written above.
        let row = unsafe { out.row_mut(layout, head, query) };
        vectorized(ScaleRow { row, factor: T::ONE / state.sum[query] });
        *log_sum = state.top[query] + state.sum[query].ln();
    }
}

/// The state of a head's queries after some blocks of keys.
struct QueryState<T> {
    /// The largest score; −∞ at first.
    top: Vec<T>,
    /// The sum of the exponentials of all scores minus the largest.
    sum: Vec<T>,
    /// The factor by which the last block shrinks the earlier sums.
    shrink: Vec<T>,
}

impl<T: Float> QueryState<T> {
    /// Returns the state before the first block. A sink counts as a score without a value.
    fn new(len: usize, sink: Option<T>) -> Self {
        let (top, sum) = sink.map_or((-T::INFINITY, T::ZERO), |sink| (sink, T::ONE));
        Self { top: vec![top; len], sum: vec![sum; len], shrink: vec![T::ONE; len] }
    }
}

/// Replaces each score s by cap·tanh(s / cap).
struct CapScores<'a, T> {
    scores: &'a mut [T],
    cap: T,
}

impl<T: Float> NullaryFnOnce for CapScores<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for score in self.scores {
            *score = capped(*score, self.cap);
        }
    }
}

/// Converts the scores of a block to weights.
struct WeighScores<'a, T> {
    block: ScoreBlock,
    scores: &'a mut [T],
    state: &'a mut QueryState<T>,
}

impl<T: Float> NullaryFnOnce for WeighScores<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { block, scores, state } = self;
        for (row, scores) in scores.chunks_exact_mut(block.keys).take(block.queries).enumerate() {
            let [before, seen, after] = block.split_row(row, scores);
            let query = block.first_query + row;
            let top = state.top[query].max_ignoring_nan(max(seen));
            // While all scores are −∞, their differences from the largest would be NaN, and so
            // would all later sums.
            let base = if top == -T::INFINITY { T::ZERO } else { top };
            for score in &mut *seen {
                *score -= base;
            }
            exp_in_place(seen);
            before.fill(T::ZERO);
            after.fill(T::ZERO);
            state.shrink[query] = (state.top[query] - base).exp();
            state.sum[query] = state.sum[query] * state.shrink[query] + sum1(seen, |weight| weight);
            state.top[query] = top;
        }
    }
}

/// Multiplies a row by a factor.
struct ScaleRow<'a, T> {
    row: &'a mut [T],
    factor: T,
}

impl<T: Float> NullaryFnOnce for ScaleRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.row {
            *x *= self.factor;
        }
    }
}

/// The inputs of the backward pass: results of the forward pass, and the gradient of `out`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionResults<'a, T> {
    /// [batch, queries, heads, size]
    pub(crate) out: &'a [T],
    /// The gradient of `out`, in the same layout.
    pub(crate) grad: &'a [T],
    /// [batch, heads, queries]
    pub(crate) log_sums: &'a [T],
}

/// The layouts of the gradients of query, key and value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientLayouts {
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
    let layouts = GradientLayouts {
        query: inputs.query.layout,
        key: inputs.key.layout,
        value: inputs.value.layout,
    };
    // SAFETY: Packed rows consist of the heads of queries, keys and values, and all of these heads
    // are written.
    unsafe {
        vec_written_by(len, |start| {
            let out = || SharedOutput { start, len };
            backward(inputs, results, layouts, &[out(), out(), out()]);
        })
    }
}

/// Returns the gradients of queries, keys and values, each as [batch, length, heads, size].
pub(crate) fn backward_separate<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
) -> [Vec<T>; 3] {
    let dense = |layout: HeadLayout| {
        let HeadLayout { length, heads, size, .. } = layout;
        HeadLayout::packed(length, heads, size, heads * size, 0)
    };
    let len = |layout: HeadLayout| inputs.batch * layout.length * layout.heads * layout.size;
    let layouts = GradientLayouts {
        query: dense(inputs.query.layout),
        key: dense(inputs.key.layout),
        value: dense(inputs.value.layout),
    };
    let query_len = len(layouts.query);
    let key_len = len(layouts.key);
    let value_len = len(layouts.value);
    // SAFETY: all heads of queries, keys and values are written.
    unsafe {
        three_vecs_written_by([query_len, key_len, value_len], |[query, key, value]| {
            let out = [
                SharedOutput { start: query, len: query_len },
                SharedOutput { start: key, len: key_len },
                SharedOutput { start: value, len: value_len },
            ];
            backward(inputs, results, layouts, &out);
        })
    }
}

/// Writes all heads of the gradients of queries, keys and values.
fn backward<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    layouts: GradientLayouts,
    out: &[SharedOutput<T>; 3],
) {
    let key_heads = inputs.key.layout.heads;
    (0..inputs.batch * key_heads).into_par_iter().for_each_init(
        || GradientScratch::new(max_block_elements(inputs), inputs.softcap.is_some()),
        |scratch, task| {
            let key_head = HeadIndex { batch: task / key_heads, head: task % key_heads };
            // SAFETY: each key head belongs to one task alone, and so do the query heads that share
            // it.
            unsafe { backward_head(inputs, results, layouts, out, key_head, scratch) };
        },
    );
}

/// The weights of a block, and their gradients.
struct GradientScratch<T> {
    weights: Vec<T>,
    grads: Vec<T>,
    /// The scores before the mask; empty without a soft cap.
    capped: Vec<T>,
}

impl<T: Float> GradientScratch<T> {
    fn new(elements: usize, is_capped: bool) -> Self {
        let zeros = |elements| vec![T::ZERO; elements];
        let capped = zeros(if is_capped { elements } else { 0 });
        Self { weights: zeros(elements), grads: zeros(elements), capped }
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
    layouts: GradientLayouts,
    out: &[SharedOutput<T>; 3],
    key_head: HeadIndex,
    scratch: &mut GradientScratch<T>,
) {
    let [_, key_out, value_out] = out;
    // SAFETY: the heads belong to this task alone, as the caller promises.
    unsafe {
        key_out.clear(layouts.key, key_head);
        value_out.clear(layouts.value, key_head);
    }
    let HeadLayout { length, heads, .. } = inputs.query.layout;
    let batch = key_head.batch;
    let group_size = inputs.group_size();
    for query_head in key_head.head * group_size..(key_head.head + 1) * group_size {
        let head = HeadIndex { batch, head: query_head };
        let weighted_sums = sum_weighted_gradients(inputs, results, head);
        let log_sums = &results.log_sums[(batch * heads + query_head) * length..][..length];
        for block in blocks(inputs, head) {
            scratch.fill(inputs, results, block, log_sums, &weighted_sums);
            // SAFETY: The heads belong to this task, as the caller guarantees. The gradients of
            // keys and values were cleared. Among a query's blocks, the first one writes; the other
            // blocks add.
            unsafe { add_block(inputs, results, layouts, out, &block, scratch) };
        }
    }
}

/// Returns the layout of a head's results and their gradients.
fn result_layout<T: Float>(inputs: &AttentionInputs<'_, T>) -> HeadLayout {
    let HeadLayout { length, heads, .. } = inputs.query.layout;
    let size = inputs.value.layout.size;
    HeadLayout::packed(length, heads, size, heads * size, 0)
}

/// Returns for each query the sum of its weights times their gradients, which equals the sum of its
/// result times the result's gradient.
fn sum_weighted_gradients<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    head: HeadIndex,
) -> Vec<T> {
    let layout = result_layout(inputs);
    (0..layout.length)
        .map(|row| {
            let x = layout.row(results.out, head, row);
            let y = layout.row(results.grad, head, row);
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
        inputs.compute_scores(&block, &mut self.weights);
        let len = self.capped.len();
        self.capped.copy_from_slice(&self.weights[..len]);
        inputs.add_mask(&block, &mut self.weights);
        let grad = result_layout(inputs).matrix(results.grad, head, first_query, queries);
        let value = inputs.value.matrix(block.key_head(inputs), first_key, keys);
        let layout = MatrixLayout::rows(queries, keys, keys);
        multiply_into(&mut self.grads, layout, grad, value.t(), StoreMode::Set, T::ONE);
        let weights = &mut self.weights[..];
        let grads = &mut self.grads[..queries * keys];
        let scale = inputs.scale;
        vectorized(DifferentiateScores {
            block,
            weights,
            grads: &mut *grads,
            log_sums,
            weighted_sums,
            scale,
        });
        if let Some(cap) = inputs.softcap {
            vectorized(MultiplyByCapSlope { grads, capped: &self.capped, cap });
        }
    }
}

/// Multiplies the gradients of capped scores by the slope of the cap, which leaves the gradients of
/// the scores before it.
struct MultiplyByCapSlope<'a, T> {
    grads: &'a mut [T],
    capped: &'a [T],
    cap: T,
}

impl<T: Float> NullaryFnOnce for MultiplyByCapSlope<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (grad, &capped) in self.grads.iter_mut().zip(self.capped) {
            *grad *= slope_of_cap(capped, self.cap);
        }
    }
}

/// Returns the gradients of the sinks. Each sequence adds one number, in the order of the batch.
pub(crate) fn backward_sinks<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
) -> Vec<T> {
    let HeadLayout { length, heads, .. } = inputs.query.layout;
    let grad_of = |task: usize| {
        let index = HeadIndex { batch: task / heads, head: task % heads };
        let sink = inputs.sinks.map_or(-T::INFINITY, |sinks| sinks[index.head]);
        let weighted_sums = sum_weighted_gradients(inputs, results, index);
        let log_sums = &results.log_sums[task * length..][..length];
        // The weight of the sink has no value: its gradient is 0.
        let grads = log_sums.iter().zip(weighted_sums);
        grads.map(|(&log_sum, sum)| -((sink - log_sum).exp() * sum).to_f64()).sum::<f64>()
    };
    let grads: Vec<f64> = (0..inputs.batch * heads).into_par_iter().map(grad_of).collect();
    let sum = |head| grads.iter().skip(head).step_by(heads).sum();
    (0..heads).map(|head| T::round_from_f64(sum(head))).collect()
}

/// Adds the contribution of a block to the gradients of its queries, keys and values.
///
/// # Safety
///
/// No other thread may access these heads of the gradients meanwhile. The gradients of keys and
/// values must be initialized, and the gradients of queries too, except for their first block.
unsafe fn add_block<T: Float>(
    inputs: &AttentionInputs<'_, T>,
    results: AttentionResults<'_, T>,
    layouts: GradientLayouts,
    [query_out, key_out, value_out]: &[SharedOutput<T>; 3],
    block: &ScoreBlock,
    scratch: &GradientScratch<T>,
) {
    let ScoreBlock { head, first_query, queries, first_key, keys, .. } = *block;
    let key_head = block.key_head(inputs);
    let weights = MatrixView::contiguous(&scratch.weights, queries, keys).t();
    let grads = MatrixView::contiguous(&scratch.grads, queries, keys);
    let query = inputs.query.matrix(head, first_query, queries);
    let key = inputs.key.matrix(key_head, first_key, keys);
    let grad = result_layout(inputs).matrix(results.grad, head, first_query, queries);
    let store = block.store();
    let query_rows = (head, first_query..first_query + queries);
    let key_rows = (key_head, first_key..first_key + keys);
    // SAFETY: as the caller promises.
    unsafe {
        query_out.multiply(layouts.query, query_rows, grads, key, store);
        key_out.multiply(layouts.key, key_rows.clone(), grads.t(), query, StoreMode::Add);
        value_out.multiply(layouts.value, key_rows, weights, grad, StoreMode::Add);
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
struct DifferentiateScores<'a, T> {
    block: ScoreBlock,
    /// Scores before, weights after.
    weights: &'a mut [T],
    /// Gradients of the weights before, of q·kᵀ after.
    grads: &'a mut [T],
    log_sums: &'a [T],
    /// The results of [`sum_weighted_gradients`].
    weighted_sums: &'a [T],
    scale: T,
}

impl<T: Float> NullaryFnOnce for DifferentiateScores<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let keys = self.block.keys;
        let rows = self.weights.chunks_exact_mut(keys).zip(self.grads.chunks_exact_mut(keys));
        for (row, (weights, grads)) in rows.take(self.block.queries).enumerate() {
            let query = self.block.first_query + row;
            let log_sum = self.log_sums[query];
            let weighted_sum = self.weighted_sums[query];
            let [before, seen, after] = self.block.split_row(row, weights);
            let [grads_before, grads, grads_after] = self.block.split_row(row, grads);
            for score in &mut *seen {
                *score -= log_sum;
            }
            exp_in_place(seen);
            for (&mut weight, grad) in seen.iter_mut().zip(grads) {
                *grad = weight * (*grad - weighted_sum) * self.scale;
            }
            for hidden in [before, after, grads_before, grads_after] {
                hidden.fill(T::ZERO);
            }
        }
    }
}
