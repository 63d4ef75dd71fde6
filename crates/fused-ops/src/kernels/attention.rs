//! Attention, block by block: softmax(q·kᵀ·scale + mask)·v for each head, without the matrix of all
//! scores.
//!
//! A task has one head of one sequence and goes over blocks of queries and blocks of keys. Going
//! forward, a block of scores becomes weights relative to the largest score so far, and what was
//! summed before shrinks when a larger one comes (Milakov and Gimelshein, "Online normalizer
//! calculation for softmax", arXiv 1805.02867; Dao et al., "FlashAttention", arXiv 2205.14135).
//! What is kept for the backward pass is one number per query, the logarithm of its sum of exponentials,
//! from which the weights are computed a second time.
//!
//! A causal query's keys end at itself, so blocks beyond are not computed: half of the work.

#![allow(unsafe_code, reason = "tasks write disjoint heads of one vector, whose rows interleave")]

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{
    float::Float,
    lanes::{max, sum1, sum2},
    matmul::{Matrix, Place, Store, Threads, multiply, multiply_into},
    memory::vec_written_by,
    vectorized,
};

/// Queries per block.
const QUERIES: usize = 64;

/// Keys per block: the scores of a block and their gradients fit into a core's second-level cache.
const KEYS: usize = 256;

/// Where [batch, length, heads, size] lies; the elements of a head's row are neighbors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Of the first element.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) count: usize,
    pub(crate) size: usize,
    pub(crate) batch_stride: usize,
    pub(crate) row_stride: usize,
    pub(crate) head_stride: usize,
}

impl Heads {
    /// Rows of `width` elements one after another, in which the heads stand from column `column`
    /// on.
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

    /// Where a row of a head starts.
    fn start(self, (batch, head): (usize, usize), row: usize) -> usize {
        self.offset + batch * self.batch_stride + head * self.head_stride + row * self.row_stride
    }

    /// Rows of a head.
    fn place(self, rows: usize) -> Place {
        Place::rows(rows, self.size, self.row_stride)
    }

    /// `rows` rows of a head from row `first` on.
    fn of<T: Float>(
        self,
        data: &[T],
        head: (usize, usize),
        first: usize,
        rows: usize,
    ) -> Matrix<'_, T> {
        Matrix::new(&data[self.start(head, first)..], self.place(rows))
    }

    fn row<T>(self, data: &[T], head: (usize, usize), row: usize) -> &[T] {
        &data[self.start(head, row)..][..self.size]
    }
}

/// What is added to the scores: [batch, heads, queries, keys], with strides of 0 where one element
/// serves many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) strides: [usize; 4],
}

impl<T: Float> Mask<'_, T> {
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
pub(crate) struct Inputs<'a, T> {
    pub(crate) batch: usize,
    pub(crate) query: (&'a [T], Heads),
    pub(crate) key: (&'a [T], Heads),
    pub(crate) value: (&'a [T], Heads),
    pub(crate) scale: T,
    pub(crate) causal: bool,
    /// How many keys each sequence has, from 1 to the length of the keys.
    pub(crate) key_lengths: Option<&'a [usize]>,
    pub(crate) mask: Option<Mask<'a, T>>,
}

/// How many keys the queries of one sequence see.
#[derive(Clone, Copy, Debug)]
struct Visible {
    keys: usize,
    /// How many the first query sees, if it does not see the keys of later ones.
    first: Option<usize>,
}

impl Visible {
    #[inline(always)]
    fn of(self, query: usize) -> usize {
        self.first.map_or(self.keys, |first| (first + query).min(self.keys))
    }
}

impl<T: Float> Inputs<'_, T> {
    /// The heads of the queries that share one head of the keys.
    fn group(&self) -> usize {
        self.query.1.count / self.key.1.count
    }

    fn visible(&self, batch: usize) -> Visible {
        let keys = self.key_lengths.map_or(self.key.1.length, |lengths| lengths[batch]);
        // The last query is the last key's, so the queries of a cached sequence see what came
        // before.
        let first = self.causal.then(|| self.key.1.length - self.query.1.length + 1);
        Visible { keys, first }
    }

    /// The scores of a block, in rows of as many elements as it has keys.
    fn scores(&self, block: &Block, out: &mut [T]) {
        let Block { head: (batch, head), first_query, queries, first_key, keys, .. } = *block;
        let query = self.query.1.of(self.query.0, (batch, head), first_query, queries);
        let key = self.key.1.of(self.key.0, block.key_head(self), first_key, keys);
        let place = Place::rows(queries, keys, keys);
        multiply_into(out, place, query, key.t(), Store::Set, self.scale);
        if let Some(mask) = self.mask {
            for (row, scores) in out.chunks_exact_mut(keys).take(queries).enumerate() {
                mask.add((batch, head), first_query + row, first_key, scores);
            }
        }
    }
}

/// Some queries of one head, and some keys.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Of which sequence, and which head of the queries.
    head: (usize, usize),
    visible: Visible,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
}

