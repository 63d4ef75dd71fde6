//! What members of a group make together: reductions of what all have, and tensors put together of
//! what each has.

use std::{iter, ops::Range, sync::OnceLock};

use candle_core::{CpuStorage, DType, Device, Result, Shape, Tensor, Var, WithDType, bail};
use half::{bf16, f16};

use crate::reduce::{
    Reduction, dispatch,
    element::Element,
    joint::{self, Output},
    kernel::{Destination, Summands, reduce},
    shared_buffer::SharedBuffer,
};

/// The reduction of these items of contiguous tensors on the processor, as a tensor of this shape.
pub(crate) fn reduced(
    summands: Vec<Tensor>,
    items: Range<usize>,
    shape: Shape,
    reduction: Reduction,
) -> Result<Output> {
    let [first, ..] = &summands[..] else { bail!("nothing to reduce") };
    dispatch!(first.dtype(), reduced_of(summands, items, shape, reduction))
}

#[expect(clippy::unnecessary_wraps, reason = "for other types there is an error")]
fn reduced_of<T: Element>(
    summands: Vec<Tensor>,
    items: Range<usize>,
    shape: Shape,
    reduction: Reduction,
) -> Result<Output> {
    let pieces: Vec<Range<usize>> =
        pieces(0..items.len(), joint::piece_items(items.len(), size_of::<T>())).collect();
    let n_pieces = pieces.len();
    let buffer = LazyBuffer::<T>::new(pieces);
    Ok(Output::new(n_pieces, move |piece| {
        let buffer = buffer.get();
        let part = buffer.part(piece);
        let items = items.start + part.start..items.start + part.end;
        let filled =
            buffer.fill(piece, |sums| reduce::<T>(&summands[..], reduction, items, sums))?;
        filled.map(|items| Tensor::from_vec(items, &shape, &Device::Cpu)).transpose()
    }))
}

/// A tensor to be put together of the items of others.
pub(crate) struct Assembly {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// Contiguous tensors on the processor, in the order of their places, which follow each other.
    pub(crate) parts: Vec<Tensor>,
    /// Whether it becomes a leaf of candle's graph, under which a gradient is found.
    pub(crate) is_leaf: bool,
}

/// The items of all parts, one after the other.
pub(crate) fn assembled(assembly: Assembly) -> Result<Output> {
    match assembly.dtype {
        DType::F32 => assembled_of(Vec::<f32>::new(), assembly),
        DType::F64 => assembled_of(Vec::<f64>::new(), assembly),
        DType::BF16 => assembled_of(Vec::<bf16>::new(), assembly),
        DType::F16 => assembled_of(Vec::<f16>::new(), assembly),
        DType::U8 => assembled_of(Vec::<u8>::new(), assembly),
        DType::U32 => assembled_of(Vec::<u32>::new(), assembly),
        DType::I16 => assembled_of(Vec::<i16>::new(), assembly),
        DType::I32 => assembled_of(Vec::<i32>::new(), assembly),
        DType::I64 => assembled_of(Vec::<i64>::new(), assembly),
        DType::F8E4M3 => {
            // The crate of the type is no dependency: candle's own variant says which it is.
            let items = Vec::new();
            let of_this_type = CpuStorage::F8E4M3(items);
            let CpuStorage::F8E4M3(items) = of_this_type else { bail!("a storage has one type") };
            assembled_of(items, assembly)
        }
        other => bail!("tensors of type {} cannot be put together", other.as_str()),
    }
}

/// `_type` tells the type of the items.
#[expect(clippy::unnecessary_wraps, reason = "for other types there is an error")]
fn assembled_of<T: WithDType>(_type: Vec<T>, assembly: Assembly) -> Result<Output> {
    let Assembly { shape, parts, is_leaf, .. } = assembly;
    // For each piece of the result: of which part it is, and where that part begins in the result.
    let step = joint::piece_items(shape.elem_count(), size_of::<T>());
    let mut sources = Vec::new();
    let mut places = Vec::new();
    let mut end = 0;
    for (n, part) in parts.iter().enumerate().filter(|(_, part)| part.elem_count() > 0) {
        let start = end;
        end += part.elem_count();
        for place in pieces(start..end, step) {
            sources.push((n, start));
            places.push(place);
        }
    }
    if places.is_empty() {
        places.push(0..0);
    }
    let n_pieces = places.len();
    let buffer = LazyBuffer::<T>::new(places);
    Ok(Output::new(n_pieces, move |piece| {
        let buffer = buffer.get();
        let place = buffer.part(piece);
        let filled = buffer.fill(piece, |items| match sources.get(piece) {
            None => Ok(()),
            Some(&(n, start)) => {
                let items_of_part = place.start - start..place.end - start;
                parts.lend(n, items_of_part, |part: &[T]| {
                    items.take(part);
                })
            }
        })?;
        filled.map(|items| tensor(items, &shape, is_leaf)).transpose()
    }))
}

