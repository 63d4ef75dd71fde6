//! Hints: advice about errors in terms of the command line.

use std::{borrow::Cow, error::Error as _, fmt, num::ParseIntError};

use candle_distributed::{
    batch,
    finetune::{
        self, ExampleError, FolderError, GenerateError, RunError, SpecError, TokenizerError,
        models::ModelError,
    },
    mesh,
    plan::{self, SourceError},
    sampler,
    train::{self, CheckpointError},
    types,
};
use clap::error::ContextKind;

use crate::error::{Error, ErrorKind};

pub(crate) const NUMBERS: &str = "\
    the file needs one number per sample: a text file of numbers separated by white space, an .npy \
    array, or a JSON list";
pub(crate) const LENGTHS: &str = "\
    --lengths takes a text file of whole numbers, one per sequence, separated by white space, an \
    .npy array, or a JSON list; with --field NAME the lines of a .jsonl file; - is standard input";
pub(crate) const ORDER: &str = "\
    --order takes positions in the list of lengths, counted from 0, as printed by \
    `candle-distributed sample` in any --format; - is standard input";
const EXAMPLE_LINES: &str = "\
    each line of a .jsonl file must be a JSON string, or an object with strings \"text\", or \
    \"prompt\" and \"completion\", or with \"messages\" that have \"role\" and \"content\"";
const WHOLE_JSON: &str = "\
    write one example per line into a .jsonl file, as `jq -c '.[]'` does with a list; files that \
    only describe the data set belong outside of its folder";
const MIXED_KINDS: &str = "\
    all lines of a file must be of one kind: move the other lines to a separate file; a folder may \
    have files of several kinds";
const OVERLONG: &str = "\
    --overlong truncate cuts longer texts at the context, --overlong skip leaves them out; \
    --context N allows longer texts, up to the limit of the model";
const NO_TARGET: &str = "--overlong skip leaves out examples that are longer than the context";
const HF_FOLDER: &str = "\
    a model is a folder in Hugging Face's format, with config.json, tokenizer.json and \
    model.safetensors; nothing is downloaded here: `hf download NAME --local-dir FOLDER` does that. \
    A folder with a config.json alone, whose eos_token_id is at least 256, defines a new model \
    that reads bytes";
const FAMILY: &str = "\
    decoders of these families are supported, with unquantized weights: Llama 2 and 3, SmolLM 2 and 3, \
    Qwen 2, 2.5 and 3, Mistral, Mixtral, Ministral, gpt-oss, Gemma 1 to 3, Phi 3 and 4, OLMo 2 and 3, Granite 3, GLM 4, \
    EXAONE 4, ERNIE 4.5, Seed-OSS";
const UNSUPPORTED_FORMAT: &str = "\
    only safetensors are supported: in Python, \
    `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)` writes them";
const NO_WEIGHTS: &str = "\
    --init SEED of train makes random ones; otherwise the folder needs all files of its model";
const DAMAGED_FOLDER: &str = "\
    the folder is damaged: copy or download it again, with all of its files; if it is the folder \
    of a run, remove the damaged part, such as best, and resume the run";
const CHAT_TEMPLATE: &str = "\
    the template sets the allowed order of roles: change the messages, or the template";
const NO_TOKENIZER: &str = "\
    in Python, `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` converts the files of \
    an older tokenizer";
const VOCABULARY_MISMATCH: &str = "\
    the tokenizer belongs to another model, or the model's embedding was not enlarged for its new \
    tokens: `resize_token_embeddings` of transformers does that";
const NO_END: &str = "\
    set \"eos_token\" in tokenizer_config.json, such as \"</s>\", or \"eos_token_id\" in config.json";
const NO_CHAT_TEMPLATE: &str = "\
    use the folder of an instruction-tuned model, add a chat_template.jinja, or give {\"prompt\", \
    \"completion\"} instead of messages";
const REWRITES: &str = "\
    the tokens of an answer cannot be located then: give {\"prompt\", \"completion\"} instead of \
    messages, or use a template that only appends";
const WEIGHTS_MISMATCH: &str = "\
    config.json and the weights must belong to one model: take both from the same folder";
