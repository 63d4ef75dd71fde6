//! Examples: sequences of tokens, and the targets among them.

use std::{fs, io, iter, path::Path};

use core_types::{Fingerprint, Placement, Seed};
use dist_sampler::{DistributedSampler, SamplerConfig};
use serde::{Deserialize, Serialize};

use crate::{
    error::{
        Error, Result,
        example::{ExampleError, SourceLocation},
    },
    files,
    text::{
        lines::{self, Item},
        tokenizer::{LabeledTokens, Tokenizer},
    },
};

/// The label of a token that is not a target, as in PyTorch.
const IGNORED: i64 = -100;

/// Memory of a token.
const TOKEN_BYTES: u64 = size_of::<u32>() as u64;

/// The treatment of texts that are longer than the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Overlong {
    /// Reject them
    #[default]
    Error,
    /// Cut them off at the context
    Truncate,
    /// Leave them out
    Skip,
    /// Split them into several examples
    Split,
}

impl Overlong {
    /// Returns the number of tokens after which more tokens of a text do not matter.
    fn enough_tokens(self, context: usize) -> usize {
        match self {
            Self::Truncate | Self::Skip => context,
            Self::Error | Self::Split => usize::MAX,
        }
    }
}

/// Sequences of tokens with their labels.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "the other fields describe the examples")]
pub struct Examples {
    examples: Vec<LabeledTokens>,
    n_overlong: u64,
    files: FileCounts,
}

/// Numbers of files by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileCounts {
    /// Files with an example in each line.
    pub n_with_line_examples: u64,
    /// Files with an example in each paragraph.
    pub n_with_paragraph_examples: u64,
    /// Files that are not UTF-8.
    pub skipped: u64,
}

impl Examples {
    /// Reads the examples of a file, or of all files under a folder in the order of their names,
    /// with at most `context` tokens each.
    ///
    /// Each file is read whole, and rejected if its text and all examples would take more than
    /// `max_bytes`. Each line of a `*.jsonl` file is an example: a string or `{"text"}` (all tokens are
    /// targets), `{"prompt", "completion"}` (the completion is the target), or `{"messages"}` (the
    /// assistant's messages are targets). All other files hold paragraphs of text. Hidden files are
    /// skipped, and text files that are not UTF-8 too.
    ///
    /// # Errors
    ///
    /// [`Error::Example`] with the file and the line of a malformed example, or with the file that
    /// takes too much memory, [`Error::Tokenizer`] or [`Error::Io`].
    pub fn read(
        path: &Path,
        tokenizer: &Tokenizer,
        context: usize,
        overlong: Overlong,
        max_bytes: Option<u64>,
    ) -> Result<Self> {
        Self::read_beside(0, path, tokenizer, context, overlong, max_bytes)
    }

    /// Like [`read`](Self::read), beside other examples of `n_tokens` tokens.
    pub(crate) fn read_beside(
        mut n_tokens: u64,
        path: &Path,
        tokenizer: &Tokenizer,
        context: usize,
        overlong: Overlong,
        max_bytes: Option<u64>,
    ) -> Result<Self> {
        let mut examples = Self::default();
        for file in files::list(path)? {
            check_memory(&file, n_tokens, max_bytes)?;
            let n_before = examples.examples.len();
            let Some(text) = examples.files.read_text(&file)? else { continue };
            for (location, item) in lines::items(&file, &text)? {
                match encode(tokenizer, &item, overlong.enough_tokens(context)) {
                    Ok(example) => examples.add(example, location, context, overlong)?,
                    Err(cause) => {
                        let cause = Box::new(cause);
                        return Err(ExampleError::Tokens { location, cause }.into());
                    }
                }
            }
            let added = &examples.examples[n_before..];
            n_tokens += added.iter().map(|example| example.ids.len() as u64).sum::<u64>();
        }
        if examples.examples.is_empty() {
            return Err(ExampleError::Empty { path: path.into() }.into());
        }
        Ok(examples)
    }

