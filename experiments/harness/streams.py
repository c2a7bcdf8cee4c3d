"""Provides the document lengths that experiments share, by the name of their source.

- "evaluation": the documents of the simulated 7B-128K runs, drawn from `constants.FAMILY`.
- "wlb_paper": wlb's default distribution, which is also fitted to the paper.
- "stdlib": the modules of Python's standard library, tokenized.
- Any other name is the path of a file of lengths.

`COST` prices documents of "wlb_paper" by a fixed ratio of attention to linear work: W_a / W_l is
1.67 for a document as long as a window of 128K, as in the 7B model. An imbalance computed with it
is the imbalance of forward latency, which Section 7.4 reports.
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
    """Returns the lengths of "wlb_paper", "stdlib" or a file.

    Args:
        name: "wlb_paper", "stdlib" or the path of a file of lengths.
        num_tokens: Tokens that "wlb_paper" must be enough for. The others have a fixed size.
        seed: Seed of "wlb_paper".
    """
    if name == "wlb_paper":
        # A sample gives the mean length, and so the number of documents; a quarter is spare.
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
    """Returns the first `num_batches` global batches, each of N windows of 128K tokens.

    A source that is too short is repeated.
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
