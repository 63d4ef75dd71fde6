//! Circles in a graph of files or folders.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The first import from each file to each other file, or from folder to folder.
pub(super) type Graph = BTreeMap<String, BTreeMap<String, ImportLine>>;

/// An import, and its place.
#[derive(Clone)]
pub(super) struct ImportLine {
    pub(super) file: String,
    pub(super) line: usize,
    pub(super) path: String,
}

/// Files that reach each other.
pub(super) struct ImportCircle {
    /// The shortest way around: each file, with its import from the next one.
    pub(super) way: Vec<(String, ImportLine)>,
    /// All that reach each other.
    pub(super) files: Vec<String>,
}

/// Returns all circles; circles that share a file are one.
pub(super) fn all(graph: &Graph) -> Vec<ImportCircle> {
    let mut circles: Vec<ImportCircle> = Vec::new();
    for start in graph.keys() {
        let is_known = circles.iter().any(|circle| circle.files.contains(start));
        if !is_known && let Some(files) = tangle(graph, start) {
            let ways = files.iter().filter_map(|file| shortest_circle(graph, file));
            circles.extend(
                ways.min_by_key(Vec::len).map(|way| ImportCircle { way, files: files.clone() }),
            );
        }
    }
    circles
}

/// Returns the files that are reachable from `start` in both directions, if there are any besides
/// it.
fn tangle(graph: &Graph, start: &str) -> Option<Vec<String>> {
    let reached = reached(graph, start);
    let files: BTreeSet<_> = reached
        .keys()
        .filter(|file| self::reached(graph, file).contains_key(start))
        .map(ToString::to_string)
        .collect();
    (files.len() > 1).then(|| files.into_iter().collect())
}

/// Returns the files reachable from `start`, each with its predecessor on a shortest path.
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

/// Returns the shortest path from a file back to it.
fn shortest_circle(graph: &Graph, start: &str) -> Option<Vec<(String, ImportLine)>> {
    let reached = reached(graph, start);
    let mut way = Vec::new();
    let mut file = start;
    loop {
        let previous = *reached.get(file)?;
        way.push((previous.to_owned(), graph[previous][file].clone()));
        file = previous;
        if file == start {
            break;
        }
    }
    way.reverse();
    Some(way)
}