impl Block {
    fn key_head<T: Float>(&self, inputs: &Inputs<'_, T>) -> (usize, usize) {
        (self.head.0, self.head.1 / inputs.group())
    }

    /// How many keys of the block a row of it sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> usize {
        self.visible.of(self.first_query + row).saturating_sub(self.first_key).min(self.keys)
    }
}

/// The blocks of a head of the queries in which anything is seen: those of some queries one after
/// another.
fn blocks<T: Float>(inputs: &Inputs<'_, T>, head: (usize, usize)) -> impl Iterator<Item = Block> {
    let length = inputs.query.1.length;
    let visible = inputs.visible(head.0);
    (0..length).step_by(QUERIES).flat_map(move |first_query| {
        let queries = QUERIES.min(length - first_query);
        let end = visible.of(first_query + queries - 1);
        (0..end).step_by(KEYS).map(move |first_key| {
            let keys = KEYS.min(end - first_key);
            Block { head, visible, first_query, queries, first_key, keys }
        })
    })
}

/// Elements of the scores of the largest block.
fn block_elements<T: Float>(inputs: &Inputs<'_, T>) -> usize {
    QUERIES.min(inputs.query.1.length) * KEYS.min(inputs.key.1.length)
}

/// A vector that several tasks write, each its own heads.
struct Shared<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: an address and a length, whose use is `unsafe` and bound to heads that one task alone
// has.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T: Float> Shared<T> {
    /// Writes or adds a product to rows of a head.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes this head meanwhile, and the rows have been written if the
    /// product is added to them.
    unsafe fn multiply(
        &self,
        heads: Heads,
        (head, first): ((usize, usize), usize),
        a: Matrix<'_, T>,
        b: Matrix<'_, T>,
        store: Store,
        rows: usize,
    ) {
        // SAFETY: all rows are inside, and nobody else uses them, as the caller promises. Rows of a
        // head do not overlap: their stride is at least its size.
        unsafe {
            let out = self.row(heads, head, first, rows);
            multiply(out, heads.place(rows), a, b, store, T::ONE, Threads::One);
        }
    }

    /// The address of row `first` of a head, which `rows - 1` more follow.
    ///
    /// # Safety
    ///
    /// It is used as the caller of [`multiply`](Self::multiply) must.
    unsafe fn row(&self, heads: Heads, head: (usize, usize), first: usize, rows: usize) -> *mut T {
        let end = heads.start(head, first + rows - 1) + heads.size;
        assert!(end <= self.len, "a head reaches beyond its vector");
        // SAFETY: the start lies before the end, which is inside.
        unsafe { self.start.add(heads.start(head, first)) }
    }

    /// Row `row` of a head.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes this head meanwhile, and the row has been written.
    #[expect(clippy::mut_from_ref, reason = "the task that has the head is the only one to use it")]
    unsafe fn row_mut(&self, heads: Heads, head: (usize, usize), row: usize) -> &mut [T] {
        // SAFETY: the row is inside, written, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.row(heads, head, row, 1), heads.size) }
    }

    /// Writes zeros to all rows of a head.
    ///
    /// # Safety
    ///
    /// Nobody else reads or writes this head meanwhile.
    unsafe fn clear(&self, heads: Heads, head: (usize, usize)) {
        for row in 0..heads.length {
            // SAFETY: the row is inside and nobody else's, and zeros are written to all of it.
            unsafe { self.row(heads, head, row, 1).write_bytes(0, heads.size) };
        }
    }
}

