#!/usr/bin/env python3
"""Compares grids of micro-batches with the rules of other trainers, for docs/benchmarks.md.

Every comparison uses one order of sequences, the same ranks and micro-steps, and as limit of a cell the largest cell of
the peer. A micro-step takes as long as its largest cell; `waste` is the time by which ranks wait, over the mean time.

- transformers (installed, 5.24.0): `BatchRebalanceSampler`, `get_length_grouped_indices`, imported.
- axolotl (if installed, 0.19.0): the time of `pack_parallel`.
- TRL, huggingface/trl at 20463989, trl/experimental/async_grpo/async_grpo_trainer.py: `_balance_by_squared_length`
  (longest first, to the least sum of squares), restated from its description.
- verl and slime, THUDM/slime at 098ec553, slime/utils/seqlen_balancing.py (from verl at 468adf22): the differencing
  method of Karmarkar and Karp, first fit and splitting of bins, restated from their descriptions.
- torchtitan, pytorch/torchtitan at 005d4c1a, experiments/rl/components/batcher.py: next fit, rows dealt round-robin,
  restated from its description.

Packed rows also have a lower bound (`least_time`), since limits can make waiting unavoidable.

The restated rules are checked on small cases first. Ours is the example `grid` of `dyn-batch`:

    cargo build --release -p dyn-batch --example grid
    peers/bin/python benches/peers/grid.py target/release/examples/grid LENGTHS_FOLDER
"""

from __future__ import annotations

import heapq
import json
import math
import pathlib
import random
import subprocess
import sys
import time
from typing import Callable, NamedTuple

Cells = list[list[int]]
RANKS = 8
# The cost of transformers' sampler, L + 0.001 L², in thousandths.
REBALANCE_COST = (0, 1000, 1)
ATTENTION = (0, 0, 1)


class Grid(NamedTuple):
    """Cells of steps, micro-step by micro-step."""

    steps: list[Cells]
    padded: bool
    cost: tuple[int, int, int]

    def cell_cost(self, lengths: list[int], cell: list[int]) -> int:
        one = lambda n: self.cost[0] + self.cost[1] * n + self.cost[2] * n * n
        if self.padded:
            return len(cell) * one(max((lengths[i] for i in cell), default=0))
        return sum(one(lengths[i]) for i in cell)

    def measure(self, lengths: list[int]) -> dict[str, float]:
        costs = [[self.cell_cost(lengths, cell) for cell in step] for step in self.steps]
        time = sum(max(step[at : at + RANKS]) for step in costs for at in range(0, len(step), RANKS))
        total = sum(map(sum, costs))
        cells = [cell for step in self.steps for cell in step]
        tokens = [self.tokens(lengths, cell) for cell in cells]
        return {
            "largest": max(map(max, costs)),
            "time": time,
            "waste": RANKS * time / total - 1 if total else 0.0,
            "padded_tokens": sum(tokens),
            "max_tokens": max(tokens),
            "cells": len(cells),
        }

    def tokens(self, lengths: list[int], cell: list[int]) -> int:
        cell_lengths = [lengths[i] for i in cell]
        return len(cell) * max(cell_lengths, default=0) if self.padded else sum(cell_lengths)


def by_falling_cost(cells: Cells, cost: Callable[[list[int]], int]) -> Cells:
    return sorted(cells, key=cost, reverse=True)


def least_sum_of_squares(items: list[int], lengths: list[int], n: int) -> Cells:
    """TRL's rule: longest first, each to the group with the least sum of squared lengths."""
    groups: Cells = [[] for _ in range(n)]
    loads = [(0, group) for group in range(n)]
    for item in sorted(items, key=lambda item: lengths[item], reverse=True):
        load, group = heapq.heappop(loads)
        groups[group].append(item)
        heapq.heappush(loads, (load + lengths[item] ** 2, group))
    return groups


def differencing(items: list[int], weight: Callable[[int], int], n: int, equal: bool = False) -> Cells:
    """The rule of verl and slime: join the two partial divisions with the largest spreads, largest to smallest."""
    order = sorted(items, key=lambda item: (weight(item), item))
    heap = []
    for at in range(0, len(order), n if equal else 1):
        first = [(weight(item), [item]) for item in order[at : at + (n if equal else 1)]]
        first += [(0, [])] * (n - len(first))
        first.sort(key=lambda part: (part[0], len(part[1])), reverse=True)
        heapq.heappush(heap, (first[-1][0] - first[0][0], -first[0][0], at, first))
    serial = len(order)
    while len(heap) > 1:
        (_, _, _, one), (_, _, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other))]
        joined.sort(key=lambda part: (part[0], len(part[1])), reverse=True)
        serial += 1
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], -joined[0][0], serial, joined))
    return [part for _, part in heap[0][3]]