    /// Makes one example per text. All tokens are targets.
    ///
    /// # Errors
    ///
    /// [`ExampleError::Overlong`] or [`ExampleError::NoTarget`], with the number of the text.
    pub(crate) fn from_texts(
        texts: impl IntoIterator<Item = String>,
        tokenizer: &Tokenizer,
        context: usize,
        overlong: Overlong,
    ) -> Result<Self> {
        let mut examples = Self::default();
        for (n, text) in (1..).zip(texts) {
            let location = SourceLocation::new(Path::new("the list"), "text", n);
            let example = tokenizer.encode_text(&text, overlong.enough_tokens(context))?;
            examples.add(example, location, context, overlong)?;
        }
        Ok(examples)
    }

    /// Adds the examples of another text.
    pub(crate) fn append(&mut self, other: Self) {
        let files = other.files;
        self.examples.extend(other.examples);
        self.n_overlong += other.n_overlong;
        self.files.n_with_line_examples += files.n_with_line_examples;
        self.files.n_with_paragraph_examples += files.n_with_paragraph_examples;
        self.files.skipped += files.skipped;
    }

    /// Returns the number of examples.
    pub(crate) fn len(&self) -> u64 {
        self.examples.len() as u64
    }

    /// Returns the length of every example, in tokens.
    pub fn lengths(&self) -> Vec<u64> {
        self.examples.iter().map(|example| example.ids.len() as u64).collect()
    }

    /// Returns the number of texts that were longer than the context.
    pub fn n_overlong(&self) -> u64 {
        self.n_overlong
    }

    /// Returns the numbers of files by kind. Both parts of a split have the numbers of all files.
    pub fn files(&self) -> FileCounts {
        self.files
    }

    /// Returns the tokens of example `index`, which must be in range.
    pub fn ids(&self, index: u64) -> &[u32] {
        &self.example(index).ids
    }

    /// Returns the labels of an example's tokens, not shifted: the token itself for a target, and −100
    /// for any other token.
    pub fn labels(&self, index: u64) -> Vec<i64> {
        let LabeledTokens { ids, targets } = self.example(index);
        let mut labels = vec![IGNORED; ids.len()];
        for target in targets {
            for (label, &id) in labels[target.clone()].iter_mut().zip(&ids[target.clone()]) {
                *label = id.into();
            }
        }
        labels
    }

    /// Returns a hash of the tokens and the labels, in hexadecimal digits.
    pub(crate) fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new();
        for LabeledTokens { ids, targets } in &self.examples {
            fingerprint.write_u64(ids.len() as u64);
            fingerprint.extend(ids.iter().map(|&id| id.into()));
            fingerprint.write_u64(targets.len() as u64);
            for target in targets {
                fingerprint.extend([target.start as u64, target.end as u64]);
            }
        }
        fingerprint.to_string()
    }

    /// Splits off a fraction of the examples for validation, drawn with `seed`. Returns the
    /// training examples and the validation examples, both in their original order.
    ///
    /// # Errors
    ///
    /// [`ExampleError::Split`] if one of the parts would be empty.
    pub fn split(self, fraction: f64, seed: Seed) -> Result<(Self, Self)> {
        let n_examples = self.examples.len();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the next lines reject fractions that are not between 0 and 1"
        )]
        let n_held_out = (fraction * n_examples as f64).round() as usize;
        if !(fraction > 0. && fraction < 1.) || n_held_out == 0 || n_held_out == n_examples {
            return Err(ExampleError::Split { fraction, n_examples, n_held_out }.into());
        }
        let held_out_flags = choose_held_out(n_examples, n_held_out, seed)?;
        let mut training = Vec::new();
        let mut validation = Vec::new();
        for (example, is_held_out) in iter::zip(self.examples, held_out_flags) {
            if is_held_out { validation.push(example) } else { training.push(example) }
        }
        let validation = Self { examples: validation, n_overlong: 0, files: self.files };
        Ok((
            Self { examples: training, n_overlong: self.n_overlong, files: self.files },
            validation,
        ))
    }

    /// Adds an example. If it is longer than the context, `overlong` decides what happens.
    fn add(
        &mut self,
        mut example: LabeledTokens,
        location: SourceLocation,
        context: usize,
        overlong: Overlong,
    ) -> Result<()> {
        let length = example.ids.len();
        if length > context {
            self.n_overlong += 1;
            match overlong {
                Overlong::Skip => return Ok(()),
                Overlong::Truncate => example = truncate(example, context),
                Overlong::Split => {
                    self.examples.extend(split(&example, context));
                    return Ok(());
                }
                Overlong::Error => {
                    return Err(ExampleError::Overlong { location, length, context }.into());
                }
            }
        }
        if has_target(&example) {
            self.examples.push(example);
            return Ok(());
        }
        Err(if length > context {
            ExampleError::NoAnswer { location, context }.into()
        } else {
            ExampleError::NoTarget { location }.into()
        })
    }

    #[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
    fn example(&self, index: u64) -> &LabeledTokens {
        let index = usize::try_from(index).expect("examples in memory have indices of type usize");
        &self.examples[index]
    }
}

