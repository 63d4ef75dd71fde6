//! Embeddings.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// A table of embeddings that computes [`embedding`](crate::embedding()); replaces
/// `candle_nn::Embedding`.
///
/// # Examples
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use fused_ops::layers::embedding;
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let tokens = embedding(10, 4, vb.pp("embed_tokens"))?;
/// let y = tokens.forward(&Tensor::new(&[[1_u32, 2, 3]], &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [1, 3, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
}

impl Embedding {
    /// Creates a layer with this table [rows, hidden size].
    ///
    /// The second argument is ignored. It exists because candle-nn's constructor has it.
    pub fn new(embeddings: Tensor, _hidden_size: usize) -> Self {
        Self { embeddings }
    }

    /// Returns the table [rows, hidden size].
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }
}

impl Module for Embedding {
    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        Ok(crate::embedding(&self.embeddings, indices)?)
    }
}

impl From<candle_nn::Embedding> for Embedding {
    fn from(embedding: candle_nn::Embedding) -> Self {
        Self { embeddings: embedding.embeddings().clone() }
    }
}

/// Loads an embedding with a `weight` [`in_size`, `out_size`], or draws it from the standard normal
/// distribution.
///
/// # Errors
///
/// Returns an error if the table cannot be loaded.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    candle_nn::embedding(in_size, out_size, vb).map(Embedding::from)
}
