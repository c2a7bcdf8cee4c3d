"""Tests training on a store with only some trained tokens: the same on every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.case import relaid, small_spec, train
from wlb.data import TokenStore, TokenStoreWriter
from wlb.spec import RunSpec

ANSWER = 7


def fine_tuning(folder: Path, name: str, lengths: list[int], **sections: Any) -> RunSpec:
    """Returns a run on random tokens that are not trained, with an ANSWER here and there, which
    is.
    """
    rng = np.random.default_rng(0)
    with TokenStoreWriter(folder / "store", vocab_size=320) as writer:
        for length in lengths:
            tokens = rng.integers(10, 300, length)
            spans = [[i, i + 1] for i in range(1, length) if rng.random() < 0.3]
            for start, _ in spans:
                tokens[start] = ANSWER
            writer.add(tokens, spans)
    spec = small_spec(folder, folder / "none", run={"name": name}, eval={"steps": 0}, **sections)
    data = replace(spec.data, store=str(folder / "store"), context_window=64, epochs=2)
    return replace(spec, data=data)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "layouts"), [("bounded", ("one", "cp2-pp2")), ("original", ("one",))]
)
def test_loss_and_divisor_are_those_of_the_trained_tokens(
    tmp_path: Path, policy: str, layouts: tuple[str, ...]
) -> None:
    lengths = [60, 64, 200, 5, 64, 30, 90, 1, 33, 7, 48, 21, 128]
    runs = []
    for layout in layouts:
        spec = fine_tuning(
            tmp_path,
            f"{policy}-{layout}",
            lengths,
            packing={"policy": policy, "s_max": 2.0},
            training={"steps": 40, "learning_rate": 0.01},
        )
        runs.append(train(relaid(spec, layout))[0])
    store = TokenStore(tmp_path / "store")
    one = runs[0]
    measured = [line["measured"] for line in one.steps]
    assert sum(m["num_tokens"] for m in measured) == 2 * sum(lengths)
    assert sum(m["num_targets"] for m in measured) == 2 * int(store.num_targets.sum())
    assert runs[-1].losses == pytest.approx(one.losses, rel=1e-3)
    # Only one token is ever the answer, so it is learnt at once; the others could not be.
    assert one.losses[0] == pytest.approx(np.log(320), abs=0.2)
    assert one.losses[-1] < 0.65 * one.losses[0]


def test_a_store_without_a_trained_token_is_refused(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "store", vocab_size=320) as writer:
        writer.add(np.arange(50), [])
    spec = small_spec(tmp_path, tmp_path / "none", eval={"steps": 0})
    spec = replace(spec, data=replace(spec.data, store=str(tmp_path / "store"), epochs=1))
    with pytest.raises(
        ValueError, match=r"every document of the store .* has no token that is a target"
    ):
        train(spec)
