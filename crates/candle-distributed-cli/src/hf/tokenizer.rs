//! The tokens of a text, as `tokenizer.json` and the files beside it say.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
};

use candle_distributed::types::human::Printable;
use serde::{Deserialize, de::DeserializeOwned};
use tokenizers::{Encoding, ModelWrapper};

use crate::{
    error::{Error, Result},
    hf::{
        byte_tokenizer,
        chat::{ChatTemplate, Message},
        folder::{self, refused},
    },
    hint, input,
};

/// The description of the tokenizer itself.
pub(crate) const FILE: &str = "tokenizer.json";

/// What stands beside it.
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const GENERATION: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Files of older tokenizers, which some programs read in place of `tokenizer.json`.
const OLDER: [&str; 4] = ["added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"];

/// What makes tokens of texts, and texts of tokens.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The folder, by which errors name it.
    path: PathBuf,
    /// The files by name, as another folder with this tokenizer has them.
    files: BTreeMap<String, Vec<u8>>,
    end: u32,
    ends: BTreeSet<u32>,
    chat: Option<ChatTemplate>,
}

/// Tokens, and which of them are to be predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) ids: Vec<u32>,
    /// Where the answers are in `ids`, in order.
    pub(crate) answers: Vec<Range<usize>>,
}

impl Tokenizer {
    /// The tokenizer of a folder, for a model that has so many tokens.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is none of its kind, if a token has a number that the model does
    /// not have, or if no token ends a text.
    pub(crate) fn open(folder: &Path, vocab_size: usize) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in [FILE, CONFIG, SPECIAL_TOKENS, GENERATION, CHAT_TEMPLATE].iter().chain(&OLDER) {
            if let Some(bytes) = input::read_if_there(&folder.join(name))? {
                files.insert((*name).to_owned(), bytes);
            }
        }
        Self::of_files(folder, files, vocab_size)
    }

    /// The tokenizer of a folder that has none: a token for each byte, and the one that ends a text.
    ///
    /// # Errors
    ///
    /// If `config.json` names no such token beyond the bytes.
    pub(crate) fn bytes(folder: &Path, vocab_size: usize) -> Result<Self> {
        let config = folder.join(folder::CONFIG);
        let Ids { eos_token_id } = input::read_json(&config, "the properties of a model")?;
        let end = eos_token_id.into_iter().flat_map(OneOrMore::into_vec).next();
        let Some(end) = end.filter(|&end| end >= byte_tokenizer::N_BYTES) else {
            let none = "without a tokenizer.json the tokens are bytes, and eos_token_id must be one \
                        beyond them, such as 256";
            return Err(refused(&config, none).hinted(hint::HF_FOLDER));
        };
        let tokenizer = byte_tokenizer::tokenizer_json(end);
        let config = byte_tokenizer::tokenizer_config_json();
        let files = [(FILE, tokenizer), (CONFIG, config)];
        let files = files.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()));
        Self::of_files(folder, files.into(), vocab_size)
    }

    fn of_files(
        folder: &Path,
        files: BTreeMap<String, Vec<u8>>,
        vocab_size: usize,
    ) -> Result<Self> {
        let inner = inner(folder, &files)?;
        check_vocabulary(folder, &inner, vocab_size)?;
        let special = SpecialTokens::read(folder, &files)?;
        let (end, ends) = special.ends(folder, &files, &inner)?;
        let chat = chat_template(folder, &files, &special)?;
        Ok(Self { inner, path: folder.to_owned(), files, end, ends, chat })
    }

    /// The token that ends a text.
    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    /// Whether a model that writes this token has ended its text: there may be several such.
    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The tokens of a text that begins here, with those that the tokenizer sets around it, such as
    /// the token of a beginning.
    ///
    /// # Errors
    ///
    /// If the tokenizer has none for it.
    pub(crate) fn begin(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(text, true).map(|encoding| encoding.get_ids().to_vec())
    }

    /// The tokens of a text alone.
    ///
    /// # Errors
    ///
    /// As of [`begin`](Self::begin).
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(text, false).map(|encoding| encoding.get_ids().to_vec())
    }

    /// All of a text, all of which is to be predicted, with its end.
    ///
    /// # Errors
    ///
    /// As of [`begin`](Self::begin).
    pub(crate) fn text(&self, text: &str) -> Result<Answered> {
        let mut ids = self.begin(text)?;
        // Some tokenizers end a text themselves.
        if ids.last() != Some(&self.end) {
            ids.push(self.end);
        }
        let all = 0..ids.len();
        Ok(Answered { ids, answers: vec![all] })
    }

    /// An answer, which alone is to be predicted, to a prompt. Both are made tokens apart from each
    /// other, as a model that has written nothing yet gets its prompt, and the answer is ended.
    ///
    /// # Errors
    ///
    /// As of [`begin`](Self::begin).
    pub(crate) fn answer(&self, prompt: &str, answer: &str) -> Result<Answered> {
        let mut ids = self.begin(prompt)?;
        // A prompt is not ended, whatever the tokenizer sets around a text.
        ids.pop_if(|last| *last == self.end && !prompt.is_empty());
        let start = ids.len();
        ids.extend(self.encode_plain(answer)?);
        ids.push(self.end);
        let answer = start..ids.len();
        Ok(Answered { ids, answers: vec![answer] })
    }

    /// A conversation by the chat template, whose turns of the assistant are to be predicted.
    ///
    /// # Errors
    ///
    /// If there is no template, if it fails, or if it does not append one turn to the others.
    pub(crate) fn conversation(&self, messages: &[Message]) -> Result<Answered> {
        let rendered = self.chat()?.conversation(messages)?;
        // The template writes what is set around a text.
        let encoding = self.encode(&rendered.text, false)?;
        let answers = rendered.answers.iter().map(|bytes| tokens_of(bytes, &encoding)).collect();
        Ok(Answered { ids: encoding.get_ids().to_vec(), answers })
    }

    /// The tokens after which the assistant answers a conversation.
    ///
    /// # Errors
    ///
    /// If there is no template, or if it fails.
    pub(crate) fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode_plain(&self.chat()?.render(messages, true)?)
    }

    /// The text of some tokens, with or without those that stand for no text.
    ///
    /// # Errors
    ///
    /// If the tokenizer cannot write them.
    pub(crate) fn decode(&self, ids: &[u32], with_special: bool) -> Result<String> {
        self.inner.decode(ids, !with_special).map_err(|fault| refused(&self.path.join(FILE), fault))
    }

    /// The files by name, as another folder with this tokenizer has them.
    pub(crate) fn files(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.files
    }

    fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            let none = format!("{} has no chat template for messages", self.path.display());
            Error::usage(none).hinted(hint::NO_CHAT_TEMPLATE)
        })
    }

    fn encode(&self, text: &str, with_added: bool) -> Result<Encoding> {
        let encoded = self.inner.encode(text, with_added);
        encoded.map_err(|fault| refused(&self.path.join(FILE), fault))
    }
}

