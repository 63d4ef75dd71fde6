//! Descriptions of models, in whatever kind of file they lie.

use std::{io::Read, path::Path};

use candle_distributed::plan::{self, ParameterInfo, ShardingPlan, source};

use crate::{
    error::{Error, Result, WithHint},
    hint, input,
};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The parameters of whatever kind of model lies at `path`.
pub(crate) fn read(path: &Path) -> Result<Vec<ParameterInfo>> {
    let parameters = read_by_name(path);
    // Other faults lie within a file of the right kind.
    if let Err(Error::Read { .. }) = parameters {
        parameters.with_hint(hint::MODEL)
    } else {
        parameters
    }
}

fn read_by_name(path: &Path) -> Result<Vec<ParameterInfo>> {
    if path.is_dir() {
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
    let text = input::read_file(path)?;
    // The index itself is at fault for what no other file is.
    source::from_index(&text, |file| read_safetensors(&path.with_file_name(file))).map_err(
        |error| match error {
            Error::Plan(source) => Error::Model { path: path.into(), source },
            error => error,
        },
    )
}

fn read_safetensors(path: &Path) -> Result<Vec<ParameterInfo>> {
    let mut file = input::open(path)?;
    let mut bytes = Vec::new();
    let failed = |source| Error::Read { path: path.into(), source };
    file.by_ref().take(source::PREFIX_LEN).read_to_end(&mut bytes).map_err(failed)?;
    if let Ok(prefix) = <[u8; 8]>::try_from(&bytes[..]) {
        let header_len = in_file(path, source::header_len(prefix))?;
        file.take(header_len).read_to_end(&mut bytes).map_err(failed)?;
    }
    in_file(path, source::from_safetensors(&bytes))
}

/// Names the file in which a model's description was found wanting.
pub(super) fn in_file<T>(path: &Path, result: Result<T, plan::Error>) -> Result<T> {
    result.map_err(|source| Error::Model { path: path.into(), source })
}
