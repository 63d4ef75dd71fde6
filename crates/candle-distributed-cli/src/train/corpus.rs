//! The text to learn from, cut into sequences of bytes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use candle_distributed::types::Fingerprint;
use serde::Deserialize;

use crate::{
    error::{Error, Result},
    hint, input,
};

/// Sequences of at least 2 bytes: all but the first byte of each are predicted.
#[derive(Debug)]
pub(crate) struct Corpus {
    sequences: Vec<Vec<u8>>,
}

/// The sources of this program, as text to learn from when there is no other.
macro_rules! own_sources {
    ($($path:literal),+ $(,)?) => {
        [$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $path)))),+]
    };
}

const EMBEDDED: [(&str, &str); 106] = own_sources![
    "README.md",
    "src/bin/candle-distributed.rs",
    "src/bytes.rs",
    "src/commands/batch/args.rs",
    "src/commands/batch/chart.rs",
    "src/commands/batch/mod.rs",
    "src/commands/batch/npz.rs",
    "src/commands/batch/order.rs",
    "src/commands/batch/print.rs",
    "src/commands/completions.rs",
    "src/commands/generate/mod.rs",
    "src/commands/launch/guard.rs",
    "src/commands/launch/job.rs",
    "src/commands/launch/lines.rs",
    "src/commands/launch/mod.rs",
    "src/commands/launch/process.rs",
    "src/commands/man.rs",
    "src/commands/mesh/collective.rs",
    "src/commands/mesh/mod.rs",
    "src/commands/mesh/report.rs",
    "src/commands/mod.rs",
    "src/commands/plan/args.rs",
    "src/commands/plan/mod.rs",
    "src/commands/plan/model.rs",
    "src/commands/plan/svg/columns.rs",
    "src/commands/plan/svg/legend.rs",
    "src/commands/plan/svg/mod.rs",
    "src/commands/plan/svg/paint.rs",
    "src/commands/plan/svg/panel.rs",
    "src/commands/plan/svg/words.rs",
    "src/commands/report/comparison.rs",
    "src/commands/report/coverage.rs",
    "src/commands/report/facts.rs",
    "src/commands/report/markup.rs",
    "src/commands/report/mod.rs",
    "src/commands/report/page.rs",
    "src/commands/report/step.rs",
    "src/commands/report/style.css",
    "src/commands/sample/mixture.rs",
    "src/commands/sample/mod.rs",
    "src/commands/sample/rows.rs",
    "src/commands/train/dry_run.rs",
    "src/commands/train/finetune.rs",
    "src/commands/train/mod.rs",
    "src/commands/train/parts.rs",
    "src/commands/train/start.rs",
    "src/commands/train/writing.rs",
    "src/devices.rs",
    "src/error.rs",
    "src/fuzzing.rs",
    "src/generation/folders.rs",
    "src/generation/mod.rs",
    "src/generation/prompt.rs",
    "src/generation/sampling.rs",
    "src/generation/weights.rs",
    "src/generation/writer.rs",
    "src/help.rs",
    "src/hf/byte_tokenizer.rs",
    "src/hf/chat.rs",
    "src/hf/examples.rs",
    "src/hf/files.rs",
    "src/hf/folder.rs",
    "src/hf/lines.rs",
    "src/hf/mod.rs",
    "src/hf/tokenizer.rs",
    "src/hint.rs",
    "src/input.rs",
    "src/lib.rs",
    "src/log.rs",
    "src/numbers/json.rs",
    "src/numbers/mod.rs",
    "src/numbers/npy.rs",
    "src/numbers/number.rs",
    "src/numbers/text.rs",
    "src/output.rs",
    "src/picture.rs",
    "src/strategy.rs",
    "src/train/agreement.rs",
    "src/train/corpus.rs",
    "src/train/curve.rs",
    "src/train/data.rs",
    "src/train/dataset.rs",
    "src/train/distributed.rs",
    "src/train/finetune.rs",
    "src/train/journal.rs",
    "src/train/limits.rs",
    "src/train/measured.rs",
    "src/train/memory.rs",
    "src/train/mod.rs",
    "src/train/model.rs",
    "src/train/model_file.rs",
    "src/train/parameters.rs",
    "src/train/precision.rs",
    "src/train/pretrained.rs",
    "src/train/products.rs",
    "src/train/recipe.rs",
    "src/train/resumed.rs",
    "src/train/run_dir.rs",
    "src/train/session.rs",
    "src/train/settings.rs",
    "src/train/sharding.rs",
    "src/train/stop.rs",
    "src/train/traffic.rs",
    "src/train/trainer.rs",
    "src/train/transformer.rs",
    "src/train/validation.rs",
];

