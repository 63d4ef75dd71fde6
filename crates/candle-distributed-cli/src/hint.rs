//! What to do about an error, where its message does not say it in the words of the command line.

use std::{borrow::Cow, error::Error as _, fmt, num::ParseIntError};

use candle_distributed::{
    batch,
    finetune::{
        self, ExampleError, FolderError, GenerateError, RunError, SpecError, TokenizerError,
    },
    mesh,
    plan::{self, CutError, ParameterError, SourceError},
    sampler,
    train::{self, CheckpointError},
    types,
};
use clap::error::ContextKind;

use crate::error::{Error, ErrorKind};

/// What a file of numbers must look like.
pub(crate) const NUMBERS: &str = "it must have a number per sample: a text file of numbers, \
                                  separated by white space, an .npy array, or a JSON list";
pub(crate) const LENGTHS: &str = "--lengths takes a text file of whole numbers, one per sequence, \
                                  separated by white space, an .npy array, or a JSON list; with \
                                  --field NAME the lines of a .jsonl file; - is standard input";
pub(crate) const ORDER: &str = "--order takes positions in the list of lengths, counted from 0, as \
                                `candle-distributed sample` prints them in any --format; - is \
                                standard input";
pub(crate) const EXAMPLE_LINES: &str = "each line of a .jsonl file must be a JSON string, or an object with \
                                        strings \"text\", or \"prompt\" and \"completion\", or with \
                                        \"messages\" that have \"role\" and \"content\"";
const WHOLE_JSON: &str = "write an example per line into a .jsonl file, as `jq -c '.[]'` does with a list; \
                                     what describes a data set belongs beside its folder";
const MIXED: &str = "all lines of a file must be of one kind: put the others into a file of \
                                their own; a folder may have files of several kinds";
const OVERLONG: &str = "--overlong truncate cuts such texts off there, --overlong skip leaves \
                                   them out; --context N takes longer ones, as far as the model does";
const NO_TARGET: &str = "--overlong skip leaves out what is longer than the context";
const HF_FOLDER: &str = "a model is a folder as Hugging Face's tools write it, with config.json, \
                                    tokenizer.json and model.safetensors: nothing is downloaded here, \
                                    `hf download NAME --local-dir FOLDER` does that. A config.json \
                                    alone, with an eos_token_id from 256 on, is a new model of bytes";
const FAMILY: &str = "models of the Llama family are read here: Llama 2 and 3, Qwen 2 and 2.5, and \
                                 Mistral, with unquantized weights and attention to the whole context";
const OTHER_FORMAT: &str = "only safetensors are read here: in Python, \
                                       `AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)` \
                                       writes them";
const NO_WEIGHTS: &str = "--init SEED of train makes random ones; otherwise the folder needs all \
                                     files of its model";
const NOT_WHOLE: &str =
    "the folder is not as it was made: copy or download it again, with all of its files";
const CHAT_TEMPLATE: &str = "the template says which roles may follow each other: change the messages, \
                                        or the template";
const NO_TOKENIZER: &str = "in Python, `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` \
                                       writes it beside the files of an older tokenizer";
const OTHER_VOCABULARY: &str = "the tokenizer is another model's, or the model's embedding \
                                           was not enlarged for its new tokens: `resize_token_embeddings` \
                                           of transformers does that";
const NO_END: &str = "set \"eos_token\" in tokenizer_config.json, such as \"</s>\", or \
                                 \"eos_token_id\" in config.json";
const NO_CHAT_TEMPLATE: &str = "take the folder of an instruction-tuned model, put a \
                                           chat_template.jinja there, or give {\"prompt\", \"completion\"} \
                                           in place of messages";
const REWRITES: &str = "which tokens are an answer cannot be told then: give \
                                   {\"prompt\", \"completion\"} in place of messages, or a template \
                                   that appends";
const NOT_ITS_WEIGHTS: &str =
    "config.json and the weights must be of one model: take both from the same folder";
const LONG_PROMPT: &str = "that is the most that the model was made for: give a shorter text";
const ADAPTER: &str = "candle-distributed generate FOLDER --adapter DIR takes the model \
                                  of one folder and the adapters of another";
const NOT_ITS_ADAPTERS: &str =
    "adapters are of one model: adapter_config.json names it as base_model_name_or_path";
const UNFINISHED: &str = "candle-distributed train --out DIR --resume ends it; what did \
                                     best so far is in the folder best, if there is a --validation";
const OCCUPIED: &str = "resume that run with --resume, or choose another folder";
const OTHER_MODEL: &str = "give --model the folder as it was, or start a new run in another folder";
const PACKED_ROWS: &str = "a smaller --batch-size or --max-tokens makes steps of fewer rows";
const MODEL_OPTION: &str = "--model FOLDER names the model to fine-tune, or a run that has ended";
const LORA_ON: &str = "--lora-on takes the names of linear layers, whole or their ends: \
                                  q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj";
