#!/usr/bin/env python3
"""Compares torch's DataLoader with the example `throughput` of data-loader: shuffled lines of a file in padded batches.

Run it in the root of the repository: `peers/bin/python benches/peers/data.py [--rounds 5] [--lines 200000]`.

Both read the same file, in turn, in a fresh process for each measurement. The lines have 100 to 299 bytes and become
64-bit ids, padded to the longest of the batch. torch reads a mapped file by offsets that NumPy has found, with workers
that persist; of its two ways to pad, the faster one counts. Its time is that of a second epoch, so that starting the
workers does not count. Memory: torch's private and shared bytes of all processes above those after the import; ours is
everything that the process has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SETTINGS = [(batch, workers) for batch in (32, 256) for workers in (0, 2)]
PADDINGS = ("numpy", "pad_sequence")
EXAMPLE = os.path.join("target", "release", "examples", "throughput")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default %(default)s)")
    parser.add_argument("--lines", type=int, default=200_000, help="lines of the file (default %(default)s)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        path, padding, batch, workers = args.child
        json.dump(measure_torch(path, padding, int(batch), int(workers)), sys.stdout)
        return 0
    build = ["cargo", "build", "--release", "-p", "data-loader", "--example", "throughput"]
    subprocess.run(build, stdout=sys.stderr, check=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lines.txt")
        write_lines(path, args.lines)
        report(path, args)
    return 0


def write_lines(path: str, lines: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.writelines("x" * (100 + n * 7919 % 200) + "\n" for n in range(lines))


def report(path: str, args: argparse.Namespace) -> None:
    print("| batch, workers | ours, lines/s: least, median | torch | times | MiB: ours, torch | padding of torch |")
    print("|---|---|---|---|---|---|")
    for batch, workers in SETTINGS:
        ours, theirs = [], {padding: [] for padding in PADDINGS}
        for _ in range(args.rounds):
            ours.append(run([EXAMPLE, str(args.lines), path, str(batch), str(workers)]))
            for padding in PADDINGS:
                child = ["--child", path, padding, str(batch), str(workers)]
                theirs[padding].append(run([sys.executable, os.path.abspath(__file__), *child]))
        best = max(PADDINGS, key=lambda padding: median(theirs[padding], "lines_per_second"))
        rates = [[one["lines_per_second"] for one in runs] for runs in (ours, theirs[best])]
        least = [f"{min(rate):,.0f}, {statistics.median(rate):,.0f}" for rate in rates]
        times = statistics.median(rates[0]) / statistics.median(rates[1])
        memory = ", ".join(f"{max(one['bytes'] for one in runs) / 2**20:.1f}" for runs in (ours, theirs[best]))
        print(f"| {batch}, {workers} | {least[0]} | {least[1]} | {times:.2f} | {memory} | {best} |", flush=True)


def median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in runs)


def run(command: list[str]) -> dict[str, float]:
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure_torch(path: str, padding: str, batch_size: int, workers: int) -> dict[str, float]:
    import numpy
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader, Dataset

    baseline = own_bytes([os.getpid()])

    class Lines(Dataset):
        def __init__(self) -> None:
            self.bytes = numpy.memmap(path, dtype=numpy.uint8, mode="r").view(numpy.ndarray)
            ends = numpy.flatnonzero(self.bytes == ord("\n"))
            self.starts, self.ends = numpy.concatenate([[0], ends[:-1] + 1]), ends

        def __len__(self) -> int:
            return len(self.ends)

        def __getitem__(self, index: int) -> numpy.ndarray:
            return self.bytes[self.starts[index] : self.ends[index]]

    def with_numpy(lines: list[numpy.ndarray]) -> torch.Tensor:
        ids = numpy.zeros((len(lines), max(map(len, lines))), dtype=numpy.int64)
        for row, line in zip(ids, lines):
            row[: len(line)] = line
        return torch.from_numpy(ids)

    def with_pad_sequence(lines: list[numpy.ndarray]) -> torch.Tensor:
        return pad_sequence([torch.from_numpy(line.astype(numpy.int64)) for line in lines], batch_first=True)

    torch.set_num_threads(1)
    collate = with_numpy if padding == "numpy" else with_pad_sequence
    lines = Lines()
    loader = DataLoader(
        lines, batch_size, shuffle=True, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0
    )
    n_ids = sum(batch.numel() for batch in loader)
    assert n_ids >= lines.bytes.size - len(lines), f"{n_ids} ids"
    used = 0
    start = time.perf_counter()
    for number, _ in enumerate(loader):
        if number == len(loader) // 2:
            pause = time.perf_counter()
            used = own_bytes([os.getpid(), *children()]) - baseline
            start += time.perf_counter() - pause
    return {"lines_per_second": len(lines) / (time.perf_counter() - start), "bytes": used}


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def own_bytes(pids: list[int]) -> int:
    """Returns the bytes of these processes without those of files; shared ones count once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main())