impl Corpus {
    /// This project's own text, in sequences of at most `longest` bytes.
    pub(crate) fn embedded(longest: usize) -> Self {
        Self::new(EMBEDDED.iter().map(|(_, text)| *text), longest)
    }

    /// The text files under `path`, in the order of their names; or `path` itself, if it is a file.
    /// A file whose name ends in `.jsonl` holds a text in each line. Sequences have at most
    /// `longest` bytes.
    ///
    /// Hidden files and files that are not UTF-8 are skipped.
    pub(crate) fn read(path: &Path, longest: usize) -> Result<Self> {
        let texts: Vec<Vec<String>> =
            files(path)?.iter().map(|file| read_texts(file)).collect::<Result<_>>()?;
        let corpus = Self::new(texts.iter().flatten().map(String::as_str), longest);
        if corpus.sequences.is_empty() {
            return Err(Error::usage(format!("no text to learn from in {}", path.display())));
        }
        Ok(corpus)
    }

    /// The paragraphs of `texts`, cut after every `longest` bytes.
    pub(crate) fn new<'a>(texts: impl IntoIterator<Item = &'a str>, longest: usize) -> Self {
        let paragraphs = texts.into_iter().flat_map(|text| text.split("\n\n"));
        let pieces = paragraphs.flat_map(|paragraph| paragraph.as_bytes().chunks(longest));
        Self { sequences: pieces.filter(|piece| piece.len() >= 2).map(<[u8]>::to_vec).collect() }
    }

    /// The length of every sequence, in bytes.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        self.sequences.iter().map(|sequence| sequence.len() as u64).collect()
    }

    /// A hash of the sequences, in hexadecimal digits.
    pub(crate) fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new();
        for sequence in &self.sequences {
            fingerprint.bytes(sequence);
        }
        format!("{:016x}", fingerprint.finish())
    }

    /// The bytes of sequence `index`, which must be one of them.
    #[expect(clippy::expect_used, reason = "says why it cannot fail")]
    pub(crate) fn sequence(&self, index: u64) -> &[u8] {
        let index = usize::try_from(index).expect("sequences in memory are counted by a usize");
        &self.sequences[index]
    }
}

/// The files under a folder, but for hidden ones, or the file itself, in the same order on every
/// machine.
pub(crate) fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    list_files(path, &mut files)?;
    Ok(files)
}