/// The results as [batch, queries, heads, size of the values], and for each query of each head, as
/// [batch, heads, queries], the logarithm of the sum of exponentials of its scores.
pub(crate) fn forward<T: Float>(inputs: &Inputs<'_, T>) -> (Vec<T>, Vec<T>) {
    let place = place_of_results(inputs);
    let Heads { length, count: heads, size, .. } = place;
    let mut log_sums = vec![T::ZERO; inputs.batch * heads * length];
    let len = log_sums.len() * size;
    // SAFETY: there is a task for each head of each sequence, which writes all rows of it: the
    // blocks of a head include one of the first key for each query, and that one writes.
    let out = unsafe {
        vec_written_by(len, |start| {
            let out = Shared { start, len };
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

/// One head of one sequence.
fn forward_head<T: Float>(
    inputs: &Inputs<'_, T>,
    head: (usize, usize),
    out: &Shared<T>,
    place: Heads,
    scores: &mut [T],
    log_sums: &mut [T],
) {
    let mut rows = Rows::new(log_sums.len());
    for block in blocks(inputs, head) {
        let Block { first_query, queries, first_key, keys, .. } = block;
        inputs.scores(&block, scores);
        vectorized(Weigh { block, scores, rows: &mut rows });
        let store = if first_key == 0 { Store::Set } else { Store::Add };
        let weights = Matrix::contiguous(scores, queries, keys);
        let value = inputs.value.1.of(inputs.value.0, block.key_head(inputs), first_key, keys);
        // SAFETY: this head is this task's alone, and the block of the first keys has written these
        // rows before any that adds to them.
        unsafe {
            if store == Store::Add {
                for query in first_query..first_query + queries {
                    let row = out.row_mut(place, head, query);
                    vectorized(Multiply { row, factor: rows.shrink[query] });
                }
            }
            out.multiply(place, (head, first_query), weights, value, store, queries);
        }
    }
    for (query, log_sum) in log_sums.iter_mut().enumerate() {
        // SAFETY: this head is this task's alone, and all of its rows have been written above.
        let row = unsafe { out.row_mut(place, head, query) };
        vectorized(Multiply { row, factor: T::ONE / rows.sum[query] });
        *log_sum = rows.top[query] + rows.sum[query].ln();
    }
}

/// What is known of the queries of a head after some blocks of keys.
struct Rows<T> {
    /// The largest score, or 0 if all were −∞.
    top: Vec<T>,
    /// The sum of exponentials of the scores less the largest.
    sum: Vec<T>,
    /// What the last block multiplied by whatever was summed before.
    shrink: Vec<T>,
}

impl<T: Float> Rows<T> {
    fn new(len: usize) -> Self {
        Self { top: vec![-T::INFINITY; len], sum: vec![T::ZERO; len], shrink: vec![T::ONE; len] }
    }
}

/// Makes weights of the scores of a block.
struct Weigh<'a, T> {
    block: Block,
    scores: &'a mut [T],
    rows: &'a mut Rows<T>,
}

impl<T: Float> NullaryFnOnce for Weigh<'_, T> {
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
struct Multiply<'a, T> {
    row: &'a mut [T],
    factor: T,
}

impl<T: Float> NullaryFnOnce for Multiply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.row {
            *x *= self.factor;
        }
    }
}

/// What the forward pass has left, and the gradient of its result; all as [batch, queries, heads,
/// size].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results<'a, T> {
    pub(crate) out: &'a [T],
    pub(crate) grad: &'a [T],
    pub(crate) log_sums: &'a [T],
}

