//! Rules about which crate may stand on which, as far as `deny.toml` cannot state them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cargo_metadata::{DependencyKind, Metadata, Package};

use crate::{tidy::Violation, workspace};

/// What the mesh runs is any function on tensors: layers, plans and files are its users' business.
const NOT_OF_THE_MESH: [&str; 2] = ["candle-nn", "fsdp-plan"];

/// What a mesh may need behind a feature alone: processes over NCCL meet by files.
const OPTIONAL_IN_THE_MESH: [&str; 2] = ["serde", "serde_json"];

/// The page that says what a user of the umbrella gets beyond candle's own dependencies.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// Every rule; `read` returns the text of a file.
pub(super) fn check(metadata: &Metadata, read: &dyn Fn(&str) -> Option<String>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for package in workspace::crates(metadata) {
        violations.extend(direct(package));
    }
    match read(ARCHITECTURE) {
        Some(page) => violations.extend(unnamed(&Graph::new(metadata), &page)),
        None => violations.push(Violation::new(ARCHITECTURE, 1, "no such file")),
    }
    violations
}

/// The dependencies of a package that it must do without, unless a rule says otherwise behind whatever
/// feature.
fn direct(package: &Package) -> Vec<Violation> {
    let normal = package.dependencies.iter().filter(|edge| edge.kind == DependencyKind::Normal);
    let rules = normal.filter_map(|edge| match (package.name.as_str(), edge.name.as_str()) {
        ("pmap-mesh", name) if NOT_OF_THE_MESH.contains(&name) => {
            Some(format!("the mesh does without `{name}`"))
        }
        ("pmap-mesh", name) if OPTIONAL_IN_THE_MESH.contains(&name) && !edge.optional => {
            Some(format!("the mesh does without `{name}` unless a feature asks for it"))
        }
        ("dyn-batch", "candle-core") if !makes_tensors(package) => {
            Some("batches become tensors behind the feature `candle` alone".to_owned())
        }
        _ => None,
    });
    let manifest = format!("{}/Cargo.toml", workspace::folder(package));
    rules.map(|rule| Violation::new(&manifest, 1, rule)).collect()
}

/// Whether candle is optional, and one feature alone brings it.
fn makes_tensors(package: &Package) -> bool {
    let brings = |enables: &Vec<String>| enables.iter().any(|name| name.contains("candle-core"));
    let features = package.features.iter().filter(|(_, enables)| brings(enables));
    features.map(|(name, _)| name).eq(["candle"])
}

/// Which package needs which others to build, by name; two versions of one package count as one.
struct Graph {
    edges: BTreeMap<String, BTreeSet<String>>,
    ours: BTreeSet<String>,
}

impl Graph {
    fn new(metadata: &Metadata) -> Self {
        let nodes = metadata.resolve.iter().flat_map(|resolve| &resolve.nodes);
        let name = |id| metadata[id].name.to_string();
        let edges = nodes.map(|node| {
            let normal = node.deps.iter().filter(|edge| {
                edge.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal)
            });
            (name(&node.id), normal.map(|edge| name(&edge.pkg)).collect())
        });
        let ours = metadata.workspace_packages();
        Self {
            edges: edges.collect(),
            ours: ours.iter().map(|package| package.name.to_string()).collect(),
        }
    }

    /// A package and everything it stands on.
    fn reachable<'a>(&'a self, from: &'a str) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::from([from]);
        let mut queue = VecDeque::from([from]);
        while let Some(name) = queue.pop_front() {
            let needed = self.edges.get(name).into_iter().flatten().map(String::as_str);
            queue.extend(needed.filter(|needed| reached.insert(needed)));
        }
        reached
    }
}

/// Which packages the umbrella brings beyond candle's own that the page does not name.
fn unnamed(graph: &Graph, page: &str) -> Vec<Violation> {
    let of_candle = graph.reachable("candle-nn");
    let brought = graph.reachable("candle-distributed").into_iter();
    let extra = brought.filter(|name| !of_candle.contains(name) && !graph.ours.contains(*name));
    let unnamed = extra.filter(|name| !page.contains(&format!("`{name}`")));
    let rule = |name| {
        format!(
            "`candle-distributed` brings `{name}`, which candle does not; this page must name it"
        )
    };
    unnamed.map(|name| Violation::new(ARCHITECTURE, 1, rule(name))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A package with optional dependencies, and features that switch on what they are given with.
    fn package(name: &str, edges: &[&str], features: &[(&str, &str)]) -> Package {
        let edges = edges.iter().map(|edge| {
            json!({ "name": edge, "req": "*", "kind": null, "optional": true,
                    "uses_default_features": true, "features": [], "target": null })
        });
        let features = features.iter().map(|&(name, enables)| (name.to_owned(), json!([enables])));
        let manifest = workspace::read().unwrap().workspace_root.join("crates/a/Cargo.toml");
        let package = json!({
            "name": name, "version": "0.1.0", "id": "a", "manifest_path": manifest, "targets": [],
            "dependencies": edges.collect::<Vec<_>>(),
            "features": features.collect::<serde_json::Map<_, _>>(),
        });
        serde_json::from_value(package).unwrap()
    }

    #[test]
    fn the_mesh_knows_no_layers_plans_or_files() {
        for name in NOT_OF_THE_MESH {
            assert_eq!(
                direct(&package("pmap-mesh", &["candle-core", name], &[])).len(),
                1,
                "{name}"
            );
            assert!(direct(&package("dist-train", &[name], &[])).is_empty(), "{name}");
        }
    }

    #[test]
    fn batches_may_become_tensors_behind_their_feature_only() {
        let found = |features| direct(&package("dyn-batch", &["candle-core"], features)).len();
        assert_eq!(found(&[("candle", "dep:candle-core")]), 0);
        assert_eq!(found(&[]), 1);
        assert_eq!(found(&[("default", "dep:candle-core")]), 1);
        assert_eq!(found(&[("candle", "dep:candle-core"), ("cuda", "candle-core/cuda")]), 1);
    }

    #[test]
    fn what_the_umbrella_brings_must_be_named() {
        let edge = |from: &str, to: &[&str]| {
            (from.to_owned(), to.iter().map(ToString::to_string).collect())
        };
        let edges = BTreeMap::from([
            edge("candle-nn", &["candle-core"]),
            edge("candle-distributed", &["mesh", "candle-nn"]),
            edge("mesh", &["candle-core", "pins", "tables"]),
            edge("tables", &["widths"]),
        ]);
        let ours = ["candle-distributed", "mesh"].map(str::to_owned).into();
        let graph = Graph { edges, ours };
        let rules = |page| {
            unnamed(&graph, page).into_iter().map(|violation| violation.rule).collect::<Vec<_>>()
        };
        let missing = rules("`pins` `tables`");
        assert_eq!(missing.len(), 1);
        assert!(missing[0].contains("`widths`"));
        assert!(rules("`pins` `tables` `widths`").is_empty());
    }
}
