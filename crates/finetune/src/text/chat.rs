//! Renders conversations as text with a chat template.
//!
//! A template is a Jinja program. transformers runs it with trimmed blocks, the functions and
//! filters below, and Python's string methods. A template does not mark answers, so an answer is
//! defined as the text that a message of the assistant adds to the conversation before it.

use std::{
    collections::BTreeMap,
    error::Error as _,
    fmt,
    io::{self, Write},
    ops::Range,
    panic::resume_unwind,
    path::PathBuf,
    sync::OnceLock,
    thread,
};

use minijinja::{
    AutoEscape, Environment, ErrorKind, State, Value,
    machinery::{eval, get_compiled_template, make_string_output},
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use minijinja_contrib::pycompat;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::{
    error::{Error, Result, tokenizer::TokenizerError},
    text::bounded::{add_checks, check_values, checked_instructions},
};

/// The role of answers.
const ASSISTANT: &str = "assistant";

/// The maximum number of instructions of a rendering. An instruction also pays for 64 bytes of texts
/// and lists, so all together take at most 128 MB. It is more than any template needs, and stops
/// endless loops.
const FUEL: u64 = 2_000_000;

/// The length limit of a template. The longest one that is known has 13 KB.
const MAX_SOURCE_BYTES: usize = 1 << 16;

/// The length limit of a conversation's text.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// The stack of the thread that compiles and renders. Nested expressions of a source of
/// [`MAX_SOURCE_BYTES`] would overflow a stack of the usual size, which ends the process.
const STACK_BYTES: usize = 256 << 20;

/// The maximum indentation that a template may request for JSON.
const MAX_INDENT: usize = 64;

/// The maximum number of digits of a width in Python's `format`.
const MAX_WIDTH_DIGITS: usize = 3;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// Speaker: `system`, `user`, `assistant`, or another role that the template supports.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

impl Message {
    /// Makes a message of `role`.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned() }
    }

    /// Returns true for a message of the assistant.
    pub(crate) fn is_answer(&self) -> bool {
        self.role == ASSISTANT
    }
}

/// The template of a tokenizer.
pub(crate) struct ChatTemplate {
    source: String,
    /// The compiled template, or the reason why it is not valid Jinja. Many models are never asked
    /// for a conversation.
    compiled: OnceLock<Result<Environment<'static>, String>>,
    /// Special tokens, by their names in the template.
    special: BTreeMap<&'static str, String>,
    /// File of the template.
    path: PathBuf,
}

/// A rendered conversation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// Byte ranges of the assistant's messages.
    pub(crate) answers: Vec<Range<usize>>,
}