/// Adds the files under `path` to `files`, sorted, so that every machine reads the same corpus.
fn list_files(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |source| Error::read(path, source);
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    if !kind.is_dir() {
        // Pipes and devices may never end.
        files.extend(kind.is_file().then(|| path.to_path_buf()));
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(failed)?;
    let entries: io::Result<Vec<PathBuf>> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut entries = entries.map_err(failed)?;
    entries.retain(|entry| !is_hidden(entry));
    entries.sort();
    entries.iter().try_for_each(|entry| list_files(entry, files))
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// The texts of a file; none if it is not UTF-8.
fn read_texts(path: &Path) -> Result<Vec<String>> {
    let bytes = fs::read(path).map_err(|source| Error::read(path, source))?;
    match String::from_utf8(bytes) {
        Ok(text) if path.extension().is_some_and(|extension| extension == "jsonl") => {
            texts_in_lines(&text, path)
        }
        text => Ok(text.into_iter().collect()),
    }
}

/// A line of a `.jsonl` file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text(String),
    Object { text: String },
}

/// The texts of the lines that are not blank; errors name the file by `path`.
fn texts_in_lines(lines: &str, path: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for (n, line) in (1_u64..).zip(lines.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let Ok(Line::Text(text) | Line::Object { text }) = serde_json::from_str(line) else {
            let name = path.display();
            let shown = input::excerpt(line);
            let wrong = Error::usage(format!("line {n} of {name} holds no text: {shown}"));
            return Err(wrong.hinted(hint::JSON_LINES));
        };
        texts.push(text);
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const LONGEST: usize = 129;

    #[test]
    fn every_source_file_is_embedded() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut all = vec![root.join("README.md")];
        all.extend(files(&root.join("src")).unwrap());
        assert!(EMBEDDED.iter().map(|(path, _)| root.join(path)).eq(all));
    }

    #[test]
    fn paragraphs_are_cut_at_the_longest_sequence() {
        let long = "x".repeat(LONGEST + 5);
        let corpus = Corpus::new(["ab\n\nc\n\n", &long], LONGEST);
        assert_eq!(corpus.lengths(), [2, LONGEST as u64, 5]);
        assert_eq!(corpus.sequence(0), b"ab");
        let others = ["ab\n\nc", "ab\n\ncd", "abcd", "ab\n\n\ncd"];
        let fingerprints: std::collections::BTreeSet<_> =
            others.map(|text| Corpus::new([text], LONGEST).fingerprint()).into();
        assert_eq!(fingerprints.len(), others.len());
    }

    #[test]
    fn folders_are_read_in_order_without_hidden_and_binary_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for (name, content) in [
            ("c.txt", &b"third"[..]),
            ("b/a", b"second"),
            ("a", b"first"),
            (".x", b"no"),
            ("z", b"\xff\xfe"),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
        }
        let corpus = Corpus::read(dir.path(), LONGEST).unwrap();
        assert_eq!(corpus.sequences, [&b"first"[..], b"second", b"third"]);
    }

    #[test]
    fn lines_of_json_are_texts() {
        let dir = tempfile::tempdir().unwrap();
        let lines = "\"first\"\n\n  \n{\"id\": 3, \"text\": \"second\\n\\nthird\"}\r\n\"\"\n";
        fs::write(dir.path().join("a.jsonl"), lines).unwrap();
        fs::write(dir.path().join("b.json"), "[1]").unwrap();
        let corpus = Corpus::read(dir.path(), LONGEST).unwrap();
        assert_eq!(corpus.sequences, [&b"first"[..], b"second", b"third", b"[1]"]);
        for wrong in ["3", "{\"text\": 3}", "{}", "[\"text\"]", "\"text", "first"] {
            let path = dir.path().join("wrong.jsonl");
            fs::write(&path, format!("\"right\"\n\n{wrong}\n")).unwrap();
            let error = Corpus::read(&path, LONGEST).unwrap_err().to_string();
            assert!(
                error.starts_with("line 3 of ") && error.contains("wrong.jsonl"),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn a_long_line_without_a_text_is_shown_shortened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long.jsonl");
        fs::write(&path, "x".repeat(1 << 20)).unwrap();
        let error = Corpus::read(&path, LONGEST).unwrap_err().to_string();
        assert!(error.ends_with(&format!("no text: \"{}\"…", "x".repeat(40))), "{}", error.len());
    }

    #[test]
    fn missing_and_empty_folders_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Corpus::read(&dir.path().join("none"), LONGEST).unwrap_err();
        assert!(matches!(*missing.kind, ErrorKind::Read { .. }));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
            let dangling = Corpus::read(dir.path(), LONGEST).unwrap_err().to_string();
            assert!(dangling.ends_with("dangling"), "{dangling}");
            fs::remove_file(dir.path().join("dangling")).unwrap();
        }
        let empty = Corpus::read(dir.path(), LONGEST).unwrap_err();
        assert!(matches!(*empty.kind, ErrorKind::Usage(_)));
    }
}
