//! Reads the examples of a file: paragraphs of a text, or lines of JSON.

use std::{fmt, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

use crate::{
    error::{
        Result,
        example::{ExampleError, SourceLocation},
    },
    text::chat::Message,
};

/// An example as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// A text. All of it is the target.
    Text(String),
    /// A prompt and a completion. The completion is the target.
    Answer { prompt: String, completion: String },
    /// A conversation. The assistant's messages are the targets.
    Messages(Vec<Message>),
}

/// Returns the items of the file at `path`: lines if its name ends in `.jsonl`, and paragraphs
/// otherwise, with line ends converted to `\n`. Blank items are skipped.
///
/// # Errors
///
/// [`ExampleError::Line`] if a line is not an item, [`ExampleError::KindMismatch`] if an item is of
/// another kind than the first item.
pub(crate) fn items(path: &Path, content: &str) -> Result<Vec<(SourceLocation, Item)>> {
    // Some programs begin a text with a byte order mark, which is no part of it.
    let content = content.strip_prefix('\u{feff}').unwrap_or(content);
    if has_line_items(path) {
        return line_items(path, content);
    }
    // Blank lines separate paragraphs, and a `\r` would make them nonempty.
    let content = content.replace("\r\n", "\n");
    let paragraphs = (1..).zip(content.split("\n\n")).filter(|(_, text)| !text.trim().is_empty());
    let mut items = Vec::new();
    for (n, text) in paragraphs {
        let text = text.trim_matches('\n').to_owned();
        items.push((SourceLocation::new(path, "paragraph", n), Item::Text(text)));
    }
    Ok(items)
}

/// Returns true if the lines of a file are its items.
pub(crate) fn has_line_items(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jsonl")
}

fn line_items(path: &Path, content: &str) -> Result<Vec<(SourceLocation, Item)>> {
    let mut items: Vec<(SourceLocation, Item)> = Vec::new();
    for (number, line) in (1..).zip(content.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let location = SourceLocation::new(path, "line", number);
        let item = match Item::parse(line) {
            Ok(item) => item,
            Err(reason) => {
                return Err(ExampleError::Line { location, reason, line: line.into() }.into());
            }
        };
        if let Some((first_location, first_item)) = items.first()
            && first_item.kind() != item.kind()
        {
            let kind = item.kind();
            let expected = first_item.kind();
            let first = first_location.number;
            return Err(ExampleError::KindMismatch { location, kind, first, expected }.into());
        }
        items.push((location, item));
    }
    Ok(items)
}

// The fields of each kind of item. A line with fields of two kinds is invalid.
const TEXT: &str = "text";
const PROMPT: &str = "prompt";
const COMPLETION: &str = "completion";
const MESSAGES: &str = "messages";

// The fields with tools, in a line and in a message. Templates would render tools, but do not get
// them here, so the model would be trained on a different text. Both fields are therefore rejected.
const TOOLS: &str = "tools";
const TOOL_CALLS: &str = "tool_calls";

impl Item {
    /// Parses a line, or describes its fault for a message.
    fn parse(line: &str) -> Result<Self, String> {
        let DistinctKeys(value) = serde_json::from_str(line).map_err(|fault| json_fault(&fault))?;
        match value {
            Value::String(text) => Ok(Self::Text(text)),
            Value::Object(mut fields) => Self::from_fields(&mut fields),
            _ => Err("is neither a string nor an object".into()),
        }
    }

    fn from_fields(fields: &mut Map<String, Value>) -> Result<Self, String> {
        let has = |name: &str| fields.contains_key(name);
        match (has(TEXT), has(PROMPT) || has(COMPLETION), has(MESSAGES)) {
            (true, false, false) => Ok(Self::Text(take_string(fields, TEXT)?)),
            (false, true, false) => {
                let prompt = take_string(fields, PROMPT)?;
                let completion = take_string(fields, COMPLETION)?;
                if completion.trim().is_empty() {
                    return Err("has an empty completion".into());
                }
                Ok(Self::Answer { prompt, completion })
            }
            (false, false, true) => {
                check_tools(TOOLS, fields.get(TOOLS))?;
                parse_messages(fields[MESSAGES].take()).map(Self::Messages)
            }
            (false, false, false) => {
                Err("has no text, no prompt and completion, and no messages".into())
            }
            _ => Err("has fields of several kinds of examples".into()),
        }
    }

