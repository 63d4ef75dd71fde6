//! The scan of a tensor's bytes while they are written or read: the checksum, and the first number
//! that is not finite.

use candle_core::DType;

use crate::safetensors::{checksum::Checksum, finite::AllowedValues};

/// The bytes to write or read before each scan. They and their copy fit into a core's cache, where
/// the scan finds them: writing 400 MB to memory takes 146 ms with the scan and 135 ms without it
/// (one core of a Xeon with 2 MiB of that cache). Scanning before writing takes 165 ms.
pub(crate) const PIECE: usize = 128 << 10;

/// The scan of a block of a tensor.
#[derive(Debug)]
pub(crate) struct BlockScan {
    dtype: DType,
    values: AllowedValues,
    hasher: crc32fast::Hasher,
    n_items: usize,
    rejected: Option<usize>,
}

/// The result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScanResult {
    pub(crate) checksum: Checksum,
    /// The index of the first rejected item in the block.
    pub(crate) rejected: Option<usize>,
}

impl BlockScan {
    /// Starts the scan of a block with items of this dtype; accepts `values`.
    pub(crate) fn new(dtype: DType, values: AllowedValues) -> Self {
        Self { dtype, values, hasher: crc32fast::Hasher::new(), n_items: 0, rejected: None }
    }

    /// Scans the next items; `piece` must end with a complete item.
    pub(crate) fn add(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        if self.rejected.is_none() {
            let rejected = self.values.first_rejected(self.dtype, piece);
            self.rejected = rejected.map(|item| self.n_items + item);
        }
        self.n_items += piece.len() / self.dtype.size_in_bytes();
    }

    /// Returns the result for all pieces.
    pub(crate) fn finish(self) -> ScanResult {
        ScanResult { checksum: self.hasher.finalize().into(), rejected: self.rejected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(bytes: &[u8], piece: usize, values: AllowedValues) -> ScanResult {
        let mut scan = BlockScan::new(DType::F32, values);
        bytes.chunks(piece).for_each(|piece| scan.add(piece));
        scan.finish()
    }

    #[test]
    fn pieces_scan_like_the_whole() {
        let mut numbers = [1.5_f32; 40];
        for (first, expected) in [(None, None), (Some(39), Some(39)), (Some(13), Some(13))] {
            if let Some(first) = first {
                numbers[first] = f32::NAN;
            }
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            for piece in [4, 8, 52, 56, 160, 164] {
                let scanned = scan(&bytes, piece, AllowedValues::Finite);
                assert_eq!(
                    scanned,
                    ScanResult { checksum: Checksum::compute(&bytes), rejected: expected }
                );
                assert_eq!(scan(&bytes, piece, AllowedValues::Any).rejected, None);
            }
        }
    }
}
