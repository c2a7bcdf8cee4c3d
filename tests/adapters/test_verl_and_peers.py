"""Tests the adapters of frameworks whose steps are balanced, on stand-ins with their signatures.

verl 0.9.1, slime 0.3.1 (624b824), NeMo-RL 0.6 (7ea279a), OpenRLHF 0.11.2 and AReaL 1.0.4 were read
for the signatures and calls below, and train by the examples where they are installed. torchtitan's
own batcher packs (0.3.0; b5bcd76 by TORCHTITAN_SOURCE, too). With a checkout of verl or slime and
the package installed, their own tests run too (VERL_SOURCE, SLIME_SOURCE).
"""

import importlib
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters.hosts import StandIn, stand_in  # noqa: F401
from tests.adapters.own_code import torchtitan_batcher  # noqa: F401
from tests.sets import nightly
from wlb.plan import UserError

ROOT = Path(__file__).parents[2]
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 0.9, 96), 1000).astype(int).tolist()

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
SLIME_TESTS = 9
"""All tests of slime's tests/test_dp_schedule.py at 624b824 pass with ours installed."""


@pytest.fixture
def verl(stand_in: StandIn) -> Any:  # noqa: F811
    stand_in("verl", "0.9.1", VERL)
    adapter = importlib.import_module("wlb.adapters.verl")
    adapter.install()
    return adapter


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


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
    with pytest.raises(ImportError, match=r"needs verl 0\.9 or later, 0\.8\.0 is installed"):
        importlib.import_module("wlb.adapters.verl")


def run_their_tests(adapter: str, file: Path, tests: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import wlb.adapters.{adapter} as adapter\nadapter.install()\n"
    )
    (tmp_path / file.name).write_text(file.read_text("utf-8"))
    names = [f"{file.name}::{name}" for name in tests] or [file.name]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or "VERL_SOURCE" not in os.environ,
    reason="needs verl >= 0.9 installed and its checkout's folder in VERL_SOURCE",
)
def test_verls_own_tests_pass_with_ours_installed(tmp_path: Path) -> None:
    file = Path(os.environ["VERL_SOURCE"]) / "tests" / "utils" / "test_seqlen_balancing.py"
    run_their_tests("verl", file, list(VERL_TESTS), tmp_path)


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
    adapter = importlib.import_module("wlb.adapters.slime")
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
    with pytest.raises(AssertionError, match=r"num_rollouts = 48 is less than .* 50"):
        ours(args, layout, lengths, global_batch_size=50, rollout_indices=rollouts)
    adapter.uninstall()
    assert rollout.build_dp_schedule is theirs


NEMO = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/data/__init__.py": "",
    "nemo_rl/data/packing/__init__.py": (
        "from nemo_rl.data.packing.algorithms import SequencePacker, get_packer\n"
    ),
    "nemo_rl/data/packing/algorithms.py": (
        "class SequencePacker:\n"
        "    def __init__(self, bin_capacity, collect_metrics=False, min_bin_count=None,\n"
        "                 bin_count_multiple=None):\n"
        "        self.bin_capacity, self.min_bin_count = bin_capacity, min_bin_count\n"
        "        self.bin_count_multiple = bin_count_multiple\n\n"
        "    def pack(self, sequence_lengths):\n"
        "        return self._pack_implementation(sequence_lengths)\n\n"
        "def get_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None,\n"
        "               bin_count_multiple=None):\n    return algorithm\n"
    ),
}


def test_nemo_rl_packer_deals_slots_to_ranks(stand_in: StandIn) -> None:  # noqa: F811
    stand_in("nemo-rl", "0.6.0", NEMO)
    packing = importlib.import_module("nemo_rl.data.packing")
    adapter = importlib.import_module("wlb.adapters.nemo_rl")
    adapter.install(cost="verl")
    packer = packing.get_packer("wlb", 2000, min_bin_count=4, bin_count_multiple=4)
    assert isinstance(packer, packing.SequencePacker)
    bins = packer.pack(LENGTHS)
    assert sorted(itertools.chain(*bins)) == list(range(96))
    assert len(bins) % 4 == 0
    assert max(sum(LENGTHS[i] for i in b) for b in bins) <= 2000
    work = np.array([sum(24576 * LENGTHS[i] + LENGTHS[i] ** 2 for i in b) for b in bins])
    slots = work.reshape(-1, 4)  # bins[rank::4] are a rank's
    assert slots.max(1).sum() < 1.01 * work.sum() / 4
    assert packing.get_packer("first_fit_decreasing", 2000) == "first_fit_decreasing"
    with pytest.raises(UserError, match="max_tokens = 500"):
        packing.get_packer("wlb", 500, min_bin_count=4, bin_count_multiple=4).pack(LENGTHS)


def priced(tokens: Any) -> int:
    """Returns verl's workload of a packed micro-batch of torchtitan, whose samples are numbered."""
    lengths = torch.bincount(tokens.token_ids.flatten(), minlength=97)[1:]
    return int((24576 * lengths + lengths**2).sum())


