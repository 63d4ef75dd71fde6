//! `generate`: generates text after a prompt.

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

/// Generate text with a model: a Hugging Face folder (Llama, Qwen, Gemma, …), or a folder written
/// by `train`.
///
/// The model runs in single precision on the CPU, and caches the keys and values of all tokens. A
/// token reads each weight once, for all prompts together.
#[derive(Debug, clap::Args)]
#[command(after_help = examples![
    "# The likeliest text, and a random one"
    "candle-distributed generate llama --prompt 'When the fog came in' --max-tokens 16"
    "candle-distributed generate llama --prompt 'When the fog came in' --temperature 0.8 --seed 7"
    "# Two texts"
    "candle-distributed generate llama --prompt 'When the fog came in' --prompt '3 and 1 is'"
])]
pub(crate) struct GenerateArgs {
    /// Folder with config.json, tokenizer.json and safetensors, or folder of a run that has ended
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Text to continue; may be repeated. Each prompt gets the text that it would get alone
    #[arg(id = "prompt", long = "prompt", value_name = "TEXT", required = true)]
    prompts: Vec<String>,
    /// Treat each prompt as a user's message, and generate the answer, with the tokenizer's chat
    /// template
    #[arg(long)]
    chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Folder of a low-rank adapter, written by PEFT or `train`, to apply to the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), default_value_t = 64)]
    max_tokens: u32,
    /// Continue after the token that ends a text
    #[arg(long)]
    ignore_eos: bool,
    /// Write the logits of all tokens of the prompt and the text into this safetensors file: one
    /// tensor `logits` [tokens, vocabulary], each row for the next token; only with one prompt
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Seed of the random draws of --temperature
    #[arg(long, value_name = "SEED", requires = "temperature", default_value_t = 0)]
    seed: u64,
    /// Output format; json writes a line for each prompt
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The JSON result.
#[derive(Serialize)]
struct GenerateOutput {
    format_version: u32,
    #[serde(flatten)]
    generated: Generated,
}

pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let mut options = args.sampling.generation(args.seed).with_max_tokens(args.max_tokens as usize);
    options.ignore_end = args.ignore_eos;
    options.check().map_err(finetune::Error::from)?;
    let generator = open_generator(&args.folder, args.adapter.as_deref())?;
    args.check_logits()?;
    let messages: Vec<_> = args.prompts.iter().map(|prompt| args.messages(prompt)).collect();
    let prompts: Vec<_> = if args.chat {
        messages.iter().map(|messages| Prompt::Messages(messages)).collect()
    } else {
        args.prompts.iter().map(|prompt| Prompt::Text(prompt)).collect()
    };
    for generated in generator.generate_all(&prompts, &options)? {
        if let Some(file) = &args.logits {
            write_logits(file, &generator.logits(&generated)?)?;
        }
        match args.format {
            Format::Text => output::model_text(&generated.text)?,
            Format::Json => output::json(&GenerateOutput { format_version: 1, generated })?,
        }
    }
    Ok(())
}

/// Writes logits as a safetensors file. They may be infinite or NaN.
fn write_logits(path: &Path, logits: &Tensor) -> Result<()> {
    let tensors = [TensorInfo::new("logits", logits)];
    let content = Cursor::new(Vec::new());
    let mut file = TensorFile::create(content, path, &tensors, BTreeMap::new())?.allow_non_finite();
    file.write(logits)?;
    output::file(path, file.finish()?.get_ref())
}

impl GenerateArgs {
    /// Rejects `--logits` of several prompts, and a file in a folder of the model, where it could
    /// replace a file or be read as weights later.
    fn check_logits(&self) -> Result<()> {
        let Some(file) = &self.logits else { return Ok(()) };
        if self.prompts.len() > 1 {
            let error = Error::usage("--logits takes one --prompt");
            return Err(error.with_hint("run the command once for each prompt"));
        }
        for folder in iter::once(&self.folder).chain(&self.adapter) {
            if leads_into(file, folder)? {
                let fault = format!(
                    "--logits {} is in {}, which the model is read from",
                    file.display(),
                    folder.display()
                );
                return Err(Error::usage(fault).with_hint("name a file in another folder"));
            }
        }
        Ok(())
    }

    /// Returns the conversation to answer.
    fn messages(&self, prompt: &str) -> Vec<Message> {
        let system = self.system.iter().map(|content| Message::new("system", content));
        system.chain([Message::new("user", prompt)]).collect()
    }
}

/// Returns true if a file is in a folder, or is a link to a file in it. The file need not exist.
fn leads_into(file: &Path, folder: &Path) -> Result<bool> {
    let folder = folder.canonicalize().map_err(|source| Error::read(folder, source))?;
    let parent = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = parent.canonicalize().map_err(|source| Error::write(file, source))?;
    let is_link_into = file.canonicalize().is_ok_and(|target| target.starts_with(&folder));
    Ok(is_link_into || parent.starts_with(&folder))
}
