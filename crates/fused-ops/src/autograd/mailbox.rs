//! Tensors that the nodes of one operation pass to each other within a backward pass.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use crate::error::Result;

/// The messages that the backward passes of one operation leave between its nodes.
///
/// Several passes may run at once: on several threads, and nested on one thread, since a rayon
/// thread that waits for a kernel may begin another pass. candle does not identify a pass, but it
/// carries the gradient of a token from node to node within the pass. So that gradient holds
/// tickets: a node that leaves a message adds its ticket, and the node that reads the gradient
/// takes the messages of the tickets. A message of a failed pass is never taken, and is dropped
/// with the graph.
#[derive(Debug)]
pub(crate) struct Mailbox<T>(Mutex<Vec<PassMessage<T>>>);

#[derive(Debug)]
struct PassMessage<T> {
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
    /// Leaves `content`, and returns the gradient that carries its ticket to `token` at `index`.
    ///
    /// The token has one dimension, with an element for each node.
    pub(crate) fn leave(&self, index: usize, content: T, token: &Tensor) -> Result<Tensor> {
        let ticket = self.put(index, content)?;
        let mut tickets = vec![0_f32; token.elem_count()];
        tickets[index] = f32::from(ticket);
        Ok(Tensor::from_vec(tickets, token.shape(), token.device())?)
    }

    fn put(&self, index: usize, content: T) -> Result<u16> {
        let mut letters = self.lock();
        let ticket = (1..=u16::MAX)
            .find(|ticket| letters.iter().all(|letter| letter.ticket != *ticket))
            .ok_or_else(|| {
                candle_core::Error::msg(format!(
                    "{} backward passes through one operation have not ended",
                    letters.len()
                ))
            })?;
        letters.push(PassMessage { ticket, index, content });
        Ok(ticket)
    }

    /// Takes the messages of this pass, each with its index. `grad`, the gradient of the token, has
    /// their tickets.
    pub(crate) fn take(&self, grad: &Tensor) -> Result<Vec<(usize, T)>> {
        // This pass has left a letter at least, so a single letter is its own. Without this case
        // each operation would wait for a GPU to read the tickets.
        if let Some(letter) = self.take_single() {
            return Ok(vec![letter]);
        }
        let tickets: Vec<u32> = grad.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect();
        let mut letters = self.lock();
        let taken = letters.extract_if(.., |letter: &mut PassMessage<T>| {
            tickets.contains(&f32::from(letter.ticket).to_bits())
        });
        Ok(taken.map(|letter| (letter.index, letter.content)).collect())
    }

    fn take_single(&self) -> Option<(usize, T)> {
        let mut letters = self.lock();
        let letter = if letters.len() == 1 { letters.pop() } else { None };
        letter.map(|letter| (letter.index, letter.content))
    }

    /// Locks the messages. A thread that panicked under the lock left only complete messages.
    fn lock(&self) -> MutexGuard<'_, Vec<PassMessage<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn pass_takes_its_messages_once() {
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
