//! The tokenizer of a folder: `tokenizer.json` and related files.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
};

use core_types::Fingerprint;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokenizers::{Encoding, ModelWrapper};

use crate::{
    error::{Error, Result, tokenizer::TokenizerError},
    files,
    text::{
        byte_tokenizer,
        chat::{ChatTemplate, Message},
    },
};

/// The main file of a tokenizer.
pub(crate) const FILE: &str = "tokenizer.json";

// Related files.
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const GENERATION: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Files of older tokenizers, which some programs read instead of `tokenizer.json`.
const OLDER_FILES: [&str; 4] = ["added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"];

/// The tokenizer of a model, with its chat template if it has one.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Folder of the files, for errors.
    path: PathBuf,
    /// Contents of the tokenizer's files by name.
    files: BTreeMap<String, Vec<u8>>,
    /// Token that ends texts in training.
    end_id: u32,
    /// All tokens that end a generated text.
    end_ids: BTreeSet<u32>,
    chat: Option<ChatTemplate>,
}

/// The maximum length of a text that the library encodes at once, which takes some 160 bytes for each
/// byte. Tests have short pieces, because the library is slow without optimization.
const PIECE_BYTES: usize = if cfg!(test) { 1 << 12 } else { 1 << 18 };

/// Tokens, and the targets among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LabeledTokens {
    pub(crate) ids: Vec<u32>,
    /// Ranges of targets in `ids`, in order.
    pub(crate) targets: Vec<Range<usize>>,
}