const TIED_HEAD: &str = "\
    set \"tie_word_embeddings\" to false in config.json to use this head, or remove it from the weights";
const LONG_PROMPT: &str = "this is the model's limit: give a shorter text";
const ADAPTER: &str = "\
    candle-distributed generate FOLDER --adapter DIR takes the model from one folder and the adapters \
    from another";
const ADAPTER_MISMATCH: &str = "\
    adapters are of one model: base_model_name_or_path in adapter_config.json names it";
const UNFINISHED: &str = "\
    candle-distributed train --out DIR --resume ends it; with --validation, the folder best holds the \
    best model so far";
const OCCUPIED: &str = "resume that run with --resume, or choose another folder";
const MODEL_MISMATCH: &str = "\
    give --model the original folder, unchanged, or start a new run in another folder";
const MODEL_OPTION: &str = "--model FOLDER names the model to fine-tune, or a run that has ended";
const LORA_ON: &str = "\
    --lora-on takes names of linear layers, in full or only their last parts: \
    q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj; Phi has qkv_proj and gate_up_proj in place \
    of five of them, GLM gate_up_proj";
const RESUME_MISMATCH: &str = "another value needs a new run, in another folder";
const SPLIT: &str = "--validation takes the fraction of the examples to hold out";
const SMALL_VALIDATION: &str = "\
    a larger --validation holds out more; a smaller --batch-size or --max-tokens makes smaller steps";
const MAX_TOKENS: &str = "\
    a step holds at least one sequence: --context cuts sequences, or rejects longer ones";
pub(crate) const RUN: &str = "\
    candle-distributed train --out DIR creates a run in DIR; without --out it is created under runs";
const TEXT: &str = "the text has changed: start a new run in another folder";
pub(crate) const SAME_RUN: &str = "\
    every process needs the same arguments, the same text and the same run folder";
const RUN_MISMATCH: &str = "\
    remove the checkpoint that does not belong here, or give --out the folder it belongs to";
pub(crate) const UNREADABLE: &str = "\
    the checkpoint may be intact, so no older one replaces it: make it readable, or move its folder \
    away to resume from the checkpoint before it";
const NO_SETTINGS: &str = "\
    start a new run in another folder, or restore the run.json of this run";
const SHARED: &str = "\
    --out must name a folder that all processes share, such as one of a network file system";
const CHANGED_WHILE_READ: &str = "\
    another process has just trained this run: the same command resumes it from its new state";
const NO_CHECKPOINT_LEFT: &str =
    "restore one of these checkpoints, or start a new run in another folder";
const LOCKED: &str = "\
    two processes would corrupt the run: end the other process, or wait until it ends";
const MEMORY: &str = "\
    --strategy full keeps one shard of the model on each device instead of all of it; a smaller \
    --world-size needs less memory in one process, a smaller --max-tokens or --batch-size and a \
    shorter --context in a step; --memory-limit overrides the limit of the system";
pub(crate) const MEMORY_OF_SHARDED: &str = "\
    with more processes, --keep inputs, a smaller model or a shorter --context, each process needs \
    less memory; --memory-limit overrides the limit of the system";
pub(crate) const GENERATE_LATER: &str = "\
    run `candle-distributed generate` on the run where there is enough memory; --no-sample turns this \
    message off";
pub(crate) const MODEL: &str = "\
    a model is a .safetensors file, a model.safetensors.index.json, a folder with either, or a \
    manifest such as {\"w\": {\"dtype\": \"F32\", \"shape\": [10, 4]}}";
pub(crate) const RULES: &str = "\
    rules look like {\"rules\": [{\"pattern\": \"*.bias\", \"choice\": \"replicate\"}], \"default\": \
    {\"full\": \"dim0\"}}";
pub(crate) const PLAN: &str = "\
    candle-distributed plan MODEL --world-size W --format json > FILE writes a plan";
const GRADIENT: &str = "\
    the model and its operations are part of this program, so the fault is in the program or the \
    device: --device cpu tells which";
pub(crate) const STATE: &str = "candle-distributed sample … --save-state FILE writes a state";
pub(crate) const BATCH_STATE: &str = "candle-distributed batch … --save-state FILE writes a state";

