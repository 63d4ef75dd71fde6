//! A training step of a small transformer over bytes: fused operations beside composed ones, on
//! virtual devices of a processor. The peers' halves are `peers/torch_train.py` and
//! `peers/jax_train.py`, with the same model and arguments.
//!
//! ```text
//! cargo bench -p benches --bench step -- [form] [slots] [hidden] [layers] [heads] [context] [rows] [steps] \
//!     [prefetch] [bytes per second]
//! ```
//!
//! Forms are `fused` and `composed` operations under data parallel, and one loss by units, of fused
//! operations, under data parallel (`units`) and fully sharded (`sharded`, `graph` with graphs kept,
//! `gathered` with parameters and graphs kept, `in-backward` with optimizers that run inside the
//! backward pass). With `prefetch`, units are gathered ahead; with a bandwidth, a network of it is
//! simulated between the slots, and waited for by sleeping.
//!
//! Prints one line: the least and the median time of a step, processor time per step, the memory of
//! the process at its peak, and the losses of the first two steps and the last.

#![allow(clippy::print_stdout, reason = "the line is the result")]

use std::{num::NonZeroU64, time::Instant};

use benches::{peak_mib, processor_seconds};
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

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Fused,
    Composed,
    Units,
    Sharded,
    Graph,
    Gathered,
    InBackward,
}

impl Form {
    fn of_name(name: Option<&String>) -> Self {
        match name.map(String::as_str) {
            None | Some("fused") => Self::Fused,
            Some("composed") => Self::Composed,
            Some("units") => Self::Units,
            Some("sharded") => Self::Sharded,
            Some("graph") => Self::Graph,
            Some("gathered") => Self::Gathered,
            Some("in-backward") => Self::InBackward,
            Some(other) => panic!("there is no form {other}"),
        }
    }
}

#[derive(Clone, Copy)]
struct Config {
    form: Form,
    slots: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    context: usize,
    rows: usize,
    steps: usize,
    prefetch: usize,
    bytes_per_second: usize,
}

impl Config {
    fn from_args() -> Self {
        let args: Vec<String> =
            std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
        let number = |index: usize, default| {
            args.get(index).and_then(|arg| arg.parse().ok()).unwrap_or(default)
        };
        Self {
            form: Form::of_name(args.first()),
            slots: number(1, 2),
            hidden: number(2, 128),
            layers: number(3, 2),
            heads: number(4, 4),
            context: number(5, 128),
            rows: number(6, 32),
            steps: number(7, 24),
            prefetch: number(8, 0),
            bytes_per_second: number(9, 0),
        }
    }
}

const VOCABULARY: usize = 256;

struct Model {
    config: Config,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

struct Block {
    attention_norm: RmsNorm,
    qkv: Linear,
    out: Linear,
    mlp_norm: RmsNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(Config { hidden, .. }: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            attention_norm: rms_norm(hidden, 1e-5, vb.pp("attention_norm"))?,
            qkv: linear_no_bias(hidden, 3 * hidden, vb.pp("qkv"))?,
            out: linear_no_bias(hidden, hidden, vb.pp("out"))?,
            mlp_norm: rms_norm(hidden, 1e-5, vb.pp("mlp_norm"))?,
            up: linear_no_bias(hidden, 4 * hidden, vb.pp("up"))?,
            down: linear_no_bias(4 * hidden, hidden, vb.pp("down"))?,
        })
    }

    /// The block as a unit: with its own norm, and not that of the next one.
    fn forward(&self, heads: usize, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.attention_norm.forward(x)?)?;
        let mixed = ops::attention_packed(&qkv, heads, heads, &AttentionConfig::causal())?;
        let (x, normed) = self.mlp_norm.forward_add(x, &self.out.forward(&mixed)?)?;
        let (up, down) = (self.up.weight(), self.down.weight());
        x + ops::mlp(&normed, up, None, Activation::Relu, down, None)?
    }
}

fn rules() -> UnitRules {
    UnitRules::new().unit("embed", ["tokens", "positions"]).unit("head", ["norm", "head"])
}

/// The loss by units, of the same layers.
fn by_units(config: Config, model: &Units, ids: &Tensor, weights: Tensor) -> Result<Tensor> {
    let Config { hidden, layers, heads, context, .. } = config;
    let inputs = ids.narrow(1, 0, context)?.contiguous()?;
    let targets = ids.narrow(1, 1, context)?.contiguous()?;
    let mut x = model.unit("embed", &inputs, move |vb, inputs| {
        let positions = embedding(context, hidden, vb.pp("positions"))?;
        let tokens = embedding(VOCABULARY, hidden, vb.pp("tokens"))?;
        tokens.forward(inputs)?.broadcast_add(positions.embeddings())
    })?;
    for layer in 0..layers {
        let block =
            move |vb: VarBuilder<'_>, x: &Tensor| Block::new(config, &vb)?.forward(heads, x);
        x = model.unit(&format!("blocks.{layer}"), &x, block)?;
    }
    model.unit("head", &(x, targets, weights), move |vb, (x, targets, weights)| {
        let normed = rms_norm(hidden, 1e-5, vb.pp("norm"))?.forward(x)?;
        let logits = linear_no_bias(hidden, VOCABULARY, vb.pp("head"))?.forward(&normed)?;
        let config = CrossEntropyConfig::default().with_row_weights(weights.clone());
        Ok(ops::cross_entropy(&logits, targets, &config)?.sum)
    })
}

