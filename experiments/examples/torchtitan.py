"""Reads a token store through a torchtitan dataloader, in micro-batches of equal work.

`python -m experiments.examples.torchtitan STORE` builds the dataloaders of two data-parallel ranks
as torchtitan's trainer does, and prints a few steps. A training script needs only two lines:

    config.training.local_batch_size = 1
    config.dataloader = BalancedDataLoader.Config(dataset_path=STORE, micro_batches_per_step=4)
"""

import argparse
from itertools import islice

from wlb.adapters.torchtitan import BalancedDataLoader

RANKS = 2  # data-parallel ranks
MICRO_BATCHES = 4  # per rank and step: gradient accumulation steps x micro-batches of the pipeline
WINDOW = 512  # training.seq_len


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", help="prefix of a store made by `wlb prepare` or Megatron")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    config = BalancedDataLoader.Config(
        dataset_path=options.store,
        micro_batches_per_step=MICRO_BATCHES,
        epochs=0,  # repeats the data without end
    )
    loaders = [
        config.build(
            dp_world_size=RANKS,
            dp_rank=rank,
            tokenizer=None,
            seq_len=WINDOW,
            local_batch_size=1,
            snapshot_every_n_steps=None,
        )
        for rank in range(RANKS)
    ]
    for rank, loader in enumerate(loaders):
        for number, (inputs, labels) in enumerate(islice(loader, options.steps * MICRO_BATCHES)):
            step, micro_batch = divmod(number, MICRO_BATCHES)
            # Positions restart at 0 in every document, and attention is cut there.
            documents = int((inputs["positions"] == 0).sum())
            print(
                f"step {step} rank {rank} micro-batch {micro_batch}: {labels.shape[1]} tokens of "
                f"{documents} documents"
            )


if __name__ == "__main__":
    main()
