//! One number for a tensor, by which processes compare what they hold.

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use core_types::Fingerprint;

use crate::mesh::place::on_host;

/// A number that differs if two tensors differ in type, shape or any bit, but for one pair in 2^64.
pub(crate) fn fingerprint(x: &Tensor) -> Result<u64> {
    let mut fingerprint = Fingerprint::new();
    fingerprint.bytes(x.dtype().as_str().as_bytes()).word(x.rank() as u64);
    fingerprint.extend(x.dims().iter().map(|&size| size as u64));
    let host = on_host(x)?;
    let (storage, layout) = host.storage_and_layout();
    let start = layout.start_offset();
    let mut items = Items { fingerprint: &mut fingerprint, start, len: x.elem_count() };
    match &*storage {
        Storage::Cpu(CpuStorage::U8(all)) => items.add(all, u8::to_le_bytes),
        Storage::Cpu(CpuStorage::U32(all)) => items.add(all, u32::to_le_bytes),
        Storage::Cpu(CpuStorage::I16(all)) => items.add(all, i16::to_le_bytes),
        Storage::Cpu(CpuStorage::I32(all)) => items.add(all, i32::to_le_bytes),
        Storage::Cpu(CpuStorage::I64(all)) => items.add(all, i64::to_le_bytes),
        Storage::Cpu(CpuStorage::BF16(all)) => items.add(all, half::bf16::to_le_bytes),
        Storage::Cpu(CpuStorage::F16(all)) => items.add(all, half::f16::to_le_bytes),
        Storage::Cpu(CpuStorage::F32(all)) => items.add(all, f32::to_le_bytes),
        Storage::Cpu(CpuStorage::F64(all)) => items.add(all, f64::to_le_bytes),
        Storage::Cpu(CpuStorage::F8E4M3(all)) => items.add(all, |item| [item.to_bits()]),
        _ => bail!("tensors of type {} cannot be compared", x.dtype().as_str()),
    }
    Ok(fingerprint.finish())
}

/// The items of a storage that a contiguous tensor looks at.
struct Items<'a> {
    fingerprint: &'a mut Fingerprint,
    start: usize,
    len: usize,
}

impl Items<'_> {
    /// Adds them, as many as fit into a word at a time.
    fn add<T: Copy, const BYTES: usize>(&mut self, all: &[T], bytes: impl Fn(T) -> [u8; BYTES]) {
        let word = |items: &[T]| {
            let mut word = [0; size_of::<u64>()];
            for (place, item) in word.chunks_exact_mut(BYTES).zip(items) {
                place.copy_from_slice(&bytes(*item));
            }
            u64::from_le_bytes(word)
        };
        let items = &all[self.start..self.start + self.len];
        self.fingerprint.extend(items.chunks(size_of::<u64>() / BYTES).map(word));
    }
}