/// Quotes a word of a command, such as a path, for a shell.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
pub(crate) fn in_shell(word: impl fmt::Display) -> String {
    let word = word.to_string();
    shlex::try_quote(&word).expect("arguments contain no NUL bytes").into_owned()
}

impl Error {
    /// Returns the advice about this error, if there is any.
    pub(crate) fn hint(&self) -> Option<Cow<'static, str>> {
        self.advice.clone().or_else(|| for_kind(&self.kind))
    }
}

/// Returns advice about rejected arguments.
pub(crate) fn for_arguments(fault: &clap::Error) -> Option<Cow<'static, str>> {
    for_whole_number(fault).or_else(|| for_option_value(fault).map(Cow::from))
}

/// Returns advice about the value of an option that takes a whole number.
fn for_whole_number(fault: &clap::Error) -> Option<Cow<'static, str>> {
    /// All whole numbers below this limit are exact in an `f64`.
    const EXACT_LIMIT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;

    let context = |kind| fault.get(kind).map(ToString::to_string);
    let argument = context(ContextKind::InvalidArg)?;
    // clap parses a negative number as an option.
    if fault.kind() == clap::error::ErrorKind::UnknownArgument {
        argument.parse::<f64>().ok()?;
        return Some(Cow::from(NOT_NEGATIVE));
    }
    if !fault.source()?.is::<ParseIntError>() {
        return None;
    }
    let value = context(ContextKind::InvalidValue)?;
    let number: f64 = value.replace(['_', ','], "").parse().ok()?;
    if number < 0.0 {
        return Some(Cow::from(NOT_NEGATIVE));
    }
    let option = argument.split(' ').next()?;
    let is_whole = number.fract() == 0.0 && number < EXACT_LIMIT;
    is_whole.then(|| format!("write all digits and nothing else: {option} {number:.0}").into())
}

const NOT_NEGATIVE: &str = "it is a count, at least 0";

/// Returns advice about the value of an option that takes one of a few words.
fn for_option_value(fault: &clap::Error) -> Option<&'static str> {
    let context = |kind| fault.get(kind).map(ToString::to_string);
    let argument = context(ContextKind::InvalidArg)?;
    match (argument.split(' ').next()?, context(ContextKind::InvalidValue)?.as_str()) {
        ("--dtype", "f16") => {
            Some("f16 loses small gradients without a loss scaler: bf16 has the range of f32")
        }
        ("--engine", "mpi") => Some(
            "this build has no MPI: build it with `--features mpi`, and start its processes with \
             `mpirun -n 2 candle-distributed …`",
        ),
        ("--engine", "nccl") => Some(
            "this build has no NCCL: build it with `--features nccl`, and start its processes with \
             `candle-distributed launch --processes 2 -- candle-distributed …`",
        ),
        _ => None,
    }
}

/// Returns the advice about errors of this kind.
fn for_kind(kind: &ErrorKind) -> Option<Cow<'static, str>> {
    match kind {
        ErrorKind::Types(error) | ErrorKind::Plan(plan::Error::World(error)) => world(error),
        ErrorKind::Sampler(error) => sampler(error).map(Cow::from),
        ErrorKind::Batch(error) => batch(error),
        ErrorKind::Plan(error) | ErrorKind::Model { source: error, .. } => {
            plan(error).map(Cow::from)
        }
        ErrorKind::Mesh(error) => mesh(error).map(Cow::from),
        ErrorKind::Training(error) => training(error).map(Cow::from),
        ErrorKind::Finetune(error) => finetune(error).map(Cow::from),
        ErrorKind::Memory { .. } => Some(MEMORY.into()),
        ErrorKind::Usage(_)
        | ErrorKind::Rank { .. }
        | ErrorKind::Read { .. }
        | ErrorKind::Stopped { .. }
        | ErrorKind::ReportedByFirst { .. }
        | ErrorKind::System { .. }
        | ErrorKind::Tensor(_) => None,
    }
}

fn world(error: &types::Error) -> Option<Cow<'static, str>> {
    match error {
        types::Error::WorldSizeOutOfRange { .. } => {
            Some("--world-size is the number of ranks, at least 1".into())
        }
        types::Error::RankOutOfRange { world_size, .. } => Some(
            format!("ranks count from 0, so the last one is {}", world_size.as_u64() - 1).into(),
        ),
        _ => None,
    }
}

