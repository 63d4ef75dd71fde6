#!/usr/bin/env python3
r"""Times published Python packages that batch or pack sequences of many lengths, for docs/benchmarks.md.

Batching groups sequences of similar length, padded to the longest in the batch, within --max-tokens; packing places
several sequences end to end in bins of --capacity. The lengths have the distribution of web documents and come from
the recipe of our own tests and benches. Lengths, imports and a warm-up, which triggers late compilation, come before
the clock starts. After the clock stops, each result is checked: it must contain every sequence once, and no batch or
bin may be too large.

Standard output is one Markdown table, progress goes to standard error. A package that cannot be imported is skipped
with a message. A measurement that fails prints its error, and the exit status is then 1.

fairseq's Cython module is built alone from the source distribution; PYTHONPATH=fairseq-0.12.2 then finds it:

    peers/bin/pip download fairseq --no-deps --no-binary :all: --no-build-isolation
    tar xzf fairseq-0.12.2.tar.gz && cd fairseq-0.12.2
    ../peers/bin/cython --cplus -3 fairseq/data/data_utils_fast.pyx
    get() { ../peers/bin/python -c "import numpy, sysconfig; print($1)"; }
    c++ -O3 -shared -fPIC -I"$(get 'numpy.get_include()')" -I"$(get 'sysconfig.get_path("include")')" \
      fairseq/data/data_utils_fast.cpp -o "fairseq/data/data_utils_fast$(get 'sysconfig.get_config_var("EXT_SUFFIX")')"
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from typing import Any, Callable, Iterator, NamedTuple

# Use one core and no network. Set the variables before the imports that read them.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DO_NOT_TRACK="1", AXOLOTL_DO_NOT_TRACK="1")

try:
    import numpy as np
except ModuleNotFoundError:
    sys.exit("numpy is not installed, and every peer needs it")

from sampler import load_average, machine, version

# Token counts of web documents: lognormal, median 430, sigma 1.05, clipped to 8..8192. Each knot is the quantile at
# p / 2^32; the function is linear between knots.
WEB_SEED = 101
WEB_KNOTS = """
    0:8 2147484:14 8589935:21 21474836:29 42949673:37 85899346:50 150323855:64 214748365:77 322122547:95
    429496730:112 536870912:129 644245094:145 751619277:161 858993459:178 966367642:195 1073741824:212
    1181116006:230 1288490189:248 1395864371:267 1503238554:287 1610612736:308 1717986918:330 1825361101:353
    1932735283:378 2040109466:403 2147483648:431 2254857830:460 2362232013:491 2469606195:525 2576980378:562
    2684354560:602 2791728742:645 2899102925:693 3006477107:746 3113851290:806 3221225472:874 3328599654:952
    3435973837:1042 3543348019:1148 3650722202:1277 3758096384:1439 3865470566:1651 3951369912:1880
    4037269258:2198 4080218931:2417 4123168604:2703 4166118277:3094 4209067950:3718 4230542787:4205
    4252017623:4956 4264902525:5681 4277787427:6984 4286377361:8192 4294967296:8192