impl Model {
    fn new(config: Config, vb: &VarBuilder<'_>) -> Result<Self> {
        let Config { hidden, layers, context, .. } = config;
        let blocks = (0..layers).map(|layer| Block::new(config, &vb.pp(format!("blocks.{layer}"))));
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
        if self.config.form == Form::Composed {
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
            let (up, down) = (block.up.weight(), block.down.weight());
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
        let Config { heads, hidden, .. } = self.config;
        let (batch, length, _) = qkv.dims3()?;
        let size = hidden / heads;
        let qkv =
            qkv.reshape((batch, length, 3, heads, size))?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (query, key, value) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = (query.matmul(&key.t()?)? / (size as f64).sqrt())?.broadcast_add(mask)?;
        let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&value)?;
        mixed.transpose(1, 2)?.reshape((batch, length, hidden))
    }
}

fn causal_mask(length: usize) -> Result<Tensor> {
    let at = |i: usize| if i % length > i / length { f32::NEG_INFINITY } else { 0.0 };
    Tensor::from_vec(
        (0..length * length).map(at).collect::<Vec<_>>(),
        (length, length),
        &Device::Cpu,
    )
}

/// The same bytes as the peers'.
#[allow(clippy::cast_possible_truncation, reason = "a byte is cut out of the state")]
fn data(config: Config) -> Result<(Tensor, Tensor)> {
    let Config { rows, context, .. } = config;
    let mut state = 12345_u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 96 + 32) as u32
    };
    let ids: Vec<_> = (0..rows * (context + 1)).map(|_| next()).collect();
    let weights = vec![1_f32; rows * context];
    Ok((
        Tensor::from_vec(ids, (rows, context + 1), &Device::Cpu)?,
        Tensor::from_vec(weights, (rows, context), &Device::Cpu)?,
    ))
}

fn loss(_: &Replica, model: &Model, (ids, weights): (Tensor, Tensor)) -> Result<Loss> {
    let tokens = weights.sum_all()?;
    Ok(Loss::sum(model.loss(&ids, &weights)?, tokens))
}

type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What trains on a batch and returns its loss.
type Trained = Box<dyn FnMut((Tensor, Tensor)) -> Outcome<f64>>;

fn adam(group: Group) -> Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 1e-3, ..ParamsAdamW::default() })
}

fn trained(config: Config, mesh: &DeviceMesh) -> Outcome<Trained> {
    let of_units = move |_: &Replica, model: &Units, (ids, weights): (Tensor, Tensor)| {
        let tokens = weights.sum_all()?;
        Ok(Loss::sum(by_units(config, model, &ids, weights)?, tokens))
    };
    let layers = move |vb: VarBuilder<'_>| Model::new(config, &vb);
    let with_options: fn(ModelBuilder<'_, Units>) -> ModelBuilder<'_, Units> = match config.form {
        Form::Fused | Form::Composed => {
            let builder = DataParallel::builder(mesh, layers).uneven(Uneven::Pad);
            let mut model = builder.build(adam)?;
            return Ok(Box::new(move |batch| Ok(model.step(batch, loss)?.loss)));
        }
        Form::Units => {
            let builder = DataParallel::builder(mesh, layers).by_units(rules());
            let mut model = builder.uneven(Uneven::Pad).build(adam)?;
            return Ok(Box::new(move |batch| Ok(model.step(batch, of_units)?.loss)));
        }
        Form::Sharded => |builder| builder,
        Form::Graph => |builder| builder.keep(Keep::Graph),
        Form::Gathered => |builder| builder.keep(Keep::Gathered),
        Form::InBackward => |builder| builder.optimizer_in_backward(),
    };
    let builder = FullyShard::builder(mesh, layers).by_units(rules()).uneven(Uneven::Pad);
    let mut model = with_options(builder).prefetch(config.prefetch).build(adam)?;
    Ok(Box::new(move |batch| Ok(model.step(batch, of_units)?.loss)))
}

fn main() -> Outcome<()> {
    let config = Config::from_args();
    let mesh = DeviceMesh::builder().axis(DeviceMesh::AXIS, config.slots);
    let mesh = match NonZeroU64::new(config.bytes_per_second as u64) {
        Some(bytes_per_second) => mesh.simulated_bandwidth(bytes_per_second).cpu()?,
        None => mesh.cpu()?,
    };
    let mut step = trained(config, &mesh)?;
    let (ids, weights) = data(config)?;
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    let warm_up = config.steps / 4;
    let mut processor = 0.0;
    for number in 0..config.steps {
        if number == warm_up {
            processor = processor_seconds();
        }
        let start = Instant::now();
        let loss = step((ids.clone(), weights.clone()))?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        losses.push(loss);
    }
    let processor = (processor_seconds() - processor) / (config.steps - warm_up) as f64 * 1e3;
    let mut times = times.split_off(warm_up);
    times.sort_by(f64::total_cmp);
    println!(
        "{:?} on {}: {:.1} / {:.1} ms, {processor:.0} ms of processor, {} MiB, losses {:?}",
        config.form,
        config.slots,
        times[0],
        times[times.len() / 2],
        peak_mib(),
        [losses[0], losses[1], losses[losses.len() - 1]],
    );
    assert!(losses[losses.len() - 1] < losses[0], "it learns");
    Ok(())
}