impl Tokenizer {
    /// Opens the tokenizer of a folder, for a model with this vocabulary size.
    ///
    /// # Errors
    ///
    /// [`Error::Tokenizer`] if a file is damaged, if a token is not in the vocabulary of the model, or
    /// if no token ends a text.
    pub(crate) fn open(folder: &Path, config: &str, vocab_size: usize) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in
            [FILE, CONFIG, SPECIAL_TOKENS, GENERATION, CHAT_TEMPLATE].iter().chain(&OLDER_FILES)
        {
            if let Some(bytes) = files::read_if_there(&folder.join(name))? {
                files.insert((*name).to_owned(), bytes);
            }
        }
        Self::from_files(folder, files, &EndIds::read(folder, config)?, vocab_size)
    }

    /// Makes the tokenizer of a byte model: one token per byte, and an end token.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NoByteEnd`] if `config.json` names no token beyond the bytes.
    pub(crate) fn bytes(folder: &Path, config: &str, vocab_size: usize) -> Result<Self> {
        let ids = EndIds::read(folder, config)?;
        let end = ids.eos_token_id.clone().into_iter().flat_map(OneOrMore::into_vec).next();
        let Some(end) = end.filter(|&end| end >= byte_tokenizer::N_BYTES) else {
            return Err(TokenizerError::NoByteEnd { path: folder.join(files::CONFIG) }.into());
        };
        let values = [
            (FILE, byte_tokenizer::tokenizer_json(end)),
            (CONFIG, byte_tokenizer::tokenizer_config_json()),
        ];
        let files = values.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()));
        Self::from_files(folder, files.into(), &ids, vocab_size)
    }

    fn from_files(
        folder: &Path,
        files: BTreeMap<String, Vec<u8>>,
        model_ids: &EndIds,
        vocab_size: usize,
    ) -> Result<Self> {
        let inner = read_tokenizer(folder, &files)?;
        check_vocabulary(folder, &inner, vocab_size)?;
        let special = SpecialTokens::read(folder, &files)?;
        let (end_id, end_ids) = special.end_tokens(folder, &files, model_ids, &inner)?;
        let chat = chat_template(folder, &files, &special)?;
        Ok(Self { inner, path: folder.to_owned(), files, end_id, end_ids, chat })
    }

    /// Returns true if this token ends a generated text. Several tokens may do so.
    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.end_ids.contains(&id)
    }

    /// Returns the tokens of a text to continue: with the tokens that the tokenizer adds before the
    /// text, such as a begin token, and without the end token that some tokenizers add after the
    /// text. End tokens in the text itself stay.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Broken`] if the tokenizer cannot encode the text.
    pub(crate) fn begin(&self, text: &str) -> Result<Vec<u32>> {
        self.begin_until(text, usize::MAX)
    }

    /// Like [`begin`](Self::begin), but stops at some token after the first `enough` tokens.
    fn begin_until(&self, text: &str, enough: usize) -> Result<Vec<u32>> {
        let (first, rest) = split_piece(text);
        let mut ids = self.encode(first, true)?.get_ids().to_vec();
        if let [before @ .., last] = &ids[..]
            && *last == self.end_id
            // Some tokenizers use the same token to begin and to end a text.
            && !before.is_empty()
            && before.ends_with(&self.encode_plain(first)?)
        {
            ids.pop();
        }
        ids.extend(self.encode_until(rest, enough.saturating_sub(ids.len()))?);
        Ok(ids)
    }

    /// Returns the tokens of a text, without the tokens that the tokenizer would add.
    ///
    /// # Errors
    ///
    /// The errors of [`begin`](Self::begin).
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_until(text, usize::MAX)
    }

    /// Like [`encode_plain`](Self::encode_plain), but stops at some token after the first `enough`
    /// tokens.
    fn encode_until(&self, text: &str, enough: usize) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() && ids.len() <= enough {
            let (piece, after) = split_piece(rest);
            ids.extend_from_slice(self.encode(piece, false)?.get_ids());
            rest = after;
        }
        Ok(ids)
    }

    /// Returns the tokens of a text with an end token. All tokens are targets. With more than `enough`
    /// tokens, the last ones may be missing, so that a long text takes no time for them.
    ///
    /// # Errors
    ///
    /// The errors of [`begin`](Self::begin).
    pub(crate) fn encode_text(&self, text: &str, enough: usize) -> Result<LabeledTokens> {
        let (first, rest) = split_piece(text);
        let mut ids = if rest.is_empty() {
            self.encode(first, true)?.get_ids().to_vec()
        } else {
            self.begin_until(text, enough)?
        };
        // Some tokenizers add the end token themselves.
        if ids.last() != Some(&self.end_id) {
            ids.push(self.end_id);
        }
        let all = 0..ids.len();
        Ok(LabeledTokens { ids, targets: vec![all] })
    }

    /// Returns the tokens of a prompt, an answer and an end token. The answer and the end token are
    /// the target. The prompt is encoded separately from the answer, as in generation, where a model
    /// gets only the prompt.
    ///
    /// # Errors
    ///
    /// The errors of [`begin`](Self::begin).
    pub(crate) fn encode_answer(&self, prompt: &str, answer: &str) -> Result<LabeledTokens> {
        let mut ids = self.begin(prompt)?;
        let start = ids.len();
        ids.extend(self.encode_plain(answer)?);
        ids.push(self.end_id);
        let target = start..ids.len();
        Ok(LabeledTokens { ids, targets: vec![target] })
    }

    /// Returns the tokens of a conversation, as rendered by the chat template. The assistant's
    /// messages are targets.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NoChatTemplate`], [`TokenizerError::Rendering`] or
    /// [`TokenizerError::Rewrites`].
    pub(crate) fn encode_conversation(&self, messages: &[Message]) -> Result<LabeledTokens> {
        let rendered = self.chat()?.render_with_answers(messages)?;
        // The template itself writes special tokens.
        let encoding = self.encode(&rendered.text, false)?;
        let targets = rendered.answers.iter().map(|bytes| token_range(bytes, &encoding)).collect();
        Ok(LabeledTokens { ids: encoding.get_ids().to_vec(), targets })
    }

    /// Returns the tokens of a conversation up to the assistant's answer.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::NoChatTemplate`] without a chat template, [`TokenizerError::Rendering`] if
    /// it fails.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode_plain(&self.chat()?.render(messages, true)?)
    }

    /// Returns the text of tokens, with or without special tokens.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Broken`] if the tokenizer cannot decode them.
    pub fn decode(&self, ids: &[u32], with_special: bool) -> Result<String> {
        call_library(&self.path, || self.inner.decode(ids, !with_special))
    }

    /// Returns the contents of the tokenizer's files by name, to copy into another folder.
    pub fn files(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.files
    }

    /// Returns a fingerprint of the files, in hexadecimal digits.
    pub(crate) fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new();
        for (name, content) in &self.files {
            fingerprint.write_bytes(name.as_bytes());
            fingerprint.write_bytes(content);
        }
        fingerprint.to_string()
    }

    fn chat(&self) -> Result<&ChatTemplate> {
        match &self.chat {
            Some(template) => Ok(template),
            None => Err(TokenizerError::NoChatTemplate { path: self.path.clone() }.into()),
        }
    }

    fn encode(&self, text: &str, with_added: bool) -> Result<Encoding> {
        call_library(&self.path, || self.inner.encode(text, with_added))
    }
}