def test_torchtitans_rl_micro_batches(
    torchtitan_batcher: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own Batcher packs (0.3.0, or a checkout's); the experiment's package imports vLLM."""
    name = "torchtitan.experiments.rl.components.batcher"
    for part in ("torchtitan.experiments.rl", "torchtitan.experiments.rl.components", name):
        module = types.ModuleType(part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    vars(sys.modules[name]).update(torchtitan_batcher)
    monkeypatch.delitem(sys.modules, "wlb.adapters.torchtitan_rl", raising=False)
    adapter = importlib.import_module("wlb.adapters.torchtitan_rl")
    monkeypatch.setattr(adapter.BalancedBatcher, "cost", "verl")
    shape = torchtitan_batcher["BatchConfig"](local_batch_size=2, seq_len=1500)
    batcher = adapter.BalancedBatcher.Config(batch=shape).build(
        num_prompts_per_train_step=24, dp_degree=4, pad_id=0
    )
    assert isinstance(batcher, adapter.BalancedBatcher)
    batch = None
    for group in np.arange(96).reshape(24, 4).tolist():
        assert batch is None
        samples = [
            Namespace(
                token_ids=[i + 1] * (LENGTHS[i] + 1), min_policy_version=0,
                **dict.fromkeys(("logprobs", "loss_mask", "advantage"), [1] * (LENGTHS[i] + 1)),
            )
            for i in group
        ]  # fmt: skip
        given = Namespace(training_samples=samples, metrics=[])
        batch = batcher.add_training_samples(training_sample_group=given)
    assert batch is not None
    assert batch.num_global_valid_tokens == sum(LENGTHS)
    trained = torch.cat([m.token_ids.flatten() for slot in batch.microbatches for m in slot])
    assert torch.bincount(trained)[1:].tolist() == LENGTHS, "each sample once"
    work = np.array([[priced(m) for m in slot] for slot in batch.microbatches])
    assert work.shape == (2, 4)
    assert work.max(1).sum() < 1.02 * work.sum() / 4


OPENRLHF = {
    "openrlhf/__init__.py": "",
    "openrlhf/utils/__init__.py": "",
    "openrlhf/utils/seqlen_balancing.py": (
        "def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):\n    ...\n\n"
        "def get_minimum_num_micro_batch_size(total_lengths, max_tokens_per_gpu, ring_attn_size,\n"
        "                                     ds_tensor_parallel_size):\n    ...\n"
    ),
    "openrlhf/trainer/__init__.py": "",
    "openrlhf/trainer/ppo_utils/__init__.py": "",
    "openrlhf/trainer/ppo_utils/experience.py": (
        "def split_experience_batch(item):\n    return [item]\n\n"
        "def make_experience_batch(items, packing_samples=False):\n    return items\n\n"
        "def balance_experiences(experiences, args):\n    ...\n"
    ),
}


def test_openrlhf(stand_in: StandIn) -> None:  # noqa: F811
    stand_in("openrlhf", "0.11.2", OPENRLHF)
    adapter = importlib.import_module("wlb.adapters.openrlhf")
    adapter.install()
    for place, theirs in adapter._swap.theirs.items():
        ours = adapter._swap.functions[place]
        assert [p[0] for p in parameters(ours)] == [p[0] for p in parameters(theirs)]
    assert len(adapter._swap.theirs) == 3
    balancing = importlib.import_module("openrlhf.utils.seqlen_balancing")
    num = balancing.get_minimum_num_micro_batch_size(LENGTHS, 600, 2, 1)
    assert num >= -(-sum(LENGTHS) // 1200)
    for parts in (num, num + 3):
        found = balancing.get_seqlen_balanced_partitions(LENGTHS, parts, False)
        assert sorted(itertools.chain(*found)) == list(range(96))
        assert max(sum(LENGTHS[i] for i in part) for part in found) <= 1200
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    actor, ds = (
        Namespace(num_nodes=1, num_gpus_per_node=4),
        Namespace(ring_attn_size=1, tensor_parallel_size=1),
    )
    args = Namespace(actor=actor, ds=ds, train=Namespace(batch_size=24))
    items = [Namespace(total_length=torch.tensor(n)) for n in LENGTHS]
    ranks = experience.balance_experiences(items, args)
    tokens = np.array([[int(i.total_length) for i in rank] for rank in ranks])
    work = tokens.reshape(4, 4, 6).sum(2)
    assert work.max() < 1.06 * work.mean(), "ranks and optimiser steps alike"
    uneven = experience.balance_experiences(items[:-1], args)
    assert sum(map(len, uneven)) == 95
    assert all(22 <= len(rank) <= 25 for rank in uneven)


AREAL = {
    "areal/__init__.py": "",
    "areal/utils/__init__.py": "",
    "areal/utils/data.py": (
        "def allocate_balanced_mbs_synced(mb_spec, lens, group=None):\n    ...\n"
    ),
}


def test_areal(stand_in: StandIn) -> None:  # noqa: F811
    stand_in("areal", "1.0.4", AREAL)
    adapter = importlib.import_module("wlb.adapters.areal")
    adapter.install()
    data = importlib.import_module("areal.utils.data")
    (theirs,) = adapter._swap.theirs.values()
    assert parameters(data.allocate_balanced_mbs_synced) == parameters(theirs)
    spec = Namespace(max_tokens_per_mb=2000, n_mbs=3, n_mbs_divisor=2)
    parts = data.allocate_balanced_mbs_synced(spec, np.array(LENGTHS))
    assert sorted(itertools.chain(*parts)) == list(range(96))
    assert len(parts) % 2 == 0
    assert max(sum(LENGTHS[i] for i in part) for part in parts) <= 2000
