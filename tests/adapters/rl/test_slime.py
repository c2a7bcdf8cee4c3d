"""Tests slime's adapter on a stand-in with the signatures of 0.3.1 (624b824).

With a checkout of slime and the package installed its own tests run too (SLIME_SOURCE).
"""

import importlib
import importlib.util
import itertools
import os
from argparse import Namespace
from pathlib import Path

import pytest

from tests.adapters.hosts import StandIn, stand_in  # noqa: F401
from tests.adapters.rl.case import LENGTHS, parameters, run_their_tests

SLIME = {
    "slime/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/utils/flops_utils.py": (
        "def calculate_fwd_flops(seqlens, args):\n"
        "    return sum(args.linear * n + n * n for n in seqlens)\n"
    ),
    "slime/utils/dp_schedule.py": (
        "def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size,\n"
        "                      rollout_indices):\n    return 'static'\n"
    ),
    "slime/ray/__init__.py": "",
    "slime/ray/rollout.py": "from slime.utils.dp_schedule import build_dp_schedule\n",
}


def test_slime_schedule(stand_in: StandIn) -> None:  # noqa: F811
    stand_in("slime", "0.3.1", SLIME)
    rollout = importlib.import_module("slime.ray.rollout")
    theirs = rollout.build_dp_schedule
    adapter = importlib.import_module("wlb.adapters.rl.slime")
    adapter.install()
    ours = rollout.build_dp_schedule
    assert parameters(ours) == parameters(theirs)
    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=600, linear=5000)
    layout = {"dp_size": 4, "cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}
    lengths = [*LENGTHS[:-1], 1500]  # the last is longer than 2 x 600
    rollouts = [i // 2 for i in range(96)]
    parts, micro_batches, nums, sizes = ours(
        args, layout, lengths, global_batch_size=20, rollout_indices=rollouts
    )
    assert sizes == [20, 20], "the last eight rollouts fill no step"
    assert sorted(itertools.chain(*parts)) == list(range(80))
    assert all(num % 2 == 0 for num in nums)
    for part, cut in zip(parts, micro_batches, strict=True):
        assert len(cut) == sum(nums)
        assert list(itertools.chain(*cut)) == list(range(len(part))), "each rank's samples in order"
        first = set(itertools.chain(*cut[: nums[0]]))
        assert {part[i] < 40 for i in first} == {True}, "steps are cut as they come"
        assert all(sum(lengths[part[i]] for i in one) <= 1200 for one in cut)
    static = Namespace(use_dynamic_batch_size=False)
    assert ours(static, layout, lengths, global_batch_size=20, rollout_indices=rollouts) == "static"
    with pytest.raises(AssertionError, match=r"global_batch_size = 50 rollouts, but only 48"):
        ours(args, layout, lengths, global_batch_size=50, rollout_indices=rollouts)
    adapter.uninstall()
    assert rollout.build_dp_schedule is theirs


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("slime") is None or "SLIME_SOURCE" not in os.environ,
    reason="needs slime >= 0.3 installed and its checkout's folder in SLIME_SOURCE",
)
def test_slimes_own_tests_pass_with_ours_installed(tmp_path: Path) -> None:
    run_their_tests(
        "slime", Path(os.environ["SLIME_SOURCE"]) / "tests" / "test_dp_schedule.py", [], tmp_path
    )
