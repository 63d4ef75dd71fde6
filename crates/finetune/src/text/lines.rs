//! Reads the examples of a file: paragraphs of a text, or lines of JSON.

use std::path::Path;

use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

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

/// The fields of a line. A field that is null counts as missing, and a repeated one is an error.
#[derive(Default, Deserialize)]
#[serde(default)]
struct LineFields {
    text: Option<Value>,
    prompt: Option<Value>,
    completion: Option<Value>,
    messages: Option<Vec<MessageFields>>,
    // Templates would render tools, but do not get them here, so the model would be trained on a
    // different text. They are therefore rejected, as are calls of tools.
    tools: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct MessageFields {
    role: Option<String>,
    content: Option<String>,
    tool_calls: Option<Value>,
}

impl Item {
    /// Parses a line, or describes its fault for a message.
    fn parse(line: &str) -> Result<Self, String> {
        match line.trim_ascii_start().bytes().next() {
            Some(b'"') => Ok(Self::Text(from_json(line)?)),
            Some(b'{') => Self::from_fields(from_json(line)?),
            _ => {
                from_json::<IgnoredAny>(line)?;
                Err("is neither a string nor an object".into())
            }
        }
    }

    fn from_fields(fields: LineFields) -> Result<Self, String> {
        let LineFields { text, prompt, completion, messages, tools } = fields;
        match (text, prompt.is_some() || completion.is_some(), messages) {
            (Some(text), false, None) => Ok(Self::Text(to_text(Some(text), "text")?)),
            (None, true, None) => {
                let prompt = to_text(prompt, "prompt")?;
                let completion = to_text(completion, "completion")?;
                if completion.trim().is_empty() {
                    return Err("has an empty completion".into());
                }
                Ok(Self::Answer { prompt, completion })
            }
            (None, false, Some(messages)) => {
                check_tools("tools", tools.as_ref())?;
                read_messages(messages).map(Self::Messages)
            }
            (None, false, None) => {
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

/// Parses JSON, or describes its fault for a message.
fn from_json<'de, T: Deserialize<'de>>(line: &'de str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|fault| {
        let text = fault.to_string();
        match text.rsplit_once(" at line ") {
            // The place in the line would be taken for a place in the file.
            Some((fault_of_field, _)) if fault.is_data() => {
                format!("has an invalid field ({fault_of_field})")
            }
            _ => format!("is not JSON ({text})"),
        }
    })
}

fn to_text(value: Option<Value>, name: &str) -> Result<String, String> {
    match value {
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
fn read_messages(fields: Vec<MessageFields>) -> Result<Vec<Message>, String> {
    let mut messages = Vec::with_capacity(fields.len());
    for MessageFields { role, content, tool_calls } in fields {
        check_tools("tool_calls", tool_calls.as_ref())?;
        let (Some(role), Some(content)) = (role, content) else {
            return Err("has messages without role and content".into());
        };
        messages.push(Message { role, content });
    }
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
            let words = format!("has an invalid field (duplicate field `{field}`): ");
            assert!(fault.contains("a.jsonl") && fault.contains("line 2"), "{fault}");
            assert!(fault.contains(&words), "{fault}");
        }
    }
}
