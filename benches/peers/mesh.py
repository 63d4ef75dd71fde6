#!/usr/bin/env python3
"""Times published Python packages that run a function on several devices, for docs/benchmarks.md.

The devices are virtual and share the processor: JAX creates them in one process; PyTorch has a process with one thread
for each, which communicate with gloo over the loopback interface. The sections are

- `jax_call`: one call of a cheap function (the negation of 8 x 4 numbers), on 2 devices and on 4. In the `resident`
  cases arguments and results stay on the devices; in `host_to_host` both are numpy arrays.
- `jax_psum` and `gloo`: the sum over two devices, with 4 KB, 1 MB and 16 MB on each.
- `jax_host`: 64 MB from two devices to the host and back.
- `jax_train` and `torch_train`: a training step with AdamW and 256 rows of a perceptron with three layers, on one device
  and data-parallel on two.

Each part of a section runs in a separate process, one after the other, because JAX fixes its number of devices when it
starts. Imports, inputs, compilation and a warm-up come before the clock starts, and results are checked. Standard output
is one line per figure, `name: median µs (min)`, progress goes to standard error. A package that cannot be imported is
skipped with a message. A part that fails prints its error, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Iterator, NamedTuple

from sampler import load_average, machine, version

WORLD = 2
# The number of bytes on each device, and the number of sums.
SIZES = {"4 KB": (4 << 10, 3000), "1 MB": (1 << 20, 500), "16 MB": (16 << 20, 60)}
ROWS = 256
WIDTHS = (512, 2048, 2048, 512)
STEPS = 40
LEARNING_RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2  # PyTorch's defaults.
WARM_UP = 10


class Figure(NamedTuple):
    name: str
    seconds: list[float]
    bytes: int = 0


class Part(NamedTuple):
    """`run` yields the figures for a number of devices, processes or threads; `one_core` pins it to one core."""

    section: str
    module: str
    devices: int
    run: Callable[[int], Iterator[Figure]]
    one_core: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}/{self.run.__name__}/{self.devices}" + ("/one_core" if self.one_core else "")


def sample(
    run: Callable[[Any], Any], calls: int, prepare: Callable[[], Any] = lambda: None
) -> tuple[list[float], Any]:
    """Returns the seconds of each call and the last result. The time excludes new arguments and freed results."""
    for _ in range(WARM_UP):
        result = run(prepare())
    seconds = []
    # Garbage collection is not part of the cost of a single call.
    gc.collect()
    gc.disable()
    for _ in range(calls):
        argument = prepare()
        result = None
        start = time.perf_counter()
        result = run(argument)
        seconds.append(time.perf_counter() - start)
    gc.enable()
    return seconds, result


def jax_mesh(devices: int) -> tuple[Any, Any, Any]:
    """Returns the mesh of all devices, the sharding along its only axis, and the replicated sharding."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    assert jax.device_count() == devices, f"{jax.device_count()} devices instead of {devices}"
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return mesh, NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def jax_call(devices: int) -> Iterator[Figure]:
    import jax
    import numpy as np

    mesh, sharded, _ = jax_mesh(devices)
    host = np.arange(32, dtype=np.float32).reshape(8, 4)
    stacked = host.reshape(devices, 8 // devices, 4)
    mapped = jax.shard_map(lambda x: -x, mesh=mesh, in_specs=sharded.spec, out_specs=sharded.spec)
    shard_map = jax.jit(mapped, in_shardings=sharded)
    pmap = jax.pmap(lambda x: -x)
    kinds = {"jit(shard_map)": (shard_map, host, jax.device_put(host, sharded)), "pmap": (pmap, stacked, pmap(stacked))}
    for kind, (function, on_host, resident) in kinds.items():
        seconds, result = sample(lambda _: function(resident).block_until_ready(), 5000)
        assert len(result.sharding.device_set) == devices and np.array_equal(result, -np.asarray(resident))
        yield Figure(f"jax/call_tiny/{kind}/resident/{devices}", seconds)
        seconds, result = sample(lambda _: np.asarray(function(on_host)), 2000)
        assert np.array_equal(result, -on_host)
        yield Figure(f"jax/call_tiny/{kind}/host_to_host/{devices}", seconds)
    if devices == WORLD:
        plain = jax.jit(lambda x: -x)
        resident = jax.device_put(host)
        seconds, _ = sample(lambda _: plain(resident).block_until_ready(), 5000)
        yield Figure("jax/call_tiny/jit/resident/no mesh", seconds)


def jax_psum(devices: int) -> Iterator[Figure]:
    import jax
    import numpy as np

    mesh, sharded, whole = jax_mesh(devices)
    for size, (n_bytes, calls) in SIZES.items():
        # Make one row for each device: all ones, all twos.
        host = np.repeat(np.arange(1, devices + 1, dtype=np.float32)[:, None], n_bytes // 4, axis=1)
        resident = jax.device_put(host, sharded)
        # With either spec each device has its own copy of the sum, as after an all-reduce.
        for kind, specs in {"input kept": whole.spec, "input donated": sharded.spec}.items():
            body = jax.shard_map(
                lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=sharded.spec, out_specs=specs, check_vma=False
            )
            psum = jax.jit(body, donate_argnums=0 if kind == "input donated" else ())
            result = psum(jax.device_put(host, sharded))
            assert len(result.addressable_shards) == devices and (np.asarray(result) == host.sum(axis=0)).all()
            if kind == "input kept":
                seconds, _ = sample(lambda _: psum(resident).block_until_ready(), calls)
            else:
                # Each sum is the argument of the next, so start with zeros, which do not grow.
                last = jax.device_put(np.zeros_like(host), sharded)

                def again(_: None) -> None:
                    nonlocal last
                    last = psum(last).block_until_ready()

                seconds, _ = sample(again, calls)
            yield Figure(f"jax/psum/{kind}/{size}/{devices}", seconds, n_bytes)


def jax_host(devices: int) -> Iterator[Figure]:
    import jax
    import numpy as np

    _, sharded, _ = jax_mesh(devices)
    host = np.random.default_rng(0).random((64, (1 << 20) // 4), dtype=np.float32)
    resident = jax.device_put(host, sharded).block_until_ready()

    def unread() -> Any:
        """Returns a new array with the same shards: an array that was read caches its host copy."""
        parts = [shard.data for shard in resident.addressable_shards]
        return jax.make_array_from_single_device_arrays(resident.shape, sharded, parts)

    def copy(array: Any) -> None:
        for shard in array.addressable_shards:
            np.copyto(reused[shard.index], shard.data)

    calls = 60
    seconds, result = sample(np.asarray, calls, unread)
    assert np.array_equal(result, host)
    yield Figure(f"jax/gather/np.asarray/64 MB/{devices}", seconds, host.nbytes)
    reused = np.zeros_like(host)
    seconds, _ = sample(copy, calls, unread)
    assert np.array_equal(reused, host)
    yield Figure(f"jax/gather/np.copyto shard by shard/64 MB/{devices}", seconds, host.nbytes)
    seconds, _ = sample(lambda _: np.copyto(reused, host), calls)
    yield Figure("numpy/copyto/64 MB", seconds, host.nbytes)
    seconds, result = sample(lambda _: jax.device_put(host, sharded).block_until_ready(), calls)
    assert np.array_equal(result, host)
    starts = [shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards]
    assert not any(host.ctypes.data <= start < host.ctypes.data + host.nbytes for start in starts), "not copied"
    yield Figure(f"jax/scatter/device_put/64 MB/{devices}", seconds, host.nbytes)


def perceptron() -> tuple[list[tuple[Any, Any]], Any, Any]:
    """Returns the weights (inputs x outputs) and biases of each layer, the inputs and the targets."""
    import numpy as np

    random = np.random.default_rng(0)

    def uniform(bound: float, *shape: int) -> Any:
        return random.uniform(-bound, bound, shape).astype(np.float32)

    layers = [(uniform(n**-0.5, n, m), uniform(n**-0.5, m)) for n, m in zip(WIDTHS, WIDTHS[1:])]
    return layers, uniform(1.0, ROWS, WIDTHS[0]), uniform(1.0, ROWS, WIDTHS[-1])


def jax_train(devices: int) -> Iterator[Figure]:
    import jax
    import jax.numpy as jnp

    mesh, sharded, whole = jax_mesh(devices)
    layers, x, y = perceptron()

    def loss_of(layers: Any, x: Any, y: Any) -> Any:
        for weight, bias in layers[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        weight, bias = layers[-1]
        return jnp.mean((x @ weight + bias - y) ** 2)

    def step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        layers, first, second, count = state
        loss, slopes = jax.value_and_grad(loss_of)(layers, x, y)
        if devices > 1:
            loss, slopes = jax.lax.pmean((loss, slopes), "data")
        count += 1
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, slopes)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, slopes)

        def update(p: Any, m: Any, v: Any) -> Any:
            m = m / (1 - BETAS[0] ** count)
            v = v / (1 - BETAS[1] ** count)
            return p * (1 - LEARNING_RATE * DECAY) - LEARNING_RATE * m / (jnp.sqrt(v) + EPSILON)

        return (jax.tree.map(update, layers, first, second), first, second, count), loss

    # Without the check each device has its own gradients until the average in `step`.
    specs = {"in_specs": (whole.spec, sharded.spec, sharded.spec), "out_specs": (whole.spec, whole.spec)}
    parallel = jax.shard_map(step, mesh=mesh, **specs, check_vma=False) if devices > 1 else step
    parallel = jax.jit(parallel, donate_argnums=0)
    zeros = jax.tree.map(jnp.zeros_like, layers)
    state = jax.device_put((layers, zeros, zeros, jnp.float32(0)), whole)
    # Copy the zeros: a buffer cannot be donated twice.
    state = jax.tree.map(jnp.copy, state)
    x, y = jax.device_put((x, y), sharded)
    losses = []

    def run(_: None) -> None:
        nonlocal state
        state, loss = jax.block_until_ready(parallel(state, x, y))
        losses.append(loss)

    seconds, _ = sample(run, STEPS)
    check_losses([float(loss) for loss in losses])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Figure(f"jax/train_step/{devices} devices, {cores} cores", seconds)


def check_losses(losses: list[float]) -> None:
    """Checks the losses: every kind of step must learn the same; PyTorch and JAX differ in the fifth digit."""
    expected = {0: 0.33609, 5: 0.25033}
    for step, loss in expected.items():
        assert abs(losses[step] - loss) < 1e-4, f"the losses are {losses[:12]}, but step {step} must have {loss}"


def torch_process(rank: int, world: int, directory: str, body: Callable[..., Any], outcomes: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = pathlib.Path(directory, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        figures = list(body(world, rank))
        if rank == 0:
            outcomes.put([tuple(figure) for figure in figures])
        dist.barrier()
    finally:
        dist.destroy_process_group()


def torch_processes(world: int, body: Callable[..., Any]) -> Iterator[Figure]:
    """Runs `body` in `world` processes, and returns the figures of rank 0."""
    import torch.multiprocessing

    outcomes = torch.multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        context = torch.multiprocessing.spawn(
            torch_process, (world, directory, body, outcomes), nprocs=world, join=False
        )
        while not context.join(timeout=0.1):
            if not outcomes.empty():
                break
        figures = outcomes.get(timeout=60)
        while not context.join():
            pass
    yield from (Figure(*figure) for figure in figures)


def gloo_all_reduce(world: int, rank: int) -> Iterator[Figure]:
    import torch
    import torch.distributed as dist

    for size, (n_bytes, calls) in SIZES.items():
        tensor = torch.full((n_bytes // 4,), rank + 1.0)
        dist.all_reduce(tensor)
        assert (tensor == world * (world + 1) / 2).all()
        # all_reduce overwrites its argument, so start with zeros, which do not grow.
        tensor.zero_()
        seconds, _ = sample(lambda _: dist.all_reduce(tensor), calls)
        yield Figure(f"torch/gloo_all_reduce/{size}/{world}", seconds, n_bytes)


def gloo(devices: int) -> Iterator[Figure]:
    return torch_processes(devices, gloo_all_reduce)


def torch_steps(world: int, rank: int) -> Iterator[Figure]:
    """Times the training steps of one process; `world` processes use DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    layers, x, y = perceptron()
    x, y = (torch.from_numpy(values).tensor_split(world)[rank].contiguous() for values in (x, y))
    kinds = {"AdamW": {}, "AdamW(fused=True)": {"fused": True}}
    for kind, options in kinds.items():
        modules: list[Any] = []
        for weight, bias in layers:
            linear = torch.nn.Linear(*weight.shape)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(weight.T))
                linear.bias.copy_(torch.from_numpy(bias))
            modules += [linear, torch.nn.ReLU()]
        model: Any = torch.nn.Sequential(*modules[:-1])
        if world > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, **options
        )
        losses = []

        def run(_: None) -> None:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        seconds, _ = sample(run, STEPS)
        losses = torch.stack(losses)
        if world > 1:
            torch.distributed.all_reduce(losses)
        check_losses((losses / world).tolist())
        way = f"DistributedDataParallel, {world} processes" if world > 1 else "plain"
        yield Figure(f"torch/train_step/{kind}/{way} of {torch.get_num_threads()} threads", seconds)


def torch_plain(threads: int) -> Iterator[Figure]:
    import torch

    torch.set_num_threads(threads)
    return torch_steps(1, 0)


def torch_ddp(devices: int) -> Iterator[Figure]:
    return torch_processes(devices, torch_steps)


PARTS = (
    Part("jax_call", "jax", 2, jax_call),
    Part("jax_call", "jax", 4, jax_call),
    Part("jax_psum", "jax", WORLD, jax_psum),
    Part("jax_host", "jax", WORLD, jax_host),
    Part("gloo", "torch.distributed", WORLD, gloo),
    Part("jax_train", "jax", 1, jax_train, one_core=True),
    Part("jax_train", "jax", 1, jax_train),
    Part("jax_train", "jax", WORLD, jax_train),
    Part("torch_train", "torch.distributed", 1, torch_plain),
    Part("torch_train", "torch.distributed", 2, torch_plain),
    Part("torch_train", "torch.distributed", WORLD, torch_ddp),
)
SECTIONS = tuple(dict.fromkeys(part.section for part in PARTS))


def main() -> int:
    args = parse_args()
    if args.child:
        # Begin a new line after any output of the packages.
        print("\n" + json.dumps(measure(next(part for part in PARTS if part.name == args.child))))
        return 0
    print(f"{machine()}, load average {load_average()}", file=sys.stderr)
    has_failed = False
    for section in args.sections or SECTIONS:
        first = None
        for part in [part for part in PARTS if part.section == section]:
            load = load_average()
            outcome = run_child(part)
            print(f"{part.name}: {outcome.get('version')}, load average {load}", file=sys.stderr, flush=True)
            for outcome_kind in ("skipped", "failed"):
                if outcome_kind in outcome:
                    print(f"  {outcome_kind}: {outcome[outcome_kind]}", file=sys.stderr, flush=True)
                    has_failed |= outcome_kind == "failed"
            figures = [Figure(*figure) for figure in outcome.get("figures", ())]
            # Compare steps with the first part, which has one core or one thread.
            first = first or figures
            for place, figure in enumerate(figures):
                is_step = section.endswith("train") and figures is not first
                print(line(figure, first[place] if is_step else None), flush=True)
    return 1 if has_failed else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ", ".join(SECTIONS)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {choices} (default: all)")
    parser.add_argument("--child", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [section for section in args.sections if section not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]}: choose from {choices}")
    return args


def line(figure: Figure, base: Figure | None) -> str:
    median = statistics.median(figure.seconds)
    text = f"{figure.name}: {median * 1e6:.1f} µs ({min(figure.seconds) * 1e6:.1f})"
    if figure.bytes >= 1 << 20:
        text += f", {figure.bytes / median / 1e9:.2f} GB/s"
    if base:
        text += f", {median / statistics.median(base.seconds):.3f} of {base.name}"
    return text


def run_child(part: Part) -> dict[str, Any]:
    """Runs a part in a fresh process, and returns its figures or the reason of its failure."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={part.devices}"]
    environment["XLA_FLAGS"] = " ".join(flags).strip()
    # Without this variable gloo resolves the host name, which fails on some machines.
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    command = [sys.executable, os.path.abspath(__file__), f"--child={part.name}"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    errors = done.stderr.strip().splitlines()
    return {"failed": f"exit status {done.returncode}" + (f": {errors[-1]}" if errors else "")}


def measure(part: Part) -> dict[str, Any]:
    if part.one_core:
        if not hasattr(os, "sched_setaffinity"):
            return {"skipped": "this system cannot pin a process to one core"}
        # Pin the process before the package counts the cores and starts a thread for each.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        importlib.import_module(part.module)
    except ModuleNotFoundError as error:
        return {"skipped": f"not installed: {error}"}
    except Exception as error:  # Broken installations raise any kind of error.
        return {"skipped": f"import fails: {type(error).__name__}: {str(error).splitlines()[0]}"}
    package = part.module.split(".")[0]
    return {
        "version": f"{package} {version((package,))}",
        "figures": [tuple(figure) for figure in part.run(part.devices)],
    }


if __name__ == "__main__":
    sys.exit(main())
