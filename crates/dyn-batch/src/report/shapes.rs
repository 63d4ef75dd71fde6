//! Which shapes the batches have, and which of them waste most.

use std::{collections::BTreeMap, fmt};

use crate::batch::Batch;

/// The shapes of batches, and their padding by padded length.
///
/// Compilers and captured graphs do their work once for each shape, so few are good; where the
/// padding is tells which boundaries to move.
///
/// # Determinism
///
/// Counts do not depend on the order of the batches.
///
/// # Examples
///
/// ```
/// use dyn_batch::{BatchConfig, DynamicBatchSampler, ShapeReport};
///
/// let config = BatchConfig::default().with_max_batch_size(2);
/// let sampler = DynamicBatchSampler::new([3_u32, 6, 4, 5, 100], config)?;
/// let batches = sampler.iter().collect::<Result<Vec<_>, _>>()?;
/// let report = ShapeReport::from_iter(&batches);
/// assert_eq!(report.n_shapes(), 3);
/// assert_eq!(
///     report.to_string(),
///     "\
/// padded length  batches  sequences  real tokens  padding
///         5..=8        2          4           18    18.2%
///      65..=128        1          1          100     0.0%
/// 3 shapes, the most frequent is 1 x 100: 1 of 3 batches",
/// );
/// # Ok::<(), dyn_batch::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ShapeReport {
    /// How many batches there are of each shape, by padded length and rows.
    pub shapes: Vec<ShapeCount>,
    /// The batches by padded length, up to 1, 2, 4, 8 and so on; those without batches left out.
    pub lengths: Vec<LengthBin>,
}

/// How many batches have a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ShapeCount {
    /// The length of each row.
    pub padded_length: u64,
    /// The number of rows.
    pub rows: u64,
    /// How many batches are like that.
    pub batches: u64,
}

/// Batches of similar padded length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LengthBin {
    /// The longest padded length that counts here, a power of two (the last one is `u64::MAX`);
    /// more than half of it is the shortest.
    pub max_padded_length: u64,
    /// The number of batches.
    pub batches: u64,
    /// The number of sequences in them.
    pub sequences: u64,
    /// Their tokens without padding.
    pub real_tokens: u128,
    /// Their tokens with padding.
    pub padded_tokens: u128,
}

impl ShapeReport {
    /// The number of different shapes.
    pub fn n_shapes(&self) -> usize {
        self.shapes.len()
    }
}

impl<'a> FromIterator<&'a Batch> for ShapeReport {
    fn from_iter<T: IntoIterator<Item = &'a Batch>>(batches: T) -> Self {
        let (mut shapes, mut lengths) =
            (BTreeMap::<_, u64>::new(), BTreeMap::<u64, LengthBin>::new());
        for batch in batches {
            *shapes.entry((batch.padded_length, batch.rows)).or_default() += 1;
            let max_padded_length =
                batch.padded_length.checked_next_power_of_two().unwrap_or(u64::MAX);
            let bin = lengths.entry(max_padded_length).or_default();
            bin.batches += 1;
            bin.sequences += batch.len() as u64;
            bin.real_tokens += u128::from(batch.real_tokens);
            bin.padded_tokens += u128::from(batch.padded_tokens());
        }
        let count = |((padded_length, rows), batches)| ShapeCount { padded_length, rows, batches };
        let bin = |(max_padded_length, bin)| LengthBin { max_padded_length, ..bin };
        Self {
            shapes: shapes.into_iter().map(count).collect(),
            lengths: lengths.into_iter().map(bin).collect(),
        }
    }
}

impl fmt::Display for ShapeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "padded length  batches  sequences  real tokens  padding")?;
        for bin in &self.lengths {
            let LengthBin { max_padded_length, batches, sequences, real_tokens, padded_tokens } =
                bin;
            let lengths = format!(
                "{}..={max_padded_length}",
                if *max_padded_length > 1 { max_padded_length / 2 + 1 } else { 0 }
            );
            let padding = 100.0 * padded_tokens.saturating_sub(*real_tokens) as f64
                / (*padded_tokens).max(1) as f64;
            writeln!(
                f,
                "{lengths:>13}  {batches:>7}  {sequences:>9}  {real_tokens:>11}  {padding:>6.1}%"
            )?;
        }
        let total: u64 = self.shapes.iter().map(|shape| shape.batches).sum();
        write!(f, "{} shapes", self.n_shapes())?;
        match self.shapes.iter().max_by_key(|shape| shape.batches) {
            Some(ShapeCount { padded_length, rows, batches }) => {
                write!(
                    f,
                    ", the most frequent is {rows} x {padded_length}: {batches} of {total} batches"
                )
            }
            None => Ok(()),
        }
    }
}
