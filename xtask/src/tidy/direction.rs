//! Rules about which crate may stand on which: the arrows of ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Violation;
use crate::workspace::{Graph, Package, Workspace};

/// These must build on a machine, and for a platform, that could never run a model.
const WITHOUT_CANDLE: [&str; 4] = ["core-types", "dist-sampler", "dyn-batch", "fsdp-plan"];

/// These meet through slices and plain data in the caller's hands.
const SIBLINGS: [&str; 4] = ["dist-sampler", "dyn-batch", "fsdp-plan", "pmap-mesh"];

/// Every rule.
pub(super) fn check(workspace: &Workspace) -> Vec<Violation> {
    let mut violations = candle(workspace);
    violations.extend(workspace.packages.iter().flat_map(siblings));
    violations
}

/// Which candle-free crates reach candle, and over which way.
fn candle(workspace: &Workspace) -> Vec<Violation> {
    let graph = with_optional(workspace);
    let free =
        workspace.packages.iter().filter(|package| WITHOUT_CANDLE.contains(&package.name.as_str()));
    let reached =
        free.filter_map(|package| Some((package, way(&graph, &package.name, "candle-core")?)));
    reached
        .map(|(package, way)| violation(package, format!("reaches candle: {}", way.join(" -> "))))
        .collect()
}

/// The resolved edges, and those that a feature of ours could add although nobody has switched it
/// on; without the one that makes tensors of batches.
fn with_optional(workspace: &Workspace) -> Graph {
    let mut graph = workspace.graph.clone();
    for package in &workspace.packages {
        let edges = graph.entry(package.name.clone()).or_default();
        let normal = package.dependencies.iter().filter(|dependency| dependency.normal);
        edges.extend(normal.map(|dependency| dependency.name.clone()));
        if package
            .dependencies
            .iter()
            .any(|edge| edge.optional && makes_tensors(package, &edge.name))
        {
            edges.remove("candle-core");
        }
    }
    graph
}

fn makes_tensors(package: &Package, dependency: &str) -> bool {
    (package.name.as_str(), dependency) == ("dyn-batch", "candle-core")
        && enabled_by(package, dependency).eq(["candle"])
}

/// The features that switch on an optional dependency.
fn enabled_by<'a>(package: &'a Package, dependency: &str) -> impl Iterator<Item = &'a String> {
    let dependency = format!("dep:{dependency}");
    package
        .features
        .iter()
        .filter(move |(_, enables)| enables.contains(&dependency))
        .map(|(name, _)| name)
}

/// The page that says what a user of the umbrella gets beyond candle's own dependencies.
pub(super) const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// Which packages the umbrella brings beyond candle's own that the page does not name.
pub(super) fn unnamed(workspace: &Workspace, page: &str) -> Vec<Violation> {
    let of_candle = reachable(&workspace.graph, "candle-nn");
    let ours: BTreeSet<&str> =
        workspace.packages.iter().map(|package| package.name.as_str()).collect();
    let brought = reachable(&workspace.graph, "candle-distributed").into_iter();
    let extra = brought.filter(|name| !of_candle.contains(name) && !ours.contains(name));
    let unnamed = extra.filter(|name| !page.contains(&format!("`{name}`")));
    let rule = |name| {
        format!(
            "`candle-distributed` brings `{name}`, which candle does not, and this page does not name it"
        )
    };
    unnamed.map(|name| Violation::new(ARCHITECTURE, 1, rule(name))).collect()
}

/// A package and everything it stands on.
fn reachable<'a>(graph: &'a Graph, from: &'a str) -> BTreeSet<&'a str> {
    let (mut reached, mut queue) = (BTreeSet::from([from]), VecDeque::from([from]));
    while let Some(name) = queue.pop_front() {
        queue.extend(
            graph
                .get(name)
                .into_iter()
                .flatten()
                .map(String::as_str)
                .filter(|next| reached.insert(next)),
        );
    }
    reached
}

/// The shortest way from one package to another, both included.
fn way(graph: &Graph, from: &str, to: &str) -> Option<Vec<String>> {
    let mut came_from = BTreeMap::from([(from, from)]);
    let mut queue = VecDeque::from([from]);
    while let Some(name) = queue.pop_front().filter(|name| *name != to) {
        for next in graph.get(name).into_iter().flatten() {
            came_from.entry(next).or_insert_with(|| {
                queue.push_back(next);
                name
            });
        }
    }
    came_from.contains_key(to).then(|| walk_back(&came_from, to))
}

fn walk_back(came_from: &BTreeMap<&str, &str>, to: &str) -> Vec<String> {
    let previous = |name: &&str| came_from.get(name).copied().filter(|previous| previous != name);
    let mut way: Vec<_> = std::iter::successors(Some(to), previous).map(str::to_owned).collect();
    way.reverse();
    way
}

/// Which siblings a sibling depends on, for tests or not; only the mesh may read a plan, behind its
/// feature.
fn siblings(package: &Package) -> Vec<Violation> {
    let is_sibling = |name: &str| SIBLINGS.contains(&name);
    let edges = package
        .dependencies
        .iter()
        .filter(|edge| is_sibling(&package.name) && is_sibling(&edge.name));
    let forbidden = edges.filter(|edge| !(edge.optional && reads_a_plan(package, &edge.name)));
    forbidden
        .map(|edge| violation(package, format!("depends on its sibling `{}`", edge.name)))
        .collect()
}