/// The tokenizer itself.
fn inner(folder: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<tokenizers::Tokenizer> {
    let Some(bytes) = files.get(FILE) else {
        let none = format!("{} has no {FILE}", folder.display());
        return Err(Error::usage(none).hinted(hint::NO_TOKENIZER));
    };
    let path = folder.join(FILE);
    let failed = |fault: tokenizers::Error| refused(&path, format!("it is no tokenizer: {fault}"));
    let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(failed)?;
    if let ModelWrapper::BPE(model) = inner.get_model()
        && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.)
    {
        let random = format!("its dropout {dropout} gives other tokens each time, it must be null");
        return Err(refused(&path, random));
    }
    // Those of whoever wrote the file last: a text has all its tokens, and no others.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(failed)?;
    Ok(inner)
}

/// Refuses tokens that the model does not know.
fn check_vocabulary(folder: &Path, inner: &tokenizers::Tokenizer, vocab_size: usize) -> Result<()> {
    let last = inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
    match last.filter(|&(_, id)| id as usize >= vocab_size) {
        None => Ok(()),
        Some((token, id)) => {
            let token = Printable(format!("{token:?}"));
            Err(refused(
                &folder.join(FILE),
                format!("its token {token} has number {id}, and the model has {vocab_size} tokens"),
            )
            .hinted(hint::OTHER_VOCABULARY))
        }
    }
}

/// The tokens with a meaning, by the names that chat templates give them.
#[derive(Debug, Default, Deserialize)]
struct SpecialTokens {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    pad_token: Option<TokenText>,
    unk_token: Option<TokenText>,
    chat_template: Option<Templates>,
}

/// A token, in either form in which it is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Described { content: String },
}

