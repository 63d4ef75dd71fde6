//! Reading the parameters of a model from the kinds of file that describe one.

use std::{
    fs::{self, File},
    io::Read,
    path::Path,
};

use candle_distributed::{
    finetune::run::model_folder,
    plan::{self, ParameterInfo, ShardingPlan, source, support},
    types::human::Printable,
};

use crate::{
    error::{Error, ErrorKind, Result, WithHint},
    hint, input,
};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The parameters of the model at `path`, a file or a folder.
pub(crate) fn read(path: &Path) -> Result<Vec<ParameterInfo>> {
    read_by_name(path).map_err(|error| match *error.kind {
        ErrorKind::Read { .. } => error.hinted(hint::MODEL),
        // Any other fault is inside a file of the right kind.
        _ => error,
    })
}

fn read_by_name(path: &Path) -> Result<Vec<ParameterInfo>> {
    if path.is_dir() {
        let path = model_folder(path)?;
        let index = path.join(INDEX);
        return if index.exists() {
            read_index(&index)
        } else {
            read_safetensors(&path.join(SINGLE_FILE))
        };
    }
    match path.to_string_lossy() {
        name if name.ends_with(".safetensors") => read_safetensors(path),
        name if name.ends_with(".safetensors.index.json") => read_index(path),
        _ => in_file(path, source::from_manifest(&input::read_file(path)?)),
    }
}

/// The plan that `plan --format json` wrote to `path`.
pub(super) fn read_plan(path: &Path) -> Result<ShardingPlan> {
    input::read_json(path, "a plan").with_hint(hint::PLAN)
}

fn read_index(path: &Path) -> Result<Vec<ParameterInfo>> {
    let text = input::read_text(open(path)?, path)?;
    let parameters = source::from_index(&text, |file| read_safetensors(&path.with_file_name(file)));
    // Faults of the files it lists already name those files.
    parameters.map_err(|error: Error| error.in_model(path))
}

fn read_safetensors(path: &Path) -> Result<Vec<ParameterInfo>> {
    let mut file = open(path)?;
    let mut bytes = Vec::new();
    read_up_to(support::PREFIX_LEN, &mut file, path, &mut bytes)?;
    // A shorter file is refused below, by the reader of headers.
    if let Ok(prefix) = <[u8; 8]>::try_from(&bytes[..]) {
        let header_len = in_file(path, support::header_len(prefix))?;
        read_up_to(header_len, &mut file, path, &mut bytes)?;
    }
    in_file(path, source::from_safetensors(&bytes))
}

/// The file at `path`, which must be one: a pipe in its place would be waited for.
fn open(path: &Path) -> Result<File> {
    let known = fs::metadata(path).map_err(|source| Error::read(path, source))?;
    if !known.is_file() {
        return Err(Error::usage(format!("{} is not a file", Printable(path.display()))));
    }
    input::open(path)
}

/// Adds the next `n_bytes` of the file at `path` to `bytes`, or as many as there are.
fn read_up_to(n_bytes: u64, file: &mut File, path: &Path, bytes: &mut Vec<u8>) -> Result<()> {
    file.take(n_bytes).read_to_end(bytes).map_err(|source| Error::read(path, source))?;
    Ok(())
}

/// Names the file whose model the planner refuses.
pub(super) fn in_file<T>(path: &Path, result: Result<T, plan::Error>) -> Result<T> {
    result.map_err(|error| Error::from(error).in_model(path))
}
