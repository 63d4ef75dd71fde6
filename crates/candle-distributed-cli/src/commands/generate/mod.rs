//! `generate`: what a model writes after a prompt.

use std::path::PathBuf;

use candle_distributed::types::Seed;
use clap::value_parser;
use serde::Serialize;

use crate::{
    error::Result,
    generation::{self, Length, Prompt, Sampling, Written},
    help::examples,
    hf::{chat::Message, files::refused},
    output::{self, Format},
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
    sampling: Sampling,
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
    written: Written,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut chooser = args.sampling.chooser(Seed::new(args.seed))?;
    let writer = generation::open(&args.folder, args.adapter.as_deref())?;
    let messages = args.messages();
    let prompt = if args.chat { Prompt::Messages(&messages) } else { Prompt::Text(&args.prompt) };
    let length = Length { max_tokens: args.max_tokens as usize, ignore_end: args.ignore_eos };
    let written = writer.write(prompt, length, &mut chooser)?;
    if let Some(file) = &args.logits {
        let saved = writer.all_logits(&written)?.save_safetensors("logits", file);
        saved.map_err(|fault| refused(file, fault))?;
    }
    match args.format {
        Format::Text => output::text(|out| writeln!(out, "{}", written.text)),
        Format::Json => output::json(&Answer { format_version: 1, written }),
    }
}

impl Args {
    /// The conversation that is to be answered.
    fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|content| Message::new("system", content));
        system.chain([Message::new("user", &self.prompt)]).collect()
    }
}
