"""Runs `batch_sampler.py` as a training loop would; with PyTorch, through its DataLoader too.

    python3 test_batch_sampler.py [PROGRAM]
"""

import os
import subprocess
import sys
import tempfile

from batch_sampler import BatchSampler

LENGTHS = [n * 37 % 200 + 1 for n in range(500)]


def check(sampler_of):
    samplers = [sampler_of(rank) for rank in range(3)]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        # As many steps on every rank, each sequence once, and no batch above its budget.
        assert [len(of_rank) for of_rank in batches] == [len(sampler) for sampler in samplers]
        assert len({len(of_rank) for of_rank in batches}) == 1
        indices = [index for of_rank in batches for batch in of_rank for index in batch]
        assert sorted(indices) == list(range(len(LENGTHS)))
        for batch in (batch for of_rank in batches for batch in of_rank):
            assert len(batch) * max(LENGTHS[index] for index in batch) <= 2000
        assert batches == [list(sampler) for sampler in samplers]
        epochs.append(batches)
    assert epochs[0] != epochs[1]


def check_loader(sampler_of):
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        print("SKIPPED, there is no torch here")
        return
    for n_workers in (0, 2):
        sampler = sampler_of(1)
        loader = DataLoader(LENGTHS, batch_sampler=sampler, num_workers=n_workers, collate_fn=list)
        assert len(loader) == len(sampler)
        assert list(loader) == [[LENGTHS[index] for index in batch] for batch in sampler]
    print("the DataLoader reads the same batches")


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else "candle-distributed"
    with tempfile.TemporaryDirectory() as folder:
        lengths = os.path.join(folder, "lengths.txt")
        with open(lengths, "w") as file:
            file.write("\n".join(map(str, LENGTHS)))
        options = ["--lengths", lengths, "--strategy", "sorted", "--max-tokens", "2000"]

        def sampler_of(rank):
            return BatchSampler(*options, rank=rank, world_size=3, program=program)

        check(sampler_of)
        check_loader(sampler_of)
        # A fault of the command line is one of the loop, not an epoch that ends early.
        try:
            list(BatchSampler(*options[:-1], "7", program=program))
        except subprocess.CalledProcessError as fault:
            assert fault.returncode == 2
        else:
            raise AssertionError("a budget of 7 tokens was accepted")
    print("all batches are as they must be")


if __name__ == "__main__":
    main()
