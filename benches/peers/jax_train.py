"""Times the training step of `benches/step.rs` in JAX.

    python jax_train.py [jit|shard_map] [devices] [hidden] [layers] [heads] [context] [rows] [steps]

`shard_map` divides the rows among `devices` virtual devices. Prints one line: the minimum and the median time of a step,
processor time per step, peak memory, and the losses of the first two steps and of the last step.
"""

import os
import resource
import sys
import time

MODE = sys.argv[1] if len(sys.argv) > 1 else "jit"
NUMBERS = [int(number) for number in sys.argv[2:]]
DEFAULTS = [2, 128, 2, 4, 128, 32, 24]
DEVICES, HIDDEN, LAYERS, HEADS, CONTEXT, ROWS, STEPS = NUMBERS + DEFAULTS[len(NUMBERS):]
VOCABULARY = 256

os.environ["JAX_PLATFORMS"] = "cpu"
if MODE == "shard_map":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402  (the environment sets the number of devices)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402


def parameters():
    random = np.random.default_rng(0)

    def matrix(outputs, inputs, scale):
        return jnp.asarray(random.normal(0, scale, (outputs, inputs)), jnp.float32)

    narrow, wide = (2 / HIDDEN) ** 0.5, (2 / (4 * HIDDEN)) ** 0.5
    block = lambda: {  # noqa: E731
        "attention_norm": jnp.ones(HIDDEN),
        "qkv": matrix(3 * HIDDEN, HIDDEN, narrow),
        "out": matrix(HIDDEN, HIDDEN, narrow),
        "mlp_norm": jnp.ones(HIDDEN),
        "up": matrix(4 * HIDDEN, HIDDEN, narrow),
        "down": matrix(HIDDEN, 4 * HIDDEN, wide),
    }
    return {
        "tokens": matrix(VOCABULARY, HIDDEN, 1.0),
        "positions": matrix(CONTEXT, HIDDEN, 1.0),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": jnp.ones(HIDDEN),
        "head": matrix(VOCABULARY, HIDDEN, narrow),
    }


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def loss_of(p, ids, weights):
    inputs, targets = ids[:, :-1], ids[:, 1:]
    batch, length = inputs.shape
    x = p["tokens"][inputs] + p["positions"][:length]
    positions = jnp.arange(length)
    mask = jnp.where(positions[:, None] >= positions[None], 0.0, -jnp.inf)
    for block in p["blocks"]:
        qkv = norm(x, block["attention_norm"]) @ block["qkv"].T
        query, key, value = qkv.reshape(batch, length, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) / (HIDDEN // HEADS) ** 0.5 + mask
        mixed = (jax.nn.softmax(scores, -1) @ value).transpose(0, 2, 1, 3)
        x = x + mixed.reshape(batch, length, HIDDEN) @ block["out"].T
        up = jax.nn.relu(norm(x, block["mlp_norm"]) @ block["up"].T)
        x = x + up @ block["down"].T
    log_likelihood = jax.nn.log_softmax(norm(x, p["norm"]) @ p["head"].T, -1)
    own = jnp.take_along_axis(log_likelihood, targets[..., None], -1)[..., 0]
    return -(own * weights).sum()


def adam(p, grads, m, v, step):
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    first, second = 1 - 0.9**step, 1 - 0.999**step

    def update(w, m, v):
        return w * (1 - 1e-5) - 1e-3 * (m / first) / (jnp.sqrt(v / second) + 1e-8)

    return jax.tree.map(update, p, m, v), m, v


def body(p, m, v, step, ids, weights):
    loss, grads = jax.value_and_grad(loss_of)(p, ids, weights)
    if MODE == "shard_map":
        grads, loss = jax.lax.psum((grads, loss), "data")
    p, m, v = adam(p, grads, m, v, step)
    return p, m, v, step + 1, loss


def data():
    """Returns the bytes of our bench."""
    state, ids = 12345, []
    for _ in range(ROWS * (CONTEXT + 1)):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        ids.append((state >> 33) % 96 + 32)
    weights = np.full((ROWS, CONTEXT), 1.0 / (ROWS * CONTEXT), np.float32)
    return np.array(ids, np.int32).reshape(ROWS, CONTEXT + 1), weights


def main():
    p, (ids, weights) = parameters(), data()
    if MODE == "shard_map":
        mesh = Mesh(np.array(jax.devices()), ("data",))
        rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        specs = (P(), P(), P(), P(), P("data"), P("data"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        step = jax.jit(mapped, donate_argnums=(0, 1, 2))
        ids, weights = jax.device_put(ids, rows), jax.device_put(weights, rows)
        p = jax.device_put(p, whole)
    else:
        step = jax.jit(body, donate_argnums=(0, 1, 2))
        ids, weights = jnp.asarray(ids), jnp.asarray(weights)
    m, v = jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p)
    number, warm_up, times, losses = jnp.float32(1), STEPS // 4, [], []
    for index in range(STEPS):
        if index == warm_up:
            processor = time.process_time()
        start = time.perf_counter()
        p, m, v, number, loss = step(p, m, v, number, ids, weights)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
    processor = (time.process_time() - processor) / (STEPS - warm_up) * 1e3
    times = sorted(times[warm_up:])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    losses = [round(losses[index], 6) for index in (0, 1, -1)]
    print(
        f"jax {MODE} on {DEVICES}: {times[0] * 1e3:.1f} / {times[len(times) // 2] * 1e3:.1f} ms, "
        f"{processor:.0f} ms of processor, {memory} MiB, losses {losses}",
        flush=True,
    )


main()