"""
WEB_CHECK = 144239848069  # The sum of the first 20000 draws, each times its position, counted from 1.

SMALLER = (1_000, 10_000, 100_000)
WARM_UP = 2_000
RUNS = 3
ENOUGH_SECONDS = 20.0  # The time after which a case is not repeated.


def draw(n: int) -> np.ndarray:
    """Returns the first `n` lengths. Unsigned 64-bit sums and products wrap in numpy, as SplitMix64 requires."""
    p, length = np.array([knot.split(":") for knot in WEB_KNOTS.split()], dtype=np.uint64).T
    z = np.uint64(WEB_SEED) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    u = (z ^ (z >> np.uint64(31))) >> np.uint64(32)
    above = np.searchsorted(p, u, side="right")
    start, rise = length[above - 1], length[above] - length[above - 1] + np.uint64(1)
    return (start + rise * (u - p[above - 1]) // (p[above] - p[above - 1])).astype(np.int64)


class Result(NamedTuple):
    """Lengths in batch order in `flat`, and the index of the first length of each batch in `starts`."""

    flat: np.ndarray
    starts: np.ndarray


class Case(NamedTuple):
    """One measurement of a package.

    `load` imports the package and returns its version. `prepare` builds the input and returns the function to time;
    `read` converts the return value of that function to a `Result`.
    """

    peer: str
    call: str
    pads: bool
    load: Callable[[], str]
    prepare: Callable[[np.ndarray, int], Callable[[], Any]]
    read: Callable[[Any, np.ndarray], Result]


def fairseq_load() -> str:
    """Loads only the Cython module: the rest of fairseq needs old versions of many packages."""
    fairseq = importlib.util.find_spec("fairseq")
    for root in (fairseq.submodule_search_locations or ()) if fairseq else ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = pathlib.Path(root, "data", "data_utils_fast" + suffix)
            if path.exists():
                name = "fairseq.data.data_utils_fast"
                spec = importlib.util.spec_from_file_location(name, path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[name] = module
                text = pathlib.Path(root, "version.txt")
                return text.read_text(encoding="utf-8").strip() if text.exists() else version(("fairseq",))
    raise ModuleNotFoundError("No module named 'fairseq.data.data_utils_fast'")


def fairseq_batch(lengths: np.ndarray, max_tokens: int, is_sorted: bool = False) -> Callable[[], Any]:
    batch_by_size_vec = sys.modules["fairseq.data.data_utils_fast"].batch_by_size_vec

    def sort() -> tuple[np.ndarray, np.ndarray]:
        # fairseq's own data sets use this kind of sort.
        order = np.argsort(lengths, kind="mergesort")
        return order, lengths[order]

    # Allow any number of sequences and any batch size.
    if is_sorted:
        order, ordered = sort()
        return lambda: batch_by_size_vec(order, ordered, max_tokens, -1, 1)
    return lambda: batch_by_size_vec(*sort(), max_tokens, -1, 1)


def axolotl_load() -> str:
    importlib.import_module("axolotl.utils.samplers.multipack")
    return version(("axolotl",))


def axolotl_pack(lengths: np.ndarray, capacity: int, is_decreasing: bool = False) -> Callable[[], Any]:
    from axolotl.utils.samplers.multipack import pack_parallel

    # The dtype of the lengths, the groups of 100000 and the single process are the defaults of axolotl's
    # MultipackBatchSampler; the limit of 200 sequences in a bin is its configuration's default. Decreasing lengths use
    # one group: of ten groups, the first would hold all the longest sequences.
    lengths = lengths.astype(np.int32)
    group_size = len(lengths) if is_decreasing else 100_000
    pack = functools.partial(
        pack_parallel, bin_capacity=capacity, group_size=group_size, bin_size=200, num_processes=1
    )
    if not is_decreasing:
        return lambda: pack(lengths)

    def decreasing() -> Any:
        order = np.argsort(-lengths, kind="stable")
        places = order.tolist()
        return [[places[place] for place in indices] for indices in pack(lengths[order])]

    return decreasing


def trl_load() -> str:
    importlib.import_module("trl.data_utils")
    importlib.import_module("datasets").disable_progress_bars()
    return version(("trl",))


def trl_pack(lengths: np.ndarray, capacity: int, batch_size: int | None = None) -> Callable[[], Any]:
    import datasets
    import pyarrow
    from trl.data_utils import pack_dataset

    # pack_dataset packs tokens instead of lengths, so use the cheapest tokens: one byte each.
    ends = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pyarrow.LargeListArray.from_arrays(ends, np.zeros(ends[-1], dtype=np.int8))
    dataset = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table({"input_ids": tokens})))
    options = {"batch_size": batch_size or len(lengths), "keep_in_memory": True, "load_from_cache_file": False}
    return lambda: pack_dataset(dataset, capacity, strategy="bfd", map_kwargs=options)


def read_indices(batches: Any, lengths: np.ndarray) -> Result:
    indices = np.concatenate(batches)
    assert np.array_equal(np.sort(indices), np.arange(len(lengths))), "a sequence is missing or in several batches"
    return Result(lengths[indices], starts([len(batch) for batch in batches]))


def read_dataset(dataset: Any, lengths: np.ndarray) -> Result:
    column = dataset.with_format("arrow")["seq_lengths"][:].combine_chunks()
    flat = column.flatten().to_numpy()
    assert np.array_equal(np.sort(flat), np.sort(lengths)), "a sequence is missing or in several bins"
    return Result(flat, starts(column.value_lengths().to_numpy()))


def starts(counts: Any) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts)[:-1]))


FAIRSEQ = ("fairseq", True, fairseq_load)
AXOLOTL = ("axolotl", False, axolotl_load)
TRL = ("trl", False, trl_load)


def case(
    peer: tuple[str, bool, Callable[[], str]], call: str, prepare: Callable[..., Any], read: Callable[..., Any]
) -> Case:
    name, pads, load = peer
    return Case(name, call, pads, load, prepare, read)


CASES = (
    case(FAIRSEQ, "argsort, `batch_by_size_vec`", fairseq_batch, read_indices),
    case(
        FAIRSEQ,
        "`batch_by_size_vec` alone, lengths already sorted",
        functools.partial(fairseq_batch, is_sorted=True),
        read_indices,
    ),
    case(AXOLOTL, "`pack_parallel`, groups of 100000", axolotl_pack, read_indices),
    case(
        AXOLOTL,
        "argsort, `pack_parallel` of decreasing lengths, one group",
        functools.partial(axolotl_pack, is_decreasing=True),
        read_indices,
    ),
    case(
        TRL, '`pack_dataset("bfd")`, 1000 rows at a time', functools.partial(trl_pack, batch_size=1000), read_dataset
    ),
    case(TRL, '`pack_dataset("bfd")`, all rows at once', trl_pack, read_dataset),
)


def main() -> int:
    args = parse_args()
    lengths = draw(max(args.n, 20_000))
    check = int((np.arange(1, 20_001) * lengths[:20_000]).sum())
    assert check == WEB_CHECK, f"the recipe has a typo: its checksum is {check}"
    if min(args.max_tokens, args.capacity) < lengths.max():
        sys.exit(f"the longest sequence has {lengths.max()} tokens: raise --max-tokens or --capacity")
    print(f"{machine()}, load average {load_average()}", file=sys.stderr)
    rows = []
    skipped = failed = 0
    for peer in dict.fromkeys(case.peer for case in CASES):
        cases = [case for case in CASES if case.peer == peer and args.only in f"{peer} {case.call}"]
        if not cases:
            continue
        try:
            release = cases[0].load()
        except Exception as error:  # Broken installations raise any kind of error.
            missing = "not installed" if isinstance(error, ModuleNotFoundError) else "import fails"
            print(f"{peer}: skipped, {missing}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
            skipped += 1
            continue
        for case in cases:
            try:
                rows += [[peer, release, case.call, *columns] for columns in measure(case, lengths, args)]
            except Exception as error:
                print(f"{peer}, {case.call}: failed: {type(error).__name__}: {error}", file=sys.stderr)
                failed += 1
    print(f"{len(rows)} measured, {skipped} skipped, {failed} failed", file=sys.stderr)
    print_table(["peer", "version", "timed", "sequences", "seconds", "batches or bins", "efficiency"], rows)
    return 1 if failed else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000, help="sequences (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="padded tokens in a batch (default %(default)s)")
    parser.add_argument("--capacity", type=int, default=8_192, help="tokens in a packed bin (default %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases with TEXT in their peer and call")
    args = parser.parse_args()
    if args.n < 1:
        parser.error("--n must be at least 1")
    return args


def measure(case: Case, lengths: np.ndarray, args: argparse.Namespace) -> Iterator[list[str]]:
    allowed = args.max_tokens if case.pads else args.capacity
    case.prepare(lengths[:WARM_UP].copy(), allowed)()
    for n in [*(n for n in SMALLER if n < args.n), args.n]:
        print(f"{case.peer}, {case.call}: {n}", file=sys.stderr, flush=True)
        sequences = lengths[:n].copy()
        run = case.prepare(sequences, allowed)
        seconds: list[float] = []
        while len(seconds) < RUNS and sum(seconds) < ENOUGH_SECONDS:
            batches = None
            with no_garbage_collection():
                start = time.perf_counter()
                batches = run()
                seconds.append(time.perf_counter() - start)
        result = case.read(batches, sequences)
        count = len(result.starts)
        if case.pads:
            # The padded size of a batch is its longest length times its number of sequences.
            longest = np.maximum.reduceat(result.flat, result.starts)
            tokens = longest * np.diff(result.starts, append=n)
            total = tokens.sum()
        else:
            tokens = np.add.reduceat(result.flat, result.starts, dtype=np.int64)
            total = count * allowed
        assert tokens.max() <= allowed, f"{tokens.max()} tokens, but the limit is {allowed}"
        yield [f"{n}", f"{statistics.median(seconds):.4g}", f"{count}", f"{sequences.sum() / total:.5f}"]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables the search for cycles: millions of small lists would trigger it again and again."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_table(head: list[str], rows: list[list[str]]) -> None:
    columns = list(zip(head, *rows))
    widths = [max(map(len, column)) for column in columns]
    # Align the last four columns, the numbers, to the right.
    right = [place >= len(head) - 4 for place in range(len(head))]
    rule = ["-" * (width - 1) + ":" if is_right else "-" * width for width, is_right in zip(widths, right)]
    for row in (head, rule, *rows):
        cells = zip(row, widths, right)
        padded = (cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells)
        print("| " + " | ".join(padded) + " |")


if __name__ == "__main__":
    sys.exit(main())
