"""Runs commands in turn, and the commands of peers with each allocator: glibc's, also with the settings of our
`keep_freed_memory`, tcmalloc and jemalloc.

    python beside.py ROUNDS OURS… -- PEERS…

Each command is one argument, and prints `… LEAST / MEDIAN ms …, MEMORY MiB` as our benches and the scripts here do. Prints a
row for each command and allocator: the least step of all rounds, the median of the rounds' least steps, and the memory of
all rounds. The last row of a peer names the allocator with the least memory of those whose steps take at most 1.1 times as
long as with its fastest one. Skips allocators that are not installed, and ignores a `LD_PRELOAD` of the caller.
"""

import ctypes.util
import os
import re
import shlex
import statistics
import subprocess
import sys

LARGEST_TIME = 1.1


KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**63), "MALLOC_ARENA_MAX": "1"}


def allocators():
    """Returns the names of installed allocators, and the variables that choose them."""
    libraries = {"tcmalloc": "tcmalloc_minimal", "jemalloc": "jemalloc"}
    found = {name: ctypes.util.find_library(library) for name, library in libraries.items()}
    preloaded = {name: {"LD_PRELOAD": library} for name, library in found.items() if library}
    return {"glibc": {}, "glibc that keeps memory": KEPT_MEMORY} | preloaded


def measure(command, variables):
    """Returns the least time of a step in milliseconds, and the memory in MiB."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, env=environment | variables)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr}")
    line = done.stdout.strip().splitlines()[-1]
    print(f"  {line}", file=sys.stderr)
    return float(re.search(r"([\d.]+) / [\d.]+ ms", line)[1]), float(re.search(r"([\d.]+) MiB", line)[1])


def show(name, measured):
    times, memory = zip(*measured)
    print(
        f"{name}: {min(times):.1f} ms, median {statistics.median(times):.1f} ms, "
        f"{min(memory):.0f} to {max(memory):.0f} MiB"
    )


def main():
    if "--" not in sys.argv[2:]:
        sys.exit(__doc__)
    rounds = int(sys.argv[1])
    cut = sys.argv.index("--")
    ours, peers = sys.argv[2:cut], sys.argv[cut + 1 :]
    choices = allocators()
    runs = [(command, "its own", {}) for command in ours]
    runs += [(command, name, variables) for command in peers for name, variables in choices.items()]
    measured = {(command, name): [] for command, name, _ in runs}
    for _ in range(rounds):
        for command, name, variables in runs:
            measured[command, name].append(measure(command, variables))
    for (command, name), results in measured.items():
        show(f"{command}, {name}", results)
    for command in peers:
        fastest = min(time for name in choices for time, _ in measured[command, name])
        fair = {
            name: statistics.median(memory for _, memory in measured[command, name])
            for name in choices
            if min(time for time, _ in measured[command, name]) <= LARGEST_TIME * fastest
        }
        print(f"{command}: at its best with {min(fair, key=fair.get)}")


if __name__ == "__main__":
    main()
