"""Shared code of the comparisons: documents, a count of trained labels, table rows, small models.

The documents are 708 functions and methods of standard-library modules in a token store. The
longest have a few windows. Whichever library made a step, it is represented as nested lists:
step[rank][micro-batch][document].
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.harness.pages import ROOT, Table
from experiments.paper.fig16.corpus import Stores, open_stores, small_sources
from wlb import FlopsWorkload, TokenStore
from wlb.adapters.dealt import RankBalance, work_of
from wlb.plan import IGNORE, IntArray

WINDOW = 512
LEARNING_RATE, WARM_UP = 2e-3, 15
"""The learning rate rises for WARM_UP steps and falls linearly to zero over the epoch."""
NUM_RANKS = 2
ACCUMULATION = 2
VOCABULARY = 320
COST = FlopsWorkload(quadratic_ns=1.67, linear_ns_per_token=1.0 * WINDOW)
"""Attention over a whole window is priced at 1.67 times the linear layers.

This is the ratio of the 7B model at a window of 128K (`experiments.harness.streams`). So the small
documents here are balanced as long documents of a large model would be.
"""
FOLDER = ROOT / "runs" / "adapters"

Tokens = list[int]
Document = tuple[Tokens, Tokens]
"""(tokens, labels), equally many. A label is IGNORE where nothing is trained."""
Step = Sequence[Sequence[Sequence[Document]]]
"""Documents of a step, indexed as step[rank][micro-batch][document]."""


def stores() -> Stores:
    """Returns the training and the held-out token store, which are made on first use."""
    sources = small_sources()
    return open_stores(FOLDER, sources, vocabulary=VOCABULARY, heldout_fraction=0.05)


def rows_of(prefix: str) -> list[Tokens]:
    """Returns the documents of a store, cut into rows of at most a window."""
    return [
        tokens[at : at + WINDOW]
        for tokens in documents_of(prefix)
        for at in range(0, len(tokens), WINDOW)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: an epoch with the batches of a library or of wlb."""

    library: str
    how: str  # who made the batches, such as "its text loader"
    num_steps: int
    imbalance: float  # predicted work of the slowest rank over the mean rank, mean of the steps
    worst: float  # the largest imbalance of a step
    utilisation: float  # predicted work of all ranks over the time in which they work or wait
    num_labels: int  # labels trained, each as often as it was trained
    num_left_out: int  # labels that were not trained
    num_twice: int  # labels that were trained a second time or more
    loss: float  # held-out loss after the epoch in nats per label; NaN if nothing was trained
    loss_sd: float | None = None  # standard deviation over initial weights; None for one run


def work_ns(steps: Sequence[Step]) -> IntArray:
    """Returns the predicted work of each rank in each step, shape [steps, ranks]."""
    lengths = [[[[len(d[0]) for d in mb] for mb in rank] for rank in step] for step in steps]
    return work_of(lengths, COST)


def row_of(
    library: str,
    how: str,
    steps: Sequence[Step],
    expected: Counter[int],
    losses: Sequence[float],
    work: IntArray | None = None,
) -> Row:
    """Makes a row of the table from the steps of an epoch.

    Args:
        library: Name of the library.
        how: Who made the batches.
        steps: All steps of the epoch.
        expected: How often each token must be trained as a label (`ledger`).
        losses: Held-out losses of runs from several initial weights.
        work: Work of each rank in each step, shape [steps, ranks]. Defaults to the work of the
            documents on each rank.
    """
    seen = ledger(d for step in steps for rank in step for mb in rank for d in mb)
    return Row(
        library=library,
        how=how,
        **asdict(RankBalance.of(work_ns(steps) if work is None else work)),
        num_labels=seen.total(),
        num_left_out=(expected - seen).total(),
        num_twice=(seen - expected).total(),
        loss=float(np.mean(losses)) if losses else float("nan"),
        loss_sd=float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
    )


def shifted(tokens: Tokens) -> Document:
    """Returns a document whose labels are the next tokens; the last token has none."""
    return tokens, [*tokens[1:], IGNORE]


def ledger(documents: Iterable[Document]) -> Counter[int]:
    """Counts how often each token is trained as a label."""
    return Counter(t for _, labels in documents for t in labels if t != IGNORE)


def grouped(ranks: Sequence[Sequence[Sequence[Document]]]) -> list[Step]:
    """Groups each rank's micro-batches, in order, into steps of ACCUMULATION."""
    num = min(map(len, ranks))
    return [[rank[at : at + ACCUMULATION] for rank in ranks] for at in range(0, num, ACCUMULATION)]


def split_at_restarts(tokens: Tokens, labels: Tokens, positions: Sequence[int]) -> list[Document]:
    """Splits a packed row into documents, which start where positions are 0.

    Padding is left out.
    """
    starts = [i for i, p in enumerate(positions) if p == 0]
    parts = [(tokens[a:b], labels[a:b]) for a, b in pairwise([*starts, len(tokens)])]
    # A document of one token has no label either, but it is not padding.
    return [part for part in parts if len(part[0]) == 1 or set(part[1]) != {IGNORE}]


def documents_of(prefix: str) -> list[Tokens]:
    """Returns the tokens of all documents of a store, in its order."""
    store = TokenStore(prefix)
    return [
        store.read(row, 0, int(store.lengths[row])).tolist() for row in range(store.num_documents)
    ]


def trained_losses(steps: Sequence[Step], heldout: Sequence[Tokens], *, seeds: int) -> list[float]:
    """Returns the held-out losses of runs from `seeds` different initial weights."""
    return [trained_loss(steps, heldout, seed=seed) for seed in range(seeds)]


