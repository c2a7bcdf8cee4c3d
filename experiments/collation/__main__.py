"""Measures how fast padding-free collators are: `python -m experiments.collation [--quick]`.

It compares transformers' DataCollatorWithFlattening, TRL's DataCollatorForLanguageModeling
(padding_free) and ours, in one run, on batches whose lengths are like those of FLAN, OrcaMath and
The Stack. `ABOUT`, which is part of the page, describes inputs and timing.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.pages import How, Table, show, write_results
from wlb.adapters.collate import PaddingFreeCollator, flatten_buffer
from wlb.plan import IntArray

try:
    import torch
    import transformers
    import trl
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TrlCollator
except ImportError as error:
    raise SystemExit(f"{error}: pip install -e '.[train,hf]'") from error

ABOUT = """\
Tokens a second of transformers' DataCollatorWithFlattening, TRL's DataCollatorForLanguageModeling
(padding_free) and ours, in one run, on batches of examples whose lengths are like those of FLAN,
OrcaMath and The Stack (lognormals that the paper's tables imply). All return torch tensors:
input_ids, labels, position_ids, cu_seq_lens, max_length; TRL also seq_idx, which it always makes.
Every batch is compared with transformers' before it is timed.

The form of the input decides most of the time, so equal forms are compared:
- lists of Python ints: every collator has to read the integers one by one;
- int64 NumPy arrays, as `datasets` with format "numpy" gives them;
- a buffer: documents one after the other as in a token store (uint16), lengths from a plan. Only
  ours takes it; its batches are compared with transformers' on lists.

The collators take turns on each batch, so that a busy machine slows all alike; a collator's time is
the sum over batches of its fastest turn. torch runs on one thread, as in a DataLoader's workers.
"""
"""Text of the page on the comparison and the timing."""
VOCABULARY = 32_000
TARGET = 20.0
"""This project's target is this multiple of transformers' tokens per second."""
BATCHES = {4: 16, 64: 8, 512: 2}
"""This many batches are timed by examples per batch: a GPU's mini-batch in the paper, and more."""
SOURCES = {"FLAN": (461, 1.0), "OrcaMath": (395, 0.6), "The Stack": (1350, 1.4)}
"""Each lognormal has this mean in tokens and this sigma.

Means come from totals of the paper's Tables 4 to 6, sigmas are fits to its steps.
"""
HUGGING_FACE, TRL, OURS = "transformers", "TRL", "ours"
COLUMNS = ("lengths", "examples", "tokens", "input", "collator", "M tokens/s", "to transformers")
FORMATS = {"tokens": ",d", "M tokens/s": ".1f", "to transformers": ".1f"}

Call = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Holds the speed of a collator on one form of input.

    tokens: mean tokens of a batch
    rate: tokens per second
    ratio: rate over transformers' on the same input (on lists, for a buffer)
    """

    source: str
    examples: int
    tokens: int
    form: str
    collator: str
    rate: float
    ratio: float

    def row(self) -> list[Any]:
        return [
            self.source,
            self.examples,
            self.tokens,
            self.form,
            self.collator,
            self.rate / 1e6,
            self.ratio,
        ]


def lengths_of(source: str, num: int, rng: np.random.Generator) -> IntArray:
    mean, sigma = SOURCES[source]
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def calls_of(lengths: IntArray, rng: np.random.Generator) -> dict[tuple[str, str], Call]:
    """Returns the calls that are timed on one batch, by form of the input and collator."""
    buffer = rng.integers(0, VOCABULARY, int(lengths.sum())).astype(np.uint16)
    rows = np.split(buffer.astype(np.int64), np.cumsum(lengths)[:-1])
    as_lists = [{"input_ids": row.tolist()} for row in rows]
    as_arrays = [{"input_ids": row} for row in rows]
    ours = PaddingFreeCollator(return_flash_attn_kwargs=True)
    hugging_face = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    of_trl = TrlCollator(pad_token_id=0, padding_free=True)
    return {
        ("lists", HUGGING_FACE): lambda: hugging_face(as_lists),
        ("lists", TRL): lambda: of_trl(as_lists),
        ("lists", OURS): lambda: ours(as_lists),
        ("arrays", HUGGING_FACE): lambda: hugging_face(as_arrays),
        ("arrays", TRL): lambda: of_trl(as_arrays),
        ("arrays", OURS): lambda: ours(as_arrays),
        ("buffer", OURS): lambda: ours.batch(flatten_buffer(buffer, lengths)),
    }


def check(calls: dict[tuple[str, str], Call]) -> None:
    """Raises RuntimeError unless all collators give transformers' batch."""
    expected = calls["lists", HUGGING_FACE]()
    for name, call in calls.items():
        found = call()
        for key, value in expected.items():
            is_tensor = isinstance(value, torch.Tensor)
            is_same = torch.equal(found[key], value) if is_tensor else found[key] == value
            if not is_same:
                raise RuntimeError(f"{key} of {name} is not transformers'")


def speeds(source: str, examples: int, *, batches: int, turns: int, seed: int) -> list[Speed]:
    rng = np.random.default_rng(seed)
    seconds: dict[tuple[str, str], float] = {}
    tokens = 0
    for _ in range(batches):
        lengths = lengths_of(source, examples, rng)
        tokens += int(lengths.sum())
        calls = calls_of(lengths, rng)
        check(calls)
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(turns):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - began)
        for name, found in best.items():
            seconds[name] = seconds.get(name, 0.0) + found
    return [
        Speed(
            source=source,
            examples=examples,
            tokens=tokens // batches,
            form=form,
            collator=collator,
            rate=tokens / found,
            ratio=seconds["arrays" if form == "arrays" else "lists", HUGGING_FACE] / found,
        )
        for (form, collator), found in seconds.items()
    ]


