//! Circles in a graph of files or folders.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The first import from each file to each other file, or from folder to folder.
pub(super) type Graph = BTreeMap<String, BTreeMap<String, Import>>;

/// An import, and its place.
#[derive(Clone)]
pub(super) struct Import {
    pub(super) file: String,
    pub(super) line: usize,
    pub(super) path: String,
}

/// Files that reach each other.
pub(super) struct Circle {
    /// The shortest way around: each file, with its import from the next one.
    pub(super) way: Vec<(String, Import)>,
    /// All that reach each other.
    pub(super) files: Vec<String>,
}

/// All circles; those that share a file are one.
pub(super) fn all(graph: &Graph) -> Vec<Circle> {
    let mut circles: Vec<Circle> = Vec::new();
    for start in graph.keys() {
        let is_known = circles.iter().any(|circle| circle.files.contains(start));
        if !is_known && let Some(files) = tangle(graph, start) {
            let ways = files.iter().filter_map(|file| around(graph, file));
            circles
                .extend(ways.min_by_key(Vec::len).map(|way| Circle { way, files: files.clone() }));
        }
    }
    circles
}

/// The files that reach `start` and are reached from it, if there are any besides it.
fn tangle(graph: &Graph, start: &str) -> Option<Vec<String>> {
    let reached = reached(graph, start);
    let returns = |file: &&&str| self::reached(graph, file).contains_key(start);
    let files: BTreeSet<_> = reached.keys().filter(returns).map(ToString::to_string).collect();
    (files.len() > 1).then(|| files.into_iter().collect())
}

/// The files that `start` reaches, each with the one before it on a shortest way.
fn reached<'a>(graph: &'a Graph, start: &'a str) -> BTreeMap<&'a str, &'a str> {
    let mut reached = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(file) = queue.pop_front() {
        for next in graph.get(file).into_iter().flat_map(BTreeMap::keys) {
            reached.entry(next.as_str()).or_insert_with(|| {
                queue.push_back(next);
                file
            });
        }
    }
    reached
}

/// The shortest way from a file back to it.
fn around(graph: &Graph, start: &str) -> Option<Vec<(String, Import)>> {
    let reached = reached(graph, start);
    let mut way = Vec::new();
    let mut file = start;
    loop {
        let before = *reached.get(file)?;
        way.push((before.to_owned(), graph[before][file].clone()));
        file = before;
        if file == start {
            break;
        }
    }
    way.reverse();
    Some(way)
}