impl FileCounts {
    /// Counts a file, and returns its text. A file that is not UTF-8 is skipped, and the result is
    /// `None`.
    fn read_text(&mut self, file: &Path) -> Result<Option<String>> {
        if file.extension().is_some_and(|extension| extension == "json") {
            return Err(ExampleError::WholeJson { path: file.into() }.into());
        }
        let bytes = fs::read(file).map_err(|cause| Error::io(file, cause))?;
        match String::from_utf8(bytes) {
            Err(fault) if lines::has_line_items(file) => {
                let cause = io::Error::new(io::ErrorKind::InvalidData, fault);
                Err(ExampleError::NotUtf8 { path: file.into(), cause }.into())
            }
            Err(_) => {
                self.skipped += 1;
                Ok(None)
            }
            Ok(text) => {
                let has_line_items = lines::has_line_items(file);
                self.n_with_line_examples += u64::from(has_line_items);
                self.n_with_paragraph_examples += u64::from(!has_line_items);
                Ok(Some(text))
            }
        }
    }
}

/// Checks that the next file fits into `max_bytes` beside `n_tokens` tokens.
fn check_memory(file: &Path, n_tokens: u64, max_bytes: Option<u64>) -> Result<()> {
    /// Copies of a file's text: as read, with converted line ends, and as items.
    const TEXT_COPIES: u64 = 3;
    let Some(limit) = max_bytes else { return Ok(()) };
    let length = fs::metadata(file).map_err(|cause| Error::io(file, cause))?.len();
    // A byte may become a token.
    let n_tokens = n_tokens.saturating_add(length);
    let needed =
        length.saturating_mul(TEXT_COPIES).saturating_add(n_tokens.saturating_mul(TOKEN_BYTES));
    if needed > limit {
        return Err(ExampleError::Memory { path: file.into(), needed, limit }.into());
    }
    Ok(())
}

/// Returns the tokens of an item. A text with more than `enough` tokens may lack the last ones.
fn encode(tokenizer: &Tokenizer, item: &Item, enough: usize) -> Result<LabeledTokens> {
    match item {
        Item::Text(text) => tokenizer.encode_text(text, enough),
        Item::Answer { prompt, completion } => tokenizer.encode_answer(prompt, completion),
        Item::Messages(messages) => tokenizer.encode_conversation(messages),
    }
}

/// Returns true if some target can be predicted: the first token cannot, since no token precedes it.
fn has_target(example: &LabeledTokens) -> bool {
    example.targets.iter().any(|target| target.end > target.start.max(1))
}

/// Splits an example into parts of at most `n_tokens` tokens. Parts without a target are dropped.
fn split(example: &LabeledTokens, n_tokens: usize) -> Vec<LabeledTokens> {
    let chunks = (0..).step_by(n_tokens).zip(example.ids.chunks(n_tokens));
    let mut parts = Vec::new();
    for (start, ids) in chunks {
        let end = start + ids.len();
        let mut targets = Vec::with_capacity(example.targets.len());
        for target in &example.targets {
            let clamped = target.start.clamp(start, end)..target.end.clamp(start, end);
            targets.push(clamped.start - start..clamped.end - start);
        }
        let part = LabeledTokens { ids: ids.to_vec(), targets };
        if has_target(&part) {
            parts.push(part);
        }
    }
    parts
}

/// Truncates an example to `n_tokens` tokens.
fn truncate(mut example: LabeledTokens, n_tokens: usize) -> LabeledTokens {
    example.ids.truncate(n_tokens);
    for target in &mut example.targets {
        *target = target.start.min(n_tokens)..target.end.min(n_tokens);
    }
    example
}

