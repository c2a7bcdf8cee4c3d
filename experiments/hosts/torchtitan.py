"""Compares the batches of torchtitan's text loader with ours.

`python -m experiments.hosts.torchtitan` needs the extra [torchtitan]. It runs on the CPU in one
process, which builds the dataloaders of both ranks one after the other. Nothing is downloaded.
"""

from functools import partial

from datasets import Dataset
from torch import Tensor
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from experiments.harness.pages import show
from experiments.hosts.common import (
    ACCUMULATION,
    COST,
    NUM_RANKS,
    WINDOW,
    Document,
    Row,
    Tokens,
    documents_of,
    grouped,
    ledger,
    row_of,
    rows_of,
    shifted,
    split_at_restarts,
    stores,
    table_of,
    trained_losses,
)
from wlb.adapters.torchtitan import BalancedDataLoader

LIBRARY = "torchtitan"


class _Encoded:
    """Replaces torchtitan's tokenizer: the texts here are token ids, written as numbers."""

    def encode(self, text: str, **_: bool) -> Tokens:
        return [int(token) for token in text.split()]


def register(documents: list[Tokens]) -> str:
    """Registers the shuffled documents as a torchtitan dataset and returns its name."""
    texts = [{"text": " ".join(map(str, tokens))} for tokens in documents]
    dataset = Dataset.from_list(texts).shuffle(seed=0)
    DATASETS["definitions"] = DatasetConfig(
        path="definitions", loader=lambda path: dataset, sample_processor=lambda row: row["text"]
    )
    return "definitions"


def documents_in(inputs: dict[str, Tensor], labels: Tensor) -> list[Document]:
    """Returns the documents of a batch, which has one packed row."""
    return split_at_restarts(
        inputs["input"][0].tolist(), labels[0].tolist(), inputs["positions"][0].tolist()
    )


def compare(seeds: int = 1) -> list[Row]:
    """Returns the table's rows for torchtitan's text loader and ours."""
    found = stores()
    whole, heldout = documents_of(found.train), rows_of(found.heldout)
    build = partial(dict, dp_world_size=NUM_RANKS, seq_len=WINDOW, local_batch_size=1)
    theirs = HuggingFaceTextDataLoader.Config(dataset=register(whole), infinite=False)
    ours = BalancedDataLoader.Config(
        dataset_path=found.train, micro_batches_per_step=ACCUMULATION, cost=COST
    )
    out: list[Row] = []
    for how, config in (("its text loader", theirs), ("BalancedDataLoader of wlb", ours)):
        ranks = [
            [
                documents_in(*batch)
                for batch in config.build(**build(dp_rank=rank, tokenizer=_Encoded()))
            ]
            for rank in range(NUM_RANKS)
        ]
        steps = grouped(ranks)
        losses = trained_losses(steps, heldout, seeds=seeds)
        out.append(row_of(LIBRARY, how, steps, ledger(map(shifted, whole)), losses))
    return out


if __name__ == "__main__":
    show(table_of(compare()))