/// The variables of a template.
#[derive(Serialize)]
struct Context<'a> {
    messages: &'a [Message],
    add_generation_prompt: bool,
    // Never given, but templates compare both with `none`.
    tools: Option<()>,
    documents: Option<()>,
    #[serde(flatten)]
    special: &'a BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// Name of the only template in the environment.
    const NAME: &'static str = "chat";

    /// Returns the template of the file `path`, which is compiled when it is first rendered.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Broken`] if it is longer than 64 KiB.
    pub(crate) fn new(
        path: PathBuf,
        source: String,
        special: BTreeMap<&'static str, String>,
    ) -> Result<Self> {
        if source.len() > MAX_SOURCE_BYTES {
            let reason =
                format!("the chat template fails: it is longer than {MAX_SOURCE_BYTES} bytes");
            return Err(TokenizerError::Broken { path, reason }.into());
        }
        Ok(Self { source, compiled: OnceLock::new(), special, path })
    }

    /// Returns the text of a conversation. With `add_generation_prompt` it ends where the assistant's
    /// answer begins.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Broken`] if the template is not valid Jinja, [`TokenizerError::Rendering`] if it
    /// fails, does not end, or writes too much.
    pub(crate) fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String> {
        self.on_large_stack(|| self.render_here(messages, add_generation_prompt))
    }

    /// Runs a function on a thread with a large stack.
    fn on_large_stack<T: Send>(&self, run: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, run);
            let thread = thread.map_err(|cause| Error::io(&self.path, cause))?;
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    fn environment(&self) -> Result<&Environment<'static>, TokenizerError> {
        let compiled = self.compiled.get_or_init(|| {
            let mut environment = environment();
            match environment.add_template_owned(Self::NAME, self.source.clone()) {
                Ok(()) => Ok(environment),
                Err(fault) => Err(error_message(&fault)),
            }
        });
        compiled.as_ref().map_err(|reason| TokenizerError::Broken {
            path: self.path.clone(),
            reason: format!("the chat template fails: {reason}"),
        })
    }

    fn render_here(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let rendering_error = |fault| TokenizerError::Rendering {
            path: self.path.clone(),
            reason: error_message(&fault),
        };
        let special = &self.special;
        let context =
            Context { messages, add_generation_prompt, tools: None, documents: None, special };
        let environment = self.environment()?;
        let template = environment.get_template(Self::NAME).map_err(rendering_error)?;
        let instructions = checked_instructions(&get_compiled_template(&template).instructions);
        let mut text = String::new();
        eval(
            environment,
            &instructions,
            Value::from(Serde(&context)),
            &BTreeMap::new(),
            &mut make_string_output(&mut text),
            AutoEscape::None,
        )
        .map_err(rendering_error)?;
        if text.len() > MAX_TEXT_BYTES {
            let path = self.path.clone();
            return Err(TokenizerError::Rendering { path, reason: too_long() }.into());
        }
        Ok(text)
    }

    /// Returns the text of a conversation and the byte ranges of its answers.
    ///
    /// # Errors
    ///
    /// The errors of [`render`](Self::render), or [`TokenizerError::Rewrites`] if a message changes
    /// the text of earlier messages.
    pub(crate) fn render_with_answers(&self, messages: &[Message]) -> Result<Rendered> {
        self.on_large_stack(|| self.render_with_answers_here(messages))
    }

    fn render_with_answers_here(&self, messages: &[Message]) -> Result<Rendered> {
        let text = self.render_here(messages, false)?;
        let mut answers = Vec::new();
        for (turn, message) in messages.iter().enumerate() {
            if message.is_answer() {
                let before = self.render_here(&messages[..turn], true)?;
                let with_answer = self.render_here(&messages[..=turn], false)?;
                if !(with_answer.starts_with(&before) && text.starts_with(&with_answer)) {
                    let path = self.path.clone();
                    return Err(TokenizerError::Rewrites { path, message: turn + 1 }.into());
                }
                answers.push(before.len()..with_answer.len());
            }
        }
        Ok(Rendered { text, answers })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("path", &self.path).finish_non_exhaustive()
    }
}

/// A writer into memory that fails beyond [`MAX_TEXT_BYTES`].
struct BoundedWriter {
    text: Vec<u8>,
}

impl Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_TEXT_BYTES - self.text.len() {
            return Err(io::Error::other(too_long()));
        }
        self.text.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn too_long() -> String {
    format!("it is longer than {MAX_TEXT_BYTES} bytes")
}

/// Returns the message of a template error, with its cause.
fn error_message(fault: &minijinja::Error) -> String {
    match fault.source() {
        Some(cause) => format!("{fault}: {cause}"),
        None => fault.to_string(),
    }
}

/// Returns Jinja as transformers configures it for chat templates, but without `strftime_now`: a text
/// with the current date would have different tokens tomorrow, and the run could not be resumed.
/// Templates that use this function have a default date for programs without it.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(call_method);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", to_json);
    // Jinja has no such filters, and to begin to read nested results of them may take endless time.
    environment.remove_filter("zip");
    environment.remove_filter("chain");
    // It writes all values whole.
    environment.remove_global("debug");
    add_checks(&mut environment);
    environment
}

#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the delimiters are the default ones")
}

/// Calls a method of Python. The filters `replace` and `join` compare the length of their result with
/// the fuel before they take memory, so they run in place of the methods.
fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    check_values(state, args.iter().chain([value]))?;
    match (value.as_str(), method, args) {
        (Some(_), "replace", _) => {
            let args = [std::slice::from_ref(value), args].concat();
            state.apply_filter("replace", &args)
        }
        (Some(_), "join", [items]) => state.apply_filter("join", &[items.clone(), value.clone()]),
        (Some(text), "format", _) if has_wide_field(text) => {
            let message = format!("a width has more than {MAX_WIDTH_DIGITS} digits");
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        }
        _ => pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Returns true if a field of a format text, such as `{:9}`, has a number that is too long.
fn has_wide_field(format: &str) -> bool {
    let fields = format.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let mut numbers = fields.flat_map(|field| field.split(|letter: char| !letter.is_ascii_digit()));
    numbers.any(|digits| digits.len() > MAX_WIDTH_DIGITS)
}

/// Fails with the reason why a template rejects a conversation.
#[expect(clippy::needless_pass_by_value, reason = "a function owns its arguments")]
fn raise_exception(
    state: &State<'_, '_>,
    reason: Value,
) -> std::result::Result<Value, minijinja::Error> {
    check_values(state, [&reason])?;
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason.to_string()))
}

