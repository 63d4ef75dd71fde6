//! Tensors that the nodes of one operation pass to each other within a backward pass.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use crate::error::Result;

/// Messages between the nodes of one operation, from all of its backward passes.
///
/// Nodes are connected by tokens: tensors of zeros that no operation reads. A node with a token
/// among its inputs sends messages to the node that made the token.
///
/// Several passes may run at once: on several threads, and nested on one thread, since a rayon
/// thread that waits for a kernel may begin another pass. candle does not identify a pass, but
/// within a pass it adds up the gradients that nodes return for a token, and hands the sum to the
/// token's node. So a sender returns the ticket of its message as the token's gradient, and the
/// token's node takes the messages whose tickets are in the sum. A message of a failed pass is
/// never taken, and is dropped with the graph.
#[derive(Debug)]
pub(crate) struct Mailbox<T>(Mutex<Vec<PassMessage<T>>>);

#[derive(Debug)]
struct PassMessage<T> {
    /// Nonzero number, unique among the messages of a mailbox. It has 16 bits because tickets are
    /// stored in f32, which all devices can add and which represents them exactly.
    ticket: u16,
    /// Index of the sender.
    index: usize,
    content: T,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Mailbox<T> {
    /// Stores a message, and returns a gradient of `token` with the message's ticket at `index` and
    /// zeros elsewhere.
    ///
    /// The token has one dimension, with an element for each sender.
    pub(crate) fn leave(&self, index: usize, content: T, token: &Tensor) -> Result<Tensor> {
        let ticket = self.put(index, content)?;
        let mut tickets = vec![0_f32; token.elem_count()];
        tickets[index] = f32::from(ticket);
        Ok(Tensor::from_vec(tickets, token.shape(), token.device())?)
    }

    /// Stores a message, and returns its ticket.
    fn put(&self, index: usize, content: T) -> Result<u16> {
        let mut messages = self.lock();
        let ticket = (1..=u16::MAX)
            .find(|ticket| messages.iter().all(|message| message.ticket != *ticket))
            .ok_or_else(|| {
                candle_core::Error::msg(format!(
                    "{} messages of unfinished backward passes are pending in one operation",
                    messages.len()
                ))
            })?;
        messages.push(PassMessage { ticket, index, content });
        Ok(ticket)
    }

    /// Takes the messages of this pass, each with the index of its sender. `grad` is the gradient
    /// of the token, which contains the tickets of the messages.
    pub(crate) fn take(&self, grad: &Tensor) -> Result<Vec<(usize, T)>> {
        // This pass has left at least one message, so a single message is its own. Without this
        // shortcut, each operation on a GPU would wait for its tickets to be copied to the
        // processor.
        if let Some(message) = self.take_single() {
            return Ok(vec![message]);
        }
        // Tickets are whole numbers, so equal tickets have equal bits.
        let tickets: Vec<u32> = grad.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect();
        let mut messages = self.lock();
        let taken = messages.extract_if(.., |message: &mut PassMessage<T>| {
            tickets.contains(&f32::from(message.ticket).to_bits())
        });
        Ok(taken.map(|message| (message.index, message.content)).collect())
    }

    /// Takes the only message; returns `None` if there are more or none.
    fn take_single(&self) -> Option<(usize, T)> {
        let mut messages = self.lock();
        let message = if messages.len() == 1 { messages.pop() } else { None };
        message.map(|message| (message.index, message.content))
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
