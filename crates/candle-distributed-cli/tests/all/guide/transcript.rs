//! Console transcripts: commands, and their output.
//!
//! A command follows `$ ` and continues in lines after `> `. Its exact output on both streams
//! follows. `…` matches anything, and a line of `…` matches any lines. At `^C`, the command is
//! interrupted. It must fail if the output has an `error:`, and succeed otherwise. If figures vary,
//! a number with a decimal point matches any other number, and spaces and rules match any width,
//! since tables are as wide as their figures.

use std::{
    env, fs,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// A command and its expected output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TranscriptEntry {
    pub(crate) command: String,
    pub(crate) output: Vec<String>,
    pub(crate) figures_vary: bool,
}

const INTERRUPT: &str = "^C";
const ANYTHING: char = '…';

/// Splits a console into entries.
pub(crate) fn parse(text: &str, figures_vary: bool) -> Vec<TranscriptEntry> {
    let mut entries: Vec<TranscriptEntry> = Vec::new();
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            entries.push(TranscriptEntry {
                command: command.to_owned(),
                output: Vec::new(),
                figures_vary,
            });
            continue;
        }
        let entry = entries.last_mut().unwrap_or_else(|| panic!("no command before {line:?}"));
        match line
            .strip_prefix("> ")
            .or((line == ">").then_some(""))
            .filter(|_| entry.output.is_empty())
        {
            Some(more) => entry.command.extend(["\n", more]),
            None => entry.output.push(line.to_owned()),
        }
    }
    entries
}

/// Runs commands in a folder, with the program on the path.
#[derive(Debug)]
pub(crate) struct Shell<'a> {
    folder: &'a Path,
    path: String,
}

impl<'a> Shell<'a> {
    pub(crate) fn new(folder: &'a Path) -> Self {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_candle-distributed"));
        let path = format!(
            "{}:{}",
            program.parent().unwrap().display(),
            env::var("PATH").unwrap_or_default()
        );
        Self { folder, path }
    }

    /// Returns true if this program or, after `python3-`, this Python module is installed.
    pub(crate) fn knows(&self, tool: &str) -> bool {
        if let Some(module) = tool.strip_prefix("python3-") {
            let import = format!("import {module}");
            let python =
                Command::new("python3").args(["-c", &import]).stderr(Stdio::null()).status();
            return python.is_ok_and(|status| status.success());
        }
        self.path.split(':').any(|folder| fs::metadata(Path::new(folder).join(tool)).is_ok())
    }

    /// Runs a command, and compares its output.
    pub(crate) fn check(&self, entry: &TranscriptEntry, place: &str) {
        let comparable = |line: &str| {
            if entry.figures_vary { without_figures(line) } else { line.trim_end().to_owned() }
        };
        let expected: Vec<String> = entry.output.iter().map(|line| comparable(line)).collect();
        let interrupted_at = expected.iter().position(|line| line == INTERRUPT);
        let (mut child, output) = self.start(entry);
        let (mut shown, mut printed): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
        let mut is_interrupted = false;
        for line in output.lines() {
            shown.push(line.unwrap());
            printed.extend(shown.last().map(|line| comparable(line)));
            if !is_interrupted
                && interrupted_at.is_some_and(|at| matches(&expected[..at], &printed))
            {
                is_interrupted = true;
                interrupt(&child);
            }
        }
        let status = child.wait().unwrap();
        // The command may print more lines before the signal arrives.
        let is_like: Vec<String> =
            expected.iter().map(|line| line.replace(INTERRUPT, "…")).collect();
        let command = &entry.command;
        let shown = shown.join("\n");
        assert!(
            matches(&is_like, &printed),
            "{place}: `{command}` should print\n{}\nbut prints\n{shown}",
            entry.output.join("\n")
        );
        let fails = expected.iter().any(|line| line.starts_with("error:"));
        assert_eq!(status.success(), !fails, "{place}: `{command}`: {status}, after\n{shown}");
    }

    /// Runs a script, which must succeed.
    pub(crate) fn run(&self, script: &str, place: &str) {
        let output = Command::new("bash")
            .args(["-e", "-o", "pipefail", "-c", script])
            .current_dir(self.folder)
            .env("PATH", &self.path)
            .env("HOME", self.folder)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{place}: {}\n{said}", output.status);
    }

