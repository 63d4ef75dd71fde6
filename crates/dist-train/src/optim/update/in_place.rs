//! Updates on the processor: every number is read and written once, and nothing of a variable's
//! size is allocated.
//!
//! Of the loop over items the compiler makes vectors; multiplications and additions are never fused,
//! so all round alike.

use std::ops::Range;

use candle_core::{CpuStorage, Result, WithDType, backend::BackendStorage, bail};
use half::slice::HalfFloatSliceExt;

use super::{Rule, items::Items, numbers::Real, open::Opened};

/// Items of the fewest that are worth a task of their own: some 10 µs.
const TASK: usize = 1 << 14;

/// Items that are worked on one after the other, so that what is read for them stays in the
/// first-level cache.
const BLOCK: usize = 1 << 10;

/// Items that are worked on together: as many as fill the widest vector.
const LANES: usize = 16;

/// Updates numbers and their state, opened in this order, by the items of a gradient; and, if they
/// are masters, what is opened last and rounded from them.
///
/// The work is divided among the threads of the pool that the caller is in. Items are computed one
/// by one, so their bits do not depend on it.
///
/// # Errors
///
/// If they are of types that are not updated.
pub(super) fn update<const N: usize, R: Rule<N>>(
    rule: &R,
    mut opened: Vec<Opened<'_>>,
    grads: Items<'_>,
) -> Result<()> {
    let is_master = opened.len() > N + 1;
    match opened.pop_if(|_| is_master) {
        None if matches!(opened[0].0, CpuStorage::F64(_)) => {
            Job::<f64, _, N>::new(opened, (), grads)?.run(rule);
        }
        None => Job::<f32, _, N>::new(opened, (), grads)?.run(rule),
        Some((CpuStorage::F16(halves), range)) => {
            Job::new(opened, &mut halves[range], grads)?.run(rule);
        }
        Some((CpuStorage::BF16(halves), range)) => {
            Job::new(opened, &mut halves[range], grads)?.run(rule);
        }
        Some((other, _)) => bail!("variables of {:?} are not updated in place", other.dtype()),
    }
    Ok(())
}

/// Some items of a variable, and all that belongs to them.
struct Job<'a, T, C, const N: usize> {
    values: &'a mut [T],
    states: [&'a mut [T]; N],
    copy: C,
    grads: Items<'a>,
    /// The position of the first item in the gradient.
    start: usize,
}

impl<'a, T: Real, C: RoundedCopy<T>, const N: usize> Job<'a, T, C, N> {
    fn new(opened: Vec<Opened<'a>>, copy: C, grads: Items<'a>) -> Result<Self> {
        let slice = |(storage, range)| Ok(&mut T::slice_mut(storage)?[range]);
        let mut slices = opened.into_iter().map(slice).collect::<Result<Vec<_>>>()?;
        let values = slices.remove(0);
        match slices.try_into() {
            Ok(states) => Ok(Self { values, states, copy, grads, start: 0 }),
            Err(slices) => bail!("{} tensors of state are open, not {N}", slices.len()),
        }
    }

    fn run<R: Rule<N>>(mut self, rule: &R) {
        if self.values.len() <= TASK {
            return self.work(rule);
        }
        let rest = self.split_off(self.values.len() / 2);
        rayon::join(|| self.run(rule), || rest.run(rule));
    }

    /// Keeps the items before `middle`, and returns the others.
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
            let grads = self.start + block.start..self.start + block.end;
            let grads = self.grads.read(grads, &mut buffer);
            let values = &mut self.values[block.clone()];
            let states = self.states.each_mut().map(|state| &mut state[block.clone()]);
            self.copy.adopt(block.clone(), values);
            apply(rule, values, states, grads);
            self.copy.store(block, values);
        }
    }
}

/// Keeps the items before `middle`, and returns the others.
#[expect(clippy::mut_mut, reason = "as `split_off_mut` wants it")]
fn tail<'a, T>(items: &mut &'a mut [T], middle: usize) -> &'a mut [T] {
    #[expect(clippy::expect_used, reason = "callers cut within what there is")]
    items.split_off_mut(middle..).expect("the middle is no more than the length")
}

fn apply<T: Real, R: Rule<N>, const N: usize>(
    rule: &R,
    values: &mut [T],
    mut states: [&mut [T]; N],
    grads: &[T],
) {
    let whole = values.len() - values.len() % LANES;
    let (values, last_values) = values.split_at_mut(whole);
    let last_states = states.each_mut().map(|state| tail(state, whole));
    apply_by::<LANES, _, _, _>(rule, values, states, &grads[..whole]);
    apply_by::<1, _, _, _>(rule, last_values, last_states, &grads[whole..]);
}

/// Updates as many items together as there are lanes, of which the compiler makes vectors. They are
/// copied, since it does not know that the slices do not overlap.
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

/// What variables hold if they are not what is calculated with.
trait RoundedCopy<T>: Send + Sized {
    /// Keeps the items before `middle`, and returns the others.
    fn split_off(&mut self, middle: usize) -> Self;

    /// Where somebody has set the variable since it was rounded from `values`, gives them its
    /// items.
    fn adopt(&self, block: Range<usize>, values: &mut [T]);

    /// Rounds `values`.
    fn store(&mut self, block: Range<usize>, values: &[T]);
}

/// Variables that are calculated with have no copy.
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

    #[expect(clippy::cast_possible_truncation, reason = "a half is an f32 as well")]
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
