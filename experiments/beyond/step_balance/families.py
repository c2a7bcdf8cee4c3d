"""Provides the lengths of a step's samples: from six distributions, or from files.

The distributions imitate the shapes that are reported of rollouts and fine-tuning data. They are
not fitted to any data set.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wlb.plan import IntArray, UserError

FAMILIES = {
    "math": "lognormal, median 2,000 tokens, sigma 0.7, cut at 8,192",
    "code": "lognormal, median 2,700, sigma 0.95, cut at 17,000: 3% of the samples are that long",
    "video": "1, 2, 4, 8, 16 or 32 times 1,024, 30% to 4% of the samples, each +-20%",
    "mix": "300, 6,000 or 50,000, 60%, 36% and 4% of the samples, each +-15%",
    "agent": "1,500 and a lognormal of median 735, sigma 0.8, for each of some 8 turns (geometric)",
    "chat": "lognormal, median 490, sigma 0.9, cut at 8,192",
}
"""The distribution of each family, in words."""


def draw(family: str, num: int, *, seed: int) -> IntArray:
    """Draws the lengths of `num` samples of a family; equal seeds give equal lengths."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(family)])
    match family:
        case "math":
            drawn = np.minimum(rng.lognormal(7.6, 0.7, num), 8192)
        case "code":
            drawn = np.minimum(rng.lognormal(7.9, 0.95, num), 17000)
        case "video":
            sizes, shares = [1, 2, 4, 8, 16, 32], [0.3, 0.25, 0.2, 0.13, 0.08, 0.04]
            drawn = rng.choice(sizes, num, p=shares) * 1024 * rng.uniform(0.8, 1.2, num)
        case "mix":
            drawn = rng.choice([300, 6000, 50000], num, p=[0.6, 0.36, 0.04])
            drawn = drawn * rng.lognormal(0, 0.15, num)
        case "agent":
            turns = rng.geometric(0.12, num)
            drawn = np.minimum([1500 + rng.lognormal(6.6, 0.8, n).sum() for n in turns], 65536)
        case _:
            drawn = np.minimum(rng.lognormal(6.2, 0.9, num), 8192)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def files(folder: Path) -> Iterator[tuple[str, IntArray]]:
    """Yields name and lengths of each file of a folder.

    A file is an array (.npy), a JSON list, or text with one number per line.
    """
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        try:
            if path.suffix == ".npy":
                lengths = np.load(path)
            elif path.suffix == ".json":
                lengths = np.array(json.loads(path.read_text("utf-8")))
            else:
                lengths = np.array(path.read_text("utf-8").split(), np.int64)
        except ValueError as error:
            raise UserError(f"{path.name} is not a list of lengths: {error}") from None
        yield path.stem, lengths.astype(np.int64)
