"""Compares the output of our program for a model folder with transformers, and for adapters with PEFT.

    python hf_folder.py PROGRAM FOLDER [ADAPTER]

PROGRAM is `candle-distributed`; FOLDER holds a model in the Hugging Face layout, for example the output of
`train --model`, and ADAPTER holds adapters for it. For three prompts the tokens of the prompt and of its continuation
must be equal, and all logits must agree within 1e-4. No tensor may be missing or unused. Prints one line per prompt,
and exits with 1 after a difference.
"""

import json
import subprocess
import sys
import tempfile
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

PROMPTS = ["When the fog came in", "3 and 1 is ", "Straße 🗼, zwölf"]
TOKENS = 16
MAX_DIFFERENCE = 1e-4


def ours(program, folder, adapter, prompt):
    """Returns the continuation that our program generates for a prompt, and its logits."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        command = [program, "generate", folder, "--prompt", prompt, "--max-tokens", str(TOKENS), "--ignore-eos"]
        command += ["--logits", file.name, "--format", "json"]
        if adapter:
            command += ["--adapter", adapter]
        written = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return written, load_file(file.name)["logits"]


def open_model(folder, adapter):
    """Returns the model in transformers, and the names of missing, unknown and wrongly shaped tensors."""
    sees_images = hasattr(AutoConfig.from_pretrained(folder), "text_config")
    auto_class = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    model, found = auto_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = [name for names in found.values() for name in names]
    if adapter:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(model, adapter)
        wrong += [str(warning.message) for warning in caught if "adapter keys" in str(warning.message)]
    return model.eval(), wrong


def main():
    program, folder, adapter = (sys.argv[1:] + [None])[:3]
    model, wrong = open_model(folder, adapter)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    is_equal = not wrong
    for name in wrong:
        print(f"missing, unknown or wrongly shaped: {name}")
    for prompt in PROMPTS:
        written, logits = ours(program, folder, adapter, prompt)
        ids = written["prompt_ids"] + written["ids"]
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0]
            greedy = model.generate(torch.tensor([written["prompt_ids"]]), max_new_tokens=TOKENS, do_sample=False,
                                    eos_token_id=None, pad_token_id=0)[0].tolist()
        difference = (logits - theirs).abs().max().item()
        same_prompt = tokenizer(prompt).input_ids == written["prompt_ids"]
        same_text = tokenizer.decode(ids, skip_special_tokens=True) == written["text"]
        is_equal &= difference <= MAX_DIFFERENCE and same_prompt and same_text and greedy == ids
        print(f"{prompt!r}: {len(ids)} tokens, logits with deviation {theirs.std():.2f} differ by {difference:.1e}, "
              f"prompt tokens {'equal' if same_prompt else 'DIFFER'}, text {'equal' if same_text else 'DIFFERS'}, "
              f"continuation {'equal' if greedy == ids else 'DIFFERS'}")
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