fn tensor<T: WithDType>(items: Vec<T>, shape: &Shape, is_leaf: bool) -> Result<Tensor> {
    if is_leaf {
        Var::from_vec(items, shape, &Device::Cpu).map(Var::into_inner)
    } else {
        Tensor::from_vec(items, shape, &Device::Cpu)
    }
}

/// A buffer that who fills its first part allocates: of what is for one member alone that is mostly
/// the member itself, to whom the allocator then gives, round after round, memory that its caches
/// hold.
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

/// A range in pieces of `step` items and a shorter last one; an empty range is one piece.
fn pieces(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = range;
    let first = start..end.min(start.saturating_add(step));
    iter::successors(Some(first), move |piece| {
        (piece.end < end).then(|| piece.end..end.min(piece.end.saturating_add(step)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::{REDUCIBLE, joint::SharedWork, same, whole};

    fn values(n: usize, items: usize, dtype: DType) -> Tensor {
        let value = |i: usize| ((i * 7919 + n * 104_729) % 251) as f32 * 0.5;
        Tensor::from_iter((0..items).map(value), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn made(output: Output) -> Tensor {
        let work = SharedWork::new(vec![output], 3);
        assert!(work.help(1));
        work.result(0).unwrap()
    }

    #[test]
    fn a_range_is_cut_without_gaps() {
        for len in [0, 1, 6, 7, 8, 21] {
            let cut: Vec<_> = pieces(3..3 + len, 7).collect();
            assert_eq!((cut[0].start, cut[cut.len() - 1].end), (3, 3 + len));
            assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(cut.len(), len.div_ceil(7).max(1));
        }
    }

    #[test]
    fn a_run_of_sums_is_that_run_of_the_whole_sum() {
        for dtype in REDUCIBLE {
            for (items, run) in
                [(0, 0..0), (5, 2..4), (70_001, 1..70_001), (70_001, 69_000..69_000)]
            {
                let summands: Vec<Tensor> = (0..3).map(|n| values(n, items, dtype)).collect();
                let whole = whole(&summands, Reduction::Sum).unwrap();
                let len = run.len();
                let sum = made(reduced(summands, run.clone(), len.into(), Reduction::Sum).unwrap());
                let expected = whole.narrow(0, run.start, len).unwrap().force_contiguous().unwrap();
                assert!(same(&sum, &expected).unwrap(), "{dtype:?} {run:?}");
            }
        }
    }

    #[test]
    fn parts_of_every_type_are_put_together_in_their_order() {
        for dtype in REDUCIBLE {
            let parts = [70_000, 0, 1, 20_000].map(|items| values(items, items, dtype)).to_vec();
            let expected = Tensor::cat(&parts, 0)
                .unwrap()
                .reshape((3, 30_000 + 1))
                .unwrap_or_else(|_| Tensor::cat(&parts, 0).unwrap());
            let shape = expected.shape().clone();
            let whole = made(assembled(Assembly { dtype, shape, parts, is_leaf: false }).unwrap());
            assert!(same(&whole, &expected).unwrap());
            assert!(!whole.is_variable());
        }
    }

    #[test]
    fn numbers_of_eight_bits_and_those_that_are_none_are_moved_as_they_are() {
        let bits = [f32::from_bits(0x7f80_0001), f32::NAN, -0.0, 1.5];
        let part = Tensor::new(&bits, &Device::Cpu).unwrap();
        let eight_bits = part.to_dtype(DType::F8E4M3).unwrap();
        let assembly = |part: &Tensor| Assembly {
            dtype: part.dtype(),
            shape: 4.into(),
            parts: vec![part.clone()],
            is_leaf: true,
        };
        let whole = made(assembled(assembly(&part)).unwrap());
        let moved: Vec<u32> =
            whole.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
        assert_eq!(moved, bits.map(f32::to_bits));
        assert!(whole.is_variable());
        let whole = made(assembled(assembly(&eight_bits)).unwrap());
        assert_eq!(whole.dtype(), DType::F8E4M3);
        let numbers = whole.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers[3].to_bits(), 1.5_f32.to_bits());
    }
}
