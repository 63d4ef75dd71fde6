//! Keys and values of a text that a decoder has read.

use candle_core::{Result, Tensor};

/// The keys, with their rotation, and the values of a layer.
#[derive(Debug, Default)]
pub(super) struct LayerCache {
    keys: GrowingRows,
    values: GrowingRows,
}

impl LayerCache {
    /// Appends keys and values [1, tokens, heads, size], and returns all that a token may attend to. A
    /// layer with a window drops the others.
    pub(super) fn append(
        &mut self,
        key: &Tensor,
        value: &Tensor,
        window: Option<usize>,
    ) -> Result<(Tensor, Tensor)> {
        Ok((self.keys.append(key, window)?, self.values.append(value, window)?))
    }
}

/// A tensor [1, capacity, key heads, head size] that doubles when it is full.
#[derive(Debug, Default)]
struct GrowingRows {
    memory: Option<Tensor>,
    length: usize,
}

impl GrowingRows {
    /// Appends rows, and returns a view of all rows that a window of the new ones may see.
    fn append(&mut self, new: &Tensor, window: Option<usize>) -> Result<Tensor> {
        let (_, n_new, heads, size) = new.dims4()?;
        let memory = match self.memory.take() {
            // The rows of a prompt need no copy.
            None => new.contiguous()?,
            Some(memory) => {
                let capacity = memory.dim(1)?;
                let memory = if self.length + n_new > capacity {
                    let kept = window.map_or(self.length, |window| self.length.min(window - 1));
                    let shape = (1, (kept + n_new).max(2 * kept), heads, size);
                    let larger = Tensor::zeros(shape, new.dtype(), new.device())?;
                    if kept > 0 {
                        let rows = memory.narrow(1, self.length - kept, kept)?;
                        larger.slice_set(&rows.contiguous()?, 1, 0)?;
                    }
                    self.length = kept;
                    larger
                } else {
                    memory
                };
                memory.slice_set(&new.contiguous()?, 1, self.length)?;
                memory
            }
        };
        self.length += n_new;
        self.memory.insert(memory).narrow(1, 0, self.length)
    }
}
