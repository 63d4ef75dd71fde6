//! What the workspace consists of: its packages as cargo sees them, and its files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::cmd::{Call, Result};

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// Every file below `dir` in the order of its path, without hidden folders and build outputs.
///
/// A folder that does not exist has no files.
pub(crate) fn files_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if dir.is_dir() {
        collect_files(dir, &mut files)?;
    }
    files.sort();
    Ok(files)
}

fn collect_files(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        match entry.file_type()?.is_dir() {
            true if name == "target" || name.to_string_lossy().starts_with('.') => {}
            true => collect_files(&entry.path(), files)?,
            false => files.push(entry.path()),
        }
    }
    Ok(())
}

/// Which package needs which others to build, by name; two versions of one package count as one.
pub(crate) type Graph = BTreeMap<String, BTreeSet<String>>;

/// The packages of the workspace and what they stand on.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The members.
    pub(crate) packages: Vec<Package>,
    /// Normal dependencies of all packages, foreign ones included.
    pub(crate) graph: Graph,
    /// The folder for everything built.
    pub(crate) target_dir: PathBuf,
}

/// A member of the workspace.
#[derive(Debug, Default)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// The oldest Rust that it promises to build with.
    pub(crate) rust_version: String,
    /// Whether a registry may have it.
    pub(crate) is_published: bool,
    /// Whether other crates can use it; a program alone cannot be used.
    pub(crate) is_library: bool,
    /// Its folder, relative to the root, with `/` on every system.
    pub(crate) dir: String,
    /// What each feature switches on.
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) dependencies: Vec<Dependency>,
}

/// A dependency as the manifest states it.
#[derive(Debug, Default)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The versions it accepts.
    pub(crate) requirement: String,
    pub(crate) optional: bool,
    /// Whether it is one of `[dependencies]`, not for tests or build scripts only.
    pub(crate) normal: bool,
}

impl Workspace {
    /// Asks cargo about this workspace on this machine.
    pub(crate) fn read() -> Result<Self> {
        let json =
            Call::cargo("metadata --format-version 1 --filter-platform host-tuple").read()?;
        Ok(Self::from_metadata(&serde_json::from_str(&json)?))
    }

    fn from_metadata(metadata: &Value) -> Self {
        let packages = items(&metadata["packages"]);
        let members = packages.filter(|package| package["source"].is_null());
        Self {
            packages: members.map(|package| Package::from_metadata(package, metadata)).collect(),
            graph: resolved(metadata),
            target_dir: text(&metadata["target_directory"]).into(),
        }
    }

    /// The packages that users depend on: those under `crates/`.
    pub(crate) fn crates(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| package.dir.starts_with("crates/"))
    }
}

impl Package {
    fn from_metadata(package: &Value, metadata: &Value) -> Self {
        let manifest = text(&package["manifest_path"]);
        let dir =
            manifest.trim_start_matches(&text(&metadata["workspace_root"])).replace('\\', "/");
        Self {
            name: text(&package["name"]),
            version: text(&package["version"]),
            rust_version: text(&package["rust_version"]),
            // A list names the registries; without one any will do.
            is_published: package["publish"]
                .as_array()
                .is_none_or(|registries| !registries.is_empty()),
            is_library: items(&package["targets"])
                .flat_map(|target| items(&target["kind"]))
                .any(|kind| kind == "lib"),
            dir: dir.trim_start_matches('/').trim_end_matches("/Cargo.toml").to_owned(),
            features: features(&package["features"]),
            dependencies: items(&package["dependencies"]).map(Dependency::from_metadata).collect(),
        }
    }
}

impl Dependency {
    fn from_metadata(dependency: &Value) -> Self {
        Self {
            name: text(&dependency["name"]),
            requirement: text(&dependency["req"]),
            optional: dependency["optional"] == true,
            normal: dependency["kind"].is_null(),
        }
    }
}

/// The edges that cargo resolved for the features in use.
fn resolved(metadata: &Value) -> Graph {
    let name_and_id = |package: &Value| (text(&package["id"]), text(&package["name"]));
    let names: BTreeMap<_, _> = items(&metadata["packages"]).map(name_and_id).collect();
    let name = |id: &Value| names.get(&text(id)).cloned().unwrap_or_default();
    let mut graph = Graph::new();
    for node in items(&metadata["resolve"]["nodes"]) {
        let normal = items(&node["deps"])
            .filter(|edge| items(&edge["dep_kinds"]).any(|kind| kind["kind"].is_null()));
        graph.entry(name(&node["id"])).or_default().extend(normal.map(|edge| name(&edge["pkg"])));
    }
    graph
}

fn features(features: &Value) -> BTreeMap<String, Vec<String>> {
    let entry =
        |(name, enables): (&String, &Value)| (name.clone(), items(enables).map(text).collect());
    features.as_object().into_iter().flatten().map(entry).collect()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata_is_read_by_the_names_of_packages() {
        let metadata = json!({
            "workspace_root": "C:\\house",
            "target_directory": "/t",
            "packages": [
                { "name": "a", "id": "path#a", "source": null, "manifest_path": "C:\\house\\crates\\a\\Cargo.toml",
                  "features": { "x": ["dep:b"] }, "publish": [], "targets": [{ "kind": ["test"] }, { "kind": ["lib"] }],
                  "dependencies": [{ "name": "b", "kind": null, "optional": true }, { "name": "c", "kind": "dev" }] },
                { "name": "b", "id": "registry#b", "source": "registry" },
            ],
            "resolve": { "nodes": [{ "id": "path#a", "deps": [
                { "pkg": "registry#b", "dep_kinds": [{ "kind": "dev" }, { "kind": null }] },
                { "pkg": "path#a", "dep_kinds": [{ "kind": "dev" }] },
            ] }] },
        });
        let workspace = Workspace::from_metadata(&metadata);
        let package = workspace.crates().next().unwrap();
        assert_eq!((package.name.as_str(), package.dir.as_str()), ("a", "crates/a"));
        assert_eq!(package.features["x"], ["dep:b"]);
        assert_eq!((package.is_published, package.is_library), (false, true));
        let kinds: Vec<_> = package.dependencies.iter().map(|d| (d.optional, d.normal)).collect();
        assert_eq!(kinds, [(true, true), (false, false)]);
        assert_eq!(workspace.packages.len(), 1);
        assert_eq!(workspace.graph, Graph::from([("a".into(), ["b".to_owned()].into())]));
    }
}
