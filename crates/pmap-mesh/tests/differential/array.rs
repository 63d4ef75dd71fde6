//! Tensors without candle, as lists of items.

use std::fmt;

use candle_core::{DType, Device, Tensor};

use crate::differential::bits::{self, FoldOp};

/// The number of items to print.
const PRINTED: usize = 12;

/// A tensor of items as bits; the last dimension varies fastest.
#[derive(Clone)]
pub(crate) struct Array {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) items: Vec<u64>,
}

impl Array {
    /// Returns an array with the items of `item`, which may change the index that it is given.
    pub(crate) fn from_fn(
        dtype: DType,
        shape: &[usize],
        mut item: impl FnMut(&mut [usize]) -> u64,
    ) -> Self {
        let mut place = vec![0; shape.len()];
        let items = (0..shape.iter().product()).map(|n: usize| {
            let mut rest = n;
            for (dim, size) in shape.iter().enumerate().rev() {
                place[dim] = rest % size;
                rest /= size;
            }
            item(&mut place)
        });
        let items = items.collect();
        Self { dtype, shape: shape.to_vec(), items }
    }

    /// Returns a row of numbers in double precision.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Self {
        let items = numbers.iter().map(|number| number.to_bits()).collect();
        Self { dtype: DType::F64, shape: vec![numbers.len()], items }
    }

    pub(crate) fn zeros(dtype: DType, shape: &[usize]) -> Self {
        Self::from_fn(dtype, shape, |_| 0)
    }

    pub(crate) fn at(&self, place: &[usize]) -> u64 {
        let mut offset = 0;
        for (n, size) in place.iter().zip(&self.shape) {
            offset = offset * size + n;
        }
        self.items[offset]
    }

    /// Returns `len` rows of dimension `dim`.
    pub(crate) fn rows(&self, dim: usize, start: usize, len: usize) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] = len;
        Self::from_fn(self.dtype, &shape, |place| {
            place[dim] += start;
            self.at(place)
        })
    }

    /// Returns the part of index `part` after a division of dimension `dim` into `parts` equal
    /// parts.
    pub(crate) fn part(&self, dim: usize, part: usize, parts: usize) -> Self {
        let rows = self.shape[dim] / parts;
        self.rows(dim, part * rows, rows)
    }

    pub(crate) fn transposed(&self, one: usize, other: usize) -> Self {
        let mut shape = self.shape.clone();
        shape.swap(one, other);
        Self::from_fn(self.dtype, &shape, |place| {
            place.swap(one, other);
            self.at(place)
        })
    }

    /// Adds a dimension of one row.
    pub(crate) fn with_dim(mut self, dim: usize) -> Self {
        self.shape.insert(dim, 1);
        self
    }

    /// Returns the same items in one dimension.
    pub(crate) fn flat(mut self) -> Self {
        self.shape = vec![self.items.len()];
        self
    }

    /// Repeats the first row of the first dimension.
    pub(crate) fn repeated(&self) -> Self {
        Self::from_fn(self.dtype, &self.shape, |place| {
            place[0] = 0;
            self.at(place)
        })
    }

    /// Concatenates arrays in dimension `dim`; returns `None` if they do not fit.
    pub(crate) fn concatenated(arrays: &[&Self], dim: usize) -> Option<Self> {
        if !arrays.iter().all(|array| array.agrees_but_for(dim, arrays[0])) {
            return None;
        }
        let mut shape = arrays[0].shape.clone();
        shape[dim] = arrays.iter().map(|array| array.shape[dim]).sum();
        Some(Self::from_fn(arrays[0].dtype, &shape, |place| {
            let mut from = 0;
            while place[dim] >= arrays[from].shape[dim] {
                place[dim] -= arrays[from].shape[dim];
                from += 1;
            }
            arrays[from].at(place)
        }))
    }

    /// Concatenates arrays of one row each in dimension `dim`; returns `None` if they do not fit.
    pub(crate) fn stacked(arrays: &[Self], dim: usize) -> Option<Self> {
        Self::concatenated(&arrays.iter().collect::<Vec<_>>(), dim)
    }

    /// Returns true if dtype and sizes are equal, except for the size in dimension `dim`.
    pub(crate) fn agrees_but_for(&self, dim: usize, other: &Self) -> bool {
        let sizes = |array: &Self| {
            let mut shape = array.shape.clone();
            shape[dim] = 0;
            shape
        };
        self.dtype == other.dtype
            && self.shape.len() == other.shape.len()
            && sizes(self) == sizes(other)
    }

    /// Returns true if dtype and sizes are equal.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.shape == other.shape
    }

    /// Folds each item over all arrays, which must agree in dtype and sizes.
    pub(crate) fn folded(arrays: &[&Self], fold: FoldOp) -> Self {
        let first = arrays[0];
        let mut column = vec![0; arrays.len()];
        let items = (0..first.items.len())
            .map(|n: usize| {
                column.iter_mut().zip(arrays).for_each(|(item, array)| *item = array.items[n]);
                bits::folded(first.dtype, fold, &column)
            })
            .collect();
        Self { dtype: first.dtype, shape: first.shape.clone(), items }
    }

    /// Returns true if both are equal to the bit.
    pub(crate) fn same(&self, other: &Self) -> bool {
        let mut items = self.items.iter().zip(&other.items);
        self.agrees(other) && items.all(|(left, right)| bits::same(self.dtype, *left, *right))
    }

    pub(crate) fn tensor(&self) -> Tensor {
        let size = self.dtype.size_in_bytes();
        let bytes: Vec<u8> =
            self.items.iter().flat_map(|item| item.to_le_bytes().into_iter().take(size)).collect();
        Tensor::from_raw_buffer(&bytes, self.dtype, &self.shape, &Device::Cpu).unwrap()
    }

    pub(crate) fn from_tensor(tensor: &Tensor) -> Self {
        let mut bytes = Vec::new();
        // An empty view may begin past the end of its storage, where candle panics.
        if tensor.elem_count() > 0 {
            tensor.force_contiguous().unwrap().write_bytes(&mut bytes).unwrap();
        }
        let items = bytes.chunks(tensor.dtype().size_in_bytes()).map(|item| {
            let mut word = [0; 8];
            word[..item.len()].copy_from_slice(item);
            u64::from_le_bytes(word)
        });
        Self { dtype: tensor.dtype(), shape: tensor.dims().to_vec(), items: items.collect() }
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dots = if self.items.len() > PRINTED { ", .." } else { "" };
        let items: Vec<String> =
            self.items.iter().take(PRINTED).map(|item| format!("{item:x}")).collect();
        write!(f, "{} {:?} [{}{dots}]", self.dtype.as_str(), self.shape, items.join(", "))
    }
}
