//! Our times beside those of published Python packages, measured one after the other in one run.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    path::Path,
    time::SystemTime,
};

use serde_json::Value;

use super::{estimates::measured, page::Table, ratio, time};
use crate::cmd::{Call, Result};

/// An operation of a peer, and the bench of ours that does the same.
struct Pair {
    what: &'static str,
    /// The Python module.
    peer: &'static str,
    /// A script of `benches/peers`, with its arguments.
    script: &'static str,
    /// What only the script's figure for this operation is called.
    figure: &'static str,
    /// The id of our bench.
    ours: &'static str,
    /// How often one pass of our bench does what the figure is for.
    times: u32,
}

const PAIRS: [Pair; 12] = [
    Pair {
        what: "a rank's epoch of 10 million, in torch's order",
        peer: "torch",
        script: "sampler.py --len 10000000 --only torch/epoch_shuffled",
        figure: "torch/epoch_shuffled",
        ours: "sampler/epoch/torch",
        times: 1,
    },
    Pair {
        what: "a rank's epoch of 10 million, streaming",
        peer: "torch",
        script: "sampler.py --len 10000000 --only torch/epoch_shuffled",
        figure: "torch/epoch_shuffled",
        ours: "sampler/epoch/streaming",
        times: 1,
    },
    Pair {
        what: "a rank's epoch of 10 million, shuffled exactly",
        peer: "numpy",
        script: "sampler.py --len 10000000 --only numpy/epoch_shuffled",
        figure: "numpy/epoch_shuffled",
        ours: "sampler/epoch/exact",
        times: 1,
    },
    Pair {
        what: "a rank's epoch of 10 million, shuffled exactly",
        peer: "spdl",
        script: "sampler.py --len 10000000 --only spdl/epoch_shuffled",
        figure: "spdl/epoch_shuffled",
        ours: "sampler/epoch/exact",
        times: 1,
    },
    Pair {
        what: "a million lengths, sorted and cut",
        peer: "fairseq",
        script: "batch.py --only fairseq",
        figure: "argsort, `batch_by_size_vec` 1000000",
        ours: "batch/plan/sorted_greedy/web_1M",
        times: 1,
    },
    Pair {
        what: "a million lengths, packed",
        peer: "axolotl",
        script: "batch.py --only groups",
        figure: "groups of 100000 1000000",
        ours: "batch/plan/pack_best_fit/web_1M",
        times: 1,
    },
    Pair {
        what: "DeepSeek-V3 on 16,384 ranks (the peer: on 8 devices)",
        peer: "accelerate",
        script: "plan.py device_map tests/fixtures/models/deepseek-v3.recipe.json",
        figure: "get_balanced_memory",
        ours: "plan/header_to_totals/row_ragged_45k_w16384",
        times: 1,
    },
    Pair {
        what: "a tiny function on 2 devices",
        peer: "jax",
        script: "mesh.py jax_call",
        figure: "jit(shard_map)/resident/2",
        ours: "mesh/call_tiny/2",
        times: 1,
    },
    Pair {
        what: "a sum of 4 KB over 2 devices",
        peer: "jax",
        script: "mesh.py jax_psum",
        figure: "input kept/4 KB",
        ours: "mesh/psum_2/4KB",
        times: PSUMS,
    },
    Pair {
        what: "a sum of 16 MB over 2 devices",
        peer: "jax",
        script: "mesh.py jax_psum",
        figure: "input kept/16 MB",
        ours: "mesh/psum_2/16MB",
        times: PSUMS,
    },
    Pair {
        what: "a sum of 4 KB over 2 devices",
        peer: "torch",
        script: "mesh.py gloo",
        figure: "gloo_all_reduce/4 KB",
        ours: "mesh/psum_2/4KB",
        times: PSUMS,
    },
    Pair {
        what: "a sum of 16 MB over 2 devices",
        peer: "torch",
        script: "mesh.py gloo",
        figure: "gloo_all_reduce/16 MB",
        ours: "mesh/psum_2/16MB",
        times: PSUMS,
    },
];

/// How many sums one pass of the bench makes.
const PSUMS: u32 = 101;

