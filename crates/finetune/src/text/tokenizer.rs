//! The tokens of a text, as `tokenizer.json` and the files beside it say.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    ops::Range,
    panic::{self, AssertUnwindSafe},
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
        files::{self, refused},
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
    /// The token that ends a text.
    end: u32,
    /// Those at which a model has ended one.
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
    pub(crate) fn open(folder: &Path, config: &str, vocab_size: usize) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in [FILE, CONFIG, SPECIAL_TOKENS, GENERATION, CHAT_TEMPLATE].iter().chain(&OLDER) {
            if let Some(bytes) = input::read_if_there(&folder.join(name))? {
                files.insert((*name).to_owned(), bytes);
            }
        }
        Self::of_files(folder, files, &Ids::read(folder, config)?, vocab_size)
    }

    /// The tokenizer of a folder that has none: a token for each byte, and the one that ends a text.
    ///
    /// # Errors
    ///
    /// If `config.json` names no such token beyond the bytes.
    pub(crate) fn bytes(folder: &Path, config: &str, vocab_size: usize) -> Result<Self> {
        let ids = Ids::read(folder, config)?;
        let config = folder.join(files::CONFIG);
        let end = ids.eos_token_id.clone().into_iter().flat_map(OneOrMore::into_vec).next();
        let Some(end) = end.filter(|&end| end >= byte_tokenizer::N_BYTES) else {
            let none = "without a tokenizer.json the tokens are bytes, and eos_token_id must be one \
                        beyond them, such as 256";
            return Err(refused(&config, none).hinted(hint::HF_FOLDER));
        };
        let tokenizer = byte_tokenizer::tokenizer_json(end);
        let config = byte_tokenizer::tokenizer_config_json();
        let files = [(FILE, tokenizer), (CONFIG, config)];
        let files = files.map(|(name, value)| (name.to_owned(), value.to_string().into_bytes()));
        Self::of_files(folder, files.into(), &ids, vocab_size)
    }

    fn of_files(
        folder: &Path,
        files: BTreeMap<String, Vec<u8>>,
        of_model: &Ids,
        vocab_size: usize,
    ) -> Result<Self> {
        let inner = inner(folder, &files)?;
        check_vocabulary(folder, &inner, vocab_size)?;
        let special = SpecialTokens::read(folder, &files)?;
        let (end, ends) = special.ends(folder, &files, of_model, &inner)?;
        let chat = chat_template(folder, &files, &special)?;
        Ok(Self { inner, path: folder.to_owned(), files, end, ends, chat })
    }

    /// Whether a model that writes this token has ended its text: there may be several such.
    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The tokens of a text that begins here and is continued: with those that the tokenizer sets
    /// before it, such as the token of a beginning, but without an end that it sets after it. An end
    /// that is in the text itself stays.
    ///
    /// # Errors
    ///
    /// If the tokenizer has none for it.
    pub(crate) fn begin(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, true)?.get_ids().to_vec();
        if let [before @ .., last] = &ids[..]
            && *last == self.end
            // Some tokenizers begin a text with the token that ends the one before.
            && !before.is_empty()
            && before.ends_with(&self.encode_plain(text)?)
        {
            ids.pop();
        }
        Ok(ids)
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
        let mut ids = self.encode(text, true)?.get_ids().to_vec();
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
        guarded(&self.path, || self.inner.decode(ids, !with_special))
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
        guarded(&self.path, || self.inner.encode(text, with_added))
    }
}

/// The tokenizer itself.
fn inner(folder: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<tokenizers::Tokenizer> {
    let Some(bytes) = files.get(FILE) else {
        let none = format!("{} has no {FILE}", folder.display());
        return Err(Error::usage(none).hinted(hint::NO_TOKENIZER));
    };
    let mut inner = guarded(folder, || tokenizers::Tokenizer::from_bytes(bytes))?;
    if let ModelWrapper::BPE(model) = inner.get_model()
        && let Some(dropout) = model.dropout.filter(|&dropout| dropout > 0.)
    {
        let random = format!("its dropout {dropout} gives other tokens each time, it must be null");
        return Err(refused(&folder.join(FILE), random));
    }
    // Those of whoever wrote the file last: a text has all its tokens, and no others.
    inner.with_padding(None);
    guarded(folder, || inner.with_truncation(None).map(drop))?;
    Ok(inner)
}

/// What the library makes of a folder's tokenizer. Where the parts of a file do not fit together, it
/// fails or panics.
fn guarded<T>(folder: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let refused = |fault: &dyn Display| refused(&folder.join(FILE), fault).hinted(hint::NOT_WHOLE);
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|fault| refused(&fault)),
        Err(_) => Err(refused(&"its parts do not fit together")),
    }
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
#[derive(Clone, Debug, Default, Deserialize)]
struct Ids {
    eos_token_id: Option<OneOrMore>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(u32),
    More(Vec<u32>),
}

