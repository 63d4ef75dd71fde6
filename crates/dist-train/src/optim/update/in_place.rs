//! In-place updates on the CPU: every number is read and written once, and nothing of a variable's
//! size is allocated.
//!
//! The compiler vectorizes the loop over items. Multiplications and additions are never fused, so
//! all items round alike.

use std::ops::Range;

use candle_core::{CpuStorage, Result, WithDType, backend::BackendStorage, bail};
use half::slice::HalfFloatSliceExt;

use super::{Rule, items::Items, numbers::Real, open::Opened};

/// Minimum number of items per task, worth about 10 µs.
const TASK: usize = 1 << 14;

/// Number of items updated before the next block, so that they stay in the first-level cache.
const BLOCK: usize = 1 << 10;

/// Number of items updated together, enough to fill the widest vector registers.
const LANES: usize = 16;

/// Updates values and their state by the items of a gradient. `opened` has the values first, then
/// the state tensors; a half-precision variable comes last, to be rounded from its master weights.
///
/// The threads of the caller's pool share the work. Items are computed independently, so the result
/// does not depend on the threads.
///
/// # Errors
///
/// Returns an error if the dtype is not supported.
pub(super) fn update<const N: usize, R: Rule<N>>(
    rule: &R,
    mut opened: Vec<Opened<'_>>,
    grads: Items<'_>,
) -> Result<()> {
    let has_master = opened.len() > N + 1;
    match opened.pop_if(|_| has_master) {
        None if matches!(opened[0].0, CpuStorage::F64(_)) => {
            UpdateJob::<f64, _, N>::new(opened, (), grads)?.run(rule);
        }
        None => UpdateJob::<f32, _, N>::new(opened, (), grads)?.run(rule),
        Some((CpuStorage::F16(halves), range)) => {
            UpdateJob::new(opened, &mut halves[range], grads)?.run(rule);
        }
        Some((CpuStorage::BF16(halves), range)) => {
            UpdateJob::new(opened, &mut halves[range], grads)?.run(rule);
        }
        Some((other, _)) => bail!("in-place updates do not support {:?} variables", other.dtype()),
    }
    Ok(())
}

/// A range of a variable's items, with their state and gradient.
struct UpdateJob<'a, T, C, const N: usize> {
    values: &'a mut [T],
    states: [&'a mut [T]; N],
    copy: C,
    grads: Items<'a>,
    /// The index of the first item in the gradient.
    start: usize,
}

impl<'a, T: Real, C: RoundedCopy<T>, const N: usize> UpdateJob<'a, T, C, N> {
    fn new(opened: Vec<Opened<'a>>, copy: C, grads: Items<'a>) -> Result<Self> {
        let mut slices = opened
            .into_iter()
            .map(|(storage, range)| Ok(&mut T::slice_mut(storage)?[range]))
            .collect::<Result<Vec<_>>>()?;
        let values = slices.remove(0);
        match slices.try_into() {
            Ok(states) => Ok(Self { values, states, copy, grads, start: 0 }),
            Err(slices) => bail!("expected {N} state tensors, got {}", slices.len()),
        }
    }

    fn run<R: Rule<N>>(mut self, rule: &R) {
        if self.values.len() <= TASK {
            return self.work(rule);
        }
        let rest = self.split_off(self.values.len() / 2);
        rayon::join(|| self.run(rule), || rest.run(rule));
    }

    /// Splits off the items from `middle` on.
    fn split_off(&mut self, middle: usize) -> Self {
        Self {
            values: tail(&mut self.values, middle),
            states: self.states.each_mut().map(|state| tail(state, middle)),
            copy: self.copy.split_off(middle),
            grads: self.grads,
            start: self.start + middle,
        }
    }

    fn work<R: Rule<N>>(mut self, rule: &R) {
        let mut buffer = [T::zero(); BLOCK];
        let len = self.values.len();
        for first in (0..len).step_by(BLOCK) {
            let block = first..len.min(first + BLOCK);
            let grad_range = self.start + block.start..self.start + block.end;
            let grads = self.grads.read(grad_range, &mut buffer);
            let values = &mut self.values[block.clone()];
            let states = self.states.each_mut().map(|state| &mut state[block.clone()]);
            self.copy.adopt(block.clone(), values);
            apply(rule, values, states, grads);
            self.copy.store(block, values);
        }
    }
}

