//! What the processes of a mesh tell each other outside of steps, so that all of them decide alike.
//!
//! Every process calls these functions in the same order. In a single process they return at once.

use candle_core::{Device, Tensor};
use pmap_mesh::DeviceMesh;

use crate::error::{Doing, Error, Result};

/// What this process has made, if every process of the mesh has made its own.
///
/// If one fails, all of them return at once: it with its error, the others with its message.
/// Without this they would wait for it until the deadline of the mesh.
///
/// # Errors
///
/// The error of `here`; [`Error::OtherProcess`] if only others fail; [`Error::Mesh`] if a process
/// does not answer.
pub(crate) fn agreed<T>(mesh: &DeviceMesh, here: Result<T>) -> Result<T> {
    if mesh.local_slots().len() == mesh.len() {
        return here;
    }
    let reason = here.as_ref().err().map(Error::to_string);
    let reasons = gather_reasons(mesh, reason.as_deref());
    // What went wrong here comes first, also if the others cannot be told.
    let made = here?;
    let failed = reasons?.into_iter().enumerate().find_map(|(slot, reason)| Some((slot, reason?)));
    match failed {
        None => Ok(made),
        Some((slot, reason)) => Err(Error::OtherProcess { slot, reason }),
    }
}

/// Why the processes of all slots failed, given why this one did.
fn gather_reasons(mesh: &DeviceMesh, here: Option<&str>) -> Result<Vec<Option<String>>> {
    let list: candle_core::Result<Vec<_>> = here.into_iter().map(to_bytes).collect();
    let list = list.doing("sending an error to the other processes")?;
    let lists = mesh.process_allgather(vec![list; mesh.local_slots().len()])?;
    let reasons = lists.iter().map(|list| list.first().map(to_text).transpose());
    let reasons: candle_core::Result<_> = reasons.collect();
    reasons.doing("receiving an error of another process")
}

fn to_bytes(text: &str) -> candle_core::Result<Tensor> {
    Tensor::new(text.as_bytes(), &Device::Cpu)
}

fn to_text(bytes: &Tensor) -> candle_core::Result<String> {
    Ok(String::from_utf8_lossy(&bytes.to_vec1()?).into_owned())
}

/// The first slot whose process has another number than this one, and that number.
///
/// # Errors
///
/// Those of [`gather_numbers`].
pub(crate) fn find_other(mesh: &DeviceMesh, number: u64) -> Result<Option<(usize, u64)>> {
    let numbers = gather_numbers(mesh, &vec![[number]; mesh.local_slots().len()])?;
    let other = numbers.iter().position(|&[other]| other != number);
    Ok(other.map(|slot| (slot, numbers[slot][0])))
}

/// The numbers of all slots, given those of this process's slots.
///
/// # Errors
///
/// [`Error::Mesh`] if a process does not answer, [`Error::Tensor`] if candle fails.
pub(crate) fn gather_numbers<const N: usize>(
    mesh: &DeviceMesh,
    numbers: &[[u64; N]],
) -> Result<Vec<[u64; N]>> {
    let lists: candle_core::Result<_> = numbers.iter().map(to_list).collect();
    let all = mesh.process_allgather(lists.doing("sending numbers")?)?;
    let numbers: candle_core::Result<_> = all.iter().map(|list| to_numbers(list)).collect();
    numbers.doing("receiving numbers")
}

/// Tensors have no unsigned numbers of 64 bits: the same bits travel as signed ones.
fn to_list<const N: usize>(numbers: &[u64; N]) -> candle_core::Result<Vec<Tensor>> {
    Ok(vec![Tensor::new(&numbers.map(u64::cast_signed), &Device::Cpu)?])
}

fn to_numbers<const N: usize>(list: &[Tensor]) -> candle_core::Result<[u64; N]> {
    let numbers = list.iter().map(Tensor::to_vec1::<i64>);
    let numbers = numbers.collect::<candle_core::Result<Vec<_>>>()?.concat();
    match <[i64; N]>::try_from(numbers) {
        Ok(numbers) => Ok(numbers.map(i64::cast_unsigned)),
        Err(other) => candle_core::bail!("{} numbers came for {N}", other.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_all_slots_arrive_to_the_bit() {
        let numbers = [[0, u64::MAX], [1 << 63, 7], [3, 4], [5, 6]];
        let mesh = DeviceMesh::cpu(4).unwrap();
        assert_eq!(gather_numbers(&mesh, &numbers).unwrap(), numbers);
    }

    #[test]
    fn texts_arrive_as_they_are() {
        for text in ["x", "no such file: ä/→", "two\nlines"] {
            assert_eq!(to_text(&to_bytes(text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn a_single_process_agrees_with_itself() {
        let mesh = DeviceMesh::cpu(2).unwrap();
        assert_eq!(agreed(&mesh, Ok(7)).unwrap(), 7);
        let failed = agreed::<()>(&mesh, Err(Error::Diverged { name: "a".into(), replica: 1 }));
        assert!(matches!(failed, Err(Error::Diverged { .. })));
    }
}