const SPLIT: &str = "--validation takes the fraction of the examples that is held out";
const SMALL_VALIDATION: &str =
    "a larger --validation holds out more; --batch-size or --max-tokens makes smaller steps";
pub(crate) const MAX_TOKENS: &str =
    "a step holds at least one sequence: --context cuts sequences, or refuses longer ones";
pub(crate) const RUN: &str = "candle-distributed train --out DIR creates a run in DIR; without \
                              --out it is created under runs";
pub(crate) const TEXT: &str = "the text has changed since: start a new run in another folder";
pub(crate) const SAME_RUN: &str = "every process needs the same arguments, the same text and the \
                                   same folder of the run";
const OTHER_RUN: &str =
    "remove the checkpoint that does not belong here, or give --out the folder that it belongs to";
pub(crate) const UNREADABLE: &str = "it may be whole, so no other is used in its place: make it readable, or move its folder \
     away to resume from the checkpoint before it";
pub(crate) const NO_SETTINGS: &str =
    "start a new run in another folder, or bring back the file that tells which run this is";
pub(crate) const SHARED: &str =
    "--out must name a folder that all processes share, such as one of a network file system";
pub(crate) const WENT_ON: &str =
    "another process has just trained it: the same command resumes it from where it is now";
const NONE_LEFT: &str = "restore one of these checkpoints, or start a new run in another folder";
const LOCKED: &str = "two processes would ruin the run: end the other one, or wait for it";
const MEMORY: &str = "--strategy full keeps a part of the model on each device instead of all of it; \
                      a smaller --world-size takes less in one process, a smaller --max-tokens or \
                      --batch-size and a shorter --context in a step; --memory-limit replaces what \
                      the system says";
pub(crate) const MEMORY_OF_PARTS: &str = "more processes, --keep inputs, a smaller model or a shorter --context take less in each; \
     --memory-limit replaces what the system says";
pub(crate) const WRITE_LATER: &str = "`candle-distributed generate` has the model of a run write, where there \
                                      is room for it; --no-sample says nothing of it";
pub(crate) const MODEL: &str = "a model is a .safetensors file, a model.safetensors.index.json, a \
                                folder with either, or a manifest such as \
                                {\"w\": {\"dtype\": \"F32\", \"shape\": [10, 4]}}";
pub(crate) const RULES: &str = "rules look like \
                                {\"rules\": [{\"pattern\": \"*.bias\", \"choice\": \"replicate\"}], \
                                \"default\": {\"full\": \"dim0\"}}";
pub(crate) const PLAN: &str =
    "candle-distributed plan MODEL --world-size W --format json > FILE writes a plan";
const GRADIENT: &str = "the model and its operations are this program's own, so the fault is the \
                        program's or the device's: --device cpu tells which";
pub(crate) const STATE: &str = "candle-distributed sample … --save-state FILE writes a state";

pub(crate) const BATCH_STATE: &str = "candle-distributed batch … --save-state FILE writes a state";

/// A word of a command, such as a path, as a shell takes it.
#[expect(clippy::expect_used, reason = "says why it cannot fail")]
pub(crate) fn in_shell(word: impl fmt::Display) -> String {
    let word = word.to_string();
    shlex::try_quote(&word).expect("arguments have no zero bytes").into_owned()
}

impl Error {
    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<Cow<'static, str>> {
        self.advice.clone().or_else(|| of(&self.kind))
    }
}

/// What to write instead of arguments that are refused.
pub(crate) fn of_arguments(fault: &clap::Error) -> Option<Cow<'static, str>> {
    of_whole_number(fault).or_else(|| of_option(fault).map(Cow::from))
}

/// What to write instead of what is no whole number, or none that an option takes.
fn of_whole_number(fault: &clap::Error) -> Option<Cow<'static, str>> {
    /// Below it, a number with an exponent is exactly the one that it says.
    const EXACT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;

    let context = |kind| fault.get(kind).map(ToString::to_string);
    let argument = context(ContextKind::InvalidArg)?;
    // clap takes what begins with a hyphen for an option.
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
    let is_whole = number.fract() == 0.0 && number < EXACT;
    is_whole.then(|| format!("write all digits, and nothing else: {option} {number:.0}").into())
}

const NOT_NEGATIVE: &str = "it is a count, at least 0";

/// What to write instead of a value that no option takes.
fn of_option(fault: &clap::Error) -> Option<&'static str> {
    let context = |kind| fault.get(kind).map(ToString::to_string);
    let is_f16 = context(ContextKind::InvalidValue).is_some_and(|value| value == "f16");
    if is_f16 && context(ContextKind::InvalidArg)?.starts_with("--dtype") {
        return Some("f16 loses small gradients without a loss scaler: bf16 has the range of f32");
    }
    None
}