/// Splits off the first piece of a text that is longer than [`PIECE_BYTES`], before a space if there
/// is one, so that the pieces have the tokens of the text; a tokenizer that adds a space before a
/// text adds one before each piece.
fn split_piece(text: &str) -> (&str, &str) {
    if text.len() <= PIECE_BYTES {
        return (text, "");
    }
    let end = text.floor_char_boundary(PIECE_BYTES);
    let space = text[..end].rfind(' ').filter(|&space| space > 0);
    text.split_at(space.unwrap_or(end))
}

/// Reads `tokenizer.json`.
fn read_tokenizer(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
) -> Result<tokenizers::Tokenizer> {
    let Some(bytes) = files.get(FILE) else {
        return Err(TokenizerError::Missing { path: folder.into() }.into());
    };
    check_sizes(folder, bytes)?;
    let mut inner = call_library(folder, || tokenizers::Tokenizer::from_bytes(bytes))?;
    if let ModelWrapper::BPE(model) = inner.get_model()
        && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.)
    {
        let reason = format!("dropout is {dropout}, must be null: with dropout, tokens are random");
        return Err(TokenizerError::Unsupported { path: folder.join(FILE), reason }.into());
    }
    // Padding and truncation would change the tokens of a text.
    inner.with_padding(None);
    call_library(folder, || inner.with_truncation(None).map(drop))?;
    Ok(inner)
}

/// The parts of `tokenizer.json` that the library could need too much memory or stack for.
#[derive(Deserialize)]
struct SizedParts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: SizedModel,
}

#[derive(Default, Deserialize)]
struct SizedModel {
    #[serde(default)]
    vocab: Value,
}

/// Rejects tokens that are too long, and rules that lengthen a text too much.
fn check_sizes(folder: &Path, bytes: &[u8]) -> Result<()> {
    /// The longest token that is known has some 300 bytes.
    const MAX_TOKEN_BYTES: usize = 1 << 12;
    /// The rules of Llama 2 write nine bytes for a space.
    const MAX_GROWTH: usize = 1 << 12;
    if bytes.starts_with(b"version https://git-lfs") {
        let reason = "it is a pointer of Git LFS: `git lfs pull` fetches the file".to_owned();
        return Err(TokenizerError::Broken { path: folder.join(FILE), reason }.into());
    }
    // The library reports other damage.
    let Ok(parts) = serde_json::from_slice::<SizedParts>(bytes) else { return Ok(()) };
    let growth = growth(&parts.normalizer).max(growth(&parts.decoder));
    let longest = longest_token(&parts.model.vocab);
    let reason = if growth > MAX_GROWTH {
        format!("its rules make {MAX_GROWTH} bytes and more of one")
    } else if longest > MAX_TOKEN_BYTES {
        format!("a token has {longest} bytes, must be at most {MAX_TOKEN_BYTES}")
    } else {
        return Ok(());
    };
    Err(TokenizerError::Broken { path: folder.join(FILE), reason }.into())
}

/// Returns the largest number of bytes that rules can make of one.
fn growth(rules: &Value) -> usize {
    let text = |name: &str| rules.get(name).and_then(Value::as_str).map_or(0, str::len);
    let own = match rules.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let pattern = rules.pointer("/pattern/String").and_then(Value::as_str);
            text("content").div_ceil(pattern.map_or(1, |pattern| pattern.len().max(1)))
        }
        Some("Prepend") => text("prepend"),
        _ => 1,
    };
    let inner = ["normalizers", "decoders"].into_iter().filter_map(|name| rules.get(name));
    let rules = inner.filter_map(Value::as_array).flatten();
    rules.map(growth).fold(own.max(1), usize::saturating_mul)
}

/// Returns the bytes of the longest token of a vocabulary: names, or pairs of a name and a score.
fn longest_token(vocab: &Value) -> usize {
    let tokens: Vec<&str> = match vocab {
        Value::Object(ids) => ids.keys().map(String::as_str).collect(),
        Value::Array(scores) => scores.iter().filter_map(|pair| pair.get(0)?.as_str()).collect(),
        _ => Vec::new(),
    };
    tokens.into_iter().map(str::len).max().unwrap_or(0)
}

/// Calls the library, and converts its errors. Inconsistent files make it panic, which is an error
/// too.
fn call_library<T>(folder: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let reason = match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(result)) => return Ok(result),
        Ok(Err(fault)) => fault.to_string(),
        Err(_) => String::from("the file is inconsistent"),
    };
    Err(TokenizerError::Broken { path: folder.join(FILE), reason }.into())
}

