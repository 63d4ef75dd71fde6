//! Outputs of shared work: reductions and concatenations.

use std::{iter, ops::Range, sync::OnceLock};

use candle_core::{CpuStorage, DType, Device, Result, Shape, Tensor, Var, WithDType, bail};
use half::{bf16, f16};

use crate::reduce::{
    Reduction, dispatch,
    element::ReduceElement,
    kernel::{SumDestination, Summands, reduce},
    shared_buffer::SharedBuffer,
    shared_work::{self, SharedOutput},
};

/// Plans the reduction of a range of the items of contiguous tensors on the processor. The result
/// is a tensor of shape `shape`.
pub(crate) fn reduce_output(
    summands: Vec<Tensor>,
    items: Range<usize>,
    shape: Shape,
    reduction: Reduction,
) -> Result<SharedOutput> {
    let [first, ..] = &summands[..] else { bail!("nothing to reduce") };
    dispatch!(first.dtype(), reduce_typed(summands, items, shape, reduction))
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "the dispatch on the dtype returns an error for other types"
)]
fn reduce_typed<T: ReduceElement>(
    summands: Vec<Tensor>,
    items: Range<usize>,
    shape: Shape,
    reduction: Reduction,
) -> Result<SharedOutput> {
    let chunks: Vec<Range<usize>> =
        chunks(0..items.len(), shared_work::chunk_items(items.len(), size_of::<T>())).collect();
    let n_chunks = chunks.len();
    let buffer = LazyBuffer::<T>::new(chunks);
    Ok(SharedOutput::new(n_chunks, move |chunk| {
        let buffer = buffer.get();
        let part = buffer.part(chunk);
        let part_items = items.start + part.start..items.start + part.end;
        let all_sums =
            buffer.fill(chunk, |sums| reduce::<T>(&summands[..], reduction, part_items, sums))?;
        all_sums.map(|sums| Tensor::from_vec(sums, &shape, &Device::Cpu)).transpose()
    }))
}

/// The concatenation of the items of several tensors into one tensor.
pub(crate) struct Concatenation {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// Contiguous tensors on the processor, in the order of their items.
    pub(crate) parts: Vec<Tensor>,
    /// Whether the result is a leaf of candle's graph, so that it gets a gradient.
    pub(crate) is_leaf: bool,
}

/// Plans a concatenation.
pub(crate) fn concat_output(concatenation: Concatenation) -> Result<SharedOutput> {
    match concatenation.dtype {
        DType::F32 => concat_typed(Vec::<f32>::new(), concatenation),
        DType::F64 => concat_typed(Vec::<f64>::new(), concatenation),
        DType::BF16 => concat_typed(Vec::<bf16>::new(), concatenation),
        DType::F16 => concat_typed(Vec::<f16>::new(), concatenation),
        DType::U8 => concat_typed(Vec::<u8>::new(), concatenation),
        DType::U32 => concat_typed(Vec::<u32>::new(), concatenation),
        DType::I16 => concat_typed(Vec::<i16>::new(), concatenation),
        DType::I32 => concat_typed(Vec::<i32>::new(), concatenation),
        DType::I64 => concat_typed(Vec::<i64>::new(), concatenation),
        DType::F8E4M3 => {
            // This crate does not depend on the crate that defines the 8-bit type, so the type is
            // inferred from candle's variant.
            let items = Vec::new();
            let storage = CpuStorage::F8E4M3(items);
            let CpuStorage::F8E4M3(items) = storage else { bail!("a storage has one type") };
            concat_typed(items, concatenation)
        }
        other => bail!("tensors of type {} cannot be put together", other.as_str()),
    }
}

