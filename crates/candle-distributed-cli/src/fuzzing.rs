//! Entry points of fuzz targets: readers of files from untrusted sources. Built only for fuzzing
//! and tests.

use std::{fs, path::Path};

use candle_distributed::{checkpoint::support::add_footer, finetune::spec::Spec};
use clap::Parser;

use crate::{
    commands::{report, train},
    error::Result,
};

/// The name of the training text in the settings of a run.
const TEXT: &str = "text.txt";
const PARAGRAPHS: &str = "to be or\n\nnot to be\n\nthat is\n\n";

/// Reads the folder of a run with these files, as `report` and `train --resume` do.
pub fn run(run_json: &[u8], metrics: &[u8]) {
    // Random files are usually rejected: only a panic is a bug.
    let _ = read_run(run_json, metrics);
}

fn read_run(run_json: &[u8], metrics: &[u8]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let run = folder.path().join("run");
    let text = folder.path().join(TEXT);
    fs::create_dir(&run)?;
    fs::write(&text, PARAGRAPHS)?;
    fs::write(run.join("run.json"), with_checksum(with_text_path(run_json, &text)))?;
    fs::write(run.join("metrics.jsonl"), metrics)?;
    // The settings may name any file of this machine, which a fuzz target must not read.
    let spec = Spec::read(&run)?;
    if spec.is_some_and(|spec| spec.data.iter().any(|data| *data != text)) {
        return Ok(());
    }
    let args = TrainLine::parse_from(["--resume".as_ref(), "--out".as_ref(), run.as_os_str()]);
    let page = report::page(&run).map(drop);
    page.and(train::prepare(&args.train))
}

/// Returns the settings with the name of the text replaced by its path.
fn with_text_path(run_json: &[u8], text: &Path) -> Vec<u8> {
    let name = format!("\"{TEXT}\"");
    let Some(at) = run_json.windows(name.len()).position(|bytes| bytes == name.as_bytes()) else {
        return run_json.into();
    };
    let path = format!("{:?}", text.display().to_string());
    [&run_json[..at], path.as_bytes(), &run_json[at + name.len()..]].concat()
}

/// Adds a correct checksum, without which no settings are read.
fn with_checksum(run_json: Vec<u8>) -> Vec<u8> {
    if run_json.ends_with(b"\n}") { add_footer(run_json) } else { run_json }
}

/// A command line of `train`.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct TrainLine {
    #[command(flatten)]
    train: train::Args,
}

#[cfg(test)]
mod tests {
    use candle_distributed::{
        finetune::{RunOptions, Start, TextSource, spec::Session},
        types::WorldSize,
    };

    use super::*;
    use crate::train::curve::tests::line;

    /// Returns the description of a run on the paragraphs, as its folder has it.
    fn description() -> Spec {
        let text = tempfile::NamedTempFile::new().unwrap();
        fs::write(text.path(), PARAGRAPHS).unwrap();
        let options =
            RunOptions { data: vec![TextSource::new(text.path())], ..RunOptions::default() };
        let Start::Train(run) = options.prepare(WorldSize::ONE).unwrap() else { unreachable!() };
        let session = Session {
            first_step: 0,
            world_size: 2,
            devices_here: 2,
            on_processors: true,
            sharding: None,
            base_bytes: None,
            step_traffic: None,
            peak_bytes: None,
        };
        Spec { data: vec![TEXT.into()], sessions: vec![session], ..run.spec }
    }

    #[test]
    fn only_valid_runs_are_read() {
        let run_json = serde_json::to_vec_pretty(&description()).unwrap();
        let metrics = line(0, "1", 1.0);
        read_run(&run_json, metrics.as_bytes()).unwrap();
        assert!(read_run(b"{}", metrics.as_bytes()).is_err());
        run(b"", b"");
    }
}