/// What to do about an error of this kind.
fn of(kind: &ErrorKind) -> Option<Cow<'static, str>> {
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
        ErrorKind::Launch(_)
        | ErrorKind::Usage(_)
        | ErrorKind::Rank { .. }
        | ErrorKind::Launcher(_)
        | ErrorKind::Read { .. }
        | ErrorKind::Json { .. }
        | ErrorKind::Stopped { .. }
        | ErrorKind::Diverged { .. }
        | ErrorKind::SaidByFirst { .. }
        | ErrorKind::Write { .. }
        | ErrorKind::Output(_)
        | ErrorKind::Chart(_)
        | ErrorKind::Train(_) => None,
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
            Some("--order streaming shuffles a data set of any length and takes no memory")
        }
        sampler::Error::RankWeights { .. } => {
            Some("--rank-weights takes one number per rank, such as 2,1,1")
        }
        sampler::Error::StateMismatch { .. } => Some(
            "resume with the options that the state was written with; only --world-size and \
             --rank may differ",
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
        batch::Error::SequenceOverBudget { max_tokens, .. } => Some(
            format!(
                "raise the limit, or leave such sequences out: --max-sequence-length {max_tokens} \
                 --overlong skip"
            )
            .into(),
        ),
        batch::Error::CannotFillStep { .. } => Some(
            "a smaller --max-tokens or --max-batch-size makes more batches; --remainder drop leaves \
             the last ones out, --remainder repeat takes the first ones twice"
                .into(),
        ),
        batch::Error::OtherBatches { .. } => Some(
            "resume with the lengths, the order and the options that the state was written with; \
             only --rank may differ"
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
        plan::Error::Source(SourceError::Malformed { .. })
        | plan::Error::Parameters(ParameterError::Empty) => Some(MODEL),
        plan::Error::Parameters(ParameterError::UnknownDtype { .. }) => {
            Some("dtypes are named as in safetensors, such as F32 and BF16")
        }
        plan::Error::Cut(CutError::Scalar { .. }) => {
            Some("--layout flat cuts parameters of any shape")
        }
        plan::Error::UnknownParameter { .. } => {
            Some("plan --format json lists the names of all parameters")
        }
        _ => None,
    }
}

fn training(error: &train::Error) -> Option<&'static str> {
    match error {
        train::Error::Gradient(_) => Some(GRADIENT),
        train::Error::Checkpoint(CheckpointError::NoUsableCheckpoint { .. }) => Some(NONE_LEFT),
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
        Error::Run(error) => of_run(error),
        _ => None,
    }
}

fn folder(error: &FolderError) -> Option<&'static str> {
    Some(match error {
        FolderError::NotAFolder { .. } | FolderError::Config { .. } => HF_FOLDER,
        FolderError::Model { .. } => FAMILY,
        FolderError::OtherFormat { .. } => OTHER_FORMAT,
        FolderError::NoWeights { .. } => NO_WEIGHTS,
        FolderError::AdaptersAlone { .. } | FolderError::Adapters { .. } => ADAPTER,
        FolderError::AdapterMismatch { .. } => NOT_ITS_ADAPTERS,
        FolderError::TensorMismatch { .. } => NOT_ITS_WEIGHTS,
        FolderError::Weights(error) => match **error {
            CheckpointError::Parameter(_) => NOT_ITS_WEIGHTS,
            _ => NOT_WHOLE,
        },
        _ => return None,
    })
}

fn tokenizer(error: &TokenizerError) -> Option<&'static str> {
    Some(match error {
        TokenizerError::Missing { .. } => NO_TOKENIZER,
        TokenizerError::Broken { .. } | TokenizerError::Template { .. } => NOT_WHOLE,
        TokenizerError::VocabularyMismatch { .. } => OTHER_VOCABULARY,
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
        ExampleError::KindMismatch { .. } => MIXED,
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
        SpecError::UnknownLayer { .. } => Some(LORA_ON),
        _ => None,
    }
}

fn of_run(error: &RunError) -> Option<&'static str> {
    match error {
        RunError::ModelMismatch { .. } => Some(OTHER_MODEL),
        RunError::CheckpointAhead { .. } => Some(OTHER_RUN),
        RunError::NotEnded { .. } => Some(UNFINISHED),
        RunError::Base { .. } => Some(ADAPTER),
        RunError::Occupied { .. } => Some(OCCUPIED),
        RunError::PackedRows { .. } => Some(PACKED_ROWS),
        RunError::ValidationTooSmall { .. } => Some(SMALL_VALIDATION),
        _ => None,
    }
}

fn generate(error: &GenerateError) -> Option<&'static str> {
    Some(match error {
        GenerateError::EmptyPrompt => "no token is set before a text here: give --prompt a word",
        GenerateError::LongPrompt { .. } => LONG_PROMPT,
        GenerateError::Temperature { .. } => "without --temperature the likeliest token is taken",
        _ => return None,
    })
}

fn mesh(error: &mesh::Error) -> Option<&'static str> {
    match error {
        mesh::Error::Mesh(mesh::MeshError::Device { .. }) => Some(
            "--device cpu works everywhere; cuda and metal need a build with that feature, and that \
             many devices",
        ),
        mesh::Error::Mesh(mesh::MeshError::Size { .. }) => {
            Some("--world-size is the number of devices")
        }
        _ => None,
    }
}
