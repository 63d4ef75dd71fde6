//! Tensors of batches of tokens.

use candle_core::{Device, Result};
use dyn_batch::{BatchTensors, Collator, PackedRow, PaddedRows};

use crate::loader::fetch::SampleBatch;

impl SampleBatch<Vec<u32>> {
    /// Pads the samples, one per row: see [`Collator::pad`]. Rows of skipped samples are empty.
    ///
    /// For other fields and types, use [`with_lengths`](Self::with_lengths) and the layouts of
    /// `dyn-batch`.
    ///
    /// # Errors
    ///
    /// The errors of [`Collator::pad`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::Device;
    /// use core_types::Epoch;
    /// use data_loader::{DataLoader, SampleBatch};
    /// use dyn_batch::Collator;
    ///
    /// let ids = vec![vec![5_u32, 6, 7], vec![8]];
    /// let mut loader = DataLoader::builder(ids).batch_size(2).collate(
    ///     |samples: SampleBatch<Vec<u32>>| Ok(samples.pad(&Collator::default(), &Device::Cpu)?),
    /// )?;
    /// loader.set_epoch(Epoch::ZERO)?;
    /// let batch = loader.next().expect("an epoch has a batch")?;
    /// assert_eq!(batch.ids.to_vec2::<u32>()?, [[5, 6, 7], [8, 0, 0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pad(&self, collator: &Collator, device: &Device) -> Result<BatchTensors<PaddedRows>> {
        let limit = collator.max_sequence_length.unwrap_or(u64::MAX);
        let batch = self.with_lengths(|ids| limit.min(ids.len() as u64));
        let batch = batch.map_err(candle_core::Error::wrap)?;
        collator.pad(&batch, |position| self.ids_at(position), device)
    }

    /// Concatenates the samples of a packed batch in its row: see [`Collator::pack`].
    ///
    /// # Errors
    ///
    /// The errors of [`Collator::pack`].
    pub fn pack(&self, collator: &Collator, device: &Device) -> Result<BatchTensors<PackedRow>> {
        let batch = self.with_lengths(|ids| ids.len() as u64).map_err(candle_core::Error::wrap)?;
        collator.pack(&batch, |position| self.ids_at(position), device)
    }

    #[expect(clippy::cast_possible_truncation, reason = "positions of items in memory")]
    fn ids_at(&self, position: u64) -> &[u32] {
        &self.items[position as usize]
    }
}
