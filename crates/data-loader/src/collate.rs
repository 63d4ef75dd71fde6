//! Tensors of batches of tokens and arrays.

use candle_core::{Device, Result, Tensor, WithDType};
use dyn_batch::{BatchTensors, Collator, PackedRow, PaddedRows};

use crate::{
    loader::fetch::SampleBatch,
    read::npy::{NumberArray, dtype::NpyElement},
};

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
        collator.pad(&batch, |position| self.item(position), device)
    }

    /// Concatenates the samples of a packed batch in its row: see [`Collator::pack`].
    ///
    /// # Errors
    ///
    /// The errors of [`Collator::pack`].
    pub fn pack(&self, collator: &Collator, device: &Device) -> Result<BatchTensors<PackedRow>> {
        let batch = self.with_lengths(|ids| ids.len() as u64).map_err(candle_core::Error::wrap)?;
        collator.pack(&batch, |position| self.item(position), device)
    }
}

impl<T: NpyElement + WithDType> SampleBatch<NumberArray<T>> {
    /// Stacks the arrays, for example of [`NpyDataset`](crate::NpyDataset), along a new first dimension.
    ///
    /// # Errors
    ///
    /// An error if their shapes differ.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::Device;
    /// use core_types::Epoch;
    /// use data_loader::{DataLoader, NpyDataset, NumberArray, SampleBatch};
    ///
    /// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
    /// # let path = folder.path().join("series.npy");
    /// candle_core::Tensor::rand(0_f32, 1., (50, 3), &Device::Cpu)?.write_npy(&path)?;
    /// let windows = NpyDataset::<f32>::open(&path)?.windows(12, 1)?;
    /// let mut loader = DataLoader::builder(windows).batch_size(4).collate(
    ///     |windows: SampleBatch<NumberArray<f32>>| Ok(windows.stack(&Device::Cpu)?),
    /// )?;
    /// loader.set_epoch(Epoch::ZERO)?;
    /// assert_eq!(loader.next().expect("an epoch has a batch")?.dims(), [4, 12, 3]);
    /// # Ok::<(), data_loader::BoxError>(())
    /// ```
    pub fn stack(&self, device: &Device) -> Result<Tensor> {
        let mut arrays = Vec::new();
        for array in &self.items {
            arrays.push(Tensor::from_slice(&array.values, array.shape.as_slice(), &Device::Cpu)?);
        }
        Tensor::stack(&arrays, 0)?.to_device(device) // one copy to the device
    }
}
