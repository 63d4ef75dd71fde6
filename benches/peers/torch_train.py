"""Times the training step of `benches/step.rs` in PyTorch.

    python torch_train.py [eager|compile|ddp|fsdp|fsdp-checkpoint] [threads] [hidden] [layers] [heads] [context] [rows]
        [steps]

`compile` is eager with `torch.compile`. `ddp` and `fsdp` start `threads` processes of one thread each; `fsdp` calls
`fully_shard` on each block and on the model, and `fsdp-checkpoint` also recomputes blocks in the backward pass. Attention is
`scaled_dot_product_attention`, and the optimizer is the fused AdamW. Prints one line: the minimum and the median time of a
step, processor time per step over all processes, peak memory, and the losses of the first two steps and of the last step.
The memory of several processes is their sum, less their memory after torch is loaded and a small model is trained.
"""

import os
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Norm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = Norm(hidden), Norm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, hidden, layers, heads, context):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids, weights):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()


def data(rows, context):
    """Returns the bytes of our bench."""
    state, ids = 12345, []
    for _ in range(rows * (context + 1)):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        ids.append((state >> 33) % 96 + 32)
    weights = torch.full((rows, context), 1.0 / (rows * context))
    return torch.tensor(ids).view(rows, context + 1), weights


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident(key):
    """Returns a size from `/proc/self/status` in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) / 1024


def fully_sharded(sizes, is_checkpointed):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = Model(*sizes)
    for index, block in enumerate(model.blocks):
        if is_checkpointed:
            model.blocks[index] = block = checkpoint_wrapper(block)
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        local = parameter.to_local()
        nn.init.ones_(local) if parameter.dim() == 1 else nn.init.normal_(local, std=0.02)
    return model


def run(rank, world, mode, sizes, rows, steps):
    torch.manual_seed(0)
    ids, weights = data(rows, sizes[3])
    if world > 1:
        part = slice(rank * rows // world, (rank + 1) * rows // world)
        ids, weights = ids[part].contiguous(), weights[part] * world
    if mode.startswith("fsdp"):
        model = fully_sharded(sizes, mode == "fsdp-checkpoint")
    else:
        model = Model(*sizes)
        if world > 1:
            model = nn.parallel.DistributedDataParallel(model)
        if mode == "compile":
            model.compile()
    return time_steps(model.parameters(), steps, lambda: model(ids, weights))


def time_steps(parameters, steps, forward):
    """Returns the sorted times of steps after a quarter of them, the processor time of one, and all losses."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    warm_up, times, losses = steps // 4, [], []
    for step in range(steps):
        if step == warm_up:
            processor = processor_seconds()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    return sorted(times[warm_up:]), (processor_seconds() - processor) / (steps - warm_up), losses


def report(name, times, processor, losses, memory):
    least, median = times[0] * 1e3, times[len(times) // 2] * 1e3
    losses = [round(losses[index], 6) for index in (0, 1, -1)]
    print(
        f"{name}: {least:.1f} / {median:.1f} ms, {processor * 1e3:.0f} ms of processor, "
        f"{memory}, losses {losses}",
        flush=True,
    )


def worker(rank, name, world, port, run, small, large):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    # Train a small model first, so that the libraries' own memory is not measured.
    run(rank, world, *small)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # Reset the high-water mark.
    times, processor, losses = run(rank, world, *large)
    total = torch.tensor([processor, resident("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        processor, memory = total.tolist()
        report(f"{name} on {world}", times, processor, losses, f"{round(memory)} MiB")
    dist.destroy_process_group()


def spawn(name, world, run, small, large):
    """Starts processes that call `run` with the arguments of a small model, then of the one that is measured."""
    port = 29500 + os.getpid() % 400
    torch.multiprocessing.spawn(worker, (name, world, port, run, small, large), nprocs=world)


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else "eager"
    numbers = [int(number) for number in sys.argv[2:]]
    defaults = [2, 128, 2, 4, 128, 32, 24]
    threads, *sizes, rows, steps = numbers + defaults[len(numbers):]
    if mode not in ("eager", "compile"):
        small = mode, [16, 1, 2, 8], threads, 2
        spawn(f"torch {mode}", threads, run, small, (mode, sizes, rows, steps))
    else:
        torch.set_num_threads(threads)
        measured = run(0, 1, mode, sizes, rows, steps)
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB"
        report(f"torch {mode} on {threads}", *measured, memory)


if __name__ == "__main__":
    main()
