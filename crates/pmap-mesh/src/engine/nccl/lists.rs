//! Lists of tensors that are summed at once: what of them goes together.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

use crate::mesh::place::in_one_piece;

/// How many bytes of small tensors are put together: some milliseconds of a fast link, beside which
/// the start of a transfer does not count; more would only take memory.
const BUCKET_BYTES: usize = 64 << 20;

/// The numbers of tensors of one type, in order, cut into buckets; the same for all lists of the
/// same shapes.
pub(super) fn buckets(list: &[Tensor]) -> Vec<Vec<usize>> {
    let mut of_types: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (n, x) in list.iter().enumerate() {
        of_types.entry(x.dtype().as_str()).or_default().push(n);
    }
    of_types.values().flat_map(|of_type| buckets_of(list, of_type)).collect()
}

fn buckets_of(list: &[Tensor], of_type: &[usize]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut room = 0;
    for &n in of_type {
        let bytes = list[n].elem_count() * list[n].dtype().size_in_bytes();
        if let Some(bucket) = buckets.last_mut().filter(|_| bytes <= room) {
            bucket.push(n);
        } else {
            buckets.push(vec![n]);
            room = BUCKET_BYTES;
        }
        room = room.saturating_sub(bytes);
    }
    buckets
}

/// The tensors of a bucket end to end.
pub(super) fn joined(list: &[Tensor], bucket: &[usize]) -> Result<Tensor> {
    let parts: Vec<Tensor> =
        bucket.iter().map(|&n| in_one_piece(&list[n])?.flatten_all()).collect::<Result<_>>()?;
    match <[Tensor; 1]>::try_from(parts) {
        Ok([only]) => Ok(only),
        Err(parts) => Tensor::cat(&parts, 0),
    }
}

/// What [`joined`] made of a bucket, as tensors of their shapes, with their numbers.
pub(super) fn cut(
    list: &[Tensor],
    bucket: &[usize],
    joined: &Tensor,
) -> Result<Vec<(usize, Tensor)>> {
    let mut start = 0;
    let part = |&n: &usize| {
        let x = &list[n];
        let part = joined.narrow(0, start, x.elem_count())?.reshape(x.shape())?;
        start += x.elem_count();
        Ok((n, part))
    };
    bucket.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn a_bucket_is_cut_into_what_it_was_joined_of() {
        let list: Vec<Tensor> =
            (0..4).map(|n| Tensor::full(n as f32, (n, 2), &Device::Cpu).unwrap()).collect();
        let joined = joined(&list, &[1, 0, 3]).unwrap();
        assert_eq!(joined.dims(), [8]);
        for (n, part) in cut(&list, &[1, 0, 3], &joined).unwrap() {
            assert_eq!(part.to_vec2::<f32>().unwrap(), list[n].to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn a_bucket_holds_tensors_of_one_type_that_have_room_in_order() {
        let zeros = |items, dtype| Tensor::zeros(items, dtype, &Device::Cpu).unwrap();
        let large = zeros(BUCKET_BYTES / 4 - 1, DType::F32);
        let small = zeros(1, DType::F32);
        let other = zeros(1, DType::F64);
        let list =
            [small.clone(), large.clone(), other.clone(), small.clone(), large, small, other];
        assert_eq!(buckets(&list), [vec![0, 1], vec![3, 4], vec![5], vec![2, 6]]);
        assert!(buckets(&[]).is_empty());
    }
}
