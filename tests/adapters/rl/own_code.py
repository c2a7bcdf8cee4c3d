"""Executes single functions and classes of other frameworks without importing the frameworks.

The packages need flash-attn, DeepSpeed, vLLM or other versions of transformers and cannot be
imported in one environment. A function that computes on plain tensors needs none of these. So only
its source is executed, with the names that it uses passed in.

A test is skipped if its framework is not installed and its environment variable is not set.
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
"""Environment variables with the folder that contains a package, such as a checkout."""


def folder_of(package: str) -> Path:
    """Returns the folder of a package, or skips the test if there is none."""
    if given := os.environ.get(VARIABLES[package]):
        return Path(given) / package
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed, and {VARIABLES[package]} names no checkout of it")
    return Path(found.submodule_search_locations[0])


def taken(package: str, file: str, names: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Executes some definitions of a file and returns them by name.

    Args:
        package: Name of the package.
        file: Path of the file in the package.
        names: Functions, classes and constants to execute.
        **given: Other names that they use.
    """
    path = folder_of(package) / file
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if _name(node) in names]
    missing = set(names) - {_name(node) for node in tree.body}
    assert not missing, f"{path} has no {missing}"
    # Annotations may use names that are not passed in, so they must not be evaluated.
    flags = __future__.annotations.compiler_flag
    found: dict[str, Any] = {"torch": torch, **given}
    exec(compile(tree, str(path), "exec", flags=flags), found)
    return found


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", None)


@pytest.fixture
def torchtitan_batcher() -> dict[str, Any]:
    """Returns torchtitan's RL `Batcher` and `BatchConfig`, with namespaces as records."""
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
    """Returns NeMo-RL's class `ClippedPGLossFn`."""
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
    """Returns slime's `loss_function` for data-parallel ranks without CP.

    It takes the number of ranks as an additional first argument. Its custom loss takes losses of
    tokens in the place of logits and only reduces them.
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
