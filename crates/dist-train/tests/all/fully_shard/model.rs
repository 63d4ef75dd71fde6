//! A small model of units, trained replicated, sharded and by candle alone.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{
    Embedding, Linear, Module, Optimizer, ParamsAdamW, RmsNorm, VarBuilder, VarMap, embedding,
    linear, linear_no_bias, ops::log_softmax, rms_norm,
};
use core_types::Seed;
use dist_train::{
    AdamW, DataParallel, DistributedModel, FullyShard, Group, Keep, ModelBuilder, UnitRules, Units,
};
use fsdp_plan::strategy::{Choice, Full, Hybrid, LayerWise, Layout, ShardingStrategy, WholeTensor};
use pmap_mesh::{DeviceMesh, Replica};

use crate::support::bits;

/// All values of `Keep`.
pub(crate) const KEEPS: [Keep; 3] = [Keep::Inputs, Keep::Graph, Keep::Gathered];

pub(crate) const N_BLOCKS: usize = 3;
const WIDTH: usize = 6;
const VOCABULARY: usize = 11;
const LENGTH: usize = 5;

/// Token and position embeddings.
struct EmbeddingPair {
    tokens: Embedding,
    positions: Embedding,
}

impl EmbeddingPair {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let tokens = embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
        Ok(Self { tokens, positions: embedding(LENGTH, WIDTH, vb.pp("positions"))? })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.tokens.forward(ids)?.broadcast_add(self.positions.embeddings())
    }
}

/// Mixes positions and features, each with a residual connection.
struct MixerBlock {
    norm: RmsNorm,
    mix: Linear,
    up: Linear,
    down: Linear,
}

impl MixerBlock {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            mix: linear_no_bias(LENGTH, LENGTH, vb.pp("mix"))?,
            up: linear(WIDTH, 3 * WIDTH, vb.pp("up"))?,
            down: linear(3 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mixed = self.norm.forward_diff(x)?.transpose(1, 2)?.contiguous()?;
        let x = (x + self.mix.forward(&mixed)?.transpose(1, 2)?)?;
        &x + self.down.forward(&self.up.forward(&x)?.silu()?)?
    }
}

struct LossHead {
    norm: RmsNorm,
    out: Linear,
}

impl LossHead {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let norm = rms_norm(WIDTH, 1e-5, vb.pp("norm"))?;
        Ok(Self { norm, out: linear_no_bias(WIDTH, VOCABULARY, vb.pp("out"))? })
    }

    fn loss(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = self.out.forward(&self.norm.forward_diff(x)?)?.flatten_to(1)?;
        let picked = log_softmax(&logits, 1)?.gather(&targets.flatten_all()?.unsqueeze(1)?, 1)?;
        picked.mean_all()?.neg()
    }
}

/// Builds all layers of the model.
pub(crate) fn build(vb: VarBuilder<'_>) -> Result<()> {
    EmbeddingPair::new(vb.clone())?;
    for block in 0..N_BLOCKS {
        MixerBlock::new(vb.pp(format!("blocks.{block}")))?;
    }
    LossHead::new(vb)?;
    Ok(())
}

pub(crate) fn rules() -> UnitRules {
    UnitRules::new().unit("embed", ["tokens", "positions"]).unit("head", ["norm", "out"])
}

/// Computes the loss of rows of tokens on a replica.
pub(crate) fn loss(_: &Replica, model: &Units, ids: Tensor) -> Result<Tensor> {
    token_loss(model, &ids)
}

/// Computes the mean next-token loss.
pub(crate) fn token_loss(model: &Units, ids: &Tensor) -> Result<Tensor> {
    let tokens = ids.narrow(1, 0, LENGTH)?.contiguous()?;
    let mut x = model.unit("embed", &tokens, |vb, ids| EmbeddingPair::new(vb)?.forward(ids))?;
    for block in 0..N_BLOCKS {
        x = model.unit(&format!("blocks.{block}"), &x, |vb, x| MixerBlock::new(vb)?.forward(x))?;
    }
    let targets = ids.narrow(1, 1, LENGTH)?.contiguous()?;
    model.unit("head", &(x, targets), |vb, (x, targets)| LossHead::new(vb)?.loss(x, targets))
}

/// Returns rows of tokens that vary by step.
pub(crate) fn batch(rows: usize, step: usize) -> Tensor {
    let ids: Vec<u32> = (0..rows * (LENGTH + 1))
        .map(|n| u32::try_from((n * n + 7 * step + n / 3) % VOCABULARY).unwrap())
        .collect();
    Tensor::from_vec(ids, (rows, LENGTH + 1), &Device::Cpu).unwrap()
}

pub(crate) fn adam(group: Group) -> Result<AdamW> {
    adam_for(group.vars)
}

