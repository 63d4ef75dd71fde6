"""Times the generation of text by our program beside transformers, with cached keys and values.

    python hf_generate.py PROGRAM FOLDER [threads] [tokens] [rounds]

PROGRAM is `candle-distributed`. Makes the random model of `hf_llama.py`, with a tokenizer of bytes, in an empty FOLDER.
In each round both generate greedy tokens after the same prompt, and one token alone: the difference of the two times
is the time of all tokens but the first, without the start, the prompt and the load. Tokens must be equal. Prints a line
for each program: the fastest and the median round in tokens per second, and the peak memory, for transformers also
after the imports.
"""

import json
import os
import subprocess
import sys
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_llama

PROMPT = "When the fog came in"
# A process starts with the peak of the one that forks it, so a small one stands between.
PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, file=sys.stderr)"""


def make(folder):
    hf_llama.make(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def ours(program, folder, threads, tokens):
    """Returns the seconds of a run, its peak memory in MiB, and what it has written."""
    command = [program, "generate", folder, "--prompt", PROMPT, "--max-tokens", str(tokens), "--ignore-eos"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["RAYON_NUM_THREADS"] = str(threads)
    start = time.perf_counter()
    command = [sys.executable, "-c", PEAK] + command + ["--format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start, int(done.stderr.split()[-1]), json.loads(done.stdout)


def theirs(model, prompt_ids, tokens):
    start = time.perf_counter()
    with torch.inference_mode():
        ids = model.generate(prompt_ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return time.perf_counter() - start, ids[0].tolist()[prompt_ids.shape[1]:]


def show(name, tokens, times, memory):
    times = sorted(times)
    fastest, median = times[0], times[len(times) // 2]
    print(f"{name}: {tokens / fastest:.0f} / {tokens / median:.0f} tokens/s, {memory}")


def main():
    program, folder = sys.argv[1:3]
    numbers = [int(number) for number in sys.argv[3:]]
    threads, tokens, rounds = numbers + [2, 256, 5][len(numbers):]
    torch.set_num_threads(threads)
    imported = hf_llama.peak_mib()
    if not os.path.exists(os.path.join(folder, "tokenizer.json")):
        make(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _, our_peak, written = ours(program, folder, threads, tokens)
    prompt_ids = torch.tensor([written["prompt_ids"]])
    _, expected = theirs(model, prompt_ids, tokens)
    our_times, their_times = [], []
    for _ in range(rounds):
        our_times.append(ours(program, folder, threads, tokens)[0] - ours(program, folder, threads, 1)[0])
        their_times.append(theirs(model, prompt_ids, tokens)[0] - theirs(model, prompt_ids, 1)[0])
    show("candle-distributed", tokens - 1, our_times, f"{our_peak} MiB")
    show("transformers", tokens - 1, their_times, f"{hf_llama.peak_mib()} MiB ({imported} after imports)")
    sys.exit(written["ids"] != expected)


if __name__ == "__main__":
    main()
