"""Times an optimizer step in PyTorch with the 7.4 million parameters of `benches/optim.rs`.

    python torch_optim.py [threads]

Prints a line for each optimizer: the minimum and the median time of a step in milliseconds.
"""

import statistics
import sys
import time

import torch


def shapes():
    yield from [(2048, 256), (2048, 256), (256,)]
    for _ in range(8):
        yield from [(768, 256), (256, 256), (1024, 256), (256, 1024), (256,), (256,)]


def variables(dtype):
    variables = []
    for shape in shapes():
        numbers = torch.sin(torch.arange(torch.Size(shape).numel()) * 0.7).view(shape).to(dtype)
        variable = torch.nn.Parameter(numbers.clone())
        variable.grad = numbers
        variables.append(variable)
    return variables


def run(name, make, dtype):
    optimizer = make(variables(dtype))
    times = []
    for _ in range(60):
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    times = times[10:]
    print(f"{name}: minimum {min(times):.1f} ms, median {statistics.median(times):.1f} ms")


def main():
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("fused", "foreach"):
            run(f"adamw {form} {dtype}", lambda p, form=form: adamw(p, lr=1e-5, **{form: True}), dtype)
    run("sgd fused, momentum", lambda p: sgd(p, lr=1e-5, momentum=0.9, fused=True), torch.float32)


if __name__ == "__main__":
    main()