/// The template of chats, alone or among others.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Clone, Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// What `config.json` and `generation_config.json` say of tokens.
#[derive(Debug, Default, Deserialize)]
struct Ids {
    eos_token_id: Option<OneOrMore>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
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
    /// Those of `tokenizer_config.json`, and of the older file what it does not say.
    fn read(folder: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<Self> {
        let newer: Self = read_part(folder, files, CONFIG)?;
        let older: Self = read_part(folder, files, SPECIAL_TOKENS)?;
        Ok(Self {
            bos_token: newer.bos_token.or(older.bos_token),
            eos_token: newer.eos_token.or(older.eos_token),
            pad_token: newer.pad_token.or(older.pad_token),
            unk_token: newer.unk_token.or(older.unk_token),
            chat_template: newer.chat_template,
        })
    }

    /// Those that are there, by name.
    fn by_name(&self) -> BTreeMap<&'static str, String> {
        let all = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("pad_token", &self.pad_token),
            ("unk_token", &self.unk_token),
        ];
        let there = all.into_iter().filter_map(|(name, token)| Some((name, token.as_ref()?)));
        there.map(|(name, token)| (name, token.text().to_owned())).collect()
    }

    /// The token that ends a text, and all at which a model has ended it: the tokenizer's own comes
    /// first, since it is what the model was trained with.
    fn ends(
        &self,
        folder: &Path,
        files: &BTreeMap<String, Vec<u8>>,
        inner: &tokenizers::Tokenizer,
    ) -> Result<(u32, BTreeSet<u32>)> {
        let mut ends = Vec::new();
        if let Some(token) = &self.eos_token {
            let text = token.text();
            let unknown = || refused(folder, format!("eos_token {text:?} is not in {FILE}"));
            ends.push(inner.token_to_id(text).ok_or_else(unknown)?);
        }
        let config = folder.join(folder::CONFIG);
        let of_model: Ids = input::read_json(&config, "the properties of a model")?;
        let of_generation: Ids = read_part(folder, files, GENERATION)?;
        let more = [of_model, of_generation].into_iter().filter_map(|ids| ids.eos_token_id);
        ends.extend(more.flat_map(OneOrMore::into_vec));
        let Some(&first) = ends.first() else {
            let none = format!("no token of {} ends a text", folder.display());
            return Err(Error::usage(none).hinted(hint::NO_END));
        };
        if let Some(id) = ends.iter().find(|&&id| inner.id_to_token(id).is_none()) {
            return Err(refused(folder, format!("eos_token_id {id} is not in {FILE}")));
        }
        Ok((first, ends.into_iter().collect()))
    }
}

/// The template of chats, if there is one; its own file comes first.
fn chat_template(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    special: &SpecialTokens,
) -> Result<Option<ChatTemplate>> {
    let (name, source) = match (files.get(CHAT_TEMPLATE), &special.chat_template) {
        (Some(bytes), _) => {
            let text = std::str::from_utf8(bytes);
            let text = text.map_err(|fault| refused(&folder.join(CHAT_TEMPLATE), fault))?;
            (CHAT_TEMPLATE, text.to_owned())
        }
        (None, Some(Templates::One(text))) => (CONFIG, text.clone()),
        (None, Some(Templates::Named(all))) => {
            let Some(default) = all.iter().find(|template| template.name == "default") else {
                let fault = "none of its chat templates is named \"default\"";
                return Err(refused(&folder.join(CONFIG), fault));
            };
            (CONFIG, default.template.clone())
        }
        (None, None) => return Ok(None),
    };
    ChatTemplate::new(folder.join(name), source, special.by_name()).map(Some)
}

/// The content of a file that need not be there.
fn read_part<T: Default + DeserializeOwned>(
    folder: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    name: &'static str,
) -> Result<T> {
    let Some(bytes) = files.get(name) else { return Ok(T::default()) };
    serde_json::from_slice(bytes)
        .map_err(|source| Error::json(folder.join(name), "what a tokenizer needs", source))
}

/// The tokens that begin within these bytes of a text.
///
/// One that begins before them and ends within is none that a model writes: its prompt has other
/// tokens there.
fn tokens_of(bytes: &Range<usize>, encoding: &Encoding) -> Range<usize> {
    let starts = encoding.get_offsets().iter().map(|(start, _)| *start);
    let start = starts.clone().take_while(|&start| start < bytes.start).count();
    let end = starts.take_while(|&start| start < bytes.end).count();
    start..end
}