/// Splits off the items from `middle` on.
#[expect(clippy::mut_mut, reason = "`split_off_mut` requires it")]
fn tail<'a, T>(items: &mut &'a mut [T], middle: usize) -> &'a mut [T] {
    #[expect(clippy::expect_used, reason = "callers split within the length")]
    items.split_off_mut(middle..).expect("`middle` is at most the length")
}

fn apply<T: Real, R: Rule<N>, const N: usize>(
    rule: &R,
    values: &mut [T],
    mut states: [&mut [T]; N],
    grads: &[T],
) {
    // The items in full vectors; the remaining items are updated one by one.
    let n_full = values.len() - values.len() % LANES;
    let (values, last_values) = values.split_at_mut(n_full);
    let last_states = states.each_mut().map(|state| tail(state, n_full));
    apply_by::<LANES, _, _, _>(rule, values, states, &grads[..n_full]);
    apply_by::<1, _, _, _>(rule, last_values, last_states, &grads[n_full..]);
}

/// Updates `L` items together, which the compiler vectorizes. The states are copied, because the
/// compiler cannot know that the slices do not overlap.
fn apply_by<const L: usize, T: Real, R: Rule<N>, const N: usize>(
    rule: &R,
    values: &mut [T],
    states: [&mut [T]; N],
    grads: &[T],
) {
    let mut states = states.map(|state| state.as_chunks_mut::<L>().0);
    let chunks = values.as_chunks_mut::<L>().0.iter_mut().zip(grads.as_chunks::<L>().0);
    for (chunk, (values, grads)) in chunks.enumerate() {
        let before = states.each_ref().map(|state| state[chunk]);
        let mut after = before;
        for lane in 0..L {
            let state = before.each_ref().map(|state| &state[lane]);
            let Ok((value, state)) = rule.apply(&values[lane], state, &grads[lane]);
            values[lane] = value;
            for (after, state) in after.iter_mut().zip(state) {
                after[lane] = state;
            }
        }
        for (state, after) in states.iter_mut().zip(after) {
            state[chunk] = after;
        }
    }
}

/// The half-precision copy of a variable with master weights.
trait RoundedCopy<T>: Send + Sized {
    /// Splits off the items from `middle` on.
    fn split_off(&mut self, middle: usize) -> Self;

    /// Overwrites `values` with the copy's items that changed since they were rounded from
    /// `values`.
    fn adopt(&self, block: Range<usize>, values: &mut [T]);

    /// Rounds `values` into the copy.
    fn store(&mut self, block: Range<usize>, values: &[T]);
}

/// Full-precision variables have no copy.
impl<T> RoundedCopy<T> for () {
    fn split_off(&mut self, _: usize) -> Self {}

    fn adopt(&self, _: Range<usize>, _: &mut [T]) {}

    fn store(&mut self, _: Range<usize>, _: &[T]) {}
}

impl<H: WithDType> RoundedCopy<f32> for &mut [H]
where
    [H]: HalfFloatSliceExt,
{
    fn split_off(&mut self, middle: usize) -> Self {
        tail(self, middle)
    }

    #[expect(clippy::cast_possible_truncation, reason = "every half is exact in f32")]
    fn adopt(&self, block: Range<usize>, values: &mut [f32]) {
        let mut rounded = [H::zero(); BLOCK];
        let rounded = &mut rounded[..block.len()];
        rounded.convert_from_f32_slice(values);
        if rounded.reinterpret_cast() == self[block.clone()].reinterpret_cast() {
            return;
        }
        for ((value, rounded), &item) in values.iter_mut().zip(rounded).zip(&self[block]) {
            if *rounded != item {
                *value = item.to_f64() as f32;
            }
        }
    }

    fn store(&mut self, block: Range<usize>, values: &[f32]) {
        self[block].convert_from_f32_slice(values);
    }
}
