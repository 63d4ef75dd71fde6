//! Fine-tuning steps of a model from a Hugging Face folder. `peers/hf_llama.py` makes the folder of a
//! Llama, and trains the same model on the same tokens. A folder with a `config.json` alone is a model of
//! any family, with random weights.
//!
//! ```text
//! cargo bench -p benches --bench llama -- FOLDER [form] [slots] [rows] [length] [steps]
//! ```
//!
//! Forms are `units` under data parallel, and `sharded`, `graph`, `gathered` and `in-backward` as in
//! `step.rs`. With the prefix `lora-` only adapters of rank 8 on all linear layers are trained;
//! `lora-half-` also stores their weights in `bf16`. Prints the line of [`time_steps`].

#![allow(clippy::print_stdout, reason = "without a folder there is only a message")]

use std::{env, fs, path::PathBuf};

use benches::{Outcome, open_mesh, peak_mib, time_steps};
use candle_core::{DType, Device, Tensor};
use candle_distributed::{
    finetune::models::{Decoder, DecoderConfig, Tokens},
    mesh::{DeviceMesh, Replica},
    train::{AdamW, DataParallel, FullyShard, Group, Keep, Lora, Units},
    types::Seed,
};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder};

/// Trains on a batch and returns its loss.
type TrainStep = Box<dyn FnMut((Tensor, Tensor)) -> Outcome<f64>>;

struct BenchConfig {
    folder: PathBuf,
    form: String,
    slots: usize,
    rows: usize,
    length: usize,
    steps: usize,
}

impl BenchConfig {
    /// Parses the arguments. Returns `None` if they name no folder.
    fn from_args() -> Outcome<Option<Self>> {
        let args: Vec<String> = env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
        let number = |index: usize, default| -> Outcome<usize> {
            Ok(args.get(index).map_or(Ok(default), |arg| arg.parse())?)
        };
        let Some(folder) = args.first() else { return Ok(None) };
        Ok(Some(Self {
            folder: folder.into(),
            form: args.get(1).map_or_else(|| "units".into(), Clone::clone),
            slots: number(2, 2)?,
            rows: number(3, 8)?,
            length: number(4, 256)?,
            steps: number(5, 24)?,
        }))
    }
}

fn adam(group: Group) -> candle_core::Result<AdamW> {
    AdamW::new(group.vars, ParamsAdamW { lr: 1e-3, ..ParamsAdamW::default() })
}

/// Returns the adapters, if the form trains adapters.
fn adapters(form: &str) -> Outcome<Option<Lora>> {
    const LAYERS: [&str; 7] =
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let lora = Lora::new(LAYERS, 8, 16.0)?;
    Ok(match form.strip_prefix("lora-") {
        Some(form) if form.starts_with("half-") => Some(lora.with_base_dtype(DType::BF16)),
        Some(_) => Some(lora),
        None => None,
    })
}

fn build_step(config: &BenchConfig, decoder: &Decoder, mesh: &DeviceMesh) -> Outcome<TrainStep> {
    let own_decoder = decoder.clone();
    let loss = move |_: &Replica, model: &Units, (ids, labels): (Tensor, Tensor)| {
        own_decoder.loss(model, &Tokens::rows(ids), &labels)
    };
    let declare = |vb: VarBuilder<'_>| decoder.declare(&vb);
    let sharded = FullyShard::builder(mesh, declare).by_units(decoder.units());
    let layout =
        ["lora-half-", "lora-"].into_iter().find_map(|name| config.form.strip_prefix(name));
    let builder = match layout.unwrap_or(&config.form) {
        "units" => DataParallel::builder(mesh, declare).by_units(decoder.units()),
        "sharded" => sharded,
        "graph" => sharded.keep(Keep::Graph),
        "gathered" => sharded.keep(Keep::Gathered),
        "in-backward" => sharded.optimizer_in_backward(),
        other => return Err(format!("unknown form {other}").into()),
    };
    let has_weights = config.folder.join("model.safetensors").exists();
    let mut builder =
        if has_weights { builder.weights(&config.folder) } else { builder.init(Seed::new(1)) };
    if decoder.lora().is_some() {
        builder = builder.train_only(Lora::PATTERNS).allow_missing(Lora::PATTERNS);
    }
    let mut model = builder.build(adam)?;
    Ok(Box::new(move |batch| Ok(model.step(batch, loss.clone())?.loss)))
}

/// Returns the tokens that the peer trains on, which are also the labels.
fn tokens(config: &BenchConfig, vocabulary: usize) -> Outcome<Tensor> {
    let mut state = 12345_u64;
    let mut ids = Vec::with_capacity(config.rows * config.length);
    for _ in 0..config.rows * config.length {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ids.push(u32::try_from((state >> 33) % vocabulary as u64)?);
    }
    Ok(Tensor::from_vec(ids, (config.rows, config.length), &Device::Cpu)?)
}

fn main() -> Outcome<()> {
    let Some(config) = BenchConfig::from_args()? else {
        println!("no folder given; see the first lines of benches/llama.rs");
        return Ok(());
    };
    let text = fs::read_to_string(config.folder.join("config.json"))?;
    let mut decoder = Decoder::from_config(DecoderConfig::from_json(&text)?)?;
    if let Some(lora) = adapters(&config.form)? {
        decoder = decoder.with_lora(lora)?;
    }
    let mesh = open_mesh(config.slots)?;
    let base_mib = peak_mib();
    let mut step = build_step(&config, &decoder, &mesh)?;
    let ids = tokens(&config, decoder.config().vocab_size)?;
    let labels = ids.to_dtype(DType::I64)?;
    let name = format!("{} on {}", config.form, config.slots);
    time_steps(&name, &mesh, base_mib, config.steps, || step((ids.clone(), labels.clone())))
}
