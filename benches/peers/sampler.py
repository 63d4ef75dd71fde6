#!/usr/bin/env python3
"""Times the samplers of published Python packages, for the comparison in docs/benchmarks.md.

Each measurement runs in a separate process, one after the other, so that earlier cases do not affect its peak memory.
The process imports the package, checks it on a small data set and builds the input (weights, if needed) before it
starts the clock and reads the baseline of its memory: imports and inputs do not count against a peer. The time covers
the construction of the sampler and the whole iteration. Python's cheapest loop consumes the indices, so that the loop
adds little to the peer's time.

Standard output is one JSON object, progress goes to standard error. A package that cannot be imported is listed under
`skipped`. A measurement that fails is listed under `failed`, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from itertools import islice
from typing import Any, Callable, NamedTuple

FORMAT_VERSION = 1


class Job(NamedTuple):
    """The sizes of a measurement: `weights` and `draws` for weighted draws, `len` for epochs."""

    len: int
    world: int
    rank: int
    weights: int
    draws: int


class Case(NamedTuple):
    """A peer's sampler. `prepare` builds the input and returns a function that makes the sampler, which is timed."""

    peer: str
    packages: tuple[str, ...]
    module: str
    operation: str
    call: str
    prepare: Callable[[Job], Callable[[], Any]]

    @property
    def name(self) -> str:
        return f"{self.peer}/{self.operation}"

    @property
    def is_weighted(self) -> bool:
        return self.operation.startswith("weighted")


def torch_epoch(job: Job) -> Callable[[], Any]:
    from torch.utils.data import DistributedSampler

    return lambda: DistributedSampler(range(job.len), num_replicas=job.world, rank=job.rank, shuffle=True)


def spdl_shuffled(job: Job) -> Callable[[], Any]:
    from spdl.source import DistributedRandomSampler

    return lambda: DistributedRandomSampler(job.len, rank=job.rank, world_size=job.world)


def spdl_sequential(job: Job) -> Callable[[], Any]:
    from spdl.source import DistributedDeterministicSampler

    return lambda: DistributedDeterministicSampler(job.len, rank=job.rank, world_size=job.world)


def numpy_epoch(job: Job) -> Callable[[], Any]:
    import numpy

    return lambda: numpy.random.default_rng(0).permutation(job.len)[job.rank :: job.world]