/// Where the gradients of query, key and value are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Targets {
    pub(crate) query: Heads,
    pub(crate) key: Heads,
    pub(crate) value: Heads,
}

/// The gradients of packed queries, keys and values, in one vector.
pub(crate) fn backward_packed<T: Float>(
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
    len: usize,
) -> Vec<T> {
    let targets = Targets { query: inputs.query.1, key: inputs.key.1, value: inputs.value.1 };
    // SAFETY: packed rows consist of the heads of queries, keys and values, all of which are
    // written.
    unsafe {
        vec_written_by(len, |start| {
            let out = || Shared { start, len };
            backward(inputs, results, targets, &[out(), out(), out()]);
        })
    }
}

/// The gradients of queries, keys and values, each as [batch, length, heads, size].
pub(crate) fn backward_separate<T: Float>(
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
) -> [Vec<T>; 3] {
    let dense = |heads: Heads| {
        let Heads { length, count, size, .. } = heads;
        Heads::packed(length, count, size, count * size, 0)
    };
    let len = |heads: Heads| inputs.batch * heads.length * heads.count * heads.size;
    let targets = Targets {
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
                        Shared { start: of_query, len: query },
                        Shared { start: of_key, len: key },
                        Shared { start: of_value, len: value },
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
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
    targets: Targets,
    out: &[Shared<T>; 3],
) {
    let key_heads = inputs.key.1.count;
    (0..inputs.batch * key_heads).into_par_iter().for_each_init(
        || Scratch::new(block_elements(inputs)),
        |scratch, task| {
            let key_head = (task / key_heads, task % key_heads);
            // SAFETY: each head of the keys, and with it the heads of the queries that share it, is
            // one task's alone.
            unsafe { backward_head(inputs, results, targets, out, key_head, scratch) };
        },
    );
}

/// The weights of a block, and their gradients.
struct Scratch<T> {
    weights: Vec<T>,
    grads: Vec<T>,
}

impl<T: Float> Scratch<T> {
    fn new(elements: usize) -> Self {
        Self { weights: vec![T::ZERO; elements], grads: vec![T::ZERO; elements] }
    }
}

/// One head of the keys of one sequence, with the heads of the queries that share it.
///
/// # Safety
///
/// Nobody else reads or writes these heads of the gradients meanwhile.
unsafe fn backward_head<T: Float>(
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
    targets: Targets,
    out: &[Shared<T>; 3],
    key_head: (usize, usize),
    scratch: &mut Scratch<T>,
) {
    let [_, of_key, of_value] = out;
    // SAFETY: the heads are this task's alone, as the caller promises.
    unsafe {
        of_key.clear(targets.key, key_head);
        of_value.clear(targets.value, key_head);
    }
    let Heads { length, count: heads, .. } = inputs.query.1;
    let batch = key_head.0;
    let group = inputs.group();
    for head in key_head.1 * group..(key_head.1 + 1) * group {
        let along = along(inputs, results, (batch, head));
        let log_sums = &results.log_sums[(batch * heads + head) * length..][..length];
        for block in blocks(inputs, (batch, head)) {
            scratch.fill(inputs, results, block, log_sums, &along);
            // SAFETY: the heads are this task's alone, as the caller promises. Those of keys and
            // values have been cleared, and of a query's blocks the one of the first keys, which
            // writes, comes before those that add.
            unsafe { add_block(inputs, results, targets, out, &block, scratch) };
        }
    }
}

/// Where results of a head and their gradients lie.
fn place_of_results<T: Float>(inputs: &Inputs<'_, T>) -> Heads {
    let (Heads { length, count, .. }, size) = (inputs.query.1, inputs.value.1.size);
    Heads::packed(length, count, size, count * size, 0)
}

/// For each query the sum of its weights times their gradients, found as that of its result times
/// the result's.
fn along<T: Float>(
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
    head: (usize, usize),
) -> Vec<T> {
    let place = place_of_results(inputs);
    let row = |row| {
        let x = place.row(results.out, head, row);
        let y = place.row(results.grad, head, row);
        vectorized(Dot { x, y })
    };
    (0..place.length).map(row).collect()
}

impl<T: Float> Scratch<T> {
    /// The weights of a block, and the gradients of q·kᵀ.
    fn fill(
        &mut self,
        inputs: &Inputs<'_, T>,
        results: Results<'_, T>,
        block: Block,
        log_sums: &[T],
        along: &[T],
    ) {
        let Block { head, first_query, queries, first_key, keys, .. } = block;
        inputs.scores(&block, &mut self.weights);
        let grad = place_of_results(inputs).of(results.grad, head, first_query, queries);
        let value = inputs.value.1.of(inputs.value.0, block.key_head(inputs), first_key, keys);
        let rows = Place::rows(queries, keys, keys);
        multiply_into(&mut self.grads, rows, grad, value.t(), Store::Set, T::ONE);
        let weights = &mut self.weights[..];
        let grads = &mut self.grads[..];
        let scale = inputs.scale;
        vectorized(Unweigh { block, weights, grads, log_sums, along, scale });
    }
}

/// Adds what a block contributes to the gradients of its queries, keys and values.
///
/// # Safety
///
/// Nobody else reads or writes these heads of the gradients meanwhile. Those of keys and values
/// have been written, and those of the queries unless the block's keys are the first.
unsafe fn add_block<T: Float>(
    inputs: &Inputs<'_, T>,
    results: Results<'_, T>,
    targets: Targets,
    [of_query, of_key, of_value]: &[Shared<T>; 3],
    block: &Block,
    scratch: &Scratch<T>,
) {
    let Block { head, first_query, queries, first_key, keys, .. } = *block;
    let key_head = block.key_head(inputs);
    let weights = Matrix::contiguous(&scratch.weights, queries, keys).t();
    let grads = Matrix::contiguous(&scratch.grads, queries, keys);
    let query = inputs.query.1.of(inputs.query.0, head, first_query, queries);
    let key = inputs.key.1.of(inputs.key.0, key_head, first_key, keys);
    let grad = place_of_results(inputs).of(results.grad, head, first_query, queries);
    let store = if first_key == 0 { Store::Set } else { Store::Add };
    let queries_at = (head, first_query);
    let keys_at = (key_head, first_key);
    // SAFETY: as the caller promises.
    unsafe {
        of_query.multiply(targets.query, queries_at, grads, key, store, queries);
        of_key.multiply(targets.key, keys_at, grads.t(), query, Store::Add, keys);
        of_value.multiply(targets.value, keys_at, weights, grad, Store::Add, keys);
    }
}

/// The sum of products of two rows.
struct Dot<'a, T> {
    x: &'a [T],
    y: &'a [T],
}