def verdict(rows: list[Speed]) -> list[str]:
    """Compares with the target, one line for each form of the input and size of batch."""
    out: list[str] = []
    for form in ("lists", "arrays", "buffer"):
        for examples in sorted({row.examples for row in rows}):
            mine = [r for r in rows if (r.form, r.collator, r.examples) == (form, OURS, examples)]
            ratios = sorted(row.ratio for row in mine)
            rates = sorted(row.rate / 1e6 for row in mine)
            out.append(
                f"{form}, {examples} examples: {rates[0]:.0f} to {rates[-1]:.0f} M tokens/s, "
                f"{ratios[0]:.0f} to {ratios[-1]:.0f} times transformers "
                f"(target {TARGET:.0f}: {'reached' if ratios[0] >= TARGET else 'not reached'})"
            )
    return out


def fixed_us(rows: list[Speed]) -> str:
    """Returns our time per call on the smallest batches of a buffer, which copy next to nothing."""
    few = min(row.examples for row in rows)
    found = [1e6 * r.tokens / r.rate for r in rows if r.form == "buffer" and r.examples == few]
    return f"{min(found):.0f} to {max(found):.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="run less and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {4: 4, 64: 2} if options.quick else BATCHES
    turns = 3 if options.quick else 7
    rows = [
        row
        for examples, batches in sizes.items()
        for source in SOURCES
        for row in speeds(source, examples, batches=batches, turns=turns, seed=options.seed)
    ]
    table = Table(
        name="collation",
        title="Tokens a second",
        columns=COLUMNS,
        rows=[row.row() for row in rows],
        formats=FORMATS,
        most_rows=100,
    )
    show(table)
    for line in verdict(rows):
        print(line)
    if options.quick:
        return
    versions = (
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}"
    )
    text = "\n\n".join(
        [
            ABOUT.strip(),
            "\n".join(f"- {line}" for line in verdict(rows)),
            f"Small batches are bound by a call's fixed cost ({fixed_us(rows)} of ours), lists by "
            f"reading Python's integers. One process, on a machine with other work: trust ratios "
            f"more than rates.",
        ]
    )
    write_results(
        Path(__file__).parent,
        title="Padding-free collators",
        how=How.MEASURED,
        profile=versions,
        seed=options.seed,
        text=text,
        tables=[table],
    )
    print("written to experiments/collation/results")


if __name__ == "__main__":
    main()