/// The settings that `docs/benchmarks.md` asks for: the length that the peers are given, and one thread for each device.
const SETTINGS: [(&str, &str); 3] =
    [("CANDLE_DISTRIBUTED_BENCH_LEN", "10000000"), ("CANDLE_NUM_THREADS", "1"), ("RAYON_NUM_THREADS", "1")];

/// Prints the version of the package that a module comes from, which may have none; fails if there is no such module.
const VERSION: &str = "import sys, importlib.util as u, importlib.metadata as m; name = sys.argv[1]; \
    u.find_spec(name) or sys.exit(1); found = m.packages_distributions().get(name); \
    print(m.version(found[0]) if found else '')";

/// Measures ours, then the peers that are installed.
pub(super) fn compare(filter: Option<&str>, home: &Path) -> Result<Table> {
    let python = env::var("PEERS_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let wanted: Vec<_> = PAIRS.iter().filter(|pair| filter.is_none_or(|text| pair.ours.contains(text))).collect();
    let peers: BTreeSet<_> = wanted.iter().map(|pair| pair.peer).collect();
    let versions: BTreeMap<_, _> =
        peers.into_iter().filter_map(|peer| Some((peer, version(&python, peer).ok()?))).collect();
    let (pairs, missing): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|pair| versions.contains_key(pair.peer));
    for peer in missing.iter().map(|pair| pair.peer).collect::<BTreeSet<_>>() {
        println!("{peer} is not installed for `{python}`, so it is left out; see benches/peers/README.md");
    }
    if pairs.is_empty() {
        return Err(format!("no peer is installed for `{python}`; PEERS_PYTHON names another interpreter").into());
    }
    let ours = our_medians(&pairs, home)?;
    let theirs = their_figures(&pairs, &python);
    let mut table = Table::new(
        "The peer's time over ours, one measured after the other.".into(),
        &["what", "our bench", "our time", "peer", "its time", "ratio"],
    );
    for pair in pairs {
        let (Some(ours), Some(theirs)) = (ours.get(pair.ours), figure(&theirs, pair)) else {
            println!("{}, {}: no figure, so there is no ratio", pair.peer, pair.what);
            continue;
        };
        let (ours, peer) = (ours / f64::from(pair.times), format!("{} {}", pair.peer, versions[pair.peer]));
        let row =
            [pair.what.to_owned(), format!("`{}`", pair.ours), time(ours), peer, time(theirs), ratio(theirs / ours)];
        table.add(row);
    }
    Ok(table)
}

fn version(python: &str, module: &str) -> Result<String> {
    Ok(Call::new(python, "-c").arg(VERSION).arg(module).read()?.trim().to_owned())
}

/// The median of one pass of each of our benches, in seconds, by its id.
fn our_medians(pairs: &[&Pair], home: &Path) -> Result<BTreeMap<String, f64>> {
    let start = SystemTime::now();
    command(pairs, home).run()?;
    measured(home, "new", start)?.iter().map(|bench| Ok((bench.id()?, bench.median("new")?))).collect()
}

/// The call that runs our halves of the pairs, and no other bench.
fn command(pairs: &[&Pair], home: &Path) -> Call {
    let ids: BTreeSet<_> = pairs.iter().map(|pair| pair.ours).collect();
    // An id begins with the name of its file.
    let files: BTreeSet<_> = ids.iter().filter_map(|id| id.split('/').next()).collect();
    let call = files.iter().fold(Call::cargo("bench -p benches"), |call, file| call.arg("--bench").arg(*file));
    let ids: Vec<_> = ids.into_iter().collect();
    let call = call.arg("--").arg(format!("^({})$", ids.join("|"))).env("CRITERION_HOME", home);
    SETTINGS.into_iter().fold(call, |call, (key, value)| call.env(key, value))
}

/// What each script printed. One that fails is told of, and leaves the others their figures.
fn their_figures<'a>(pairs: &[&'a Pair], python: &str) -> BTreeMap<&'a str, Vec<(String, f64)>> {
    let scripts: BTreeSet<_> = pairs.iter().map(|pair| pair.script).collect();
    let run = |script| match Call::new(python, &format!("benches/peers/{script}")).run_and_read() {
        Ok(text) => figures(&text),
        Err(error) => {
            println!("{error}");
            Vec::new()
        }
    };
    scripts.into_iter().map(|script| (script, run(script))).collect()
}

