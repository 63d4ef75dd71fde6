//! Training steps of a small transformer over bytes, with fused and with composed operations, on
//! virtual CPU devices. `peers/torch_train.py` and `peers/jax_train.py` train the same model and
//! take the same arguments.
//!
//! ```text
//! cargo bench -p benches --bench step -- [form] [slots] [hidden] [layers] [heads] [context] [rows] [steps] \
//!     [prefetch]
//! ```
//!
//! Forms:
//!
//! - `fused`, `composed`: the whole model, under data parallel.
//! - `units`: fused operations by units, under data parallel.
//! - `sharded`: the same loss, fully sharded; `graph` keeps graphs, `gathered` keeps parameters and
//!   graphs, `in-backward` runs the optimizers inside the backward pass.
//!
//! `prefetch` is the number of units to gather ahead. With the feature `mpi`, `mpirun` starts one
//! process for each slot: `mpirun -n 2 target/release/deps/step-… sharded 2`.
//!
//! Prints the line of [`time_steps`].

use benches::{Outcome, is_test, open_mesh, peak_mib, time_steps};
use candle_core::{D, Device, Result, Tensor};
use candle_distributed::{
    mesh::{DeviceMesh, Replica, Uneven},
    ops::{
        self, Activation, AttentionConfig, CrossEntropyConfig,
        layers::{Embedding, Linear, RmsNorm, embedding, linear_no_bias, rms_norm},
    },
    train::{AdamW, DataParallel, FullyShard, Group, Keep, Loss, ModelBuilder, UnitRules, Units},
};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder};

#[derive(Clone, Copy, Debug, PartialEq)]
enum StepForm {
    Fused,
    Composed,
    Units,
    Sharded,
    Graph,
    Gathered,
    InBackward,
}

impl StepForm {
    fn from_name(name: Option<&String>) -> Self {
        match name.map(String::as_str) {
            None | Some("fused") => Self::Fused,
            Some("composed") => Self::Composed,
            Some("units") => Self::Units,
            Some("sharded") => Self::Sharded,
            Some("graph") => Self::Graph,
            Some("gathered") => Self::Gathered,
            Some("in-backward") => Self::InBackward,
            Some(other) => panic!("unknown form {other}"),
        }
    }
}

#[derive(Clone, Copy)]
struct StepConfig {
    form: StepForm,
    slots: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    context: usize,
    rows: usize,
    steps: usize,
    prefetch: usize,
}

impl StepConfig {
    fn from_args() -> Self {
        let args: Vec<String> =
            std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
        let number = |index: usize, default| {
            args.get(index).and_then(|arg| arg.parse().ok()).unwrap_or(default)
        };
        Self {
            form: StepForm::from_name(args.first()),
            slots: number(1, 2),
            hidden: number(2, 128),
            layers: number(3, 2),
            heads: number(4, 4),
            context: number(5, 128),
            rows: number(6, 32),
            steps: number(7, if is_test() { 4 } else { 24 }),
            prefetch: number(8, 0),
        }
    }
}

const VOCABULARY: usize = 256;

struct Transformer {
    config: StepConfig,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<TransformerBlock>,
    norm: RmsNorm,
    head: Linear,
}

struct TransformerBlock {
    attention_norm: RmsNorm,
    qkv: Linear,
    out: Linear,
    mlp_norm: RmsNorm,
    up: Linear,
    down: Linear,
}

impl TransformerBlock {
    fn new(StepConfig { hidden, .. }: StepConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            attention_norm: rms_norm(hidden, 1e-5, vb.pp("attention_norm"))?,
            qkv: linear_no_bias(hidden, 3 * hidden, vb.pp("qkv"))?,
            out: linear_no_bias(hidden, hidden, vb.pp("out"))?,
            mlp_norm: rms_norm(hidden, 1e-5, vb.pp("mlp_norm"))?,
            up: linear_no_bias(hidden, 4 * hidden, vb.pp("up"))?,
            down: linear_no_bias(4 * hidden, hidden, vb.pp("down"))?,
        })
    }

    /// Computes the block as a unit, beginning with its own norm; `Transformer::fused` joins that
    /// norm to the block before.
    fn forward(&self, heads: usize, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.attention_norm.forward(x)?)?;
        let mixed = ops::attention_packed(&qkv, heads, heads, &AttentionConfig::causal())?;
        let (x, normed) = self.mlp_norm.forward_add(x, &self.out.forward(&mixed)?)?;
        let up = self.up.weight();
        let down = self.down.weight();
        x + ops::mlp(&normed, up, None, Activation::Relu, down, None)?
    }
}