    /// Returns the kind in words, for error messages.
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Answer { .. } => "a prompt and a completion",
            Self::Messages(_) => "messages",
        }
    }
}

/// Describes why a line cannot be read.
fn json_fault(fault: &serde_json::Error) -> String {
    let text = fault.to_string();
    match text.rsplit_once(" at line ") {
        // The place in the line would be taken for a place in the file.
        Some((repeated, _)) if fault.is_data() => repeated.into(),
        _ => format!("is not JSON ({text})"),
    }
}

/// A value of JSON without repeated keys, of which a [`Value`] would keep the last.
struct DistinctKeys(Value);

impl<'de> Deserialize<'de> for DistinctKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DistinctKeysVisitor).map(Self)
    }
}

struct DistinctKeysVisitor;

impl<'de> Visitor<'de> for DistinctKeysVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(DistinctKeys(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some((name, DistinctKeys(value))) = entries.next_entry::<String, _>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format_args!("has the field {name:?} twice")));
            }
            fields.insert(name, value);
        }
        Ok(fields.into())
    }
}

fn take_string(fields: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(format!("has a {name} that is not a string")),
        None => Err(format!("has no {name}")),
    }
}

/// Rejects a list of tools, unless it is empty.
fn check_tools(name: &str, tools: Option<&Value>) -> Result<(), String> {
    match tools {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(tools)) if tools.is_empty() => Ok(()),
        Some(_) => Err(format!("has {name}, which chat templates do not get here")),
    }
}

/// Returns the messages of a conversation, with at least one message of the assistant.
fn parse_messages(value: Value) -> Result<Vec<Message>, String> {
    for message in value.as_array().into_iter().flatten() {
        check_tools(TOOL_CALLS, message.get(TOOL_CALLS))?;
    }
    let messages: Vec<Message> = serde_json::from_value(value)
        .map_err(|fault| format!("has messages without role and content ({fault})"))?;
    let mut answers = messages.iter().filter(|message| message.is_answer()).peekable();
    if answers.peek().is_none() {
        return Err("has no message of the assistant".into());
    }
    if answers.any(|answer| answer.content.trim().is_empty()) {
        return Err("has an empty message of the assistant".into());
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_order_mark_is_no_text() {
        for (path, content) in [("a.jsonl", "\u{feff}\"a text\"\n"), ("a.txt", "\u{feff}a text\n")]
        {
            let found = items(Path::new(path), content).unwrap();
            let found: Vec<Item> = found.into_iter().map(|(_, item)| item).collect();
            assert_eq!(found, [Item::Text("a text".to_owned())], "{path}");
        }
    }

    #[test]
    fn repeated_fields_are_rejected() {
        let found = |lines: &str| items(Path::new("a.jsonl"), lines).map(|items| items.len());
        let message =
            r#"{"messages": [{"role": "assistant", "content": "1", "n": [1, -1, 0.5, null]}]}"#;
        assert_eq!(found(message).unwrap(), 1);
        for (field, line) in [
            ("text", r#"{"text": "a", "text": "b"}"#.to_owned()),
            ("role", message.replace(r#""n""#, r#""role": "user", "n""#)),
        ] {
            let fault = found(&format!("\n{line}")).unwrap_err().to_string();
            let words = format!("has the field {field:?} twice: ");
            assert!(fault.contains("a.jsonl") && fault.contains("line 2"), "{fault}");
            assert!(fault.contains(&words), "{fault}");
        }
    }
}
