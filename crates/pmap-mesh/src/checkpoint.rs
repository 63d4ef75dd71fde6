//! Sharded variables on disk: one safetensors file for each slot.

use std::{
    fs,
    path::{Path, PathBuf},
};

use candle_core::{Device, safetensors::Load};
use fsdp_plan::ShardingPlan;
use safetensors::SafeTensors;

use crate::{
    assembly::Assembly,
    error::{Error, Result},
    mesh::DeviceMesh,
    sharded_vars::ShardedVars,
};

impl ShardedVars {
    /// Writes one file for each slot of the first shard group into the folder `path`, which is made if it is not there:
    /// `shard-00001-of-00004.safetensors` and so on.
    ///
    /// An entry is a run of a parameter's items, named `{parameter}@{first item}`. A file is written under another name
    /// first, so that one that is there is replaced whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::File`] with the path and what the system says.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let folder = path.as_ref();
        fs::create_dir_all(folder).map_err(|source| file_error(folder, source))?;
        let files = self.plan().shard_group().as_usize();
        for slot in 0..files {
            let path = folder.join(format!("shard-{:05}-of-{files:05}.safetensors", slot + 1));
            let unfinished = path.with_extension("unfinished");
            let entries = self.parts(slot).iter().map(|part| {
                Ok((format!("{}@{}", self.name(part.param_idx), part.start), part.var.to_device(&Device::Cpu)?))
            });
            let entries = entries.collect::<candle_core::Result<Vec<_>>>().map_err(Error::Assemble)?;
            safetensors::serialize_to_file(entries, None, &unfinished)
                .map_err(|source| file_error(&unfinished, source))?;
            fs::rename(&unfinished, &path).map_err(|source| file_error(&path, source))?;
        }
        Ok(())
    }

    /// Reads what [`save`](Self::save) wrote, under any plan, and cuts it as `plan` says: for another number of slots,
    /// another strategy.
    ///
    /// Files are read one after the other; memory holds one of them and the new parts.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the folder holds no such files or one cannot be read, [`Error::Incomplete`] if items are
    /// missing, and those of [`shard`](Self::shard).
    pub fn load(mesh: &DeviceMesh, plan: &ShardingPlan, path: impl AsRef<Path>) -> Result<Self> {
        let mut assembly = Assembly::new(mesh, plan)?;
        for path in files(path.as_ref())? {
            let bytes = fs::read(&path).map_err(|source| file_error(&path, source))?;
            let file = SafeTensors::deserialize(&bytes).map_err(|source| file_error(&path, source))?;
            for (key, view) in file.iter() {
                let Some((name, start)) = parse_key(key) else { continue };
                let Some(param_idx) = plan.index_of(name) else { continue };
                let items = view.load(&Device::Cpu).and_then(|items| items.flatten_all()).map_err(Error::Assemble)?;
                assembly.add(param_idx, start, &items)?;
            }
        }
        Self::assembled(mesh, plan, assembly)
    }
}

/// The files of a checkpoint in order; all files of one number, and at least one.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|source| file_error(folder, source))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(|source| file_error(folder, source)));
    let mut paths = paths.collect::<Result<Vec<_>>>()?;
    paths.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("shard-") && name.ends_with(".safetensors")
    });
    paths.sort();
    if paths.is_empty() {
        return Err(file_error(folder, "there are no files named shard-*.safetensors"));
    }
    Ok(paths)
}

fn parse_key(key: &str) -> Option<(&str, usize)> {
    let (name, start) = key.rsplit_once('@')?;
    Some((name, start.parse().ok()?))
}

fn file_error(path: &Path, reason: impl std::fmt::Display) -> Error {
    Error::File { path: path.to_owned(), reason: reason.to_string() }
}
