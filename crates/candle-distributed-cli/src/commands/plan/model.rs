//! Readers of model descriptions: safetensors headers, indices and manifests.

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
};

use candle_distributed::{
    finetune::{Folder, run::model_folder},
    plan::{self, ParameterInfo, ShardingPlan, source, support},
    types::human::Printable,
};

use crate::{
    error::{Error, ErrorKind, Result, WithHint},
    hint, input,
};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Reads the parameters of the model at `path`, a file or a folder.
pub(crate) fn read(path: &Path) -> Result<Vec<ParameterInfo>> {
    read_by_name(path).map_err(|error| match *error.kind {
        ErrorKind::Read { .. } => error.with_hint(hint::MODEL),
        // Other errors are about the content of a file of the right kind.
        _ => error,
    })
}

fn read_by_name(path: &Path) -> Result<Vec<ParameterInfo>> {
    if path.is_dir() {
        let path = model_folder(path)?;
        let [index, weights, config] = [INDEX, SINGLE_FILE, CONFIG].map(|name| path.join(name));
        return match (index.exists(), weights.exists() || !config.exists()) {
            (true, _) => read_index(&index),
            (false, true) => read_safetensors(&weights),
            (false, false) => Ok(Folder::parameters(&path)?),
        };
    }
    match path.to_string_lossy() {
        name if name.ends_with(".safetensors") => read_safetensors(path),
        name if name.ends_with(".safetensors.index.json") => read_index(path),
        _ => in_file(path, source::from_manifest(&input::read_file(path)?)),
    }
}

/// Reads a plan written by `plan --format json`.
pub(super) fn read_plan(path: &Path) -> Result<ShardingPlan> {
    input::read_json(path, "a plan").with_hint(hint::PLAN)
}

fn read_index(path: &Path) -> Result<Vec<ParameterInfo>> {
    let text = input::read_text(open(path)?, path)?;
    let parameters = source::from_index(&text, |file| read_safetensors(&path.with_file_name(file)));
    // Errors in the listed files already name those files.
    parameters.map_err(|error: Error| error.in_model(path))
}

fn read_safetensors(path: &Path) -> Result<Vec<ParameterInfo>> {
    let mut file = open(path)?;
    let mut bytes = Vec::new();
    read_up_to(support::PREFIX_LEN, &mut file, path, &mut bytes)?;
    // `from_safetensors` rejects a shorter file below.
    if let Ok(prefix) = <[u8; 8]>::try_from(&bytes[..]) {
        let header_len = in_file(path, support::header_len(prefix))?;
        read_up_to(header_len, &mut file, path, &mut bytes)?;
    }
    in_file(path, source::from_safetensors(&bytes))
}

/// Opens the file at `path`. Rejects pipes, which could block forever.
fn open(path: &Path) -> Result<File> {
    let metadata = fs::metadata(path).map_err(|source| Error::read(path, source))?;
    if !metadata.is_file() {
        return Err(Error::usage(format!("{} is not a file", Printable(path.display()))));
    }
    input::open(path)
}

/// Appends up to `n_bytes` from the file at `path` to `bytes`.
fn read_up_to(n_bytes: u64, file: &mut File, path: &Path, bytes: &mut Vec<u8>) -> Result<()> {
    file.take(n_bytes).read_to_end(bytes).map_err(|source| Error::read(path, source))?;
    Ok(())
}

/// Adds the path of the model to an error of the planner.
pub(super) fn in_file<T>(path: &Path, result: Result<T, plan::Error>) -> Result<T> {
    result.map_err(|error| Error::from(error).in_model(path))
}