def first_fit(items: list[int], lengths: list[int], max_tokens: int) -> Cells:
    bins: Cells = []
    used: list[int] = []
    for item in items:
        place = next((i for i, load in enumerate(used) if load + lengths[item] <= max_tokens), None)
        if place is None:
            bins.append([item])
            used.append(lengths[item])
        else:
            bins[place].append(item)
            used[place] += lengths[item]
    return bins


def split_bins(bins: Cells, count: int, lengths: list[int]) -> Cells:
    """Splits the bin with the most tokens in two until there are `count` bins."""
    bins = [list(bin) for bin in bins]
    tokens = lambda bin: sum(lengths[i] for i in bin)
    while len(bins) < count and any(len(bin) > 1 for bin in bins):
        largest = max((bin for bin in bins if len(bin) > 1), key=tokens)
        bins.remove(largest)
        halves: Cells = [[], []]
        for item in sorted(largest, key=lambda item: -lengths[item]):
            halves[0 if tokens(halves[0]) <= tokens(halves[1]) else 1].append(item)
        bins += halves
    return bins


def slime(items: list[int], lengths: list[int], max_tokens: int) -> Cells:
    """First fit, bins split to a multiple of the ranks, equally many bins per rank by differencing."""
    bins = first_fit(items, lengths, max_tokens)
    bins = split_bins(bins, math.ceil(len(bins) / RANKS) * RANKS, lengths)
    cost = lambda bin: sum(lengths[i] ** 2 for i in bin)
    parts = differencing(list(range(len(bins))), lambda i: cost(bins[i]), RANKS, equal=True)
    # The order of bins within a rank is free, so take the best.
    ranks = [by_falling_cost([bins[i] for i in part], cost) for part in parts]
    return [rank[step] for step in range(len(ranks[0])) for rank in ranks]


def torchtitan(items: list[int], lengths: list[int], max_tokens: int) -> Cells:
    """Next fit in the order of arrival, rows dealt round-robin, empty rows last."""
    rows: Cells = [[]]
    used = 0
    for item in items:
        if rows[-1] and used + lengths[item] > max_tokens:
            rows.append([])
            used = 0
        rows[-1].append(item)
        used += lengths[item]
    return rows + [[]] * (-len(rows) % RANKS)