def trained_loss(steps: Sequence[Step], heldout: Sequence[Tokens], *, seed: int = 0) -> float:
    """Returns the held-out loss of a small LLaMA after one epoch of these steps.

    One process trains the micro-batches of all ranks one after the other. The loss of a step is the
    mean over all its labels.
    """
    import torch

    from wlb.model import build_reference
    from wlb.spec import ModelSpec

    torch.set_num_threads(1)
    model = build_reference(
        ModelSpec(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            ffn_hidden_size=176,
            vocab_size=VOCABULARY,
        ),
        seed=seed,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for i, step in enumerate(steps):
        micro_batches = [mb for rank in step for mb in rank if mb]
        num_targets = ledger(d for mb in micro_batches for d in mb).total()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (i + 1) / WARM_UP) * (1 - i / len(steps))
        for mb in micro_batches:
            (_loss(model, mb) / num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        total = sum(float(_loss(model, [shifted(d)])) for d in heldout)
    return total / sum(len(d) - 1 for d in heldout)


def _loss(model: Any, documents: Sequence[Document]) -> Any:
    """Returns the loss of a micro-batch, summed over its labels."""
    import torch

    from wlb.kernels import Segments, attend
    from wlb.model import LocalAttend, Rows, inverse_frequencies, rope_tables
    from wlb.plan import offsets_of

    lengths = np.array([len(tokens) for tokens, _ in documents])
    offsets = offsets_of(lengths)
    segments = Segments.from_offsets(offsets, offsets, device="cpu")
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
    cos, sin = rope_tables(positions, inverse_frequencies(model.spec))
    labels = torch.tensor([t for _, labels in documents for t in labels])
    call = partial(attend, segments=segments, backend="sdpa")
    rows = Rows(cos=cos, sin=sin, attend=LocalAttend(call), labels=labels)
    return model(torch.tensor([t for tokens, _ in documents for t in tokens]), rows)


def table_of(rows: Sequence[Row]) -> Table:
    formats = dict.fromkeys(("imbalance", "loss", "loss_sd"), ".3f")
    formats |= dict.fromkeys(("num_labels", "num_left_out", "num_twice"), ",d")
    return Table.of(
        "adapters",
        "An epoch by libraries' own batches and by wlb's",
        [asdict(row) for row in rows],
        formats=formats | {"worst": ".2f", "utilisation": ".1%"},
        note=f"{NUM_RANKS} ranks x {ACCUMULATION} micro-batches, window {WINDOW:,}. imbalance: "
        "predicted work of the slowest rank over the mean rank, mean of the steps; worst: of the "
        "worst step. num_left_out: labels that were not trained. num_twice: labels that were "
        "trained more than once. loss: held-out, in nats per label, mean over initial weights. "
        "loss_sd: standard deviation over initial weights.",
    )


def in_two_processes(train: Callable[[int], None]) -> None:
    """Runs train(rank) in two processes of a Gloo group, as torchrun would start them."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(_one_of_two, (train, port), nprocs=2)


def _one_of_two(rank: int, train: Callable[[int], None], port: int) -> None:
    import torch
    import torch.distributed as dist

    from wlb.parallel import world as worlds

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "localhost"
    torch.set_num_threads(1)
    # With two Gloo worker threads the heap could be corrupted (wlb.parallel.gloo).
    worlds.one_gloo_worker(is_one_machine=True)
    try:
        dist.init_process_group("gloo")
        train(rank)
        # A rank that leaves early would close connections that the other rank still uses.
        dist.barrier()
    finally:
        worlds.shutdown()  # otherwise Gloo's threads could abort the process at exit


def words_tokenizer() -> Any:
    """Returns a tokenizer of 16 words, built in memory so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "."])}
    words |= {f"w{i}": i + 4 for i in range(12)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama() -> Any:
    """Returns a tiny transformers LLaMA for `words_tokenizer`, with equal weights on all ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class TinyTrainer:
    """Trains a bigram model by data parallelism, each rank on micro-batches of its samples.

    The loss of a step is the mean over the tokens of all ranks, so it does not depend on how
    samples were divided into micro-batches.
    """

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def step(self, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> float:
        """Trains one step and returns its loss.

        Args:
            lengths: Tokens of each of this rank's samples.
            micro_batches: Indices into `lengths`. Each sample is in one micro-batch.
        """
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(sum(lengths)), 0.0])
        dist.all_reduce(total)
        for part in micro_batches:
            ids = torch.cat([torch.arange(lengths[i]) % 8 for i in part])
            loss = torch.nn.functional.cross_entropy(self.model(ids), ids, reduction="sum")
            (loss / total[0]).backward()
            total[1] += loss.detach() / total[0]
        summed = total[1:].clone()
        for tensor in (summed, *(weight.grad for weight in self.model.parameters())):
            dist.all_reduce(tensor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(summed)


def torchtitan_rl_without_vllm() -> None:
    """Makes torchtitan's RL batcher importable without vLLM.

    Importing the package of torchtitan's RL experiment imports vLLM. So this registers an empty
    package of that name, whose modules can be imported one by one.
    """
    import importlib.util
    import sys
    from types import ModuleType

    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    assert found.submodule_search_locations is not None
    package = ModuleType("torchtitan.experiments.rl")
    package.__path__ = [f"{found.submodule_search_locations[0]}/experiments/rl"]
    sys.modules[package.__name__] = package
