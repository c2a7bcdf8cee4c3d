"""Tests verl's adapter on a stand-in with the signatures of 0.9.1.

With a checkout of verl and the package installed its own tests run too (VERL_SOURCE).
"""

import importlib
import importlib.util
import itertools
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters.hosts import StandIn, stand_in  # noqa: F401
from tests.adapters.rl.case import LENGTHS, parameters, run_their_tests
from wlb.plan import UserError

VERL = {
    "verl/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/tensordict_utils.py": (
        "def index_select_tensor_dict(batch, index):\n"
        "    return {name: value[index] for name, value in batch.items()}\n"
    ),
    "verl/utils/seqlen_balancing.py": (
        "def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):\n    ...\n\n"
        "def rearrange_micro_batches(batch, max_token_len, dp_group=None,\n"
        "    num_batches_divided_by=None, same_micro_num_in_dp=True, min_num_micro_batch=None,\n"
        "    use_dynamic_bsz_balance=True, force_group_size=1):\n    ...\n"
    ),
    "verl/trainer/__init__.py": "",
    "verl/trainer/ppo/__init__.py": "",
    "verl/trainer/ppo/v1/__init__.py": "",
    "verl/trainer/ppo/v1/trainer_base.py": (
        "from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions\n\n"
        "class PPOTrainer:\n"
        "    def _balance_batch(self, batch, metrics, logging_prefix='x', keep_minibatch=False):\n"
        "        parts = get_seqlen_balanced_partitions(batch, k_partitions=2, equal_size=True)\n"
        "        return [j for part in parts for j in part]\n"
    ),
}
VERL_TESTS = (
    "test_seqlen_balancing", "test_dynamic_batch", "test_dataproto_split_uneven",
    "test_group_balanced_partitions", "test_group_balanced_partitions_single_sample_groups",
    "test_group_balanced_partitions_equal_size",
)  # fmt: skip
"""verl's tests of the module (tests/utils/test_seqlen_balancing.py at 1dda039) that pass with ours
installed; test_seqlen_balancing_distributed_params needs two GPUs, with verl's own, too."""


@pytest.fixture
def verl(stand_in: StandIn) -> Any:  # noqa: F811
    stand_in("verl", "0.9.1", VERL)
    adapter = importlib.import_module("wlb.adapters.rl.verl")
    adapter.install()
    return adapter


def test_verl_gets_our_functions_with_its_signatures_and_its_own_back(verl: Any) -> None:
    module = importlib.import_module("verl.utils.seqlen_balancing")
    trainer = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    theirs = dict(verl._swap.theirs)
    assert len(theirs) == 2
    for place, function in theirs.items():
        ours = getattr(module, place.split(":")[1])
        assert ours is not function
        assert parameters(ours) == parameters(function)
    assert trainer.get_seqlen_balanced_partitions is verl.get_seqlen_balanced_partitions
    verl.install()
    assert verl._swap.theirs == theirs, "a second call has nothing left to replace"
    verl.uninstall()
    assert trainer.get_seqlen_balanced_partitions in theirs.values()
    assert not hasattr(trainer.PPOTrainer._balance_batch, "theirs")


def test_verl_partitions_are_balanced_and_equal_in_size(verl: Any) -> None:
    module = importlib.import_module("verl.utils.seqlen_balancing")
    for equal in (True, False):
        parts = module.get_seqlen_balanced_partitions(torch.tensor(LENGTHS), 8, equal_size=equal)
        assert sorted(itertools.chain(*parts)) == list(range(96))
        assert all(part == sorted(part) for part in parts)
        sums = [sum(LENGTHS[i] for i in part) for part in parts]
        assert max(sums) <= 1.01 * sum(sums) / 8
        assert not equal or {len(part) for part in parts} == {12}
    with pytest.raises(UserError, match="3 samples"):
        module.get_seqlen_balanced_partitions([1, 2, 3], 8, equal_size=False)


def verl_batch(lengths: list[int]) -> Any:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.arange(mask.numel()).view(mask.shape), "attention_mask": mask}


def test_verl_micro_batches_keep_cap_groups_and_number(verl: Any) -> None:
    module = importlib.import_module("verl.utils.seqlen_balancing")
    batch = verl_batch(LENGTHS)
    parts, indices = module.rearrange_micro_batches(
        batch, 4000, num_batches_divided_by=4, force_group_size=2
    )
    assert len(indices) % 4 == 0
    assert sorted(itertools.chain(*indices)) == list(range(96))
    for part, index in zip(parts, indices, strict=True):
        assert part["attention_mask"].sum() == sum(LENGTHS[i] for i in index) <= 4000
        assert torch.equal(part["input_ids"], batch["input_ids"][index])
        assert {i ^ 1 for i in index} == set(index), "pairs stay together"
    work = [sum(24576 * LENGTHS[i] + LENGTHS[i] ** 2 for i in index) for index in indices]
    assert max(work) < 1.1 * sum(work) / len(work)
    assert len(module.rearrange_micro_batches(batch, 4000, min_num_micro_batch=20)[1]) == 20
    with pytest.raises(UserError, match=r"sample \d+ has \d+ tokens.*max_tokens = 500"):
        module.rearrange_micro_batches(batch, 500)


def test_verl_trainer_gets_mini_batches_in_the_order_it_cuts_them(verl: Any) -> None:
    trainer = importlib.import_module("verl.trainer.ppo.v1.trainer_base").PPOTrainer()
    actor = Namespace(ppo_mini_batch_size=6)
    trainer.config = Namespace(actor_rollout_ref=Namespace(actor=actor, rollout=Namespace(n=4)))
    order = trainer._balance_batch(LENGTHS, {})
    assert sorted(order) == list(range(96))
    # Two ranks of 48, each cut into four mini-batches of 12.
    work = np.array(LENGTHS)[order].reshape(2, 4, 12).sum(2)
    assert work.max() < 1.02 * work.mean()


def test_verls_loss_by_the_width_of_micro_batches_is_refused(verl: Any) -> None:
    trainer = importlib.import_module("verl.trainer.ppo.v1.trainer_base").PPOTrainer()
    actor = Namespace(
        ppo_mini_batch_size=6, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=None
    )
    trainer.config = Namespace(actor_rollout_ref=Namespace(actor=actor, rollout=Namespace(n=4)))
    with pytest.raises(UserError, match=r"'seq-mean-token-sum-norm'.*set actor\.loss_scale_factor"):
        trainer._balance_batch(LENGTHS, {})
    actor.loss_scale_factor = 4096
    assert len(trainer._balance_batch(LENGTHS, {})) == 96


def test_verl_that_is_too_old_is_refused(stand_in: StandIn) -> None:  # noqa: F811
    stand_in("verl", "0.8.0", VERL)
    with pytest.raises(ImportError, match=r"needs verl 0\.9 or later, but 0\.8\.0 is installed"):
        importlib.import_module("wlb.adapters.rl.verl")


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or "VERL_SOURCE" not in os.environ,
    reason="needs verl >= 0.9 installed and its checkout's folder in VERL_SOURCE",
)
def test_verls_own_tests_pass_with_ours_installed(tmp_path: Path) -> None:
    file = Path(os.environ["VERL_SOURCE"]) / "tests" / "utils" / "test_seqlen_balancing.py"
    run_their_tests("verl", file, list(VERL_TESTS), tmp_path)