def torch_weighted(job: Job) -> Callable[[], Any]:
    import torch
    from torch.utils.data import WeightedRandomSampler

    weights = torch.rand(job.weights, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return lambda: WeightedRandomSampler(weights, job.draws, generator=torch.Generator().manual_seed(0))


def spdl_weighted(job: Job) -> Callable[[], Any]:
    import numpy
    from spdl.source import DistributedRandomSampler

    weights = numpy.random.default_rng(0).random(job.weights)
    return lambda: DistributedRandomSampler(
        job.weights, rank=job.rank, world_size=job.world, weights=weights, num_draws=job.draws
    )


def numpy_weighted(job: Job) -> Callable[[], Any]:
    import numpy

    weights = numpy.random.default_rng(0).random(job.weights)
    weights /= weights.sum()
    return lambda: numpy.random.default_rng(0).choice(job.weights, size=job.draws, p=weights)


TORCH = ("torch", ("torch",), "torch.utils.data")
SPDL = ("spdl", ("spdl", "spdl_core"), "spdl.source")
NUMPY = ("numpy", ("numpy",), "numpy")

CASES = (
    Case(*TORCH, "epoch_shuffled", "torch.utils.data.DistributedSampler(shuffle=True)", torch_epoch),
    Case(*SPDL, "epoch_shuffled", "spdl.source.DistributedRandomSampler", spdl_shuffled),
    Case(*SPDL, "epoch_sequential", "spdl.source.DistributedDeterministicSampler", spdl_sequential),
    Case(*NUMPY, "epoch_shuffled", "default_rng().permutation(len)[rank::world]", numpy_epoch),
    Case(*TORCH, "weighted_draws", "torch.utils.data.WeightedRandomSampler", torch_weighted),
    Case(*SPDL, "weighted_draws", "spdl.source.DistributedRandomSampler(weights=...)", spdl_weighted),
    Case(*NUMPY, "weighted_draws", "Generator.choice(p=...)", numpy_weighted),
)


def main() -> int:
    args = parse_args()
    job = Job(args.len, args.world, args.rank, args.weights, args.draws)
    if args.child:
        json.dump(measure(next(case for case in CASES if case.name == args.child), job), sys.stdout)
        return 0
    report = compare([case for case in CASES if args.only in case.name], job, args.repeats)
    json.dump(report, sys.stdout, indent=2)
    print()
    return 1 if report["failed"] else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--len", type=int, default=100_000_000, help="samples in the data set (default %(default)s)")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (default %(default)s)")
    parser.add_argument("--rank", type=int, default=3, help="the timed rank (default %(default)s)")
    parser.add_argument("--weights", type=int, default=1_000_000, help="weights to draw from (default %(default)s)")
    parser.add_argument("--draws", type=int, default=10_000_000, help="weighted draws (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="processes per case; medians are reported")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases with TEXT in PEER/OPERATION")
    parser.add_argument("--child", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 0 <= args.rank < args.world:
        parser.error(f"rank {args.rank} is out of range for a world of {args.world}")
    if min(args.len, args.draws) < 2 * args.world:
        parser.error("every rank needs two indices: raise --len or --draws, or lower --world")
    if args.weights < 1 or args.repeats < 1:
        parser.error("--weights and --repeats must be at least 1")
    return args


def compare(cases: list[Case], job: Job, repeats: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "machine": machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rank": job.rank,
        "repeats": repeats,
        "results": [],
        "skipped": [],
        "failed": [],
    }
    for case in cases:
        print(f"{case.name}: {case.call}", file=sys.stderr, flush=True)
        load = load_average()
        runs = [run_child(case, job)]
        while len(runs) < repeats and "seconds" in runs[0]:
            runs.append(run_child(case, job))
        outcome = next((key for run in runs for key in ("skipped", "failed") if key in run), None)
        if outcome:
            reason = next(run[outcome] for run in runs if outcome in run)
            report[outcome].append({"peer": case.peer, "operation": case.operation, "reason": reason})
            print(f"  {outcome}: {reason}", file=sys.stderr)
        else:
            report["results"].append({**summary(case, job, runs), "load_average_before": load})
    return report


def summary(case: Case, job: Job, runs: list[dict[str, Any]]) -> dict[str, Any]:
    # Only SPDL divides weighted draws among ranks; the other peers return all draws.
    shared = not case.is_weighted or case.peer == "spdl"
    return {
        "peer": case.peer,
        "version": runs[0]["version"],
        "operation": case.operation,
        "call": case.call,
        "len": job.weights if case.is_weighted else job.len,
        "world": job.world if shared else 1,
        "draws": job.draws if case.is_weighted else None,
        "indices": runs[0]["indices"],
        "seconds_to_first": statistics.median(run["seconds_to_first"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def run_child(case: Case, job: Job) -> dict[str, Any]:
    """Runs a measurement in a fresh process, and returns its result or the reason of its failure."""
    options = [f"--{key}={value}" for key, value in job._asdict().items()]
    command = [sys.executable, os.path.abspath(__file__), f"--child={case.name}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    # A negative status is a signal; 9 most often means that memory ran out.
    errors = done.stderr.strip().splitlines()
    return {"failed": f"exit status {done.returncode}" + (f": {errors[-1]}" if errors else "")}


def measure(case: Case, job: Job) -> dict[str, Any]:
    try:
        importlib.import_module(case.module)
    except ModuleNotFoundError as error:
        return {"skipped": f"not installed: {error}"}
    except Exception as error:  # Broken installations raise any kind of error.
        return {"skipped": f"import fails: {type(error).__name__}: {str(error).splitlines()[0]}"}
    check(case, job.world)
    make = case.prepare(job)
    baseline = peak_bytes()
    result = drain(make)
    return {"version": version(case.packages), **result, "peak_bytes": peak_bytes() - baseline}


def check(case: Case, world: int) -> None:
    """Checks the sampler's indices on a small data set, and triggers its late imports."""
    small = Job(len=50 * world, world=world, rank=0, weights=50 * world, draws=50 * world)
    ranks = [[int(index) for index in case.prepare(small._replace(rank=rank))()] for rank in range(world)]
    drain(case.prepare(small))
    everything = list(range(small.len))
    union = sorted(index for indices in ranks for index in indices)
    if case.is_weighted:
        assert set(union) <= set(everything), f"{case.name}: an index is out of range"
    else:
        assert union == everything, f"{case.name}: the ranks do not cover the data set once"
    if case.operation == "epoch_shuffled":
        assert ranks[0] != sorted(ranks[0]), f"{case.name}: the order is not shuffled"


def drain(make: Callable[[], Any]) -> dict[str, Any]:
    start = time.perf_counter()
    sampler = make()
    indices = iter(sampler)
    next(indices)
    first = time.perf_counter()
    # Consume all remaining indices but one in C code; then exactly one must be left.
    deque(islice(indices, len(sampler) - 2), maxlen=0)
    last = next(indices, None)
    rest = next(indices, None)
    end = time.perf_counter()
    assert last is not None and rest is None, "the sampler has another number of indices than its length"
    return {"indices": len(sampler), "seconds_to_first": first - start, "seconds": end - start}


def peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def load_average() -> float | None:
    """Returns the load of the last minute. Above 1 before a case, another program is using the machine."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}"
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
