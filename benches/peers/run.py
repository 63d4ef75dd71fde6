#!/usr/bin/env python3
"""Prints the ratios of installed Python packages' times to ours.

Run it in the root of the repository: `peers/bin/python benches/peers/run.py [TEXT]`. TEXT selects our benches by id.
"""
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys

PSUMS = 101  # The number of sums in one pass of our bench.

# (measurement, the peer's module, script with arguments, part of its figure's name, our bench, repetitions in one pass
# of our bench)
PAIRS = [
    ("a rank's epoch of 10 million, in torch's order", "torch",
     "sampler.py --len 10000000 --only torch/epoch_shuffled", "torch/epoch_shuffled", "sampler/epoch/torch", 1),
    ("a rank's epoch of 10 million, streaming", "torch",
     "sampler.py --len 10000000 --only torch/epoch_shuffled", "torch/epoch_shuffled", "sampler/epoch/streaming", 1),
    ("a rank's epoch of 10 million, shuffled exactly", "numpy",
     "sampler.py --len 10000000 --only numpy/epoch_shuffled", "numpy/epoch_shuffled", "sampler/epoch/exact", 1),
    ("a rank's epoch of 10 million, shuffled exactly", "spdl",
     "sampler.py --len 10000000 --only spdl/epoch_shuffled", "spdl/epoch_shuffled", "sampler/epoch/exact", 1),
    ("a million lengths, sorted and cut", "fairseq", "batch.py --only fairseq",
     "argsort, `batch_by_size_vec` 1000000", "batch/plan/sorted_greedy/web_1M", 1),
    ("a million lengths, packed", "axolotl", "batch.py --only groups", "groups of 100000 1000000",
     "batch/plan/pack_best_fit/web_1M", 1),
    ("DeepSeek-V3 on 16,384 ranks (the peer: on 8 devices)", "accelerate",
     "plan.py device_map tests/fixtures/models/deepseek-v3.recipe.json", "get_balanced_memory",
     "plan/header_to_totals/row_ragged_45k_w16384", 1),
    ("a tiny function on 2 devices", "jax", "mesh.py jax_call", "jit(shard_map)/resident/2", "mesh/call_tiny/2", 1),
    ("a sum of 4 KB over 2 devices", "jax", "mesh.py jax_psum", "input kept/4 KB", "mesh/psum_2/4KB", PSUMS),
    ("a sum of 16 MB over 2 devices", "jax", "mesh.py jax_psum", "input kept/16 MB", "mesh/psum_2/16MB", PSUMS),
    ("a sum of 4 KB over 2 devices", "torch", "mesh.py gloo", "gloo_all_reduce/4 KB", "mesh/psum_2/4KB", PSUMS),
    ("a sum of 16 MB over 2 devices", "torch", "mesh.py gloo", "gloo_all_reduce/16 MB", "mesh/psum_2/16MB", PSUMS),
]

# The length in the arguments of the peers, and one thread for each device.
SETTINGS = {"CANDLE_DISTRIBUTED_BENCH_LEN": "10000000", "CANDLE_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
HOME = os.path.join("target", "criterion")


def main():
    text = sys.argv[1] if len(sys.argv) > 1 else ""
    pairs = [pair for pair in PAIRS if text in pair[4]]
    missing = {pair[1] for pair in pairs if importlib.util.find_spec(pair[1]) is None}
    for peer in sorted(missing):
        print(f"skipping {peer}, which is not installed; see benches/peers/README.md", file=sys.stderr)
    pairs = [pair for pair in pairs if pair[1] not in missing]
    if not pairs:
        sys.exit("no peer is installed")
    run_ours(sorted({pair[4] for pair in pairs}))
    figures = {script: run_theirs(script) for script in sorted({pair[2] for pair in pairs})}
    print("| measurement | our bench | our time | peer | its time | ratio |\n|---|---|---|---|---|---|")
    for title, peer, script, figure, bench, repetitions in pairs:
        theirs = next((seconds for name, seconds in figures[script] if figure in name), None)
        if theirs is None:
            print(f"{peer}, {title}: no figure", file=sys.stderr)
            continue
        ours = median(bench) / repetitions
        print(f"| {title} | `{bench}` | {time(ours)} | {peer} {version(peer)} | {time(theirs)} | {theirs / ours:.3g} |")


def run_ours(benches):
    """Runs only these benches; an id begins with the name of its file."""
    files = sorted({bench.split("/")[0] for bench in benches})
    command = ["cargo", "bench", "-p", "benches"] + [word for file in files for word in ("--bench", file)]
    command += ["--", f"^({'|'.join(benches)})$"]
    settings = {**os.environ, **SETTINGS, "CRITERION_HOME": os.path.abspath(HOME)}
    subprocess.run(command, env=settings, stdout=sys.stderr, check=True)


def median(bench):
    """Returns the median time of one pass in seconds, from the files of criterion."""
    for folder, _, names in os.walk(HOME):
        if os.path.basename(folder) == "new" and "benchmark.json" in names:
            with open(os.path.join(folder, "benchmark.json"), encoding="utf8") as file:
                if json.load(file)["full_id"] != bench:
                    continue
            with open(os.path.join(folder, "estimates.json"), encoding="utf8") as file:
                return json.load(file)["median"]["point_estimate"] / 1e9
    sys.exit(f"criterion has no result for {bench}")


def run_theirs(script):
    """Returns the names and seconds of the figures that a script prints, or no figures if the script fails."""
    name, *arguments = script.split()
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    run = subprocess.run([sys.executable, path, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        print(f"{script} failed", file=sys.stderr)
        return []
    return figures_of(run.stdout.lstrip())


def figures_of(text):
    """Reads figures from a JSON object, a Markdown table, or lines `name: median µs (min)`."""
    if text.startswith("{"):
        return [(f"{one['peer']}/{one['operation']}", one["seconds"]) for one in json.loads(text)["results"]]
    if text.startswith("|"):
        rows = [[cell.strip() for cell in line.split("|")[1:]] for line in text.splitlines() if line.startswith("|")]
        column = rows[0].index("seconds")
        return [(" ".join(row[:column]), float(row[column])) for row in rows[2:]]
    found = re.findall(r"^(.+?): ([\d.]+) µs", text, re.M)
    return [(name, float(microseconds) / 1e6) for name, microseconds in found]


def version(module):
    """Returns the version of the package that contains a module."""
    package = importlib.metadata.packages_distributions().get(module, [module])[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def time(seconds):
    """Returns a time in seconds, milliseconds or microseconds, depending on its size."""
    for unit, factor in [("s", 1), ("ms", 1e3), ("µs", 1e6)]:
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.2f} {unit}"


if __name__ == "__main__":
    main()
