//! `generate`: what a model writes after a prompt.

use std::{
    collections::BTreeMap,
    io::Cursor,
    iter,
    path::{Path, PathBuf},
};

use candle_core::Tensor;
use candle_distributed::{
    checkpoint::{TensorFile, TensorInfo},
    finetune::{self, Generated, Message, Prompt, run::open_generator},
};
use clap::value_parser;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    help::examples,
    output::{self, Format},
    sampling::SamplingArgs,
};

/// Let a model write: from a Hugging Face folder (Llama, Qwen 2, Mistral), or one that `train` wrote.
///
/// It computes in single precision on this processor, and for each token all tokens before it again:
/// this is to see what a model has learnt, and not to serve it.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# The likeliest text, and another one"
    "candle-distributed generate llama --prompt 'When the fog came in' --max-tokens 16"
    "candle-distributed generate llama --prompt 'When the fog came in' --temperature 0.8 --seed 7"
])]
pub(crate) struct Args {
    /// Folder with config.json, tokenizer.json and safetensors, or of a run that has ended
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// The text that the model continues
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Have the prompt answered as a user's message, by the tokenizer's chat template
    #[arg(long)]
    chat: bool,
    /// The message of the system before it
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Folder of a low-rank adapter that PEFT or `train` wrote, to compute with
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Most tokens to write
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), default_value_t = 64)]
    max_tokens: u32,
    /// Write on after the token that ends a text
    #[arg(long)]
    ignore_eos: bool,
    /// Write the logits of all tokens of the prompt and the text into this file, for other programs:
    /// safetensors with `logits` [tokens, vocabulary], each row for the token after
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Seed of the choices of --temperature
    #[arg(long, value_name = "SEED", requires = "temperature", default_value_t = 0)]
    seed: u64,
    /// Text for people, or JSON
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What a program reads.
#[derive(Serialize)]
struct Answer {
    format_version: u32,
    #[serde(flatten)]
    generated: Generated,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut options = args.sampling.generation(args.seed).with_max_tokens(args.max_tokens as usize);
    options.ignore_end = args.ignore_eos;
    options.check().map_err(finetune::Error::from)?;
    let generator = open_generator(&args.folder, args.adapter.as_deref())?;
    args.check_logits()?;
    let messages = args.messages();
    let prompt = if args.chat { Prompt::Messages(&messages) } else { Prompt::Text(&args.prompt) };
    let generated = generator.generate(prompt, &options)?;
    if let Some(file) = &args.logits {
        write_logits(file, &generator.logits(&generated)?)?;
    }
    match args.format {
        Format::Text => output::text(|out| writeln!(out, "{}", generated.text)),
        Format::Json => output::json(&Answer { format_version: 1, generated }),
    }
}

/// Writes logits, which need not be finite, as a safetensors file.
fn write_logits(path: &Path, logits: &Tensor) -> Result<()> {
    let tensors = [TensorInfo::new("logits", logits)];
    let content = Cursor::new(Vec::new());
    let file = TensorFile::create(content, path, &tensors, BTreeMap::new())?;
    let mut file = file.allow_non_finite();
    file.write(logits)?;
    output::file(path, file.finish()?.get_ref())
}

impl Args {
    /// Refuses logits in a folder that the model is read from: they would replace a file of it, or be
    /// taken for its weights.
    fn check_logits(&self) -> Result<()> {
        let Some(file) = &self.logits else { return Ok(()) };
        for folder in iter::once(&self.folder).chain(&self.adapter) {
            if leads_into(file, folder)? {
                let (file, folder) = (file.display(), folder.display());
                let fault = format!("--logits {file} is in {folder}, which the model is read from");
                return Err(Error::usage(fault).hinted("name a file in another folder"));
            }
        }
        Ok(())
    }

    /// The conversation that is to be answered.
    fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|content| Message::new("system", content));
        system.chain([Message::new("user", &self.prompt)]).collect()
    }
}

/// Whether a file, which need not be there, is in a folder, or a link to what is.
fn leads_into(file: &Path, folder: &Path) -> Result<bool> {
    let folder = folder.canonicalize().map_err(|source| Error::read(folder, source))?;
    let beside = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let beside = beside.canonicalize().map_err(|source| Error::write(file, source))?;
    let is_link_there = file.canonicalize().is_ok_and(|target| target.starts_with(&folder));
    Ok(is_link_there || beside.starts_with(&folder))
}
