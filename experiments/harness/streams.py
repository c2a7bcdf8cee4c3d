"""Provides the length sources that experiments share: fitted families, standard library, files.

Two families are fitted to the paper. "evaluation" gives the documents of the simulated 7B-128K
runs, drawn from the family of `experiments/harness/constants.py`. "wlb_paper" is the library's
default family. `COST` goes with it: a fixed ratio of attention to linear work (W_a / W_l = 1.67 at
a window of 128K for the 7B model), so that imbalance is that of forward latency, as in Section 7.4.
"""

from itertools import islice
from pathlib import Path

from experiments.harness import constants, evaluation
from experiments.harness.constants import configuration
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource, TokenStore, lengths_of_family, lengths_of_file
from wlb.plan import GlobalBatch
from wlb.prepare import prepare, text_documents

WINDOW = 131072
RATIO = 1.67
COST = FlopsWorkload(quadratic_ns=1000 * RATIO / WINDOW, linear_ns_per_token=1000)
STORES = Path("runs/stores")


def source_of(name: str, *, num_tokens: int, seed: int) -> LengthSource:
    """Returns the source "wlb_paper" (enough for num_tokens), "stdlib", or that of a file."""
    if name == "wlb_paper":
        mean = int(lengths_of_family(window=WINDOW, num_documents=4096, seed=seed).lengths.mean())
        return lengths_of_family(
            window=WINDOW, num_documents=num_tokens * 5 // 4 // mean, seed=seed
        )
    if name == "stdlib":
        made = prepare(
            text_documents("stdlib"),
            STORES / "stdlib-bpe32000-experiments",
            vocab_size=32000,
            heldout_fraction=0,
            seed=0,
            sample_bytes=24_000_000,
        )
        return LengthSource(name="stdlib", lengths=TokenStore(made.prefix).lengths)
    return lengths_of_file(name)


def batches_of(
    name: str, *, num_micro_batches: int, num_batches: int, seed: int
) -> list[GlobalBatch]:
    """Returns the first `num_batches` global batches of N x 128K tokens, repeating a short
    source.
    """
    if name == "evaluation":
        spec = configuration("7b_128k", f"data.num_windows={num_micro_batches}")
        return evaluation.batches_of(spec, family=constants.FAMILY, steps=num_batches, seed=seed)
    per_batch = num_micro_batches * WINDOW
    source = source_of(name, num_tokens=per_batch * num_batches, seed=seed)
    stream = GlobalBatches(source, tokens_per_batch=per_batch, seed=seed)
    return [batch for batch, _ in islice(stream.iterate(), num_batches)]


def title_of(name: str) -> str:
    return {
        "evaluation": "fitted distribution (lengths of the evaluation)",
        "wlb_paper": "fitted distribution (wlb_paper)",
        "stdlib": "Python standard library, 32K BPE",
    }.get(name, Path(name).name)
