//! The items of a file of examples: paragraphs of a text, or lines of JSON.

use std::{fmt, path::Path};

use serde_json::{Map, Value};

use crate::{
    error::{Error, Result},
    hf::chat::Message,
    hint, input,
};

/// What a model learns from, as a file has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A text, all of which is to be predicted.
    Text(String),
    /// An answer, which is to be predicted, and what comes before it.
    Answer { prompt: String, completion: String },
    /// A conversation, of which the turns of the assistant are to be predicted.
    Messages(Vec<Message>),
}

/// Where an item stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) path: &'a Path,
    /// What is counted, such as lines.
    unit: &'static str,
    /// From 1.
    n: u64,
}

impl Place<'static> {
    /// Returns the place of a text that the program makes itself.
    pub(crate) fn of_text(n: u64) -> Self {
        Self { path: Path::new("the stories"), unit: "text", n }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {}", self.unit, self.n, self.path.display())
    }
}

/// The items of the content of the file at `path`: lines if its name ends in `.jsonl`, and else
/// paragraphs, with the ends of lines of Unix. What is blank is none.
///
/// # Errors
///
/// With its place, if a line is no item, or one of another kind than the first.
pub(crate) fn items<'a>(path: &'a Path, content: &str) -> Result<Vec<(Place<'a>, Item)>> {
    if is_of_lines(path) {
        return lines(path, content);
    }
    // With those of Windows, no line would seem blank.
    let content = content.replace("\r\n", "\n");
    let paragraphs = (1..).zip(content.split("\n\n")).filter(|(_, text)| !text.trim().is_empty());
    let item = |(n, text): (u64, &str)| {
        (Place { path, unit: "paragraph", n }, Item::Text(text.trim_matches('\n').to_owned()))
    };
    Ok(paragraphs.map(item).collect())
}

/// Whether the lines of a file are its items.
pub(crate) fn is_of_lines(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jsonl")
}

fn lines<'a>(path: &'a Path, content: &str) -> Result<Vec<(Place<'a>, Item)>> {
    let mut items: Vec<(Place<'_>, Item)> = Vec::new();
    for (n, line) in (1..).zip(content.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let place = Place { path, unit: "line", n };
        let item = Item::parse(line).map_err(|fault| {
            let shown = input::excerpt(line);
            Error::usage(format!("{place} {fault}: {shown}")).hinted(hint::EXAMPLE_LINES)
        })?;
        if let Some((first, other)) = items.first()
            && other.kind() != item.kind()
        {
            let (kind, before) = (item.kind(), other.kind());
            let mixed = format!("{place} holds {kind}, and line {} {before}", first.n);
            return Err(Error::usage(mixed).hinted(hint::MIXED));
        }
        items.push((place, item));
    }
    Ok(items)
}

/// The fields of the kinds of items. A line with fields of two kinds is none.
const TEXT: &str = "text";
const PROMPT: &str = "prompt";
const COMPLETION: &str = "completion";
const MESSAGES: &str = "messages";

/// What a conversation may say of tools: a line, and a message. Templates write it, but are not given
/// it here, so that another text would be learnt from.
const TOOLS: &str = "tools";
const TOOL_CALLS: &str = "tool_calls";

impl Item {
    /// The item of a line, or what is wrong with it.
    fn parse(line: &str) -> Result<Self, String> {
        match serde_json::from_str(line).map_err(|fault| format!("is no JSON ({fault})"))? {
            Value::String(text) => Ok(Self::Text(text)),
            Value::Object(mut fields) => Self::of_object(&mut fields),
            _ => Err("is neither a string nor an object".into()),
        }
    }

    fn of_object(fields: &mut Map<String, Value>) -> Result<Self, String> {
        let has = |name: &str| fields.contains_key(name);
        match (has(TEXT), has(PROMPT) || has(COMPLETION), has(MESSAGES)) {
            (true, false, false) => Ok(Self::Text(string(fields, TEXT)?)),
            (false, true, false) => {
                let (prompt, completion) = (string(fields, PROMPT)?, string(fields, COMPLETION)?);
                if completion.trim().is_empty() {
                    return Err("has an empty completion".into());
                }
                Ok(Self::Answer { prompt, completion })
            }
            (false, false, true) => {
                check_tools(TOOLS, fields.get(TOOLS))?;
                messages(fields.remove(MESSAGES)).map(Self::Messages)
            }
            (false, false, false) => {
                Err("has no text, no prompt and completion, and no messages".into())
            }
            _ => Err("has fields of several kinds of examples".into()),
        }
    }

    /// What it is, in words.
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Answer { .. } => "a prompt and a completion",
            Self::Messages(_) => "messages",
        }
    }
}

fn string(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("has a {name} that is no string")),
        None => Err(format!("has no {name}")),
    }
}

/// Refuses tools, unless there are none.
fn check_tools(name: &str, tools: Option<&Value>) -> Result<(), String> {
    match tools {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(tools)) if tools.is_empty() => Ok(()),
        Some(_) => Err(format!("has {name}, which no chat template is given")),
    }
}

/// The turns of a conversation, of which the assistant has some.
fn messages(value: Option<Value>) -> Result<Vec<Message>, String> {
    for message in value.iter().filter_map(Value::as_array).flatten() {
        check_tools(TOOL_CALLS, message.get(TOOL_CALLS))?;
    }
    let messages: Vec<Message> = serde_json::from_value(value.unwrap_or_default())
        .map_err(|fault| format!("has messages that have no role and content ({fault})"))?;
    let mut answers = messages.iter().filter(|message| message.is_answer()).peekable();
    if answers.peek().is_none() {
        return Err("has no message of the assistant".into());
    }
    if answers.any(|answer| answer.content.trim().is_empty()) {
        return Err("has an empty message of the assistant".into());
    }
    Ok(messages)
}