/// Plans a concatenation of items of type `T`; `_type` only tells the compiler this type.
#[expect(
    clippy::unnecessary_wraps,
    reason = "the dispatch on the dtype returns an error for other types"
)]
fn concat_typed<T: WithDType>(_type: Vec<T>, concatenation: Concatenation) -> Result<SharedOutput> {
    let Concatenation { shape, parts, is_leaf, .. } = concatenation;
    let step = shared_work::chunk_items(shape.elem_count(), size_of::<T>());
    // For each chunk of the result: the index of its part, and the part's start in the result.
    let mut sources = Vec::new();
    // The range of each chunk in the result.
    let mut places = Vec::new();
    let mut end = 0;
    for (n, part) in parts.iter().enumerate().filter(|(_, part)| part.elem_count() > 0) {
        let start = end;
        end += part.elem_count();
        for place in chunks(start..end, step) {
            sources.push((n, start));
            places.push(place);
        }
    }
    if places.is_empty() {
        places.push(0..0);
    }
    let n_chunks = places.len();
    let buffer = LazyBuffer::<T>::new(places);
    Ok(SharedOutput::new(n_chunks, move |chunk| {
        let buffer = buffer.get();
        let place = buffer.part(chunk);
        let all_items = buffer.fill(chunk, |unfilled| match sources.get(chunk) {
            // An empty result has one chunk without a source.
            None => Ok(()),
            Some(&(n, start)) => {
                let part_items = place.start - start..place.end - start;
                parts.lend(n, part_items, |items: &[T]| {
                    unfilled.push_items(items);
                })
            }
        })?;
        all_items.map(|items| result_tensor(items, &shape, is_leaf)).transpose()
    }))
}

/// Converts the items of a result to a tensor.
fn result_tensor<T: WithDType>(items: Vec<T>, shape: &Shape, is_leaf: bool) -> Result<Tensor> {
    if is_leaf {
        Var::from_vec(items, shape, &Device::Cpu).map(Var::into_inner)
    } else {
        Tensor::from_vec(items, shape, &Device::Cpu)
    }
}

/// A buffer that is allocated by the first thread that fills a chunk. If only one member wants the
/// result, that thread is usually this member's, and its allocator returns the same cached memory
/// in every round.
struct LazyBuffer<T> {
    parts: Vec<Range<usize>>,
    buffer: OnceLock<SharedBuffer<T>>,
}

impl<T: Copy> LazyBuffer<T> {
    fn new(parts: Vec<Range<usize>>) -> Self {
        Self { parts, buffer: OnceLock::new() }
    }

    fn get(&self) -> &SharedBuffer<T> {
        self.buffer.get_or_init(|| SharedBuffer::new(self.parts.clone()))
    }
}

/// Splits a range into chunks of `step` items, of which the last may be shorter. An empty range is
/// one chunk.
fn chunks(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = range;
    let first = start..end.min(start.saturating_add(step));
    iter::successors(Some(first), move |chunk| {
        (chunk.end < end).then(|| chunk.end..end.min(chunk.end.saturating_add(step)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::shared_work::SharedWork;

    fn run_alone(output: SharedOutput) -> Tensor {
        let work = SharedWork::new(vec![output], 3);
        assert!(work.run_chunks(1));
        work.result(0).unwrap()
    }

    #[test]
    fn chunks_cover_the_range() {
        for len in [0, 1, 6, 7, 8, 21] {
            let cut: Vec<_> = chunks(3..3 + len, 7).collect();
            assert_eq!((cut[0].start, cut[cut.len() - 1].end), (3, 3 + len));
            assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(cut.len(), len.div_ceil(7).max(1));
        }
    }

    #[test]
    fn f8_and_nan_keep_their_bits() {
        let bits = [f32::from_bits(0x7f80_0001), f32::NAN, -0.0, 1.5];
        let part = Tensor::new(&bits, &Device::Cpu).unwrap();
        let eight_bits = part.to_dtype(DType::F8E4M3).unwrap();
        let concatenation = |part: &Tensor| Concatenation {
            dtype: part.dtype(),
            shape: 4.into(),
            parts: vec![part.clone()],
            is_leaf: true,
        };
        let whole = run_alone(concat_output(concatenation(&part)).unwrap());
        let moved: Vec<u32> =
            whole.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
        assert_eq!(moved, bits.map(f32::to_bits));
        assert!(whole.is_variable());
        let whole = run_alone(concat_output(concatenation(&eight_bits)).unwrap());
        assert_eq!(whole.dtype(), DType::F8E4M3);
        let numbers = whole.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers[3].to_bits(), 1.5_f32.to_bits());
    }
}
