#!/usr/bin/env python3
"""Times published Python packages that distribute a model over devices, for docs/benchmarks.md.

`device_map` is Accelerate's `infer_auto_device_map`, which assigns whole layers to the devices of one machine.
`load_plan` is the load planner of torch.distributed.checkpoint for one rank: --loaded ranks read a checkpoint of --saved
ranks, and every tensor is cut along dimension 0 as in `fully_shard`.

FILE lists the tensors of a model, in one of the formats of tests/fixtures/models. The script allocates no weights and
uses one process. Imports and inputs (a tree of empty modules; the checkpoint's metadata) come before the clock starts,
and results are checked after it stops. Standard output is one Markdown table, progress goes to standard error. The peak
is the largest resident size of the process, inputs included, so run each operation in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import math
import os
import pathlib
import sys
import time
from typing import Any, Callable, Iterator, NamedTuple

# Use one core. Set the variables before the imports that read them.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

from sampler import load_average, machine, peak_bytes, version

RUNS = 3
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Tensor(NamedTuple):
    name: str
    shape: list[int]
    dtype: str


class Case(NamedTuple):
    """One measurement: `run` is timed, `read` checks its result and describes it in words."""

    peer: str
    packages: tuple[str, ...]
    call: str
    run: Callable[[], Any]
    read: Callable[[Any], str]


def read_tensors(path: pathlib.Path) -> list[Tensor]:
    """Reads the tensors of a manifest, or of a recipe, which has a template for each layer and each expert."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "groups" not in content:
        return [Tensor(name, tensor["shape"], tensor["dtype"]) for name, tensor in content.items()]

    def fill(entry: list[Any], **numbers: int) -> Tensor:
        name, shape, *dtype = entry
        return Tensor(name.format(**numbers), shape, *(dtype or [content["dtype_default"]]))

    tensors = [fill(entry) for entry in content["before"]]
    for group in content["groups"]:
        # Consecutive templates with {e} are repeated together for each expert.
        runs: list[tuple[int, list[Any]]] = []
        for entry in group["tensors"]:
            experts = group["experts"] if "{e}" in entry[0] else 1
            if not (runs and runs[-1][0] == experts > 1):
                runs.append((experts, []))
            runs[-1][1].append(entry)
        for layer in range(*group["layers"]):
            for experts, entries in runs:
                tensors += [fill(entry, l=layer, e=expert) for expert in range(experts) for entry in entries]
    tensors += [fill(entry) for entry in content["after"]]
    assert len(tensors) == content["tensors"], f"{len(tensors)} tensors, but the file states {content['tensors']}"
    return tensors


def device_map(tensors: list[Tensor], args: argparse.Namespace) -> Iterator[Case]:
    import torch
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # It warns about every device that this machine lacks.
    # Accelerate recognizes the layers that must not be split by the name of their class.
    layer_class = type("DecoderLayer", (torch.nn.Module,), {})
    model = torch.nn.Module()
    for name, shape, dtype in tensors:
        *path, leaf = name.split(".")
        owner = model
        for depth, part in enumerate(path):
            if part not in owner._modules:
                is_layer = part.isdigit() and path[depth - 1] in ("layers", "layer", "h")
                owner.add_module(part, layer_class() if is_layer else torch.nn.Module())
            owner = owner._modules[part]
        tensor = torch.empty(shape, dtype=getattr(torch, DTYPES[dtype]), device="meta")
        if leaf == "e_score_correction_bias":
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor))
    assert len(model.state_dict()) == len(tensors)
    memory = round(args.memory * 1e9)
    limits = {device: memory for device in range(args.devices)}

    def read(result: dict[str, Any]) -> str:
        used: dict[Any, int] = {}
        for name, tensor in model.state_dict().items():
            place = next(result[prefix] for prefix in prefixes(name) if prefix in result)
            used[place] = used.get(place, 0) + tensor.numel() * tensor.element_size()
        # Layers that do not fit are on disk.
        disk = used.pop("disk", 0)
        assert max(used.values()) <= memory and set(used) <= set(limits)
        mean = (sum(used.values()) + disk) / args.devices
        on_disk = f", {disk / 1e9:.1f} GB on disk" if disk else ""
        return f"{len(used)} devices, largest over mean {max(used.values()) / mean:.3f}{on_disk}"

    def place(max_memory: dict[Any, int]) -> dict[str, Any]:
        return infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=["DecoderLayer"])

    def balance() -> dict[Any, int]:
        return get_balanced_memory(model, max_memory=dict(limits), no_split_module_classes=["DecoderLayer"])

    peer = ("accelerate", ("accelerate",))
    devices = f"{args.devices} devices of {args.memory:g} GB, layers not split"
    yield Case(*peer, f"`infer_auto_device_map`, {devices}", lambda: place(dict(limits)), read)
    yield Case(*peer, f"`get_balanced_memory`, `infer_auto_device_map`, {devices}", lambda: place(balance()), read)


def prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), -1, -1))