fn sampler(error: &sampler::Error) -> Option<&'static str> {
    match error {
        sampler::Error::EmptyDataSet => Some("--len is the number of samples, at least 1"),
        sampler::Error::TooLongToShuffle { .. } | sampler::Error::OutOfMemory { .. } => {
            Some("--order streaming shuffles a data set of any length without using memory")
        }
        sampler::Error::RankWeights { .. } => {
            Some("--rank-weights takes one number per rank, such as 2,1,1")
        }
        sampler::Error::StateMismatch { what, .. } if *what != "format version" => Some(
            "resume with the options that wrote the state; only --world-size and --rank may differ",
        ),
        _ => None,
    }
}

fn batch(error: &batch::Error) -> Option<Cow<'static, str>> {
    match error {
        batch::Error::NoLimit => {
            Some("give --max-tokens, --max-batch-size or --max-cost".into())
        }
        batch::Error::NoTokenBudget => Some("give --max-tokens".into()),
        batch::Error::SequenceTooLong { .. } => {
            Some("--overlong skip leaves such sequences out, --overlong truncate cuts them".into())
        }
        batch::Error::SequenceOverBudget { length, padded_length, multiple, max_tokens, .. } => {
            // With padding, the longest sequence that fits depends on other options too.
            let is_padded = length != padded_length;
            let max = if is_padded { "N".to_owned() } else { (max_tokens / multiple).to_string() };
            let hint = format!(
                "raise the limit, or leave such sequences out with --max-sequence-length {max} \
                 --overlong skip"
            );
            Some(hint.into())
        }
        batch::Error::CannotFillStep { .. } => Some(
            "a smaller --max-tokens or --max-batch-size makes more batches; --remainder drop leaves \
             the last batches out, --remainder repeat reads the first batches twice"
                .into(),
        ),
        batch::Error::BatchMismatch { .. } => Some(
            "resume with the lengths, the order and the options of the run that wrote the state; \
             only --rank and --world-size may differ"
                .into(),
        ),
        batch::Error::TooManySequences { .. } => {
            Some("--window 1000 sorts the sequences of 1000 batches at a time".into())
        }
        _ => None,
    }
}

fn plan(error: &plan::Error) -> Option<&'static str> {
    match error {
        plan::Error::Source(SourceError::Malformed { .. }) | plan::Error::NoParameters => {
            Some(MODEL)
        }
        plan::Error::UnknownDtype { .. } => {
            Some("dtypes have the names of safetensors, such as F32 and BF16")
        }
        plan::Error::Scalar { .. } => Some("--layout flat cuts parameters of any shape"),
        plan::Error::Unknown { what: "parameter", .. } => {
            Some("plan --format json lists the names of all parameters")
        }
        _ => None,
    }
}

fn training(error: &train::Error) -> Option<&'static str> {
    match error {
        train::Error::Gradient(_) => Some(GRADIENT),
        train::Error::Checkpoint(CheckpointError::NoUsableCheckpoint { .. }) => {
            Some(NO_CHECKPOINT_LEFT)
        }
        train::Error::Checkpoint(CheckpointError::Locked { .. }) => Some(LOCKED),
        _ => None,
    }
}

fn finetune(error: &finetune::Error) -> Option<&'static str> {
    use finetune::Error;

    match error {
        Error::Folder(error) => folder(error),
        Error::Tokenizer(error) => tokenizer(error),
        Error::Example(error) => example(error),
        Error::Generate(error) => generate(error),
        Error::Spec(error) => spec(error),
        Error::Run(error) => finetune_run(error),
        _ => None,
    }
}