impl<T: Float> NullaryFnOnce for Dot<'_, T> {
    type Output = T;

    #[inline(always)]
    fn call(self) -> T {
        sum2(self.x, self.y, |x, y| x * y)
    }
}

/// Makes weights of scores, and gradients of scores of those of weights.
struct Unweigh<'a, T> {
    block: Block,
    /// Scores before, weights after.
    weights: &'a mut [T],
    /// Gradients of the weights before, of q·kᵀ after.
    grads: &'a mut [T],
    log_sums: &'a [T],
    /// See [`along`].
    along: &'a [T],
    scale: T,
}

impl<T: Float> NullaryFnOnce for Unweigh<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let keys = self.block.keys;
        let rows = self.weights.chunks_exact_mut(keys).zip(self.grads.chunks_exact_mut(keys));
        for (row, (weights, grads)) in rows.take(self.block.queries).enumerate() {
            let query = self.block.first_query + row;
            let log_sum = self.log_sums[query];
            let along = self.along[query];
            let visible = self.block.visible(row);
            for (weight, grad) in weights[..visible].iter_mut().zip(&mut grads[..visible]) {
                *weight = (*weight - log_sum).exp();
                *grad = *weight * (*grad - along) * self.scale;
            }
            weights[visible..].fill(T::ZERO);
            grads[visible..].fill(T::ZERO);
        }
    }
}
