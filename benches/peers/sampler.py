#!/usr/bin/env python3
"""Times the samplers of published Python packages, for the comparison in docs/benchmarks.md.

Each measurement runs in a process of its own, one after the other, so that its peak memory is its own and not that
of the largest case before it. A process imports the package, checks it on a small data set, builds the input
(weights, where there are any), and only then starts the clock and takes the baseline of its memory: neither imports
nor inputs count against a peer. The clock runs from making the sampler until the iterator says that it is exhausted.
The indices are drained by the cheapest loop that Python has, so that the time is the peer's and not that of a loop
body.

Standard output is one JSON object, progress goes to standard error. A package that cannot be imported is listed under
`skipped`; a measurement that breaks is listed under `failed`, and the exit status is then 1.
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
    """What to sample: `weights` and `draws` are for weighted draws, `len` for epochs."""

    len: int
    world: int
    rank: int
    weights: int
    draws: int


class Case(NamedTuple):
    """A peer's sampler. `prepare` builds the input and returns what makes the sampler: the part to be timed."""

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
    parser.add_argument("--rank", type=int, default=3, help="the rank that is timed (default %(default)s)")
    parser.add_argument("--weights", type=int, default=1_000_000, help="weights to draw from (default %(default)s)")
    parser.add_argument("--draws", type=int, default=10_000_000, help="weighted draws (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="processes per case; medians are reported")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose PEER/OPERATION contains TEXT")
    parser.add_argument("--child", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 0 <= args.rank < args.world:
        parser.error(f"rank {args.rank} is out of range for a world of {args.world}")
    if min(args.len, args.draws) < 2 * args.world:
        parser.error("every rank needs two indices: raise --len or --draws, or lower --world")
    if args.weights < 1 or args.repeats < 1:
        parser.error("--weights and --repeats start at 1")
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
    # Only SPDL divides weighted draws among ranks; the others make and return all of them.
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
    """One measurement in a fresh process; its result, or the reason why there is none."""
    options = [f"--{key}={value}" for key, value in job._asdict().items()]
    command = [sys.executable, os.path.abspath(__file__), f"--child={case.name}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    # A negative status is a signal; 9 most often means that memory ran out.
    said = done.stderr.strip().splitlines()
    return {"failed": f"exit status {done.returncode}" + (f": {said[-1]}" if said else "")}


def measure(case: Case, job: Job) -> dict[str, Any]:
    try:
        importlib.import_module(case.module)
    except ModuleNotFoundError as error:
        return {"skipped": f"not installed: {error}"}
    except Exception as error:  # Broken installations raise whatever they like.
        return {"skipped": f"import fails: {type(error).__name__}: {str(error).splitlines()[0]}"}
    check(case, job.world)
    make = case.prepare(job)
    baseline = peak_bytes()
    result = drain(make)
    return {"version": version(case.packages), **result, "peak_bytes": peak_bytes() - baseline}


def check(case: Case, world: int) -> None:
    """Sees that the sampler does what the case says, and warms up what it imports late."""
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
    # All but the last in C code; then exactly one must be left.
    deque(islice(indices, len(sampler) - 2), maxlen=0)
    last = next(indices, None)
    rest = next(indices, None)
    end = time.perf_counter()
    assert last is not None and rest is None, "the sampler does not have the length that it claims"
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
    """Of the last minute: more than about 1 before a case says that something else used the machine."""
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