    /// Starts a command, and returns the process and its output.
    fn start(&self, entry: &TranscriptEntry) -> (Child, BufReader<io::PipeReader>) {
        let (reader, writer) = io::pipe().unwrap();
        // `exec` replaces the shell, so that the program gets the signal.
        let exec = if entry.output.iter().any(|line| line == INTERRUPT) { "exec " } else { "" };
        let child = Command::new("sh")
            .args(["-c", &format!("{exec}{}", entry.command)])
            .current_dir(self.folder)
            .env("PATH", &self.path)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer)
            .spawn()
            .unwrap();
        (child, BufReader::new(reader))
    }
}

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success(), "kill: {status}");
}

/// Returns true if the lines match the patterns.
fn matches(patterns: &[String], lines: &[String]) -> bool {
    match patterns {
        [] => lines.is_empty(),
        [first, rest @ ..] if first == "…" => {
            (0..=lines.len()).any(|skipped| matches(rest, &lines[skipped..]))
        }
        [first, rest @ ..] => lines
            .split_first()
            .is_some_and(|(line, lines)| is_like(first, line) && matches(rest, lines)),
    }
}

/// Returns true if a line matches a pattern. `…` matches anything.
fn is_like(pattern: &str, line: &str) -> bool {
    match pattern.split_once(ANYTHING) {
        None => pattern == line,
        Some((start, rest)) => line.strip_prefix(start).is_some_and(|line| {
            line.char_indices()
                .map(|(at, _)| at)
                .chain([line.len()])
                .any(|at| is_like(rest, &line[at..]))
        }),
    }
}

/// Normalizes a line: replaces figures by 0.0, and shortens spaces and rules to one character.
fn without_figures(line: &str) -> String {
    line.split_whitespace().map(normalized_word).collect::<Vec<_>>().join(" ")
}

fn normalized_word(word: &str) -> String {
    if word.chars().all(|c| c == '─') {
        return String::from("─");
    }
    let bare = word.trim_end_matches([',', ':', ';']);
    let is_figure = bare.contains('.') && bare.parse::<f64>().is_ok();
    if is_figure { word.replace(bare, "0.0") } else { word.to_owned() }
}

#[test]
fn parse_splits_commands_and_output() {
    let entry = |command: &str, output: &[&str]| TranscriptEntry {
        command: command.into(),
        output: output.iter().map(ToString::to_string).collect(),
        figures_vary: false,
    };
    let expected = [entry("a |\nb", &["1", "> 2"]), entry("c", &[])];
    assert_eq!(parse("$ a |\n> b\n1\n> 2\n$ c\n", false), expected);
}

#[test]
fn ellipsis_matches_anything() {
    let lines = ["loss 5.499, 327 tokens/s", "", "done"].map(str::to_owned);
    let accepts = |patterns: &[&str]| {
        matches(&patterns.iter().map(ToString::to_string).collect::<Vec<_>>(), &lines)
    };
    assert!(accepts(&["loss 5.…, … tokens/s", "", "done"]));
    assert!(accepts(&["loss 5.499, 327 tokens/s", "…", "done"]));
    assert!(accepts(&["…"]) && accepts(&["…", "done"]) && accepts(&["…", "", "done", "…"]));
    assert!(!accepts(&["loss 4.…", "", "done"]));
    assert!(!accepts(&["loss 5.…, … tokens", "", "done"]));
    assert!(!accepts(&[]) && !accepts(&["…", ""]) && !accepts(&["loss…", "done"]));
}

#[test]
fn only_decimal_figures_may_vary() {
    let same = |a: &str, b: &str| without_figures(a) == without_figures(b);
    assert!(
        same(" psum   9.5  0.01", " psum  10.25  0.02")
            && same("───", "─────")
            && same("loss 5.1, at 3", "loss 15.01, at 3")
    );
    assert!(
        !same("step 1 of 5", "step 2 of 5")
            && !same("loss 5.1, at 3", "loss 5.1 at 3")
            && !same("a 1.5", "b 1.5")
    );
}

#[test]
fn wrong_output_or_status_fails() {
    let folder = tempfile::tempdir().unwrap();
    let holds = |console: &str| {
        let check = || {
            for entry in parse(console, false) {
                Shell::new(folder.path()).check(&entry, "here");
            }
        };
        std::panic::catch_unwind(check).is_ok()
    };
    assert!(holds("$ echo a\na\n") && holds("$ echo error: a; false\nerror: a\n"));
    assert!(
        !holds("$ echo b\na\n")
            && !holds("$ echo a\n")
            && !holds("$ false\n")
            && !holds("$ echo error: a\nerror: a\n")
    );
}