fn figure(theirs: &BTreeMap<&str, Vec<(String, f64)>>, pair: &Pair) -> Option<f64> {
    let found = theirs.get(pair.script)?.iter().find(|(name, _)| name.contains(pair.figure));
    found.map(|(_, seconds)| *seconds)
}

/// The figures that a script prints, by name and in seconds: as an object, as a table, or a line each.
fn figures(text: &str) -> Vec<(String, f64)> {
    match text.trim_start().chars().next() {
        Some('{') => figures_of_object(text),
        Some('|') => figures_of_table(text),
        _ => text.lines().filter_map(figure_of_line).collect(),
    }
}

fn figures_of_object(text: &str) -> Vec<(String, f64)> {
    let report: Value = serde_json::from_str(text).unwrap_or_default();
    let word = |result: &Value, key: &str| result[key].as_str().unwrap_or_default().to_owned();
    let figure = |result: &Value| {
        Some((format!("{}/{}", word(result, "peer"), word(result, "operation")), result["seconds"].as_f64()?))
    };
    report["results"].as_array().into_iter().flatten().filter_map(figure).collect()
}

/// The name of a figure is what stands before it in its row.
fn figures_of_table(text: &str) -> Vec<(String, f64)> {
    let mut rows = text.lines().map(|line| line.split('|').map(str::trim).skip(1).collect::<Vec<_>>());
    let head = rows.next().unwrap_or_default();
    let Some(column) = head.iter().position(|name| *name == "seconds") else { return Vec::new() };
    let figure = |row: Vec<&str>| Some((row.get(..column)?.join(" "), row.get(column)?.parse().ok()?));
    rows.filter_map(figure).collect()
}

/// `name: median µs (min)`.
fn figure_of_line(line: &str) -> Option<(String, f64)> {
    let (name, rest) = line.split_once(": ")?;
    let microseconds: f64 = rest.split_once(" µs")?.0.parse().ok()?;
    Some((name.to_owned(), microseconds / 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    fn check(text: &str, name: &str, seconds: f64) {
        let figures = figures(text);
        assert_eq!(figures.len(), 1, "{text}");
        assert_eq!(figures[0].0, name);
        assert!((figures[0].1 - seconds).abs() < 1e-12, "{text}");
    }

    #[test]
    fn figures_are_read_from_each_kind_of_output() {
        let object = r#"{ "results": [{ "peer": "torch", "operation": "epoch", "seconds": 1.5 }], "failed": [] }"#;
        check(object, "torch/epoch", 1.5);
        let table =
            "| peer | timed | seconds | peak GiB |\n| --- | --- | ---: | ---: |\n| a | f, 8 devices | 0.62 | 1 |\n";
        check(table, "a f, 8 devices", 0.62);
        check("jax/psum/input kept/1 MB/2: 140.0 µs (120.1), 7.49 GB/s\n", "jax/psum/input kept/1 MB/2", 140e-6);
        assert!(figures("nothing: to see\n").is_empty());
    }

    #[test]
    fn the_benches_of_the_pairs_are_run_and_no_others() {
        let pairs = [&PAIRS[0], &PAIRS[1], &PAIRS[7]];
        let shown = command(&pairs, Path::new("home")).to_string();
        let expected = "cargo bench -p benches --bench mesh --bench sampler -- \
            '^(mesh/call_tiny/2|sampler/epoch/streaming|sampler/epoch/torch)$'";
        assert!(shown.ends_with(expected), "{shown}");
    }

    #[test]
    fn pairs_name_scripts_and_benches_that_exist() {
        for Pair { script, ours, .. } in PAIRS {
            let script = script.split(' ').next().unwrap();
            assert!(workspace::root().join("benches/peers").join(script).is_file(), "{script}");
            let file = ours.split('/').next().unwrap();
            let source = std::fs::read_to_string(workspace::root().join(format!("benches/{file}.rs"))).unwrap();
            let topic = ours.split('/').take(2).collect::<Vec<_>>().join("/");
            assert!(source.contains(&format!("\"{topic}\"")), "{ours}");
        }
    }
}
