//! Facts that the processes of a mesh exchange between calls, so that all make the same decisions.
//!
//! Every process makes these calls, in the same order. In a single process they return at once.

use std::fmt;

use candle_core::{Device, Tensor};

use crate::{
    error::{Error, ProcessError, Result},
    mesh::DeviceMesh,
};

#[doc(hidden)]
impl DeviceMesh {
    /// Returns true if slot 0 runs in this process, which then does the work that one process does
    /// for all.
    pub fn is_first_process(&self) -> bool {
        self.local_slots().start == 0
    }

    /// Returns true if some slots run in other processes.
    pub fn spans_processes(&self) -> bool {
        self.devices().len() < self.len()
    }

    /// Returns the value of `outcome` if every process has one.
    ///
    /// If one fails, all of them return at once. Without this the others would wait for it in their
    /// next collective, until the deadline of the mesh.
    ///
    /// # Errors
    ///
    /// The error of `outcome`; [`ProcessError::Peer`] with the message of another process if only
    /// others fail; [`ProcessError::Exchange`] if a process does not answer.
    pub fn all_ok<T, E>(&self, outcome: Result<T, E>) -> Result<T, E>
    where
        E: fmt::Display + From<Error>,
    {
        if !self.spans_processes() {
            return outcome;
        }
        let message = outcome.as_ref().err().map(E::to_string);
        let messages = self.gather_texts(message.as_slice());
        // The local error comes first, even if the exchange fails as well.
        let value = outcome?;
        for (slot, texts) in messages?.into_iter().enumerate() {
            if let Some(reason) = texts.into_iter().next() {
                return Err(Error::from(ProcessError::Peer { slot, reason }).into());
            }
        }
        Ok(value)
    }

    /// Returns the first slot whose process has another number than this one, and that number.
    ///
    /// # Errors
    ///
    /// The errors of [`process_allgather`](Self::process_allgather).
    pub fn find_mismatch(&self, number: u64) -> Result<Option<(usize, u64)>> {
        let numbers = self.gather_numbers(&vec![[number]; self.devices().len()])?;
        let slot = numbers.iter().position(|&[other]| other != number);
        Ok(slot.map(|slot| (slot, numbers[slot][0])))
    }

    /// Returns the numbers of all slots, given the numbers of this process's slots: an array for each
    /// slot, or lists that may differ in length.
    ///
    /// # Errors
    ///
    /// The errors of [`process_allgather`](Self::process_allgather), and [`ProcessError::Exchange`] if
    /// another process passes an array of a different size.
    pub fn gather_numbers<T>(&self, local: &[T]) -> Result<Vec<T>>
    where
        T: AsRef<[u64]> + TryFrom<Vec<u64>>,
    {
        let lists: candle_core::Result<_> =
            local.iter().map(|numbers| encode_numbers(numbers.as_ref())).collect();
        let all = self.process_allgather(lists.map_err(exchange_error)?)?;
        all.iter().map(|list| decode_numbers(list).map_err(exchange_error)).collect()
    }

    /// Returns the texts of all slots, given the texts of this process, which are sent for its
    /// first slot; its other slots have no texts.
    ///
    /// # Errors
    ///
    /// The errors of [`process_allgather`](Self::process_allgather).
    pub fn gather_texts(&self, local: &[String]) -> Result<Vec<Vec<String>>> {
        let texts: candle_core::Result<_> = local.iter().map(encode_text).collect();
        let mut lists = vec![Vec::new(); self.devices().len()];
        lists[0] = texts.map_err(exchange_error)?;
        let all = self.process_allgather(lists)?;
        let texts = all.iter().map(|list| list.iter().map(decode_text).collect());
        texts.collect::<Result<_, _>>().map_err(exchange_error)
    }
}

fn exchange_error(cause: candle_core::Error) -> Error {
    ProcessError::Exchange { cause }.into()
}

/// Encodes `u64` numbers, a type that tensors lack, as `i64` with the same bits.
fn encode_numbers(numbers: &[u64]) -> candle_core::Result<Vec<Tensor>> {
    let signed: Vec<i64> = numbers.iter().map(|number| number.cast_signed()).collect();
    Ok(vec![Tensor::new(signed, &Device::Cpu)?])
}

fn decode_numbers<T: TryFrom<Vec<u64>>>(list: &[Tensor]) -> candle_core::Result<T> {
    let signed: candle_core::Result<Vec<_>> = list.iter().map(Tensor::to_vec1::<i64>).collect();
    let numbers: Vec<u64> = signed?.into_iter().flatten().map(i64::cast_unsigned).collect();
    let len = numbers.len();
    T::try_from(numbers).map_err(|_| {
        candle_core::Error::msg(format!(
            "received {len} numbers, which is not the size of an array"
        ))
    })
}

fn encode_text(text: &String) -> candle_core::Result<Tensor> {
    Tensor::new(text.as_bytes(), &Device::Cpu)
}

fn decode_text(bytes: &Tensor) -> candle_core::Result<String> {
    Ok(String::from_utf8_lossy(&bytes.to_vec1()?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ValueError;

    #[test]
    fn numbers_keep_their_bits() {
        let numbers = [[0, u64::MAX], [1 << 63, 7], [3, 4], [5, 6]];
        let mesh = DeviceMesh::cpu(4).unwrap();
        assert_eq!(mesh.gather_numbers(&numbers).unwrap(), numbers);
        let lists = vec![vec![], vec![u64::MAX], vec![1, 2], vec![3]];
        assert_eq!(mesh.gather_numbers(&lists).unwrap(), lists);
        let one = encode_numbers(&[1]).unwrap();
        assert!(decode_numbers::<[u64; 2]>(&one).is_err());
    }

    #[test]
    fn texts_arrive_unchanged() {
        let texts = ["", "no such file: ä/→", "two\nlines"].map(String::from);
        let all = DeviceMesh::cpu(2).unwrap().gather_texts(&texts).unwrap();
        assert_eq!(all, [texts.to_vec(), vec![]]);
    }

    #[test]
    fn single_process_agrees_with_itself() {
        let mesh = DeviceMesh::cpu(2).unwrap();
        assert_eq!(mesh.all_ok::<_, Error>(Ok(7)).unwrap(), 7);
        let failed = mesh.all_ok::<(), Error>(Err(ValueError::MeshMismatch.into()));
        assert!(matches!(failed, Err(Error::Value(ValueError::MeshMismatch))));
        assert_eq!(mesh.find_mismatch(7).unwrap(), None);
    }
}