fn reads_a_plan(package: &Package, dependency: &str) -> bool {
    (package.name.as_str(), dependency) == ("pmap-mesh", "fsdp-plan")
        && enabled_by(package, dependency).eq(["plan"])
}

fn violation(package: &Package, rule: String) -> Violation {
    Violation::new(&format!("{}/Cargo.toml", package.dir), 1, rule)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, edges: &[(&str, bool, bool)], features: &[(&str, &str)]) -> Package {
        let edge = |&(name, optional, normal): &(&str, bool, bool)| Dependency {
            name: name.to_owned(),
            optional,
            normal,
            ..Dependency::default()
        };
        let feature = |&(name, enables): &(&str, &str)| (name.to_owned(), vec![enables.to_owned()]);
        Package {
            name: name.to_owned(),
            dependencies: edges.iter().map(edge).collect(),
            features: features.iter().map(feature).collect(),
            ..Package::default()
        }
    }

    /// The rules that `package` breaks where `helper` stands on candle.
    fn rules(package: Package) -> Vec<String> {
        let graph = Graph::from([("helper".to_owned(), ["candle-core".to_owned()].into())]);
        let workspace = Workspace { packages: vec![package], graph, target_dir: PathBuf::new() };
        check(&workspace).into_iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn what_the_umbrella_brings_must_be_named() {
        let edge = |from: &str, to: &[&str]| {
            (from.to_owned(), to.iter().map(ToString::to_string).collect())
        };
        let graph = Graph::from([
            edge("candle-nn", &["candle-core"]),
            edge("candle-distributed", &["mesh", "candle-nn"]),
            edge("mesh", &["candle-core", "pins", "tables"]),
            edge("tables", &["widths"]),
        ]);
        let workspace = Workspace {
            packages: vec![package("mesh", &[], &[])],
            graph,
            target_dir: PathBuf::new(),
        };
        let rules = |page| {
            unnamed(&workspace, page)
                .into_iter()
                .map(|violation| violation.rule)
                .collect::<Vec<_>>()
        };
        // The umbrella is a package of ours in the real workspace.
        let missing = rules("`candle-distributed` `pins` `tables`");
        assert_eq!(missing.len(), 1);
        assert!(missing[0].contains("`widths`"));
        assert!(rules("`candle-distributed` `pins` `tables` `widths`").is_empty());
    }

    #[test]
    fn a_way_to_candle_is_found_over_other_packages_and_behind_features() {
        let expected = ["reaches candle: fsdp-plan -> helper -> candle-core"];
        assert_eq!(rules(package("fsdp-plan", &[("helper", false, true)], &[])), expected);
        assert_eq!(rules(package("fsdp-plan", &[("helper", true, true)], &[])), expected);
        assert!(rules(package("fsdp-plan", &[("helper", false, false)], &[])).is_empty());
        assert!(rules(package("pmap-mesh", &[("candle-core", false, true)], &[])).is_empty());
    }

    #[test]
    fn batches_may_become_tensors_behind_their_feature_only() {
        let reaches = ["reaches candle: dyn-batch -> candle-core"];
        let tensors = ("candle", "dep:candle-core");
        assert!(rules(package("dyn-batch", &[("candle-core", true, true)], &[tensors])).is_empty());
        assert_eq!(rules(package("dyn-batch", &[("candle-core", false, true)], &[])), reaches);
        assert_eq!(
            rules(package("dyn-batch", &[("candle-core", true, true)], &[("default", tensors.1)])),
            reaches
        );
        assert_eq!(
            rules(package("fsdp-plan", &[("candle-core", true, true)], &[tensors])).len(),
            1
        );
    }

    #[test]
    fn an_edge_between_siblings_is_found_even_if_for_tests_only() {
        let expected = ["depends on its sibling `dist-sampler`"];
        for (optional, normal) in [(false, true), (true, true), (false, false)] {
            assert_eq!(
                rules(package("dyn-batch", &[("dist-sampler", optional, normal)], &[])),
                expected
            );
        }
        assert!(
            rules(package("candle-distributed", &[("dist-sampler", false, true)], &[])).is_empty()
        );
    }

    #[test]
    fn only_the_mesh_reads_a_plan_and_only_behind_its_feature() {
        let optional = [("fsdp-plan", true, true)];
        assert!(rules(package("pmap-mesh", &optional, &[("plan", "dep:fsdp-plan")])).is_empty());
        assert_eq!(rules(package("pmap-mesh", &optional, &[("other", "dep:fsdp-plan")])).len(), 1);
        assert_eq!(rules(package("pmap-mesh", &[("fsdp-plan", false, true)], &[])).len(), 1);
        assert_eq!(rules(package("dyn-batch", &optional, &[("plan", "dep:fsdp-plan")])).len(), 1);
    }

    #[test]
    fn the_way_shown_is_the_shortest() {
        let edge = |from: &str, to: &[&str]| {
            (from.to_owned(), to.iter().map(ToString::to_string).collect())
        };
        let graph =
            Graph::from([edge("a", &["b", "c"]), edge("b", &["a", "c"]), edge("c", &["d"])]);
        assert_eq!(way(&graph, "a", "d"), Some(["a", "c", "d"].map(str::to_owned).to_vec()));
        assert_eq!(way(&graph, "d", "a"), None);
    }
}