fn rules() -> UnitRules {
    UnitRules::new().unit("embed", ["tokens", "positions"]).unit("head", ["norm", "head"])
}

/// Computes the loss by units, with the layers of [`Transformer`].
fn by_units(config: StepConfig, model: &Units, ids: &Tensor, weights: Tensor) -> Result<Tensor> {
    let StepConfig { hidden, layers, heads, context, .. } = config;
    let inputs = ids.narrow(1, 0, context)?.contiguous()?;
    let targets = ids.narrow(1, 1, context)?.contiguous()?;
    let mut x = model.unit("embed", &inputs, move |vb, inputs| {
        let positions = embedding(context, hidden, vb.pp("positions"))?;
        let tokens = embedding(VOCABULARY, hidden, vb.pp("tokens"))?;
        tokens.forward(inputs)?.broadcast_add(positions.embeddings())
    })?;
    for layer in 0..layers {
        x = model.unit(&format!("blocks.{layer}"), &x, move |vb, x: &Tensor| {
            TransformerBlock::new(config, &vb)?.forward(heads, x)
        })?;
    }
    model.unit("head", &(x, targets, weights), move |vb, (x, targets, weights)| {
        let normed = rms_norm(hidden, 1e-5, vb.pp("norm"))?.forward(x)?;
        let logits = linear_no_bias(hidden, VOCABULARY, vb.pp("head"))?.forward(&normed)?;
        let config = CrossEntropyConfig::default().with_row_weights(weights.clone());
        Ok(ops::cross_entropy(&logits, targets, &config)?.sum)
    })
}

impl Transformer {
    fn new(config: StepConfig, vb: &VarBuilder<'_>) -> Result<Self> {
        let StepConfig { hidden, layers, context, .. } = config;
        let blocks = (0..layers)
            .map(|layer| TransformerBlock::new(config, &vb.pp(format!("blocks.{layer}"))));
        Ok(Self {
            config,
            tokens: embedding(VOCABULARY, hidden, vb.pp("tokens"))?,
            positions: embedding(context, hidden, vb.pp("positions"))?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: rms_norm(hidden, 1e-5, vb.pp("norm"))?,
            head: linear_no_bias(hidden, VOCABULARY, vb.pp("head"))?,
        })
    }

    fn loss(&self, ids: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let inputs = ids.narrow(1, 0, self.config.context)?.contiguous()?;
        let targets = ids.narrow(1, 1, self.config.context)?.contiguous()?;
        if self.config.form == StepForm::Composed {
            self.composed(&inputs, &targets, weights)
        } else {
            self.fused(&inputs, &targets, weights)
        }
    }

    fn fused(&self, inputs: &Tensor, targets: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let heads = self.config.heads;
        let mut x = self.tokens.forward(inputs)?.broadcast_add(self.positions.embeddings())?;
        let mut normed = self.first_norm().forward(&x)?;
        for (index, block) in self.blocks.iter().enumerate() {
            let qkv = block.qkv.forward(&normed)?;
            let mixed = ops::attention_packed(&qkv, heads, heads, &AttentionConfig::causal())?;
            (x, normed) = block.mlp_norm.forward_add(&x, &block.out.forward(&mixed)?)?;
            let up = block.up.weight();
            let down = block.down.weight();
            let mlp = ops::mlp(&normed, up, None, Activation::Relu, down, None)?;
            let next = self.blocks.get(index + 1).map_or(&self.norm, |next| &next.attention_norm);
            (x, normed) = next.forward_add(&x, &mlp)?;
        }
        let logits = self.head.forward(&normed)?;
        let config = CrossEntropyConfig::default().with_row_weights(weights.clone());
        Ok(ops::cross_entropy(&logits, targets, &config)?.sum)
    }

    fn first_norm(&self) -> &RmsNorm {
        self.blocks.first().map_or(&self.norm, |block| &block.attention_norm)
    }

    fn composed(&self, inputs: &Tensor, targets: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let norm =
            |norm: &RmsNorm, x: &Tensor| candle_nn::ops::rms_norm_slow(x, norm.weight(), 1e-5);
        let linear = |linear: &Linear, x: &Tensor| {
            candle_nn::Linear::new(linear.weight().clone(), None).forward(x)
        };
        let table = candle_nn::Embedding::new(self.tokens.embeddings().clone(), self.config.hidden);
        let mut x = table.forward(inputs)?.broadcast_add(self.positions.embeddings())?;
        let mask = causal_mask(self.config.context)?;
        for block in &self.blocks {
            let qkv = linear(&block.qkv, &norm(&block.attention_norm, &x)?)?;
            x = (&x + linear(&block.out, &self.attend(&qkv, &mask)?)?)?;
            let up = linear(&block.up, &norm(&block.mlp_norm, &x)?)?.relu()?;
            x = (&x + linear(&block.down, &up)?)?;
        }
        let logits = linear(&self.head, &norm(&self.norm, &x)?)?;
        let log_likelihood = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
        let own = log_likelihood.gather(&targets.unsqueeze(2)?, D::Minus1)?.squeeze(2)?;
        (own * weights)?.sum_all()?.neg()
    }