impl Ids {
    /// Reads those of the `config.json` of a folder.
    fn read(folder: &Path, config: &str) -> Result<Self> {
        let what = "the properties of a model";
        serde_json::from_str(config)
            .map_err(|source| Error::json(folder.join(files::CONFIG), what, source))
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
        of_model: &Ids,
        inner: &tokenizers::Tokenizer,
    ) -> Result<(u32, BTreeSet<u32>)> {
        let mut ends = Vec::new();
        if let Some(token) = &self.eos_token {
            let text = token.text();
            let unknown = || refused(folder, format!("eos_token {text:?} is not in {FILE}"));
            ends.push(inner.token_to_id(text).ok_or_else(unknown)?);
        }
        let of_generation: Ids = read_part(folder, files, GENERATION)?;
        let more = [of_model.clone(), of_generation].into_iter().filter_map(|ids| ids.eos_token_id);
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

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use crate::hf::golden;

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

    fn refusal(model: &str, name: &str, change: impl FnOnce(&mut Value)) -> String {
        let copy = golden::changed(model, name, change);
        open(copy.path()).unwrap_err().to_string()
    }

    #[test]
    fn tokens_and_texts_are_those_of_transformers() {
        for model in golden::MODELS {
            let tokenizer = open(&golden::path(model)).unwrap();
            let cases = golden::json(model, "tokens.json")["tokenizer"].clone();
            for case in cases.as_array().unwrap() {
                let (text, ids) = (case["text"].as_str().unwrap(), golden::ids(&case["ids"]));
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
    fn answers_in_a_conversation_are_those_of_transformers() {
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
            let Answered { ids, answers } = tokenizer.conversation(&messages).unwrap();
            assert_eq!(ids, golden::ids(&case["ids"]), "{model}");
            let labels: Vec<i64> = serde_json::from_value(case["labels"].clone()).unwrap();
            let is_answer = |n: usize| answers.iter().any(|answer| answer.contains(&n));
            let predicted: Vec<bool> = (0..ids.len()).map(is_answer).collect();
            let expected: Vec<bool> = labels.iter().map(|&label| label != -100).collect();
            assert_eq!(predicted, expected, "{model} {}", case["conversation"]);
        }
    }

    #[test]
    fn a_prompt_is_not_ended_but_keeps_its_own_end() {
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
            let answer = ending.answer(prompt, "b").unwrap();
            assert_eq!(answer, plain.answer(prompt, "b").unwrap());
            assert!(answer.ids.starts_with(&ids), "{prompt:?}");
        }
        assert_eq!(ending.text("hi").unwrap(), plain.text("hi").unwrap());
    }

    #[test]
    fn a_template_in_its_own_file_comes_first_and_the_default_of_several_is_taken() {
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
        let fault = refusal("qwen2", "tokenizer_config.json", |config| {
            config["chat_template"] = json!([{"name": "tools", "template": ""}]);
        });
        assert!(fault.contains("none of its chat templates is named \"default\""), "{fault}");
        let none = open(&golden::path("qwen2")).unwrap().prompt(&messages).unwrap_err();
        assert!(none.to_string().contains("has no chat template"), "{none}");
    }

    #[test]
    fn the_tokenizer_names_the_end_and_other_files_name_more() {
        let tokenizer = open(&golden::path("qwen2")).unwrap();
        assert_eq!((tokenizer.end, tokenizer.is_end(317)), (319, false));
        let copy = golden::changed("qwen2", "config.json", |config| {
            config["eos_token_id"] = json!([317, 319]);
        });
        let tokenizer = open(copy.path()).unwrap();
        assert_eq!((tokenizer.end, tokenizer.is_end(317)), (319, true));
        let without_token = |config: &mut Value| config["eos_token"] = Value::Null;
        let copy = golden::changed("qwen2", "tokenizer_config.json", without_token);
        assert_eq!(open(copy.path()).unwrap().end, 319);
        fs::write(
            copy.path().join("special_tokens_map.json"),
            r#"{"eos_token": {"content": "h"}}"#,
        )
        .unwrap();
        assert_eq!(open(copy.path()).unwrap().end, tokenizer.encode_plain("h").unwrap()[0]);
        let text = tokenizer.text("a<|im_end|>").unwrap();
        assert_eq!(text.ids.iter().filter(|&&id| id == 319).count(), 1, "it is not ended twice");
    }

    #[test]
    fn a_tokenizer_without_an_end_is_refused() {
        let copy = golden::changed("llama", "tokenizer_config.json", |config| {
            config["eos_token"] = Value::Null;
        });
        fs::write(copy.path().join("config.json"), "{}").unwrap();
        let fault = open(copy.path()).unwrap_err();
        assert!(fault.to_string().contains("no token of ") && fault.hint().is_some(), "{fault}");
        let fault = refusal("llama", "tokenizer_config.json", |config| {
            config["eos_token"] = "<end>".into();
        });
        assert!(fault.contains("eos_token \"<end>\" is not in tokenizer.json"), "{fault}");
        let fault = refusal("llama", "config.json", |config| config["eos_token_id"] = 320.into());
        assert!(fault.contains("eos_token_id 320 is not in tokenizer.json"), "{fault}");
    }

    #[test]
    fn tokens_that_the_model_does_not_know_are_refused() {
        assert!(open_sized(&golden::path("llama3"), 320).is_ok());
        let fault = open_sized(&golden::path("llama3"), 319).unwrap_err().to_string();
        assert!(fault.contains("<|eot_id|>"), "{fault}");
        assert!(fault.ends_with("has number 319, and the model has 319 tokens"), "{fault}");
    }

    #[test]
    fn dropout_is_refused_and_padding_and_truncation_are_passed_over() {
        let fault = refusal("llama", FILE, |file| file["model"]["dropout"] = json!(0.1));
        assert!(fault.contains("its dropout 0.1 gives other tokens each time"), "{fault}");
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
    fn bytes_are_tokens_where_there_is_no_tokenizer() {
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
        assert_eq!(tokenizer.text("a").unwrap().ids, [97, 256]);
        assert_eq!(tokenizer.begin("<|end|>").unwrap(), [256]);
        // The same from the files that are written for it.
        for (name, bytes) in tokenizer.files() {
            fs::write(home.path().join(name), bytes).unwrap();
        }
        config("256");
        let read = open_sized(home.path(), 257).unwrap();
        assert_eq!(read.answer("a", "b").unwrap(), tokenizer.answer("a", "b").unwrap());
        for end in ["255", "null", "[]"] {
            config(end);
            let fault = bytes(home.path(), 257).unwrap_err().to_string();
            assert!(fault.contains("eos_token_id must be one beyond them"), "{fault}");
        }
        config("[256, 257]");
        let fault = bytes(home.path(), 258).unwrap_err().to_string();
        assert!(fault.contains("eos_token_id 257 is not in tokenizer.json"), "{fault}");
        config("257");
        assert!(bytes(home.path(), 257).is_err());
    }

    /// Every value of a JSON document in turn is another one.
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
                for name in fields.keys().take(16) {
                    put(fields[name].clone(), &|whole| &mut whole[name]);
                }
            }
            _ => {}
        }
        others
    }

    #[test]
    fn no_tokenizer_panics() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("config.json"), r#"{"eos_token_id": 2}"#).unwrap();
        let (mut n_read, mut n_refused) = (0, 0);
        for model in golden::MODELS {
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
                        n_refused += 1;
                        let name = home.path().to_str().unwrap();
                        assert!(fault.to_string().contains(name), "{fault}");
                    }
                }
            }
        }
        assert!(n_read > 100 && n_refused > 100, "{n_read} {n_refused}");
    }
}
