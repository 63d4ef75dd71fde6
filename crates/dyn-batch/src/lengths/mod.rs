//! Lengths of the sequences of a data set.

pub(crate) mod histogram;
pub(crate) mod minima;
pub(crate) mod split;

use std::sync::Arc;

use crate::{
    batch::Sequence,
    error::{Error, Result},
};

/// The lengths of all sequences of a data set, each available in constant time.
///
/// Slices, arrays and vectors of `u32`, `u64` and `usize` implement this trait, and so do
/// references to them, also counted ones. Implement it for data sets that know their lengths, for example from an
/// index file.
///
/// # Determinism
///
/// [`length`](Self::length) must return the same length for an index each time, and on each rank. A
/// plan panics if a length changes.
///
/// # Examples
///
/// ```
/// use dyn_batch::SequenceLengths;
///
/// /// Sentence `i` is between two offsets.
/// struct Offsets(Vec<u64>);
///
/// impl SequenceLengths for Offsets {
///     fn count(&self) -> u64 {
///         self.0.len() as u64 - 1
///     }
///
///     fn length(&self, index: u64) -> Option<u64> {
///         let start = usize::try_from(index).ok()?;
///         self.0.get(start..)?.get(..2).map(|ends| ends[1] - ends[0])
///     }
/// }
///
/// let corpus = Offsets(vec![0, 12, 15, 40]);
/// assert_eq!((corpus.count(), corpus.length(2), corpus.length(3)), (3, Some(25), None));
/// ```
pub trait SequenceLengths {
    /// Returns the number of sequences.
    fn count(&self) -> u64;

    /// Returns the length of sequence `index`, or `None` if the index is out of range.
    fn length(&self, index: u64) -> Option<u64>;
}

/// Returns a sequence of a data set with its length.
pub(crate) fn measure(lengths: &impl SequenceLengths, index: u64) -> Result<Sequence> {
    match lengths.length(index) {
        Some(length) => Ok(Sequence { index, length }),
        None => Err(Error::IndexOutOfRange { index, count: lengths.count() }),
    }
}

macro_rules! slices {
    ($($int:ty)*) => {$(
        impl SequenceLengths for [$int] {
            fn count(&self) -> u64 {
                self.len() as u64
            }

            #[allow(
                clippy::cast_lossless,
                reason = "the macro also covers `usize`, which has no lossless conversion"
            )]
            fn length(&self, index: u64) -> Option<u64> {
                self.get(usize::try_from(index).ok()?).map(|&length| length as u64)
            }
        }
    )*};
}

slices!(u32 u64 usize);

impl<T, const N: usize> SequenceLengths for [T; N]
where
    [T]: SequenceLengths,
{
    fn count(&self) -> u64 {
        self.as_slice().count()
    }

    fn length(&self, index: u64) -> Option<u64> {
        self.as_slice().length(index)
    }
}

impl<T> SequenceLengths for Vec<T>
where
    [T]: SequenceLengths,
{
    fn count(&self) -> u64 {
        self.as_slice().count()
    }

    fn length(&self, index: u64) -> Option<u64> {
        self.as_slice().length(index)
    }
}

impl<L: SequenceLengths + ?Sized> SequenceLengths for &L {
    fn count(&self) -> u64 {
        (**self).count()
    }

    fn length(&self, index: u64) -> Option<u64> {
        (**self).length(index)
    }
}

impl<L: SequenceLengths + ?Sized> SequenceLengths for Arc<L> {
    fn count(&self) -> u64 {
        (**self).count()
    }

    fn length(&self, index: u64) -> Option<u64> {
        (**self).length(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lengths: impl SequenceLengths) {
        assert_eq!(lengths.count(), 2);
        assert_eq!([0, 1, 2, u64::MAX].map(|i| lengths.length(i)), [Some(5), Some(7), None, None]);
    }

    #[test]
    fn common_collections_are_lengths() {
        check([5_u32, 7]);
        let owned = vec![5_u64, 7];
        check(&owned);
        check(Arc::<[u64]>::from(owned));
        check(vec![5_usize, 7]);
        check([5_u32, 7].as_slice());
    }
}