/// Checks that all tokens of the tokenizer are in the vocabulary of the model.
fn check_vocabulary(folder: &Path, inner: &tokenizers::Tokenizer, vocab_size: usize) -> Result<()> {
    // The library adds tokens to a text that need not be in its own vocabulary.
    let added = call_library(folder, || inner.encode("", true))?;
    let added = added.get_tokens().iter().cloned().zip(added.get_ids().iter().copied());
    let highest = inner.get_vocab(true).into_iter().chain(added).max_by_key(|(_, id)| *id);
    match highest.filter(|&(_, id)| id as usize >= vocab_size) {
        None => Ok(()),
        Some((token, id)) => {
            let path = folder.join(FILE);
            Err(TokenizerError::VocabularyMismatch { path, token, id, vocab_size }.into())
        }
    }
}

/// Special tokens, by their names in chat templates.
#[derive(Debug, Default, Deserialize)]
struct SpecialTokens {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
    chat_template: Option<Templates>,
}

/// A token in either format.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "a special token must be a text, or an object with a text \"content\""
)]
enum TokenText {
    Text(String),
    Described { content: String },
}

/// One chat template, or several with names.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "chat_template must be a text, or a list of objects with \"name\" and \"template\""
)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Clone, Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// The end tokens in `config.json` and `generation_config.json`.
#[derive(Clone, Debug, Default, Deserialize)]
struct EndIds {
    eos_token_id: Option<OneOrMore>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "eos_token_id must be the number of a token, or a list of such numbers"
)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

impl EndIds {
    /// Reads the `config.json` of a folder.
    fn read(folder: &Path, config: &str) -> Result<Self> {
        serde_json::from_str(config).map_err(|cause| Error::Json {
            path: folder.join(files::CONFIG),
            expected: "the properties of a model",
            cause,
        })
    }
}

impl OneOrMore {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::More(ids) => ids,
        }
    }
}

impl TokenText {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Described { content: text } => text,
        }
    }
}

impl SpecialTokens {
    /// Reads `tokenizer_config.json`. Fields that it does not have come from the file of older
    /// tokenizers, `special_tokens_map.json`.
    fn read(folder: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<Self> {
        let newer: Self = read_optional(folder, files, CONFIG)?;
        let older: Self = read_optional(folder, files, SPECIAL_TOKENS)?;
        Ok(Self {
            bos_token: newer.bos_token.or(older.bos_token),
            eos_token: newer.eos_token.or(older.eos_token),
            pad_token: newer.pad_token.or(older.pad_token),
            unk_token: newer.unk_token.or(older.unk_token),
            chat_template: newer.chat_template,
        })
    }

    /// Returns the tokens by name.
    fn by_name(&self) -> BTreeMap<&'static str, String> {
        let all = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("pad_token", &self.pad_token),
            ("unk_token", &self.unk_token),
        ];
        all.into_iter()
            .filter_map(|(name, token)| Some((name, token.as_ref()?.text().to_owned())))
            .collect()
    }

    /// Returns the end token for training, and all tokens that end a generated text. The
    /// tokenizer's end token takes precedence in training, since the model was pretrained with it.
    fn end_tokens(
        &self,
        folder: &Path,
        files: &BTreeMap<String, Vec<u8>>,
        model_ids: &EndIds,
        inner: &tokenizers::Tokenizer,
    ) -> Result<(u32, BTreeSet<u32>)> {
        let no_end = |reason| Error::from(TokenizerError::NoEnd { path: folder.into(), reason });
        let mut end_ids = Vec::new();
        if let Some(token) = &self.eos_token {
            let text = token.text();
            let Some(id) = inner.token_to_id(text) else {
                return Err(no_end(format!("eos_token {text:?} is not in tokenizer.json")));
            };
            end_ids.push(id);
        }
        let generation_ids: EndIds = read_optional(folder, files, GENERATION)?;
        let configured =
            [model_ids.clone(), generation_ids].into_iter().filter_map(|ids| ids.eos_token_id);
        end_ids.extend(configured.flat_map(OneOrMore::into_vec));
        let Some(&first) = end_ids.first() else {
            return Err(no_end("no token ends a text".into()));
        };
        if let Some(&id) = end_ids.iter().find(|&&id| inner.id_to_token(id).is_none()) {
            return Err(no_end(format!("eos_token_id {id} is not in tokenizer.json")));
        }
        Ok((first, end_ids.into_iter().collect()))
    }
}

