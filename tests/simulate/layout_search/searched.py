"""Provides a small model and documents, so that layout searches take seconds."""

from itertools import islice

from wlb.data import GlobalBatches, lengths_of_family
from wlb.plan import GlobalBatch
from wlb.simulate.layout_search.trial import BatchSample
from wlb.spec import RunSpec, load

WINDOW, N = 8192, 4
KEYS = [
    "model.vocab_size=4096",
    "model.hidden_size=1024",
    "model.num_layers=4",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.head_dim=0",
    "model.ffn_hidden_size=2816",
    "parallel.tp=2",
    "parallel.cp=2",
    "parallel.pp=2",
    "parallel.dp=1",
    f"data.context_window={WINDOW}",
    f"data.num_windows={N}",
    "training.dtype=bfloat16",
    "cost.profile=h100",
    "planner.baseline=false",
]
"""Settings of a run on eight devices."""


def spec_of(*overrides: str) -> RunSpec:
    return load("demo", [*KEYS, *overrides])


def batches(steps: int = 6, *, micro_batches: int = N) -> tuple[GlobalBatch, ...]:
    documents = 200 * steps * micro_batches
    source = lengths_of_family("wlb_paper", window=WINDOW, num_documents=documents, seed=3)
    stream = GlobalBatches(source, tokens_per_batch=micro_batches * WINDOW, seed=3)
    return tuple(batch for batch, _ in islice(stream.iterate(), steps))


def sample(steps: int = 6) -> BatchSample:
    return BatchSample(batches=batches(steps), device="cuda")