/// Writes JSON like Python's `json.dumps`, with characters and the order of keys unchanged.
#[expect(clippy::needless_pass_by_value, reason = "a filter owns its arguments")]
fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    options: Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    check_values(state, [value])?;
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let mut out = BoundedWriter { text: Vec::new() };
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, SpacedFormatter)),
        Some(width) if width > MAX_INDENT => {
            let message = format!("indent is {width}, must be at most {MAX_INDENT}");
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
        }
        Some(width) => {
            let indent = b" ".repeat(width);
            let pretty = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
    };
    let json_error = |fault: String| minijinja::Error::new(ErrorKind::BadSerialization, fault);
    written.map_err(|fault| json_error(fault.to_string()))?;
    String::from_utf8(out.text).map_err(|fault| json_error(fault.to_string()))
}

/// Formats JSON on one line, with a space after each comma and colon.
struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    fn template(source: &str) -> ChatTemplate {
        let special = [("bos_token", String::from("<s>")), ("eos_token", String::from("</s>"))];
        ChatTemplate::new("template".into(), source.into(), special.into()).unwrap()
    }

    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        turns.iter().map(|(role, content)| Message::new(role, content)).collect()
    }

    #[test]
    fn chat_texts_match_transformers() {
        let chat = golden::chat();
        for case in chat["rendered"].as_array().unwrap() {
            let name = case["template"].as_str().unwrap();
            let conversation = &chat["conversations"][case["conversation"].as_str().unwrap()];
            let messages: Vec<Message> = serde_json::from_value(conversation.clone()).unwrap();
            let template = template(chat["templates"][name].as_str().unwrap());
            let found = template.render(&messages, case["add_generation_prompt"] == true);
            match case["text"].as_str() {
                Some(text) => assert_eq!(found.unwrap(), text, "{name}"),
                None => assert!(found.unwrap_err().to_string().contains("must take turns")),
            }
        }
    }

    #[test]
    fn answers_are_assistant_turns() {
        let template = template(
            "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}\
             {% if add_generation_prompt %}a:{% endif %}",
        );
        let turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "45")];
        let found = template.render_with_answers(&messages(&turns)).unwrap();
        assert_eq!(found.text, "u:1;a:2;u:3;a:45;");
        let answers: Vec<&str> =
            found.answers.iter().map(|answer| &found.text[answer.clone()]).collect();
        assert_eq!(answers, ["2;", "45;"]);
    }

    #[test]
    fn rewriting_templates_are_rejected() {
        let turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")];
        for source in [
            // The text starts with the number of messages.
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            // The last message comes first.
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            // All answers but the last are left out.
            "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}\
             {% endif %}{% endfor %}",
            // The generation prompt is not the start of the assistant's message.
            "{% for m in messages %}{{ m.content }}{% endfor %}\
             {% if add_generation_prompt %}!{% endif %}",
        ] {
            let fault = template(source).render_with_answers(&messages(&turns)).unwrap_err();
            assert!(fault.to_string().contains("does not append"), "{source}: {fault}");
        }
    }

    #[test]
    fn failing_or_endless_templates_are_rejected() {
        let long = ChatTemplate::new("a/template".into(), " ".repeat(65_537), BTreeMap::new());
        let fault = long.unwrap_err().to_string();
        assert!(fault.starts_with("a/template: the chat template fails"), "{fault}");
        let turns = messages(&[("user", "1")]);
        for (source, words) in [
            ("{% if %}", "syntax error"),
            ("{{ raise_exception('no such role') }}", "no such role"),
            // Texts that are longer than the memory of most machines.
            ("{{ range(99999) | join('x' * 100000) }}", "larger than 4096"),
            ("{{ ('x' * 100000).join(range(99999)) }}", "fuel"),
            ("{{ ('x' * 900000) | selectattr('y' * 900000) | list }}", "larger than 4096"),
            ("{{ ('x' * 100000).replace('x', 'y' * 100000) }}", "fuel"),
            ("{{ ('x' * 100000) | replace('x', 'y' * 100000) }}", "fuel"),
            ("{{ '{:1000}'.format(1) }}", "digits"),
            ("{{ '%9999999999d' | format(1) }}", ""),
            ("{{ messages[3].content }}", "undefined"),
            ("{{ strftime_now('%Y') }}", "strftime_now"),
            ("{{ 'x' * 1000000000000 }}", ""),
            (
                "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}\
                 {% endfor %}",
                "fuel",
            ),
            ("{{ messages | tojson(indent=1000000000000) }}", "indent is 1000000000000, must be"),
            (
                "{% for a in range(99) %}{{ 'x' * 100000 }}{% endfor %}",
                "it is longer than 1048576 bytes",
            ),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ] {
            let fault = template(source).render(&turns, false).unwrap_err().to_string();
            assert!(fault.starts_with("template: the chat template fails"), "{fault}");
            assert!(fault.contains(words), "{source}: {fault}");
        }
    }

    #[test]
    fn values_that_fill_the_memory_are_rejected() {
        let turns = messages(&[("user", "1")]);
        // Their text would never end, or they contain themselves.
        let doubled = |value: &str| {
            let doubling = format!("{{% set x = {value} %}}").repeat(40);
            doubling.clone() + &doubling.replace('x', "y")
        };
        for value in [
            doubled("[x, x]"),
            doubled("(x, x)"),
            doubled("{1: x, 2: x}"),
            doubled("dict(a=x, b=x)"),
            doubled("[x] * 2"),
            "{% set x = ['a' * 100000] * 1000000 %}{% set y = [x] %}".into(),
            "{% set x = namespace() %}{% set x.a = x %}{% set y = namespace(a=x) %}".into(),
            "{% set x = namespace() %}{% set x.a = [x] %}{% set y = namespace(a=[x]) %}".into(),
        ] {
            for user in [
                "x",
                "x ~ ''",
                "x | string",
                "[x] | join",
                "x | tojson",
                "x | pprint",
                "x == y",
                "[x] | map('string') | list",
                "x in [y]",
                "[x] | select('eq', y) | list",
                "x is eq y",
                "x | upper",
                "'{}'.format(x)",
                "'%s' | format(x)",
                "{'a': x}.items() | string",
                "[x] | sort",
                "[x, y] | unique | list",
                "raise_exception(x)",
                "[x].count(y)",
                "x == y == 1",
                "1 < 2 < x < y",
                "x in [y] in y",
                "x in 'a' in 'b'",
                "{'a': 1, x: 2}",
                "messages[x]",
                "{1: 2}[[x]]",
                "'x' if loop is defined else {x: 1}.a",
            ] {
                let source =
                    format!("{{% set x = 'a' %}}{{% set y = 'b' %}}{value}{{{{ {user} }}}}");
                let fault = template(&source).render(&turns, false).map(|text| text.len());
                let fault = fault.map_err(|fault| fault.to_string());
                let is_found = fault.as_ref().is_err_and(|fault| fault.contains("value is larger"));
                assert!(is_found, "{source}: {fault:?}");
            }
            let source = format!("{value}{{{{ x | length }}}}");
            drop(template(&source).render(&turns, false));
        }
        // Values that are equal, so that a comparison would read them whole.
        let equal = doubled("[x, x]");
        let source = format!(
            "{{% set x = 'a' %}}{{% set y = 'a' %}}{equal}{{% for v in [x, y] %}}{{{{ loop.changed(v) }}}}{{% endfor %}}"
        );
        let fault = template(&source).render(&turns, false).unwrap_err().to_string();
        assert!(fault.contains("value is larger"), "{fault}");
    }

    #[test]
    fn nests_and_methods_are_rendered() {
        let turns = messages(&[("user", "1")]);
        // Deeper nests than a stack of the usual size can hold.
        let nest = "{% set ns = namespace(s=1) %}{% for a in range(999) %}{% for b in range(999) %}\
                    {% set ns.s = [ns.s] %}{% endfor %}{% endfor %}";
        for source in [
            nest.to_owned(),
            nest.replace("(999)", "(400)") + "{{ ns.s ~ '' }}",
            format!("{{{{ {}1 }}}}", "-".repeat(30_000)),
            format!("{{{{ 1{} }}}}", "+1".repeat(20_000)),
            format!("{{{{ messages{} }}}}", ".a".repeat(30_000)),
        ] {
            drop(template(&source).render(&turns, false));
        }
        let methods = "{{ 'aba'.replace('a', 'c', 1) }} {{ ', '.join(['x', 'y']) }} \
                       {{ '{:3}|{}'.format('d', 20240101) }}";
        assert_eq!(template(methods).render(&turns, false).unwrap(), "cba x, y d  |20240101");
        let wide = template("{{ '{:999}'.format(1) }}").render(&turns, false).unwrap();
        assert_eq!(wide.len(), 999);
        let widest = template("{{ messages | tojson(indent=64) }}").render(&turns, false).unwrap();
        assert!(widest.contains(&format!("\n{}\"role\"", " ".repeat(128))), "{widest}");
        let day = "{% if strftime_now is defined %}{{ strftime_now() }}{% else %}1{% endif %}";
        assert_eq!(template(day).render(&turns, false).unwrap(), "1");
    }

    /// The instructions that check values change no text.
    #[test]
    fn checked_templates_equal_plain_ones() {
        for source in [
            "{{ {'a': nope}.a is defined }} {{ {(1, 2): 3}[(1, 2)] }} {{ {1: 'a'} }} {{ {none: 1, 1.5: 2} }}",
            "{% set m = {'b': 1, 'a': 2, 'b': 3} %}{{ m }} {{ m.items() | list }} {{ m | length }}",
            "{% set n = namespace(a=1) %}{% set m = {'n': n} %}{% set n.a = 5 %}{{ m.n.a }}",
            "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ {'f': f}.f(3) }}",
            "{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 < 2 == 2 }}",
            "{% for i in [1, 2, 3] %}{% if 1 < i < 3 %}{{ i }}{% else %}-{% endif %}{% endfor %}",
            "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{% endfor %}",
            "{% for i in [[1, [2]], 3] recursive %}\
             {% if 0 < loop.index < 9 and i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}{% endfor %}",
        ] {
            let mut plain = environment();
            plain.add_template_owned("chat", source.to_owned()).unwrap();
            let expected = plain.get_template("chat").unwrap().render(()).unwrap();
            assert_eq!(template(source).render(&[], false).unwrap(), expected, "{source}");
        }
    }

    /// Every filter, test and method ends on values whose text would never end.
    #[test]
    fn every_use_of_a_value_ends() {
        let filters = "safe escape e lower upper title capitalize length count items trim join split lines \
                       default d round abs int float attr first last min max sort list string bool batch \
                       slice sum select reject selectattr rejectattr map groupby unique reverse format \
                       urlencode tojson pprint indent replace dictsort";
        let tests = "undefined defined none safe escaped boolean odd even divisibleby number integer int \
                     float string sequence iterable mapping startingwith endingwith lower upper sameas eq \
                     ne lt le gt ge in true false filter test";
        let methods = "capitalize count find format islower isupper join lower lstrip replace rfind rstrip \
                       split splitlines startswith endswith strip title upper get items keys values index";
        let mut uses = Vec::new();
        for filter in filters.split(' ') {
            for arguments in ["", "(x)", "('eq', x)"] {
                uses.push(format!("{{{{ x | {filter}{arguments} }}}}"));
            }
        }
        for test in tests.split(' ') {
            uses.extend(["", "(y)"].map(|argument| format!("{{{{ x is {test}{argument} }}}}")));
        }
        for method in methods.split(' ') {
            let one = |(value, argument)| format!("{{{{ {value}.{method}({argument}) }}}}");
            uses.extend(
                [("x", ""), ("x", "y"), ("[x]", "y"), ("'abc'", "x"), ("'a'", "'a', x")].map(one),
            );
        }
        for value in
            ["range(x)", "dict(x)", "namespace(x)", "debug()", "x[y]", "x[1:y]", "x + y", "x * 2"]
        {
            uses.push(format!("{{{{ {value} }}}}"));
        }
        uses.push("{% for v in [x, y] %}{{ loop.changed(v) }}{% endfor %}".into());
        uses.push("{% for v in [x, y] %}{{ loop.changed(v, 1) }}{% endfor %}".into());
        let turns = messages(&[("user", "1")]);
        for value in ["[x, {1: x}]", "x + x"] {
            let doubling =
                format!("{{% set x = {value} %}}").repeat(if value == "x + x" { 19 } else { 40 });
            let both = doubling.clone() + &doubling.replace('x', "y");
            for last in &uses {
                let source = format!("{{% set x = 'a' %}}{{% set y = 'b' %}}{both}{last}");
                drop(template(&source).render(&turns, false));
            }
        }
    }
}
