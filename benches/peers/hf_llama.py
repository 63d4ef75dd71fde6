"""Times the fine-tuning steps of `benches/llama.rs` in transformers.

    python hf_llama.py FOLDER [threads] [rows] [length] [steps] [lora] [compile]

Makes a random model of 15 million parameters in FOLDER if it has none. Both programs train this model on the same tokens,
so their losses are equal. With `lora` PEFT trains only adapters of rank 8 on all linear layers; `compile` calls
`torch.compile`. Attention is `sdpa`, and the optimizer is torch's fused AdamW. Prints one line: the minimum and the median
time of a step, tokens per second by the median, processor time per step, peak memory, memory after the imports, and the
losses of the first two steps and of the last step.
"""

import os
import resource
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make(folder):
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=384,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def tokens(rows, length, vocabulary):
    """Returns the tokens of our bench."""
    state, ids = 12345, []
    for _ in range(rows * length):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        ids.append((state >> 33) % vocabulary)
    return torch.tensor(ids).view(rows, length)


def main():
    folder = sys.argv[1]
    words = sys.argv[2:]
    lora, compiled = "lora" in words, "compile" in words
    numbers = [int(word) for word in words if word not in ("lora", "compile")]
    threads, rows, length, steps = numbers + [2, 8, 256, 24][len(numbers):]
    torch.set_num_threads(threads)
    if lora:
        from peft import LoraConfig, get_peft_model
    imported = peak_mib()
    if not os.path.exists(os.path.join(folder, "config.json")):
        make(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers))
    if compiled:
        model.compile()
    model.train()
    ids = tokens(rows, length, model.config.vocab_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    warm_up, times, losses = steps // 4, [], []
    for step in range(steps):
        if step == warm_up:
            processor = processor_seconds()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    processor = (processor_seconds() - processor) / (steps - warm_up)
    times = sorted(times[warm_up:])
    median = times[len(times) // 2]
    losses = [round(losses[index], 6) for index in (0, 1, -1)]
    print(
        f"{'compiled ' if compiled else ''}{'peft' if lora else 'transformers'} on {threads}: {times[0] * 1e3:.1f} / {median * 1e3:.1f} ms, "
        f"{rows * length / median:.0f} tokens/s, {processor * 1e3:.0f} ms of processor, "
        f"{peak_mib()} MiB ({imported} after imports), losses {losses}",
    )


if __name__ == "__main__":
    main()
