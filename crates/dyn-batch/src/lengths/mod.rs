//! How long the sequences of a data set are, without a look at the sequences.

pub(crate) mod histogram;
pub(crate) mod minima;

use crate::{
    batch::Sequence,
    error::{Error, Result},
};

/// The lengths of all sequences of a data set, each known in constant time.
///
/// Slices, arrays and vectors of `u32`, `u64` and `usize` are such a thing, and so is a reference
/// to one. Implement it for a data set that knows its lengths, from an index file for example: no
/// sequence is read for its length.
///
/// # Determinism
///
/// [`length`](Self::length) must give the same answer for the same index each time, and on each
/// rank. A plan that finds another one than before panics.
///
/// # Examples
///
/// ```
/// use dyn_batch::SequenceLengths;
///
/// /// Sentence `i` lies between two offsets.
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
    /// The number of sequences.
    fn count(&self) -> u64;

    /// The length of sequence `index`, or `None` if there is none.
    fn length(&self, index: u64) -> Option<u64>;
}

/// A sequence of a data set with its length.
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
                reason = "the same text serves `usize`, which has no lossless conversion"
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lengths: impl SequenceLengths) {
        assert_eq!(lengths.count(), 2);
        assert_eq!([0, 1, 2, u64::MAX].map(|i| lengths.length(i)), [Some(5), Some(7), None, None]);
    }

    #[test]
    fn lengths_come_from_slices_arrays_vectors_and_references() {
        check([5_u32, 7]);
        let owned = vec![5_u64, 7];
        check(&owned);
        check(vec![5_usize, 7]);
        check([5_u32, 7].as_slice());
    }
}