def check_restated() -> None:
    """Checks the restated rules on cases with known answers."""
    lengths = [8, 7, 6, 5, 4]
    sums = lambda parts: sorted(sum(lengths[i] for i in part) for part in parts)
    # The textbook case of differencing: sums of 14 and 16.
    assert sums(differencing(list(range(5)), lambda i: lengths[i], 2)) == [14, 16]
    assert sums(differencing(list(range(4)), lambda i: lengths[i], 2, equal=True)) == [13, 13]
    # The example of torchtitan: three of 5 tokens in rows of 10.
    assert torchtitan([0, 1, 2], [5, 5, 5], 10)[:2] == [[0, 1], [2]]
    assert first_fit([0, 1, 2, 3], [6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert least_sum_of_squares([0, 1, 2], [3, 2, 2], 2) == [[0], [1, 2]]


def ours(program: str, lengths: list[int], **request: object) -> tuple[Grid, dict]:
    request["lengths"] = lengths
    run = subprocess.run([program], input=json.dumps(request), capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    seen = sorted(i for step in answer["steps"] for cell in step for i in cell)
    assert seen == list(range(len(seen))) and all(cell for step in answer["steps"] for cell in step)
    return Grid(answer["steps"], not request.get("pack"), tuple(request["cost"])), answer


def named_sets(folder: pathlib.Path) -> dict[str, list[int]]:
    draw = random.Random(7)
    sets = {"lognormal": [min(1024, max(16, round(draw.lognormvariate(5, 1)))) for _ in range(1600)]}
    for name in ("web", "squad", "imdb", "speech", "sft32k", "uniform2k", "const512", "spike512"):
        path = folder / f"{name}.txt"
        sets[name] = [max(1, int(length)) for length in path.read_text().split()][:8192]
    sets["32k+128k"] = [131072 if draw.random() < 0.1 else draw.randint(1024, 32768) for _ in range(2048)]
    sets["agents"] = [min(131072, max(64, round(2000 * draw.paretovariate(1.1)))) for _ in range(4096)]
    return sets


def compare_padded(program: str, name: str, lengths: list[int], per_device: int, accumulation: int) -> None:
    from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices

    size = per_device * accumulation * RANKS
    lengths = lengths[: len(lengths) // size * size]
    chunks = lambda order: [order[at : at + per_device] for at in range(0, len(order), per_device)]
    plain = Grid(
        [chunks(list(range(at, at + size))) for at in range(0, len(lengths), size)], True, REBALANCE_COST
    )
    samplers = [
        BatchRebalanceSampler(lengths, size, RANKS, accumulation, shuffle=False, rank=rank) for rank in range(RANKS)
    ]
    flat = [cell for micro_step in zip(*samplers) for cell in micro_step]
    per_step = RANKS * accumulation
    peer = Grid([flat[at : at + per_step] for at in range(0, len(flat), per_step)], True, REBALANCE_COST)
    report(program, name, lengths, [("plain order", plain), ("batch_rebalance", peer)], accumulation, size)
    # group_by_length chooses other sequences for a step, so its own order is the common order.
    order = get_length_grouped_indices(lengths, per_device * accumulation)
    grouped_lengths = [lengths[i] for i in order]
    grouped = Grid(plain.steps, True, REBALANCE_COST)
    report(program, name, grouped_lengths, [("group_by_length", grouped)], accumulation, size)


def report(program, name, lengths, peers, accumulation, size) -> None:
    for label, peer in peers:
        theirs = peer.measure(lengths)
        grid, answer = ours(
            program, lengths, ranks=RANKS, accumulation=accumulation, global_batch_size=size,
            max_tokens=theirs["max_tokens"], cost=REBALANCE_COST,
        )
        found = grid.measure(lengths)
        above = [
            step
            for step, (one, other) in enumerate(zip(grid.steps, peer.steps))
            if max(grid.cell_cost(lengths, cell) for cell in one)
            > max(peer.cell_cost(lengths, cell) for cell in other)
        ]
        row(name, label, theirs, found, f"{len(above)} of {len(grid.steps)} steps above")


def compare_packed(program: str, name: str, lengths: list[int], accumulation: int) -> None:
    """Packs global batches of 16 sequences per cell, or all of a small set."""
    n_cells = RANKS * accumulation
    size = min(16 * n_cells, len(lengths))
    lengths = lengths[: len(lengths) // size * size]
    batches = [list(range(at, at + size)) for at in range(0, len(lengths), size)]
    squares = lambda cell: sum(lengths[i] ** 2 for i in cell)
    longest = max(lengths)
    budget = max(longest, math.ceil(1.02 * max(sum(lengths[i] for i in batch) for batch in batches) / n_cells))
    rules: list[tuple[str, Callable[[list[int]], Cells]]] = [
        ("trl", lambda batch: by_falling_cost(least_sum_of_squares(batch, lengths, n_cells), squares)),
        ("verl", lambda batch: by_falling_cost(differencing(batch, lambda i: lengths[i] ** 2, n_cells), squares)),
        ("slime", lambda batch: slime(batch, lengths, budget)),
        ("torchtitan", lambda batch: torchtitan(batch, lengths, budget)),
    ]
    for label, rule in rules:
        peer = Grid([rule(batch) for batch in batches], False, ATTENTION)
        theirs = peer.measure(lengths)
        cap = theirs["max_tokens"] if label in ("trl", "verl") else budget
        given = accumulation if label in ("trl", "verl") else None
        grid, answer = ours(
            program, lengths, ranks=RANKS, accumulation=given, global_batch_size=size, max_tokens=cap,
            cost=ATTENTION, pack=True,
        )
        found = grid.measure(lengths)
        steps = zip(batches, grid.steps)
        least = sum(least_time([lengths[i] for i in batch], cap, len(step) // RANKS) for batch, step in steps)
        row(name, label, theirs, found, f"{found['time'] / least - 1:.3%} above the bound, "
            f"{1e6 * answer['seconds'] / len(batches):.0f} us a step")


def least_time(lengths: list[int], max_tokens: int, n_steps: int) -> float:
    """A lower bound of the time of packed cells whose cost is the sum of squares.

    A micro-step takes at least as long as the longest sequence for which the earlier ones have no space. What the
    earlier cells cannot hold either, all ranks share.
    """
    lengths = sorted(lengths, reverse=True)
    total = sum(length**2 for length in lengths)
    least = total / RANKS
    levels: list[int] = []
    for step in range(n_steps):
        leader = first_beyond(lengths, max_tokens, RANKS * step)
        if leader is None:
            break
        levels.append(lengths[leader] ** 2)
        held = min(most_cost(lengths, max_tokens, levels), RANKS * sum(levels))
        least = max(least, sum(levels) + (total - held) / RANKS)
    return least


def first_beyond(lengths: list[int], max_tokens: int, n_cells: int) -> int | None:
    """The first of falling lengths that fits in none of `n_cells` cells which hold all longer ones."""
    tokens, n_large, thirds = 0, 0, 0
    for place, length in enumerate(lengths):
        tokens += length
        # A cell holds one sequence of more than half of it, and at most two of more than a third.
        n_large += 2 * length > max_tokens
        thirds += (3 * length > max_tokens) + (3 * length > 2 * max_tokens)
        if tokens > n_cells * max_tokens or n_large > n_cells or thirds > 2 * n_cells:
            return place
    return None


def most_cost(lengths: list[int], max_tokens: int, levels: list[int]) -> float:
    """The most that the cells of micro-steps with these levels hold of falling lengths.

    For any n, the n longest sequences are in n cells, which hold at most their levels. A cell with a sequence of more
    than half of its tokens has only short ones beside it. The other cells hold at most the longest of the other
    sequences, or parts of them. The least of all these limits holds.
    """
    cells = [level for level in levels for _ in range(RANKS)]
    n_large = sum(2 * length > max_tokens for length in lengths)
    longest_small = lengths[n_large] if n_large < len(lengths) else 0
    with_large = [n**2 + (max_tokens - n) * min(max_tokens - n, longest_small) for n in lengths[:n_large]]
    limits = []
    for n in range(min(len(cells), len(lengths)) + 1):
        most = [math.inf] * (n - n_large) + with_large[:n]
        held = sum(min(level, limit) for level, limit in zip(cells, most))
        limits.append(held + filled(lengths[n:], max_tokens, len(cells) - n))
    return min(limits)


def filled(lengths: list[int], max_tokens: int, n_cells: int) -> float:
    """The cost of the longest sequences, or parts of them, that fill cells with at most one large sequence each."""
    held = 0
    space = n_cells * max_tokens
    for place, length in enumerate(lengths):
        if space <= 0:
            break
        if 2 * length > max_tokens and place >= n_cells:
            continue
        part = min(1, space / length)
        held += part * length**2
        space -= part * length
    return held


def compare_time(program: str, n: int = 1_000_000) -> None:
    """Times packed grids of web lengths beside axolotl's packer, which neither balances nor deals: least of ten."""
    # It sets variables that axolotl reads.
    import batch

    try:
        batch.axolotl_load()
    except ModuleNotFoundError as error:
        print(f"axolotl is skipped: {error}", file=sys.stderr)
        return
    lengths = batch.draw(n)
    pack = batch.axolotl_pack(lengths, 16384)
    batch.axolotl_pack(lengths[: batch.WARM_UP], 16384)()
    request = {"global_batch_size": 1408, "max_tokens": 16384, "cost": ATTENTION, "pack": True}
    _, answer = ours(program, lengths.tolist(), ranks=RANKS, **request)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        pack()
        seconds.append(time.perf_counter() - start)
    print(f"{n} web lengths: axolotl {min(seconds):.2f} s, ours in grids of 1408 {answer['seconds']:.2f} s")


def row(name: str, peer: str, theirs: dict, found: dict, note: str) -> None:
    columns = [
        name, peer, f"{found['largest'] / theirs['largest']:.4f}", f"{theirs['time'] / found['time']:.4f}",
        f"{theirs['waste']:.3%}", f"{found['waste']:.3%}",
        f"{theirs['padded_tokens']}", f"{found['padded_tokens']}", f"{theirs['cells']}", f"{found['cells']}", note,
    ]
    print("| " + " | ".join(columns) + " |", flush=True)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    check_restated()
    print("| lengths | peer | largest cell, ours / peer's | peer's time / ours | peer's waste | ours "
          "| peer's tokens | ours | peer's cells | ours | |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|")
    for name, lengths in named_sets(folder).items():
        compare_padded(program, name, lengths, per_device=8, accumulation=2)
    for name, lengths in named_sets(folder).items():
        compare_packed(program, name, lengths, accumulation=8)
    compare_time(program)


if __name__ == "__main__":
    main()
