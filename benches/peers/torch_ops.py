"""Times the forward and backward passes of single operations in PyTorch, with the shapes of `benches/ops.rs`.

    python torch_ops.py [threads]

Each line has the name of a bench and the median time of one forward and backward pass in milliseconds. As in our bench,
the loss is the sum of the result, and each pass allocates new gradients. `graph` measures a view: the overhead of the
library for a forward and backward pass of this size.
"""

import statistics
import sys
import time

import torch
from torch.nn import functional as F

torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)


def variable(*shape):
    n = torch.Size(shape).numel()
    numbers = torch.tensor([((i * 7919 + i // 31) % 2003) / 1000 - 1 for i in range(n)])
    return numbers.reshape(shape).requires_grad_()


def measure(name, f, *inputs):
    def once():
        for x in inputs:
            x.grad = None
        f(*inputs).sum().backward()

    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        once()
    times = []
    end = time.perf_counter() + 1.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    print(f"{name} {statistics.median(times) * 1000:.2f}", flush=True)


def rope(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


rows, width = variable(4096, 512), variable(512)
measure("graph", lambda x: x.reshape(512, 4096), rows)
measure("rms_norm", lambda x, w: F.rms_norm(x, (512,), w, 1e-5), rows, width)
measure("layer_norm", lambda x, w, b: F.layer_norm(x, (512,), w, b, 1e-5), rows, width, variable(512))
measure("softmax", lambda x: F.softmax(x, -1), rows)
measure("gelu", F.gelu, rows)
measure("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), rows)
measure("silu", F.silu, rows)
measure("swiglu", lambda x, y: F.silu(x) * y, rows, variable(4096, 512))
measure("dropout", lambda x: F.dropout(x, 0.1), rows)
targets = torch.arange(4096) * 31 % 512
measure("cross_entropy", lambda x: F.cross_entropy(x, targets, reduction="sum"), rows)
weight = variable(512, 512)
measure("linear", F.linear, rows, weight, width)
measure("linear_relu", lambda x, w, b: F.relu(F.linear(x, w, b)), rows, weight, width)
measure("linear_gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), rows, weight, width)
up, down = variable(2048, 512), variable(512, 2048)
measure("mlp", lambda x, up, down: F.linear(F.relu(F.linear(x, up)), down), rows, up, down)
angles = (torch.arange(256 * 32) * 1e-3).reshape(256, 32)
measure("rope", lambda x: rope(x, angles.cos(), angles.sin()), variable(4, 8, 256, 64))
for length, heads, size in [(128, 4, 32), (256, 8, 64), (1024, 4, 128)]:
    qkv = [variable(4096 // length, length, heads, size) for _ in range(3)]

    def attention(query, key, value):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    measure(f"attention_{length}x{heads}x{size}", attention, *qkv)
