//! Memory layouts of a tensor: the same items in every kind of view.

use candle_core::{Result, Tensor};

use crate::differential::array::Array;

/// A memory layout; each falls back to `Plain` for an array that cannot have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Layout {
    Plain,
    /// The first dimension varies fastest.
    Transposed,
    /// A slice from the middle of a tensor that is longer in the last dimension.
    Between,
    /// Every second item of a longer tensor.
    Strided,
    /// Equal rows that share memory.
    Repeated,
    /// An empty view that begins past the end of its storage.
    BehindTheEnd,
}

impl Layout {
    pub(crate) const ALL: [Self; 6] = [
        Self::Plain,
        Self::Transposed,
        Self::Between,
        Self::Strided,
        Self::Repeated,
        Self::BehindTheEnd,
    ];

    /// Returns a tensor of these items.
    pub(crate) fn tensor(self, array: &Array) -> Tensor {
        self.view(array).unwrap()
    }

    fn view(self, array: &Array) -> Result<Tensor> {
        let Some(last) = array.shape.len().checked_sub(1) else { return Ok(array.tensor()) };
        let size = array.shape[last];
        match self {
            Self::BehindTheEnd if array.items.is_empty() => past_the_end(array),
            _ if array.items.is_empty() => Ok(array.tensor()),
            Self::Transposed => array.transposed(0, last).tensor().transpose(0, last),
            Self::Between => {
                let longer = Array::concatenated(&[array; 3], last).unwrap();
                longer.tensor().narrow(last, size, size)
            }
            Self::Strided => {
                let pairs = array.clone().with_dim(last + 1);
                let pairs = Array::concatenated(&[&pairs; 2], last + 1).unwrap();
                pairs.tensor().narrow(last + 1, 1, 1)?.squeeze(last + 1)
            }
            Self::Repeated if array.repeated().same(array) => {
                array.rows(0, 0, 1).tensor().broadcast_as(&array.shape[..])
            }
            Self::Plain | Self::Repeated | Self::BehindTheEnd => Ok(array.tensor()),
        }
    }
}

fn past_the_end(array: &Array) -> Result<Tensor> {
    let mut longer = array.shape.clone();
    longer[0] += 2;
    Array::zeros(array.dtype, &longer).tensor().narrow(0, 2, array.shape[0])
}