    fn attend(&self, qkv: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let StepConfig { heads, hidden, .. } = self.config;
        let (batch, length, _) = qkv.dims3()?;
        let size = hidden / heads;
        let qkv =
            qkv.reshape((batch, length, 3, heads, size))?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let query = qkv.get(0)?;
        let key = qkv.get(1)?;
        let value = qkv.get(2)?;
        let scores = (query.matmul(&key.t()?)? / (size as f64).sqrt())?.broadcast_add(mask)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&value)?;
        mixed.transpose(1, 2)?.reshape((batch, length, hidden))
    }
}

fn causal_mask(length: usize) -> Result<Tensor> {
    let mut mask = vec![0_f32; length * length];
    for row in 0..length {
        mask[row * length + row + 1..(row + 1) * length].fill(f32::NEG_INFINITY);
    }
    Tensor::from_vec(mask, (length, length), &Device::Cpu)
}

/// Returns the bytes that the peers train on, and a weight of 1 for each target.
#[allow(clippy::cast_possible_truncation, reason = "a token is below 128")]
fn training_data(config: StepConfig) -> Result<(Tensor, Tensor)> {
    let StepConfig { rows, context, .. } = config;
    let mut state = 12345_u64;
    let mut ids = Vec::with_capacity(rows * (context + 1));
    for _ in 0..rows * (context + 1) {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ids.push(((state >> 33) % 96 + 32) as u32);
    }
    let weights = vec![1_f32; rows * context];
    Ok((
        Tensor::from_vec(ids, (rows, context + 1), &Device::Cpu)?,
        Tensor::from_vec(weights, (rows, context), &Device::Cpu)?,
    ))
}

fn loss(_: &Replica, model: &Transformer, (ids, weights): (Tensor, Tensor)) -> Result<Loss> {
    let tokens = weights.sum_all()?;
    Ok(Loss::sum(model.loss(&ids, &weights)?, tokens))
}

/// Trains on a batch and returns its loss.
type TrainStep = Box<dyn FnMut((Tensor, Tensor)) -> Outcome<f64>>;

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 1e-3, ..ParamsAdamW::default() })
}

fn build_step(config: StepConfig, mesh: &DeviceMesh) -> Outcome<TrainStep> {
    let units_loss = move |_: &Replica, model: &Units, (ids, weights): (Tensor, Tensor)| {
        let tokens = weights.sum_all()?;
        Ok(Loss::sum(by_units(config, model, &ids, weights)?, tokens))
    };
    let layers = move |vb: VarBuilder<'_>| Transformer::new(config, &vb);
    let with_options: fn(ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> = match config.form {
        StepForm::Fused | StepForm::Composed => {
            let builder = DataParallel::builder(mesh, layers).uneven(Uneven::Pad);
            let mut model = builder.build(adam)?;
            return Ok(Box::new(move |batch| Ok(model.step(batch, loss)?.loss)));
        }
        StepForm::Units => {
            let builder = DataParallel::builder(mesh, layers).by_units(rules());
            let mut model = builder.uneven(Uneven::Pad).build(adam)?;
            return Ok(Box::new(move |batch| Ok(model.step(batch, units_loss)?.loss)));
        }
        StepForm::Sharded => |builder| builder,
        StepForm::Graph => |builder| builder.keep(Keep::Graph),
        StepForm::Gathered => |builder| builder.keep(Keep::Gathered),
        StepForm::InBackward => |builder| builder.optimizer_in_backward(),
    };
    let builder = FullyShard::builder(mesh, layers).by_units(rules()).uneven(Uneven::Pad);
    let mut model = with_options(builder).prefetch(config.prefetch).build(adam)?;
    Ok(Box::new(move |batch| Ok(model.step(batch, units_loss)?.loss)))
}

fn main() -> Outcome<()> {
    let config = StepConfig::from_args();
    let mesh = open_mesh(config.slots)?;
    let base_mib = peak_mib();
    let mut step = build_step(config, &mesh)?;
    let (ids, weights) = training_data(config)?;
    let name = format!("{:?} on {}", config.form, config.slots);
    time_steps(&name, &mesh, base_mib, config.steps, || step((ids.clone(), weights.clone())))
}
