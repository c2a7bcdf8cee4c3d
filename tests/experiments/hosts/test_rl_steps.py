"""Tests the examples of RL hosts: what cuts a step, and two processes that train by it.

NeMo-RL 0.6 (7ea279a), OpenRLHF 0.11.2 and AReaL 1.0.4 were read for the arguments below.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest

from experiments.hosts import openrlhf_steps
from experiments.hosts.areal_steps import allocate_balanced_mbs_synced
from experiments.hosts.nemo_rl_steps import balanced_bins
from tests.adapters.rl.case import LENGTHS, ROOT
from tests.sets import nightly
from wlb.plan import UserError


def test_nemo_rl_bins_are_slots_of_all_ranks() -> None:
    bins = balanced_bins(LENGTHS, capacity=2000, ranks=4)
    assert sorted(itertools.chain(*bins)) == list(range(96))
    assert len(bins) % 4 == 0
    assert max(sum(LENGTHS[i] for i in b) for b in bins) <= 2000
    work = np.array([sum(24576 * LENGTHS[i] + LENGTHS[i] ** 2 for i in b) for b in bins])
    slots = work.reshape(-1, 4)  # bins[rank::4] are a rank's
    assert slots.max(1).sum() < 1.01 * work.sum() / 4
    with pytest.raises(UserError, match="max_tokens = 500"):
        balanced_bins(LENGTHS, capacity=500, ranks=4)


def test_openrlhf_partitions_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openrlhf_steps, "LIMIT", 1200)
    least = -(-sum(LENGTHS) // 1200)
    for num in (least + 1, least + 4):
        found = openrlhf_steps.balanced_partitions(LENGTHS, num, False)
        assert len(found) == num
        assert sorted(itertools.chain(*found)) == list(range(96))
        assert max(sum(LENGTHS[i] for i in part) for part in found) <= 1200


def test_areal_micro_batches_keep_limit_number_and_multiple() -> None:
    spec = Namespace(max_tokens_per_mb=2000, n_mbs=3, n_mbs_divisor=2)
    parts = allocate_balanced_mbs_synced(spec, LENGTHS)
    assert sorted(itertools.chain(*parts)) == list(range(96))
    assert len(parts) % 2 == 0
    assert max(sum(LENGTHS[i] for i in part) for part in parts) <= 2000


@pytest.mark.full
@pytest.mark.process
@pytest.mark.dist
@pytest.mark.parametrize(
    "example", ["verl", "slime", "nemo_rl", "openrlhf", "areal", *nightly("torchtitan_rl")]
)
def test_the_examples_train_two_processes_where_the_framework_is_installed(example: str) -> None:
    package = "torchtitan" if example == "torchtitan_rl" else example
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"experiments.hosts.{example}_steps"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"step (\d), rank (\d): (\d+) micro-batches", done.stdout)
    assert len(found) == 8
    assert len({(step, num) for step, _, num in found}) == 4, "as many on both ranks"