/// Returns the chat template, if there is one. `chat_template.jinja` takes precedence over the template
/// in `tokenizer_config.json`.
fn chat_template(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    special: &SpecialTokens,
) -> Result<Option<ChatTemplate>> {
    let (name, source) = match (files.get(CHAT_TEMPLATE), &special.chat_template) {
        (Some(bytes), _) => {
            let text = std::str::from_utf8(bytes).map_err(|fault| {
                let cause = io::Error::new(io::ErrorKind::InvalidData, fault);
                Error::io(folder.join(CHAT_TEMPLATE), cause)
            })?;
            (CHAT_TEMPLATE, text.to_owned())
        }
        (None, Some(Templates::One(text))) => (CONFIG, text.clone()),
        (None, Some(Templates::Named(all))) => {
            let Some(default) = all.iter().find(|template| template.name == "default") else {
                let path = folder.join(CONFIG);
                let reason = "it has several chat templates, but none named \"default\"".into();
                return Err(TokenizerError::Unsupported { path, reason }.into());
            };
            (CONFIG, default.template.clone())
        }
        (None, None) => return Ok(None),
    };
    ChatTemplate::new(folder.join(name), source, special.by_name()).map(Some)
}

/// Parses an optional file. Without the file, returns the default.
fn read_optional<T: Default + DeserializeOwned>(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    name: &'static str,
) -> Result<T> {
    let Some(bytes) = files.get(name) else { return Ok(T::default()) };
    serde_json::from_slice(bytes).map_err(|cause| Error::Json {
        path: folder.join(name),
        expected: "the settings of a tokenizer",
        cause,
    })
}