def load_plan(tensors: list[Tensor], args: argparse.Namespace) -> Iterator[Case]:
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    check_metadata()
    metadata = checkpoint(tensors, args.saved)
    chunks = sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values())
    print(f"{chunks} saved chunks, load average {load_average()}", file=sys.stderr, flush=True)
    mine = {tensor.name: [cut(tensor.shape, args.loaded, args.rank)] for tensor in tensors}
    wanted = sum(math.prod(chunk.sizes) for [chunk] in mine.values())

    def read(items: list[Any]) -> str:
        found = sum(math.prod(item.lengths) for item in items)
        assert found == wanted, f"{found} elements are read, but the rank has {wanted}"
        return f"{len(items)} reads of {chunks} chunks"

    ranks = f"{args.saved} to {args.loaded} ranks, rank {args.rank}"
    with one_rank(args.rank, args.loaded) as mesh:
        state = sharded(tensors, mesh)
        yield Case(
            "torch.distributed.checkpoint",
            ("torch",),
            f"`create_default_local_load_plan` of DTensors, {ranks}",
            lambda: create_default_local_load_plan(state, metadata),
            lambda plan: read(plan.items),
        )
    yield Case(
        "torch.distributed.checkpoint",
        ("torch",),
        f"`create_read_items_for_chunk_list` alone, {ranks}",
        lambda: [
            item
            for name, entry in metadata.state_dict_metadata.items()
            for item in create_read_items_for_chunk_list(name, entry, mine[name])
        ],
        read,
    )


def cut(shape: list[int], world: int, rank: int) -> Any:
    """Returns the shard of `rank` in `fully_shard`: equal numbers of rows, fewer or none on the last ranks."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    rows = -(-shape[0] // world)
    start = min(rank * rows, shape[0])
    end = min(start + rows, shape[0])
    return ChunkStorageMetadata(torch.Size([start, *[0] * (len(shape) - 1)]), torch.Size([end - start, *shape[1:]]))


def checkpoint(tensors: list[Tensor], world: int) -> Any:
    """Returns the metadata of a checkpoint of `world` ranks. Torch lists the empty shards as a single chunk."""
    import torch
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    entries = {}
    for name, shape, dtype in tensors:
        holders = -(-shape[0] // -(-shape[0] // world))
        chunks = [cut(shape, world, rank) for rank in range(min(holders + 1, world))]
        properties = TensorProperties(dtype=getattr(torch, DTYPES[dtype]))
        entries[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(entries)


@contextlib.contextmanager
def one_rank(rank: int, world: int) -> Iterator[Any]:
    """Opens the mesh of `rank` in a fake process group, which sends no data."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def sharded(tensors: list[Tensor], mesh: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor, Shard

    state = {}
    for name, shape, dtype in tensors:
        local = cut(shape, mesh.size(), mesh.get_local_rank()).sizes
        whole = torch.empty(shape, dtype=getattr(torch, DTYPES[dtype]), device="meta")
        part = torch.empty(local, dtype=whole.dtype, device="meta")
        state[name] = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state


def check_metadata() -> None:
    """Checks that `checkpoint` equals the metadata of torch's own save planners for a small model."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    world = 7
    tensors = [Tensor(f"a.{rows}", [rows, 5], "F32") for rows in (1, 3, 6, 7, 8, 14, 23)] + [Tensor("b", [9], "BF16")]
    plans = []
    for rank in range(world):
        with one_rank(rank, world) as mesh:
            planner = DefaultSavePlanner()
            planner.set_up_planner(sharded(tensors, mesh), is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
    _, expected = planner.create_global_plan(plans)
    found = checkpoint(tensors, world).state_dict_metadata
    assert list(found) == list(expected.state_dict_metadata)
    for name, entry in expected.state_dict_metadata.items():
        assert (found[name].size, found[name].chunks) == (entry.size, entry.chunks), f"{found[name]} is not {entry}"
        assert found[name].properties.dtype == entry.properties.dtype


OPERATIONS = {"device_map": ("accelerate", device_map), "load_plan": ("torch.distributed.checkpoint", load_plan)}


def main() -> int:
    args = parse_args()
    module, cases = OPERATIONS[args.operation]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        sys.exit(f"not installed: {error}")
    tensors = read_tensors(args.file)
    print(f"{machine()}, load average {load_average()}", file=sys.stderr, flush=True)
    rows = []
    for case in cases(tensors, args):
        print(f"{case.peer}: {case.call}", file=sys.stderr, flush=True)
        seconds = []
        for _ in range(RUNS):
            result = None
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            result = case.run()
            seconds.append(time.perf_counter() - start)
            gc.enable()
        print("  " + " ".join(f"{run:.3f}" for run in seconds), file=sys.stderr, flush=True)
        words = case.read(result)
        columns = [case.peer, version(case.packages), case.call, args.file.name, f"{len(tensors)}", words]
        rows.append([*columns, f"{min(seconds):.4g}", f"{peak_bytes() / 2**30:.2f}"])
    print_table(["peer", "version", "timed", "model", "tensors", "result", "seconds", "peak GiB"], rows)
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("file", type=pathlib.Path, metavar="FILE", help="a manifest or a recipe")
    parser.add_argument("--devices", type=int, default=8, help="devices of device_map (default %(default)s)")
    parser.add_argument("--memory", type=float, default=192, help="GB of each device (default %(default)s)")
    parser.add_argument("--saved", type=int, default=4096, help="ranks of the saved checkpoint (default %(default)s)")
    parser.add_argument("--loaded", type=int, default=3072, help="ranks that load it (default %(default)s)")
    parser.add_argument("--rank", type=int, help="the timed rank (default: half of --loaded)")
    args = parser.parse_args()
    if min(args.devices, args.saved, args.loaded) < 1:
        parser.error("--devices, --saved and --loaded must be at least 1")
    if args.rank is None:
        args.rank = args.loaded // 2
    if not 0 <= args.rank < args.loaded:
        parser.error(f"rank {args.rank} is out of range for {args.loaded} ranks")
    return args


def print_table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join(" ---: " if place >= len(head) - 2 else " --- " for place in range(len(head))) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    sys.exit(main())