fn adam_for(vars: Vec<Var>) -> Result<AdamW> {
    let params = ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..ParamsAdamW::default() };
    AdamW::new(vars, params)
}

pub(crate) fn sharded(mesh: &DeviceMesh) -> ModelBuilder<'_, Units> {
    FullyShard::builder(mesh, build).by_units(rules()).init(Seed::new(3))
}

pub(crate) fn data_parallel(mesh: &DeviceMesh) -> ModelBuilder<'_, Units> {
    DataParallel::builder(mesh, build).by_units(rules()).init(Seed::new(3))
}

/// Returns every sharding strategy with a name for messages.
pub(crate) fn strategies() -> Vec<(&'static str, Box<dyn ShardingStrategy>)> {
    let hybrid = Hybrid::default()
        .with_rule("norm", Choice::Replicate)
        .unwrap()
        .with_rule("head", Choice::LayerWise)
        .unwrap()
        .with_rule("mix", Choice::Full(Layout::Flat))
        .unwrap();
    vec![
        ("dim 0", Box::new(Full::new(Layout::Dim0))),
        ("flat", Box::new(Full::new(Layout::Flat))),
        ("aligned", Box::new(Full::new(Layout::FlatAligned))),
        ("rows", Box::new(Full::new(Layout::RowRagged { rows: 1 }))),
        ("blocks", Box::new(Full::new(Layout::BlockRagged { block: 4 }))),
        ("layers", Box::new(LayerWise::default())),
        ("whole tensors", Box::new(WholeTensor)),
        ("hybrid", Box::new(hybrid)),
    ]
}

/// Enters units `first` and `both` of two layers, which share the first layer.
pub(crate) fn tied(_: &Replica, model: &Units, x: Tensor) -> Result<Tensor> {
    let x = model.unit("first", &x, |vb, x| linear(3, 3, vb.pp("0"))?.forward(x)?.tanh())?;
    let x = model.unit("both", &x, |vb, x| {
        let x = linear(3, 3, vb.pp("1"))?.forward(x)?.tanh()?;
        linear(3, 3, vb.pp("0"))?.forward(&x)
    })?;
    x.sqr()?.mean_all()
}

/// The bits of all losses and of the parameters after training.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Trained {
    pub(crate) losses: Vec<u64>,
    pub(crate) parameters: BTreeMap<String, Vec<u32>>,
}

pub(crate) fn parameters(model: &DistributedModel<Units, AdamW>) -> BTreeMap<String, Vec<u32>> {
    let parameters = model.parameters().unwrap().into_iter();
    parameters.map(|(name, whole)| (name, bits(&whole))).collect()
}

/// Trains a model for some steps.
pub(crate) fn train(
    mut model: DistributedModel<Units, AdamW>,
    rows: usize,
    steps: usize,
) -> Trained {
    let losses = (0..steps)
        .map(|step| model.step(batch(rows, step), loss).unwrap().loss.to_bits())
        .collect();
    Trained { losses, parameters: parameters(&model) }
}

/// Trains with candle alone, on `parts` micro-batches of each batch.
pub(crate) fn train_plain(parts: usize, rows: usize, steps: usize) -> Trained {
    let vars = initial_variables();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = Units::constructor(rules(), build)(vb).unwrap();
    let named: BTreeMap<_, _> = vars.data().lock().unwrap().clone().into_iter().collect();
    let mut optimizer = adam_for(named.values().cloned().collect()).unwrap();
    let mut losses = Vec::new();
    for step in 0..steps {
        let ids = batch(rows, step);
        let per_part = rows / parts;
        let mut sums = GradStore::default();
        let mut total = 0.0;
        for part in 0..parts {
            let ids = ids.narrow(0, part * per_part, per_part).unwrap();
            let mean = token_loss(&model, &ids).unwrap();
            total += f64::from(mean.to_scalar::<f32>().unwrap()) * per_part as f64;
            let share = (mean * (per_part as f64 / rows as f64)).unwrap();
            let grads = share.backward().unwrap();
            for var in named.values() {
                let grad = grads.get(var).unwrap().clone();
                let sum = match sums.remove(var) {
                    Some(before) => (before + grad).unwrap(),
                    None => grad,
                };
                sums.insert(var, sum);
            }
        }
        losses.push((total / rows as f64).to_bits());
        optimizer.step(&sums).unwrap();
    }
    let parameters = named.iter().map(|(name, var)| (name.clone(), bits(var)));
    Trained { losses, parameters: parameters.collect() }
}

/// Returns the initial variables of every model.
fn initial_variables() -> VarMap {
    let vars = VarMap::new();
    let mesh = DeviceMesh::cpu(1).unwrap();
    let model = data_parallel(&mesh).build(adam).unwrap();
    for (name, value) in model.parameters().unwrap() {
        vars.data().lock().unwrap().insert(name, Var::from_tensor(&value).unwrap());
    }
    vars
}
