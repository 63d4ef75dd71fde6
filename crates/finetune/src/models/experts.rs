//! A feed-forward network of experts: a router chooses a few for each token.
//!
//! Shazeer et al., arXiv 1701.06538; Jiang et al., "Mixtral of Experts", arXiv 2401.04088.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use fused_ops::{ExpertWeights, grouped_linear, layers::Linear, silu, softmax, swiglu};

use crate::models::{
    config::{Clamp, DecoderConfig, ExpertNames, ExpertsConfig, Routing},
    layers::linear,
};

#[derive(Debug)]
pub(super) struct Experts {
    config: ExpertsConfig,
    router: Linear,
    weights: Weights,
}

/// The weights of all experts.
#[derive(Debug)]
enum Weights {
    /// Gate, up and down of each expert.
    Separate([Vec<Tensor>; 3]),
    /// Gate and up in alternating columns, then down, [experts, inputs, outputs], with their biases.
    Stacked { gate_up: [Tensor; 2], down: [Tensor; 2], clamp: Clamp },
}

impl Experts {
    pub(super) fn new(
        config: &DecoderConfig,
        experts: &ExpertsConfig,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let (n, inner, hidden) = (experts.n, experts.inner, config.hidden_size);
        let router = linear(experts.router(hidden), vb)?;
        let vb = vb.pp("experts");
        let weights = match experts.names {
            ExpertNames::Separate([gate, up, down]) => {
                let all = |name, shape: (usize, usize)| -> Result<Vec<Tensor>> {
                    (0..n).map(|expert| vb.pp(expert).pp(name).get(shape, "weight")).collect()
                };
                let shape = (inner, hidden);
                Weights::Separate([all(gate, shape)?, all(up, shape)?, all(down, (hidden, inner))?])
            }
            ExpertNames::Stacked(clamp) => {
                let layer = |name: &str, inputs, outputs| -> Result<[Tensor; 2]> {
                    let bias = vb.get((n, outputs), &format!("{name}_bias"))?;
                    Ok([vb.get((n, inputs, outputs), name)?.transpose(1, 2)?, bias])
                };
                let gate_up = layer("gate_up_proj", hidden, 2 * inner)?;
                Weights::Stacked { gate_up, down: layer("down_proj", inner, hidden)?, clamp }
            }
        };
        Ok(Self { config: *experts, router, weights })
    }

    /// Returns the weighted sum of the experts of each token, for `x` [rows, length, hidden].
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let tokens = x.flatten_to(1)?;
        let logits = self.router.forward(&tokens)?;
        let choices = Choices::new(&logits, &self.config)?;
        let device = x.device();
        let sorted = tokens.index_select(&Tensor::new(&choices.tokens[..], device)?, 0)?;
        let results = self.apply(&sorted, &choices)?;
        let results = results.index_select(&Tensor::new(&choices.places[..], device)?, 0)?;
        let weights = self.weights_of(&logits, &choices)?.to_dtype(x.dtype())?;
        let (n_tokens, per_token) = weights.dims2()?;
        let results = results.reshape((n_tokens, per_token, ()))?;
        results.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?.reshape(x.shape())
    }

    /// Returns the weights of the chosen experts [tokens, experts of a token].
    fn weights_of(&self, logits: &Tensor, choices: &Choices) -> Result<Tensor> {
        let logits = logits.to_dtype(DType::F32)?;
        let shape = (logits.dim(0)?, self.config.per_token);
        let chosen = Tensor::from_slice(&choices.experts, shape, logits.device())?;
        match self.config.routing {
            Routing::SoftmaxChosen => {
                Ok(softmax(&logits.gather(&chosen, 1)?.contiguous()?, D::Minus1)?)
            }
            Routing::Softmax => softmax(&logits, D::Minus1)?.gather(&chosen, 1),
            Routing::SoftmaxRenormalized => {
                let weights = softmax(&logits, D::Minus1)?.gather(&chosen, 1)?;
                weights.broadcast_div(&weights.sum_keepdim(1)?)
            }
        }
    }

    /// Applies to each row its expert.
    fn apply(&self, x: &Tensor, choices: &Choices) -> Result<Tensor> {
        let counts = &choices.counts[..];
        match &self.weights {
            Weights::Separate(weights) => {
                let [gate, up, down] = weights.each_ref().map(|all| ExpertWeights::Separate(all));
                let gated =
                    swiglu(&grouped_linear(x, gate, counts)?, &grouped_linear(x, up, counts)?);
                Ok(grouped_linear(&gated?, down, counts)?)
            }
            Weights::Stacked { gate_up, down, clamp } => {
                let rows = Tensor::new(&choices.sorted_experts()[..], x.device())?;
                let layer = |x: &Tensor, [weight, bias]: &[Tensor; 2]| {
                    let product = grouped_linear(x, ExpertWeights::Stacked(weight), counts)?;
                    product + bias.index_select(&rows, 0)?
                };
                let gate_up = layer(x, gate_up)?;
                let pairs = gate_up.reshape((gate_up.dim(0)?, (), 2))?;
                let part = |n| pairs.narrow(2, n, 1)?.squeeze(2);
                layer(&clamp.gated(&part(0)?, &part(1)?)?, down)
            }
        }
    }
}

impl Clamp {
    /// Returns (up + 1) · gate · sigmoid(α · gate), with clamped inputs.
    fn gated(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let gate = gate.minimum(self.limit)?;
        let up = up.maximum(-self.limit)?.minimum(self.limit)?;
        (silu(&(gate * self.alpha)?)? / self.alpha)? * (up + 1.)?
    }
}

/// The experts of each token. An expert that comes first wins a tie.
struct Choices {
    /// The experts of all tokens, token by token.
    experts: Vec<u32>,
    /// The tokens of all experts, expert by expert.
    tokens: Vec<u32>,
    /// The place of each of `experts` among `tokens`.
    places: Vec<u32>,
    /// The number of tokens of each expert.
    counts: Vec<usize>,
}

impl Choices {
    #[expect(clippy::cast_possible_truncation, reason = "candle's indices are u32")]
    fn new(logits: &Tensor, config: &ExpertsConfig) -> Result<Self> {
        let logits: Vec<Vec<f32>> = logits.detach().to_dtype(DType::F32)?.to_vec2()?;
        let mut experts = Vec::with_capacity(logits.len() * config.per_token);
        for row in &logits {
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            // The sort is stable.
            order.sort_by(|&left, &right| row[right as usize].total_cmp(&row[left as usize]));
            experts.extend_from_slice(&order[..config.per_token]);
        }
        let mut order: Vec<usize> = (0..experts.len()).collect();
        order.sort_by_key(|&choice| experts[choice]);
        let mut counts = vec![0; config.n];
        let mut places = vec![0; experts.len()];
        for (place, &choice) in order.iter().enumerate() {
            counts[experts[choice] as usize] += 1;
            places[choice] = place as u32;
        }
        let tokens = order.iter().map(|choice| (choice / config.per_token) as u32).collect();
        Ok(Self { experts, tokens, places, counts })
    }

    /// Returns the expert of each row, sorted.
    fn sorted_experts(&self) -> Vec<u32> {
        let mut experts = self.experts.clone();
        experts.sort_unstable();
        experts
    }
}
