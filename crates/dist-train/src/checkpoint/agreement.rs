//! What the processes of a mesh tell each other about a checkpoint.

use candle_core::{Device, Tensor};
use pmap_mesh::DeviceMesh;

use crate::error::{Doing, Result};

/// Waits for all processes of a mesh.
pub(super) fn wait_for_all(mesh: &DeviceMesh) -> Result<()> {
    mesh.process_allgather(mesh.local_slots().map(|_| Vec::new()).collect())?;
    Ok(())
}

/// The numbers of all slots, given those of this process's slots.
pub(super) fn gather_numbers(mesh: &DeviceMesh, numbers: &[u64]) -> Result<Vec<u64>> {
    let lists: candle_core::Result<_> = numbers.iter().map(|&number| to_list(number)).collect();
    let all = mesh.process_allgather(lists.doing("sending a number")?)?;
    let numbers: candle_core::Result<_> = all.iter().flatten().map(to_number).collect();
    numbers.doing("receiving a number")
}

/// Tensors have no unsigned numbers of 64 bits: the same bits travel as signed ones.
fn to_list(number: u64) -> candle_core::Result<Vec<Tensor>> {
    Ok(vec![Tensor::new(number.cast_signed(), &Device::Cpu)?])
}

fn to_number(tensor: &Tensor) -> candle_core::Result<u64> {
    Ok(tensor.to_scalar::<i64>()?.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_all_slots_arrive_to_the_bit() {
        let numbers = [0, u64::MAX, 1 << 63, 7];
        let mesh = DeviceMesh::cpu(4).unwrap();
        assert_eq!(gather_numbers(&mesh, &numbers).unwrap(), numbers);
    }
}
