//! Tensors that the nodes of one operation pass to each other within a backward pass.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use crate::error::Result;

/// What the backward passes through one operation have left between its nodes.
///
/// Several passes may run at once: on several threads, and on one thread within each other, since a
/// thread of rayon that waits for a kernel may begin another pass. candle gives a pass no name, but
/// it carries the gradient of a token from node to node within the pass. So that gradient holds
/// tickets: a node that leaves something adds its ticket, and the node that reads the gradient takes
/// what the tickets name. What a failed pass has left is never taken, and is dropped with the graph.
#[derive(Debug)]
pub(crate) struct Mailbox<T>(Mutex<Vec<Letter<T>>>);

#[derive(Debug)]
struct Letter<T> {
    /// Unique among the letters of a mailbox, and not 0. A `u16` is exact in f32, which all devices
    /// can add.
    ticket: u16,
    index: usize,
    content: T,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Mailbox<T> {
    /// Leaves `content`, and returns the gradient that carries its ticket to `token` in place
    /// `index`.
    ///
    /// The token has one dimension, in which each node has a place of its own.
    pub(crate) fn leave(&self, index: usize, content: T, token: &Tensor) -> Result<Tensor> {
        let ticket = self.put(index, content)?;
        let mut tickets = vec![0_f32; token.elem_count()];
        tickets[index] = f32::from(ticket);
        Ok(Tensor::from_vec(tickets, token.shape(), token.device())?)
    }

    fn put(&self, index: usize, content: T) -> Result<u16> {
        let mut letters = self.lock();
        let is_free = |ticket: &u16| letters.iter().all(|letter| letter.ticket != *ticket);
        let ticket = (1..=u16::MAX).find(is_free).ok_or_else(|| {
            candle_core::Error::msg(format!(
                "{} backward passes through one operation have not ended",
                letters.len()
            ))
        })?;
        letters.push(Letter { ticket, index, content });
        Ok(ticket)
    }

    /// Takes what this pass has left, each with its index: what the tickets in `grad` name, the
    /// gradient of the token.
    pub(crate) fn take(&self, grad: &Tensor) -> Result<Vec<(usize, T)>> {
        // This pass has left a letter at least, so a single letter is its own. Without this case
        // each operation would wait for a GPU to read the tickets.
        if let Some(letter) = self.take_single() {
            return Ok(vec![letter]);
        }
        let tickets: Vec<u32> = grad.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect();
        let is_named =
            |letter: &mut Letter<T>| tickets.contains(&f32::from(letter.ticket).to_bits());
        let mut letters = self.lock();
        let taken = letters.extract_if(.., is_named);
        Ok(taken.map(|letter| (letter.index, letter.content)).collect())
    }

    fn take_single(&self) -> Option<(usize, T)> {
        let mut letters = self.lock();
        let letter = if letters.len() == 1 { letters.pop() } else { None };
        letter.map(|letter| (letter.index, letter.content))
    }

    /// A thread that panicked with the lock has left a whole letter or none.
    fn lock(&self) -> MutexGuard<'_, Vec<Letter<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn a_pass_takes_its_own_letters_once() {
        let mailbox = Mailbox::default();
        let token = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let leave = |index, content| mailbox.leave(index, content, &token).unwrap();
        let first = leave(0, "a");
        let second = leave(0, "b");
        let first = (first + leave(1, "c")).unwrap();
        assert_eq!(mailbox.take(&first).unwrap(), [(0, "a"), (1, "c")]);
        let third = leave(1, "d");
        assert_eq!(mailbox.take(&third).unwrap(), [(1, "d")]);
        assert_eq!(mailbox.take(&second).unwrap(), [(0, "b")]);
        assert!(mailbox.lock().is_empty());
    }
}
