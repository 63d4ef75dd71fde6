"""Times the fine-tuning steps of `benches/llama.rs` in transformers.

    python hf_llama.py FOLDER [threads] [rows] [length] [steps] [lora] [compile] [fsdp] [checkpoint]

Makes a random model in FOLDER if it has none: of 29 million parameters over 256 tokens with `fsdp`, of 15 million
otherwise. Both programs train this model on the same tokens, so their losses are equal. With `lora` PEFT trains only
adapters of rank 8 on all linear layers; `compile` calls `torch.compile`. `fsdp` starts `threads` processes of one thread
each and shards each layer and the model, `checkpoint` also recomputes layers in the backward pass. Attention is `sdpa`,
and the optimizer is torch's fused AdamW. Prints the line of `torch_train.py`; the memory of one process is all of it, and
its memory after the imports follows.
"""

import os
import resource
import sys

import torch
from torch_train import report, spawn, time_steps
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = "lora", "compile", "fsdp", "checkpoint"


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def config(vocabulary, hidden, inner, layers, heads):
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def make(folder, is_sharded):
    sizes = (256, 512, 1376, 9, 8) if is_sharded else (2048, 384, 1408, 6, 6)
    torch.manual_seed(0)
    LlamaForCausalLM(config(*sizes)).save_pretrained(folder)


def tokens(rows, length, vocabulary):
    """Returns the tokens of our bench."""
    state, ids = 12345, []
    for _ in range(rows * length):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        ids.append((state >> 33) % vocabulary)
    return torch.tensor(ids).view(rows, length)


def fully_sharded(config, folder, rank, world, is_checkpointed):
    """Returns a model of which no process ever holds all weights; they are random without a folder."""
    from safetensors import safe_open
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = [name for name, _ in model.named_parameters()]
    for index, layer in enumerate(model.model.layers):
        if is_checkpointed:
            model.model.layers[index] = layer = checkpoint_wrapper(layer)
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    if folder is None:
        model.init_weights()
        return model
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        for name, parameter in zip(names, model.parameters()):
            parameter.to_local().copy_(torch.chunk(file.get_tensor(name), world)[rank])
    return model


def run_sharded(rank, world, config, folder, is_checkpointed, rows, length, steps):
    with torch.no_grad():
        model = fully_sharded(config, folder, rank, world, is_checkpointed)
    ids = tokens(rows, length, config.vocab_size)
    ids = ids[rank * rows // world : (rank + 1) * rows // world].contiguous()
    times, processor, losses = time_steps(
        model.parameters(), steps, lambda: model(input_ids=ids, labels=ids).loss
    )
    losses = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(losses)
    return times, processor, (losses / world).tolist()


def main():
    folder = sys.argv[1]
    words = [word for word in sys.argv[2:] if word in WORDS]
    numbers = [int(word) for word in sys.argv[2:] if word not in WORDS]
    threads, rows, length, steps = numbers + [2, 8, 256, 24][len(numbers):]
    if not os.path.exists(os.path.join(folder, "config.json")):
        make(folder, "fsdp" in words)
    name = " ".join(["transformers", *words])
    if "fsdp" in words:
        is_checkpointed = "checkpoint" in words
        small = config(16, 16, 16, 1, 2), None, is_checkpointed, threads, 8, 2
        sizes = LlamaConfig.from_pretrained(folder)
        spawn(name, threads, run_sharded, small, (sizes, folder, is_checkpointed, rows, length, steps))
        return
    torch.set_num_threads(threads)
    if "lora" in words:
        from peft import LoraConfig, get_peft_model
    imported = peak_mib()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if "lora" in words:
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=layers))
    if "compile" in words:
        model.compile()
    model.train()
    ids = tokens(rows, length, model.config.vocab_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    measured = time_steps(trained, steps, lambda: model(input_ids=ids, labels=ids).loss)
    report(f"{name} on {threads}", *measured, f"{peak_mib()} MiB ({imported} after imports)")


if __name__ == "__main__":
    main()
