"""Batches for PyTorch's DataLoader, made by the command line of candle-distributed.

The lengths of the sequences are in a file, and `options` are those of `candle-distributed batch`: the
strategy and its limits. Every rank gets the same number of batches, and those of a step cost about
the same. Batches are shuffled, in another way in each epoch; torch is not needed to make them.

    sampler = BatchSampler("--lengths", "lengths.npy", "--strategy", "sorted", "--max-tokens", "16384")
    loader = torch.utils.data.DataLoader(data_set, batch_sampler=sampler, collate_fn=pad)
"""

import json
import subprocess


class BatchSampler:
    def __init__(self, *options, rank=0, world_size=1, seed=0, program="candle-distributed"):
        ranks = f"--world-size {world_size} --rank {rank} --shuffle --seed {seed}".split()
        self.command = [program, "batch", *options, *ranks]
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        command = [*self.command, "--epoch", str(self.epoch), "--format", "jsonl"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for line in process.stdout:
                yield json.loads(line)["indices"]
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command)

    def __len__(self):
        command = [*self.command, "--epoch", str(self.epoch), "--count", "0", "--format", "json"]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["n_steps"]
