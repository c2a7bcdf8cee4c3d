"""Tests that ranks on Gloo live through long runs.

With two workers per group they aborted after some 300 steps (`wlb.parallel.gloo`).
"""

from pathlib import Path

import pytest

from tests.train.case import small_spec, train, write_corpus

STEPS = 3_000


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.parametrize("seed", [0, 1])
def test_the_layout_of_the_demo_trains_3000_steps(tmp_path: Path, seed: int):
    corpus = write_corpus(tmp_path / "corpus")
    spec = small_spec(
        tmp_path,
        corpus,
        run={"seed": seed},
        parallel={"tp": 2, "cp": 2, "pp": 2, "dp": 1},
        pp={"virtual_stages": 2},
        training={"steps": STEPS},
        eval={"interval": 500},
    )
    run, _ = train(spec)
    assert len(run.steps) == STEPS