/// Returns the range of tokens that begin within these bytes of a text.
///
/// A token that begins before these bytes and ends within them is left out: a model never generates
/// such a token, since the prompt alone ends with other tokens.
fn token_range(bytes: &Range<usize>, encoding: &Encoding) -> Range<usize> {
    let starts = encoding.get_offsets().iter().map(|(start, _)| *start);
    let start = starts.clone().take_while(|&start| start < bytes.start).count();
    let end = starts.take_while(|&start| start < bytes.end).count();
    start..end
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::golden;

    fn open_sized(folder: &Path, vocab_size: usize) -> Result<Tokenizer> {
        let config = std::fs::read_to_string(folder.join(files::CONFIG)).unwrap();
        Tokenizer::open(folder, &config, vocab_size)
    }

    fn bytes(folder: &Path, vocab_size: usize) -> Result<Tokenizer> {
        let config = std::fs::read_to_string(folder.join(files::CONFIG)).unwrap();
        Tokenizer::bytes(folder, &config, vocab_size)
    }

    fn open(folder: &Path) -> Result<Tokenizer> {
        open_sized(folder, 320)
    }

    fn rejection(model: &str, name: &str, change: impl FnOnce(&mut Value)) -> String {
        let copy = golden::changed(model, name, change);
        open(copy.path()).unwrap_err().to_string()
    }

    #[test]
    fn pieces_have_the_tokens_of_the_text() {
        let sentence = "A word, and then äöü another one. ";
        let n_repeats = PIECE_BYTES / sentence.len() + 9;
        let text = sentence.repeat(n_repeats);
        let (first, rest) = split_piece(&text);
        assert!(first.len() <= PIECE_BYTES && rest.starts_with(' '));
        let unbroken = "ä".repeat(PIECE_BYTES);
        assert_eq!(split_piece(&unbroken), unbroken.split_at(PIECE_BYTES));
        // llama adds a space before each piece.
        for (model, max_added) in [("llama", 1), ("qwen2", 0)] {
            let tokenizer = open(&golden::path(model)).unwrap();
            let whole = tokenizer.encode(&text, false).unwrap().get_ids().to_vec();
            let pieces = tokenizer.encode_plain(&text).unwrap();
            assert!(pieces.len() - whole.len() <= max_added && pieces[..1000] == whole[..1000]);
            assert!(pieces.ends_with(&whole[whole.len() - 100..]), "{model}");
            let ids = tokenizer.encode_text(&text, usize::MAX).unwrap().ids;
            let whole = tokenizer.encode(&text, true).unwrap().get_ids().to_vec();
            assert!(ids.starts_with(&whole[..1000]) && ids.last() == Some(&tokenizer.end_id));
        }
    }

    #[test]
    fn needless_tokens_are_not_computed() {
        let text = "a word ".repeat(PIECE_BYTES / 3);
        let tokenizer = open(&golden::path("qwen2")).unwrap();
        let all = tokenizer.encode_text(&text, usize::MAX).unwrap().ids;
        let ids = tokenizer.encode_text(&text, 1000).unwrap().ids;
        assert!(1000 < ids.len() && ids.len() < all.len());
        assert_eq!(ids[..1000], all[..1000]);
    }

    #[test]
    fn tokens_match_transformers() {
        for model in golden::MODELS {
            let tokenizer = open(&golden::path(model)).unwrap();
            let cases = golden::json(model, "tokens.json")["tokenizer"].clone();
            for case in cases.as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let ids = golden::ids(&case["ids"]);
                assert_eq!(tokenizer.begin(text).unwrap(), ids, "{model}: {text}");
                let plain = golden::ids(&case["ids_without_added"]);
                assert_eq!(tokenizer.encode_plain(text).unwrap(), plain, "{model}: {text}");
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded"], "{model}");
                let decoded = tokenizer.decode(&ids, false).unwrap();
                assert_eq!(decoded, case["decoded_skip_special"], "{model}");
            }
            assert_eq!(cases.as_array().unwrap().len(), 8);
        }
    }

    #[test]
    fn conversation_answers_match_transformers() {
        let chat = golden::chat();
        for case in chat["tokens"].as_array().unwrap() {
            let model = case["model"].as_str().unwrap();
            let copy = golden::changed(model, "tokenizer_config.json", |config| {
                config["chat_template"] =
                    chat["templates"][case["template"].as_str().unwrap()].clone();
            });
            let conversation = &chat["conversations"][case["conversation"].as_str().unwrap()];
            let messages: Vec<Message> = serde_json::from_value(conversation.clone()).unwrap();
            let tokenizer = open(copy.path()).unwrap();
            let LabeledTokens { ids, targets } = tokenizer.encode_conversation(&messages).unwrap();
            assert_eq!(ids, golden::ids(&case["ids"]), "{model}");
            let labels: Vec<i64> = serde_json::from_value(case["labels"].clone()).unwrap();
            let mut predicted = Vec::new();
            for n in 0..ids.len() {
                predicted.push(targets.iter().any(|target| target.contains(&n)));
            }
            let expected: Vec<bool> = labels.iter().map(|&label| label != -100).collect();
            assert_eq!(predicted, expected, "{model} {}", case["conversation"]);
        }
    }

    #[test]
    fn prompts_get_no_end_token() {
        let plain = open(&golden::path("llama")).unwrap();
        let copy = golden::changed("llama", FILE, |file| {
            let processor = &mut file["post_processor"];
            let end = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
            processor["single"].as_array_mut().unwrap().push(end);
            processor["special_tokens"]["</s>"] =
                json!({"id": "</s>", "ids": [2], "tokens": ["</s>"]});
        });
        let ending = open(copy.path()).unwrap();
        for prompt in ["", "hi", "hi</s>", "</s>", "hi</s></s>"] {
            let ids = plain.begin(prompt).unwrap();
            assert_eq!(ids.iter().filter(|&&id| id == 2).count(), prompt.matches("</s>").count());
            assert_eq!(ending.begin(prompt).unwrap(), ids, "{prompt:?}");
            let answer = ending.encode_answer(prompt, "b").unwrap();
            assert_eq!(answer, plain.encode_answer(prompt, "b").unwrap());
            assert!(answer.ids.starts_with(&ids), "{prompt:?}");
        }
        assert_eq!(ending.encode_text("hi", 9).unwrap(), plain.encode_text("hi", 9).unwrap());
    }

    #[test]
    fn template_file_and_default_take_precedence() {
        let named = json!([
            {"name": "tools", "template": "tools"},
            {"name": "default", "template": "{{ messages[0].content }}"},
        ]);
        let copy = golden::changed("qwen2", "tokenizer_config.json", |config| {
            config["chat_template"] = named;
        });
        let messages = [Message { role: "user".into(), content: "ab".into() }];
        let prompt = || {
            let tokenizer = open(copy.path()).unwrap();
            tokenizer.decode(&tokenizer.prompt(&messages).unwrap(), true).unwrap()
        };
        assert_eq!(prompt(), "ab");
        fs::write(copy.path().join("chat_template.jinja"), "{{ eos_token }}b").unwrap();
        assert_eq!(prompt(), "<|im_end|>b");
        let fault = rejection("qwen2", "tokenizer_config.json", |config| {
            config["chat_template"] = json!([{"name": "tools", "template": ""}]);
        });
        assert!(fault.contains("several chat templates, but none named \"default\""), "{fault}");
        let none = open(&golden::path("qwen2")).unwrap().prompt(&messages).unwrap_err();
        assert!(none.to_string().contains("has no chat template"), "{none}");
    }

    #[test]
    fn end_tokens_come_from_all_files() {
        let tokenizer = open(&golden::path("qwen2")).unwrap();
        assert_eq!((tokenizer.end_id, tokenizer.is_end(317)), (319, false));
        let copy = golden::changed("qwen2", "config.json", |config| {
            config["eos_token_id"] = json!([317, 319]);
        });
        let tokenizer = open(copy.path()).unwrap();
        assert_eq!((tokenizer.end_id, tokenizer.is_end(317)), (319, true));
        let copy = golden::changed("qwen2", "tokenizer_config.json", |config| {
            config["eos_token"] = Value::Null;
        });
        assert_eq!(open(copy.path()).unwrap().end_id, 319);
        fs::write(
            copy.path().join("special_tokens_map.json"),
            r#"{"eos_token": {"content": "h"}}"#,
        )
        .unwrap();
        assert_eq!(open(copy.path()).unwrap().end_id, tokenizer.encode_plain("h").unwrap()[0]);
        let text = tokenizer.encode_text("a<|im_end|>", 9).unwrap();
        assert_eq!(text.ids.iter().filter(|&&id| id == 319).count(), 1, "no second end token");
    }

    #[test]
    fn missing_end_token_is_rejected() {
        let copy = golden::changed("llama", "tokenizer_config.json", |config| {
            config["eos_token"] = Value::Null;
        });
        fs::write(copy.path().join("config.json"), "{}").unwrap();
        let fault = open(copy.path()).unwrap_err();
        assert!(matches!(fault, Error::Tokenizer(TokenizerError::NoEnd { .. })), "{fault}");
        let fault = rejection("llama", "tokenizer_config.json", |config| {
            config["eos_token"] = "<end>".into();
        });
        assert!(fault.contains("eos_token \"<end>\" is not in tokenizer.json"), "{fault}");
        let fault = rejection("llama", "config.json", |config| config["eos_token_id"] = 320.into());
        assert!(fault.contains("eos_token_id 320 is not in tokenizer.json"), "{fault}");
        let fault =
            rejection("llama", "config.json", |config| config["eos_token_id"] = (-1).into());
        assert!(fault.contains("eos_token_id must be the number of a token"), "{fault}");
    }

    #[test]
    fn tokens_beyond_vocabulary_are_rejected() {
        assert!(open_sized(&golden::path("llama3"), 320).is_ok());
        let fault = open_sized(&golden::path("llama3"), 319).unwrap_err().to_string();
        assert!(fault.contains("<|eot_id|>"), "{fault}");
        assert!(fault.ends_with("has number 319, but the model has 319 tokens"), "{fault}");
    }

    #[test]
    fn tokens_of_templates_beyond_vocabulary_are_rejected() {
        let reason = rejection("llama", FILE, |tokenizer| {
            let special = json!({"<z>": {"id": "<z>", "ids": [999_999], "tokens": ["<z>"]}});
            let token = json!({"SpecialToken": {"id": "<z>", "type_id": 0}});
            let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
            tokenizer["post_processor"] = json!({
                "type": "TemplateProcessing", "single": [token, text("A")],
                "pair": [text("A"), text("B")], "special_tokens": special,
            });
        });
        assert!(reason.contains("999999"), "{reason}");
    }

    #[test]
    fn oversized_tokenizers_are_rejected() {
        let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
        let doubled =
            |name: &str, n: usize| json!({"type": "Sequence", name: vec![replace("aa"); n]});
        let long = "b".repeat(4097);
        for (part, value) in [
            ("normalizer", doubled("normalizers", 13)),
            ("decoder", doubled("decoders", 13)),
            ("normalizer", json!({"type": "Prepend", "prepend": long})),
            ("normalizer", replace(&long)),
            ("model", json!({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], [long, -1.0]]})),
        ] {
            let reason = rejection("llama", FILE, |tokenizer| tokenizer[part] = value);
            assert!(reason.contains("4096"), "{part}: {reason}");
        }
        let copy = golden::changed("llama", FILE, |tokenizer| {
            tokenizer["normalizer"] = doubled("normalizers", 12);
        });
        open(copy.path()).unwrap();
    }

    #[test]
    fn dropout_is_rejected_padding_is_ignored() {
        let fault = rejection("llama", FILE, |file| file["model"]["dropout"] = json!(0.1));
        assert!(fault.contains("dropout is 0.1, must be null"), "{fault}");
        let copy = golden::changed("llama", FILE, |file| {
            file["truncation"] = json!({
                "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
            });
            file["padding"] = json!({
                "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
            });
        });
        let text = "The lamp wanted oil.";
        let expected = open(&golden::path("llama")).unwrap().begin(text).unwrap();
        assert_eq!(open(copy.path()).unwrap().begin(text).unwrap(), expected);
    }

    #[test]
    fn missing_tokenizer_means_byte_tokens() {
        let home = tempfile::tempdir().unwrap();
        let config = |end: &str| {
            fs::write(home.path().join("config.json"), format!("{{\"eos_token_id\": {end}}}"))
                .unwrap();
        };
        config("[256]");
        let tokenizer = bytes(home.path(), 260).unwrap();
        let all = String::from_utf8_lossy(&(0..=255).collect::<Vec<u8>>()).into_owned();
        for text in ["to be\n\n or not", "Straße 🗼", &all] {
            let ids = tokenizer.begin(text).unwrap();
            assert!(ids.iter().map(|&id| u8::try_from(id).unwrap()).eq(text.bytes()));
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }
        assert_eq!(tokenizer.encode_text("a", 9).unwrap().ids, [97, 256]);
        assert_eq!(tokenizer.begin("<|end|>").unwrap(), [256]);
        // The saved files give the same tokenizer.
        for (name, bytes) in tokenizer.files() {
            fs::write(home.path().join(name), bytes).unwrap();
        }
        config("256");
        let read = open_sized(home.path(), 257).unwrap();
        assert_eq!(
            read.encode_answer("a", "b").unwrap(),
            tokenizer.encode_answer("a", "b").unwrap()
        );
        for end in ["255", "null", "[]"] {
            config(end);
            let fault = bytes(home.path(), 257).unwrap_err().to_string();
            assert!(fault.contains("eos_token_id must be at least 256"), "{fault}");
        }
        config("[256, 257]");
        let fault = bytes(home.path(), 258).unwrap_err().to_string();
        assert!(fault.contains("eos_token_id 257 is not in tokenizer.json"), "{fault}");
        config("257");
        assert!(bytes(home.path(), 257).is_err());
    }

    /// Replaces each value of a JSON document in turn.
    fn mutated(value: &Value) -> Vec<Value> {
        let mut others = vec![json!(null), json!(-1), json!(7), json!("x"), json!([]), json!({})];
        let mut put = |inner: Value, place: &dyn Fn(&mut Value) -> &mut Value| {
            for other in mutated(&inner) {
                let mut whole = value.clone();
                *place(&mut whole) = other;
                others.push(whole);
            }
        };
        match value {
            Value::Array(items) => {
                for n in 0..items.len().min(2) {
                    put(items[n].clone(), &|whole| &mut whole[n]);
                }
            }
            Value::Object(fields) => {
                for name in fields.keys().take(10) {
                    put(fields[name].clone(), &|whole| &mut whole[name]);
                }
            }
            _ => {}
        }
        others
    }

    #[test]
    fn damaged_tokenizers_never_panic() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("config.json"), r#"{"eos_token_id": 2}"#).unwrap();
        let mut n_read = 0;
        let mut n_rejected = 0;
        // One with word pieces of characters, and one of bytes.
        for model in ["llama", "qwen2"] {
            for file in mutated(&golden::json(model, FILE)) {
                fs::write(home.path().join(FILE), file.to_string()).unwrap();
                match open(home.path()) {
                    Ok(tokenizer) => {
                        n_read += 1;
                        if let Ok(ids) = tokenizer.begin("The lamp, Straße 🗼</s>\n\n 12") {
                            drop(tokenizer.decode(&ids, true));
                        }
                        drop(tokenizer.decode(&[0, 5, 319, 320, u32::MAX], false));
                    }
                    Err(fault) => {
                        n_rejected += 1;
                        let name = home.path().to_str().unwrap();
                        assert!(fault.to_string().contains(name), "{fault}");
                    }
                }
            }
        }
        assert!(n_read > 100 && n_rejected > 100, "{n_read} {n_rejected}");
    }
}