fn folder(error: &FolderError) -> Option<&'static str> {
    Some(match error {
        FolderError::NotAFolder { .. } | FolderError::Config { .. } => HF_FOLDER,
        FolderError::Model { .. } => FAMILY,
        FolderError::UnsupportedFormat { .. } => UNSUPPORTED_FORMAT,
        FolderError::NoWeights { .. } => NO_WEIGHTS,
        FolderError::AdaptersAlone { .. } | FolderError::Adapters { .. } => ADAPTER,
        FolderError::AdapterMismatch { .. } => ADAPTER_MISMATCH,
        FolderError::TensorMismatch { .. } => WEIGHTS_MISMATCH,
        FolderError::TiedHead { .. } => TIED_HEAD,
        FolderError::Weights(error) => match **error {
            CheckpointError::Parameter(_) => WEIGHTS_MISMATCH,
            _ => DAMAGED_FOLDER,
        },
        _ => return None,
    })
}

fn tokenizer(error: &TokenizerError) -> Option<&'static str> {
    Some(match error {
        TokenizerError::Missing { .. } => NO_TOKENIZER,
        TokenizerError::Broken { .. } => DAMAGED_FOLDER,
        TokenizerError::VocabularyMismatch { .. } => VOCABULARY_MISMATCH,
        TokenizerError::NoEnd { .. } => NO_END,
        TokenizerError::NoByteEnd { .. } => HF_FOLDER,
        TokenizerError::NoChatTemplate { .. } => NO_CHAT_TEMPLATE,
        TokenizerError::Rendering { .. } => CHAT_TEMPLATE,
        TokenizerError::Rewrites { .. } => REWRITES,
        _ => return None,
    })
}

fn example(error: &ExampleError) -> Option<&'static str> {
    Some(match error {
        ExampleError::Line { .. } | ExampleError::NotUtf8 { .. } => EXAMPLE_LINES,
        ExampleError::KindMismatch { .. } => MIXED_KINDS,
        ExampleError::WholeJson { .. } => WHOLE_JSON,
        ExampleError::Overlong { .. } => OVERLONG,
        ExampleError::NoAnswer { .. } | ExampleError::NoTarget { .. } => NO_TARGET,
        ExampleError::Split { .. } => SPLIT,
        ExampleError::Tokens { cause, .. } => return finetune(cause),
        _ => return None,
    })
}

fn spec(error: &SpecError) -> Option<&'static str> {
    match error {
        SpecError::AdaptersAlone { .. } => Some(MODEL_OPTION),
        SpecError::UnknownLayer { .. } | SpecError::Model(ModelError::Adapter { .. }) => {
            Some(LORA_ON)
        }
        SpecError::ResumeMismatch { .. } => Some(RESUME_MISMATCH),
        SpecError::NoData => Some(EXAMPLE_LINES),
        SpecError::Setting { name: "max_tokens", .. } => Some(MAX_TOKENS),
        _ => None,
    }
}

fn finetune_run(error: &RunError) -> Option<&'static str> {
    match error {
        RunError::ModelMismatch { .. } => Some(MODEL_MISMATCH),
        RunError::CheckpointAhead { .. } => Some(RUN_MISMATCH),
        RunError::NotEnded { .. } => Some(UNFINISHED),
        RunError::Base { .. } => Some(ADAPTER),
        RunError::Occupied { .. } => Some(OCCUPIED),
        RunError::TextMismatch => Some(TEXT),
        RunError::ChangedWhileRead { .. } => Some(CHANGED_WHILE_READ),
        RunError::NoDescription { .. } => Some(NO_SETTINGS),
        RunError::NotShared { .. } => Some(SHARED),
        RunError::ValidationTooSmall { .. } => Some(SMALL_VALIDATION),
        _ => None,
    }
}

fn generate(error: &GenerateError) -> Option<&'static str> {
    Some(match error {
        GenerateError::EmptyPrompt => {
            "this model has no token for the beginning of a text: give --prompt a word"
        }
        GenerateError::LongPrompt { .. } => LONG_PROMPT,
        GenerateError::Temperature { .. } => {
            "without --temperature, the likeliest token is chosen each time"
        }
        _ => return None,
    })
}

fn mesh(error: &mesh::Error) -> Option<&'static str> {
    match error {
        mesh::Error::Mesh(mesh::MeshError::Device { .. }) => Some(
            "--device cpu works everywhere; cuda and metal need a build with that feature, and \
             enough devices",
        ),
        mesh::Error::Mesh(mesh::MeshError::Size { .. }) => {
            Some("--world-size is the number of devices")
        }
        _ => None,
    }
}