/// Returns a flag per example, true for held-out examples. The first examples of a random order are
/// held out.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn choose_held_out(n_examples: usize, n_held_out: usize, seed: Seed) -> Result<Vec<bool>> {
    let config = SamplerConfig::default().with_seed(seed);
    let order = DistributedSampler::new(n_examples as u64, Placement::SINGLE, config)?;
    let mut held_out_flags = vec![false; n_examples];
    for index in order.iter().take(n_held_out) {
        let index = usize::try_from(index).expect("examples in memory have indices of type usize");
        held_out_flags[index] = true;
    }
    Ok(held_out_flags)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::golden;

    fn read(name: &str, text: &str, context: usize, overlong: Overlong) -> Result<Examples> {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(name);
        fs::write(&path, text).unwrap();
        let folder = golden::folder("qwen2");
        Examples::read(&path, folder.tokenizer(), context, overlong, None)
    }

    #[test]
    fn memory_of_texts_is_limited() {
        let home = tempfile::tempdir().unwrap();
        for name in ["a.jsonl", "b.jsonl"] {
            fs::write(home.path().join(name), format!("\"{}\"", "word ".repeat(200))).unwrap();
        }
        let read = |max_bytes| {
            let folder = golden::folder("qwen2");
            Examples::read(home.path(), folder.tokenizer(), 2000, Overlong::Error, Some(max_bytes))
        };
        let length = 1002;
        let fits = 7 * length + 4 * read(1 << 20).unwrap().lengths()[0];
        read(fits).unwrap();
        for (max_bytes, name) in [(fits - 1, "b.jsonl"), (7 * length - 1, "a.jsonl")] {
            let Err(Error::Example(ExampleError::Memory { path, limit, .. })) = read(max_bytes)
            else {
                panic!("{max_bytes}")
            };
            assert_eq!((path, limit), (home.path().join(name), max_bytes));
        }
    }

    fn lines(content: &str) -> Result<Examples> {
        read("a.jsonl", content, 128, Overlong::Error)
    }

    #[test]
    fn answer_masks_match_transformers() {
        let home = tempfile::tempdir().unwrap();
        for model in golden::MODELS {
            let path = home.path().join("pairs.jsonl");
            let pairs = golden::json(model, "tokens.json")["pairs"].clone();
            let mut content = Vec::new();
            for pair in pairs.as_array().unwrap() {
                content.push(json!({"prompt": pair[0], "completion": pair[1]}).to_string());
            }
            fs::write(&path, content.join("\n")).unwrap();
            let folder = golden::folder(model);
            let examples =
                Examples::read(&path, folder.tokenizer(), 128, Overlong::Error, None).unwrap();
            let expected = golden::json(model, "expected.json")["answer_only"].clone();
            for (n, len) in (0_u64..).zip(examples.lengths()) {
                let row = usize::try_from(n).unwrap();
                let len = usize::try_from(len).unwrap();
                let ids = golden::ids(&expected["input_ids"][row]);
                assert_eq!(examples.ids(n), &ids[..len], "{model}");
                let labels = expected["labels"][row].as_array().unwrap();
                let labels: Vec<i64> = labels.iter().map(|label| label.as_i64().unwrap()).collect();
                assert_eq!(examples.labels(n), &labels[..len], "{model}");
                assert!(labels[len..].iter().all(|&label| label == IGNORED), "{model}");
            }
            assert_eq!(examples.len(), 3);
        }
    }

    #[test]
    fn texts_are_lines_or_paragraphs() {
        let examples = lines("\"first\"\n\n{\"id\": 3, \"text\": \"a\\n\\nb\"}\r\n").unwrap();
        let tokenizer = golden::folder("qwen2");
        let decoded = |examples: &Examples| -> Vec<String> {
            let all = (0..examples.len()).map(|n| examples.ids(n));
            all.map(|ids| tokenizer.tokenizer().decode(ids, true).unwrap()).collect()
        };
        assert_eq!(decoded(&examples), ["first<|im_end|>", "a\n\nb<|im_end|>"]);
        let all: Vec<i64> = examples.ids(0).iter().map(|&id| id.into()).collect();
        assert_eq!(examples.labels(0), all);
        for paragraphs in
            ["first\n\n  \n\nsec\nond\n\n", "first\n\n\nsec\nond\n", "\nfirst\n\nsec\nond"]
        {
            for content in [paragraphs.to_owned(), paragraphs.replace('\n', "\r\n")] {
                let examples = read("a.txt", &content, 128, Overlong::Error).unwrap();
                assert_eq!(decoded(&examples), ["first<|im_end|>", "sec\nond<|im_end|>"]);
            }
        }
    }

    #[test]
    fn invalid_lines_are_named() {
        for (line, words) in [
            ("{\"text\": \"a", "is not JSON"),
            ("3", "is neither a string nor an object"),
            ("{}", "has no text, no prompt and completion, and no messages"),
            ("{\"text\": 3}", "has a text that is not a string"),
            ("{\"prompt\": \"a\"}", "has no completion"),
            ("{\"completion\": \"a\"}", "has no prompt"),
            ("{\"prompt\": \"a\", \"completion\": \" \"}", "has an empty completion"),
            ("{\"prompt\": [], \"completion\": \"a\"}", "has a prompt that is not a string"),
            ("{\"text\": \"a\", \"messages\": []}", "has fields of several kinds"),
            ("{\"messages\": []}", "has no message of the assistant"),
            ("{\"messages\": null}", "has no text, no prompt and completion, and no messages"),
            ("{\"messages\": [{\"role\": \"user\"}]}", "has messages without role and content"),
            ("{\"messages\": [{\"content\": 3}]}", "expected a string"),
            (
                "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\\n\"}]}",
                "has an empty message of the assistant",
            ),
            (
                "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}], \"tools\": [{}]}",
                "has tools, which chat templates do not get here",
            ),
            (
                "{\"messages\": [{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}]}",
                "has tool_calls, which chat templates do not get here",
            ),
            // Empty lists are ignored.
            (
                "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"tool_calls\": null}], \
                 \"tools\": []}",
                "but line 1 holds a text",
            ),
            ("{\"prompt\": \"a\", \"completion\": \"b\"}", "but line 1 holds a text"),
        ] {
            let fault = lines(&format!("\"right\"\n\n{line}\n")).unwrap_err();
            let message = fault.to_string();
            assert!(message.starts_with("line 3 of ") && message.contains("a.jsonl"), "{message}");
            assert!(message.contains(words), "{line}: {message}");
        }
    }

    #[test]
    fn folder_files_are_read_or_counted() {
        let home = tempfile::tempdir().unwrap();
        let write =
            |name: &str, content: &[u8]| fs::write(home.path().join(name), content).unwrap();
        let read = || {
            let folder = golden::folder("qwen2");
            Examples::read(home.path(), folder.tokenizer(), 128, Overlong::Error, None)
        };
        write("a.jsonl", b"\"a\"\n\"b\"");
        write("README.md", b"c");
        write("picture.png", b"\x89PNG\xff");
        let examples = read().unwrap();
        assert_eq!(examples.len(), 3);
        let files =
            FileCounts { n_with_line_examples: 1, n_with_paragraph_examples: 1, skipped: 1 };
        assert_eq!(examples.files(), files);
        let (kept, held) = examples.split(0.4, Seed::new(0)).unwrap();
        assert_eq!((kept.files(), held.files()), (files, files));
        write("dataset_info.json", b"{}");
        let fault = read().unwrap_err();
        assert!(fault.to_string().contains("dataset_info.json is one JSON document"), "{fault}");
        write("b.jsonl", b"\"a\xe9\"");
        let fault = read().unwrap_err();
        assert!(fault.to_string().contains("b.jsonl"), "{fault}");
        assert!(matches!(fault, Error::Example(ExampleError::NotUtf8 { .. })));
    }

    #[test]
    fn tokenizer_errors_name_the_line() {
        let line = r#"{"messages": [{"role": "assistant", "content": "a"}]}"#;
        let fault = lines(line).unwrap_err();
        assert!(fault.to_string().contains("line 1 of "), "{fault}");
        assert!(fault.to_string().contains("has no chat template"), "{fault}");
    }

    #[test]
    fn overlong_option_is_followed() {
        let content = "\"abc\"\n\"abcdefghijkl\"\n";
        let fault = read("a.jsonl", content, 8, Overlong::Error).unwrap_err();
        assert!(fault.to_string().starts_with("line 2 of "), "{fault}");
        assert!(fault.to_string().contains(" tokens, more than the context of 8"), "{fault}");
        assert!(matches!(fault, Error::Example(ExampleError::Overlong { context: 8, .. })));
        let whole = lines(content).unwrap();
        let cut = read("a.jsonl", content, 8, Overlong::Truncate).unwrap();
        assert_eq!((cut.n_overlong(), cut.ids(0)), (1, whole.ids(0)));
        assert_eq!((cut.ids(1), cut.labels(1).len()), (&whole.ids(1)[..8], 8));
        let rest = read("a.jsonl", content, 8, Overlong::Skip).unwrap();
        assert_eq!((rest.n_overlong(), rest.len(), rest.ids(0)), (1, 1, whole.ids(0)));
        // An example may be exactly as long as the context.
        let len = usize::try_from(whole.lengths()[1]).unwrap();
        assert_eq!(read("a.jsonl", content, len, Overlong::Error).unwrap().n_overlong(), 0);
    }

    #[test]
    fn empty_texts_are_rejected() {
        let fault = lines("\"a\"\n\"\"").unwrap_err();
        let message = fault.to_string();
        assert!(message.starts_with("line 2 of "), "{message}");
        assert!(message.ends_with("has no token to predict"), "{message}");
        assert!(matches!(fault, Error::Example(ExampleError::NoTarget { .. })));
    }

    #[test]
    fn truncated_answers_are_rejected() {
        let line = r#"{"prompt": "zqxjzqxj", "completion": "yes"}"#;
        let prompt = golden::folder("qwen2").tokenizer().begin("zqxjzqxj").unwrap().len();
        let fault = read("a.jsonl", line, prompt, Overlong::Truncate).unwrap_err().to_string();
        assert!(
            fault.starts_with("line 1 of ") && fault.contains("has no answer within"),
            "{fault}"
        );
        let cut = read("a.jsonl", line, prompt + 1, Overlong::Truncate).unwrap();
        let predicted = cut.labels(0).into_iter().filter(|&label| label != IGNORED);
        assert_eq!(predicted.count(), 1);
        let none = read("a.jsonl", line, prompt, Overlong::Skip).unwrap_err().to_string();
        assert!(none.starts_with("there is no example in"), "{none}");
    }

    #[test]
    fn fingerprint_covers_tokens_and_labels() {
        let texts = ["\"ab\"", "\"ab\"\n\"ab\"", "\"cd\"", r#"{"prompt": "a", "completion": "b"}"#];
        let all: BTreeSet<String> =
            texts.iter().map(|text| lines(text).unwrap().fingerprint()).collect();
        assert_eq!(all.len(), texts.len());
    }

    #[test]
    fn split_follows_fraction_and_seed() {
        let content: Vec<String> = (0..40).map(|n| format!("\"number {n}\"")).collect();
        let all = lines(&content.join("\n")).unwrap();
        let tokens = |examples: &Examples| -> Vec<Vec<u32>> {
            (0..examples.len()).map(|n| examples.ids(n).to_vec()).collect()
        };
        let split =
            |fraction, seed| lines(&content.join("\n")).unwrap().split(fraction, Seed::new(seed));
        let (kept, held) = split(0.1, 1).unwrap();
        assert_eq!((kept.len(), held.len()), (36, 4));
        let kept = tokens(&kept);
        let held = tokens(&held);
        let mut rest = kept.iter().peekable();
        let mut out = held.iter().peekable();
        for ids in &tokens(&all) {
            let next = rest.next_if_eq(&ids).or(out.next_if_eq(&ids));
            assert!(next.is_some(), "both parts keep the order");
        }
        assert_eq!(tokens(&split(0.1, 1).unwrap().1), held);
        assert_ne!(tokens(&split(0.1, 2).unwrap().1), held);
        for fraction in [0., 0.01, 0.99, 1., -0.5, f64::NAN, f64::INFINITY] {
            let fault = split(fraction, 1).unwrap_err().to_string();
            assert!(fault.starts_with(&format!("a fraction {fraction} of 40")), "{fault}");
        }
    }
}
