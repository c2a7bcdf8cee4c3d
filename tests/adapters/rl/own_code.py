"""Takes functions and classes of frameworks out of their own files, to be called in one process.

Their packages want flash-attn, DeepSpeed, vLLM or other versions of transformers and do not import
beside each other; a function that takes plain tensors needs none of these. So its source is
executed alone, with the names that it uses given to it. A framework that is neither installed nor
named by its variable is skipped.
"""

import __future__

import ast
import enum
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Own = Callable[..., Any]

VARIABLES = {
    "verl": "VERL_SOURCE", "slime": "SLIME_SOURCE", "nemo_rl": "NEMO_RL_SOURCE",
    "openrlhf": "OPENRLHF_SOURCE", "torchtitan": "TORCHTITAN_SOURCE",
}  # fmt: skip
"""Each names the folder in which the package's folder lies, such as a checkout."""


def folder_of(package: str) -> Path:
    """Returns the package's folder; the test is skipped where there is none."""
    if given := os.environ.get(VARIABLES[package]):
        return Path(given) / package
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed, and {VARIABLES[package]} names no checkout of it")
    return Path(found.submodule_search_locations[0])


def taken(package: str, file: str, names: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Returns the functions, classes and constants of these names in the package's file, by name.

    given: what they use of other modules, or of the same module without being taken.
    """
    path = folder_of(package) / file
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if _name(node) in names]
    missing = set(names) - {_name(node) for node in tree.body}
    assert not missing, f"{path} has no {missing}"
    flags = __future__.annotations.compiler_flag  # annotations name what is not given
    found: dict[str, Any] = {"torch": torch, **given}
    exec(compile(tree, str(path), "exec", flags=flags), found)
    return found


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", None)


@pytest.fixture
def torchtitan_batcher() -> dict[str, Any]:
    """Returns torchtitan's RL `Batcher` and `BatchConfig`; its records are namespaces."""
    from torchtitan.config import Configurable

    metrics = SimpleNamespace(Metric=lambda *_: None, NoReduce=float, Sum=float)
    return taken(
        "torchtitan",
        "experiments/rl/components/batcher.py",
        ("_PAD_VALUES", "_DTYPES", "BatchConfig", "Batcher"),
        dataclass=dataclass,
        field=field,
        math=math,
        Configurable=Configurable,
        TrainingBatch=SimpleNamespace,
        TrainingMicrobatch=SimpleNamespace,
        m=metrics,
    )


@pytest.fixture
def verl_agg_loss() -> Own:
    """Returns verl's `agg_loss`."""
    sums = taken("verl", "utils/torch_functional.py", ("masked_sum",))
    used = SimpleNamespace(masked_sum=sums["masked_sum"])
    return taken("verl", "trainer/ppo/core_algos.py", ("agg_loss",), verl_F=used)["agg_loss"]


@pytest.fixture
def openrlhf_aggregate_loss() -> Own:
    """Returns OpenRLHF's `aggregate_loss`."""
    used = taken("openrlhf", "models/utils.py", ("masked_mean",))["masked_mean"]
    return taken("openrlhf", "models/loss.py", ("aggregate_loss",), masked_mean=used)[
        "aggregate_loss"
    ]


@pytest.fixture
def nemo_rl_clipped_loss() -> Own:
    """Returns NeMo-RL's class `ClippedPGLossFn`, which takes a configuration."""
    kinds = ("LossType", "LossInputType", "MetricNormalizer")
    interfaces = taken("nemo_rl", "algorithms/loss/interfaces.py", kinds, enum=enum)
    used = taken("nemo_rl", "algorithms/utils.py", ("masked_mean", "calculate_kl"))
    return taken(
        "nemo_rl",
        "algorithms/loss/loss_functions.py",
        ("ClippedPGLossFn",),
        **{name: interfaces[name] for name in kinds},
        LossFunction=object,
        masked_mean=used["masked_mean"],
        calculate_kl=used["calculate_kl"],
    )["ClippedPGLossFn"]


@pytest.fixture
def slime_loss_function() -> Iterator[Own]:
    """Returns slime's `loss_function` for two data-parallel ranks without CP.

    Its custom loss reduces what it is given as logits: a loss for each token of the responses.
    """
    mpu = SimpleNamespace(
        get_context_parallel_world_size=lambda: 1,
        get_data_parallel_world_size=lambda with_context_parallel=False: mpu.ranks,
        ranks=2,
    )
    folder = "backends/megatron_utils/"
    reducer = taken("slime", f"{folder}cp_utils.py", ("get_sum_of_sample_mean",), mpu=mpu)
    function = taken(
        "slime",
        f"{folder}loss.py",
        ("loss_function",),
        mpu=mpu,
        get_sum_of_sample_mean=reducer["get_sum_of_sample_mean"],
        load_function=lambda path: lambda args, batch, losses, reduce: (reduce(losses), {}),
    )["loss_function"]

    def of_ranks(ranks: int, *args: Any) -> Any:
        mpu.ranks = ranks
        return function(*args)

    return of_ranks
