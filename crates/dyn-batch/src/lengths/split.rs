//! Documents split into pieces that fit packed rows.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    lengths::SequenceLengths,
};

/// The lengths of the pieces of documents, for packed rows that split over-long documents instead of
/// rejecting them. No other type of this crate splits a sequence.
///
/// A document longer than `max_length` becomes pieces of this length and the rest: as few as possible.
/// Pieces are sequences of their own: a packed batch marks them as segments, without attention between
/// them, and the first token of each has no label.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, DynamicBatchSampler, DynamicBatchStrategy, Packing, SplitLengths};
///
/// let documents = SplitLengths::new(vec![5_u32, 23, 9], 10)?;
/// let config = BatchConfig::default()
///     .with_strategy(DynamicBatchStrategy::Pack(Packing::BestFit))
///     .with_max_tokens(10);
/// let sampler = DynamicBatchSampler::new(&documents, config)?;
/// let rows = sampler.iter().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(rows.len(), 4);
///
/// // The last piece of document 1 has the tokens 20 to 22.
/// let piece = documents.piece(3).ok_or("no such piece")?;
/// assert_eq!((piece.index, piece.range), (1, 20..23));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "bfd_split")]
pub struct SplitLengths<L> {
    lengths: L,
    max_length: u64,
    /// Number of the first piece of each document, and the number of all pieces.
    first_pieces: Vec<u64>,
}

/// A piece of a document.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DocumentPiece {
    /// Position of the document in the data set.
    pub index: u64,
    /// Tokens of the document.
    pub range: Range<u64>,
}

impl<L: SequenceLengths> SplitLengths<L> {
    /// Splits documents of these lengths into pieces of at most `max_length` tokens, for example the
    /// length of a row.
    ///
    /// # Errors
    ///
    /// [`Error::Zero`] for a `max_length` of 0, and [`Error::TooManySequences`] for more than 2^64
    /// pieces.
    pub fn new(lengths: L, max_length: u64) -> Result<Self> {
        if max_length == 0 {
            return Err(Error::Zero { setting: "max_length" });
        }
        let mut first_pieces = vec![0];
        let mut n_pieces = 0_u64;
        for length in (0..lengths.count()).map_while(|index| lengths.length(index)) {
            let count = length.div_ceil(max_length).max(1);
            n_pieces = n_pieces
                .checked_add(count)
                .ok_or(Error::TooManySequences { count: u64::MAX, limit: u64::MAX })?;
            first_pieces.push(n_pieces);
        }
        Ok(Self { lengths, max_length, first_pieces })
    }

    /// Returns a piece by its number, an index of a batch, or `None` if it is out of range.
    pub fn piece(&self, number: u64) -> Option<DocumentPiece> {
        let index = self.first_pieces.partition_point(|&first| first <= number).checked_sub(1)?;
        let length = self.lengths.length(index as u64)?;
        let start = (number - self.first_pieces[index]) * self.max_length;
        let end = start.saturating_add(self.max_length).min(length);
        Some(DocumentPiece { index: index as u64, range: start..end })
    }
}

impl<L: SequenceLengths> SequenceLengths for SplitLengths<L> {
    fn count(&self) -> u64 {
        self.first_pieces.last().copied().unwrap_or(0)
    }

    fn length(&self, index: u64) -> Option<u64> {
        self.piece(index).map(|piece| piece.range.end - piece.range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_document() {
        let lengths = [0_u64, 1, 9, 10, 11, 20, 35];
        let split = SplitLengths::new(lengths, 10).unwrap();
        let mut pieces = (0..split.count()).map(|number| split.piece(number).unwrap());
        for (index, &length) in (0..).zip(&lengths) {
            let mut end = 0;
            for _ in 0..length.div_ceil(10).max(1) {
                let piece = pieces.next().unwrap();
                assert_eq!((piece.index, piece.range.start), (index, end));
                assert!(piece.range.end - piece.range.start <= 10);
                end = piece.range.end;
            }
            assert_eq!(end, length);
        }
        assert_eq!(split.count(), 12);
        assert_eq!((split.piece(12), split.length(u64::MAX)), (None, None));
        assert_eq!(SplitLengths::new(lengths, 0), Err(Error::Zero { setting: "max_length" }));
    }
}
