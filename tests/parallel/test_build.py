"""Tests how a rank's stages are built: which values, and how much memory on the way there."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.parity.case import Case, spec_of
from wlb.launch.local import run_local
from wlb.model import build_reference, initial_weight
from wlb.parallel import build
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import Dtype

pytestmark = [pytest.mark.full, pytest.mark.dist]

FLOAT32_BYTES = 4


def live_bytes() -> int:
    """Returns the bytes of all tensors of this process that have storage, each storage once."""
    gc.collect()
    held = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local if t.is_cpu)}
    return sum(storages.values())


def built(world: World, case: Case, dtype: Dtype) -> dict[str, Any]:
    """Returns live bytes at each parameter's turn and at the end, and whether values are the
    reference's.
    """
    spec = spec_of(case)
    spec = replace(spec, training=replace(spec.training, dtype=dtype))
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    # What is there already is no longer searched: a million objects of imported modules.
    gc.collect()
    gc.freeze()
    before = live_bytes()
    made: list[weakref.ref[Tensor]] = []
    bytes_then: list[int] = []
    num_alive = 0

    def watched(*arguments: Any, **named: Any) -> Tensor:
        nonlocal num_alive
        bytes_then.append(live_bytes() - before)
        num_alive += sum(whole() is not None for whole in made)
        value = initial_weight(*arguments, **named)
        made.append(weakref.ref(value))
        return value

    build.initial_weight = watched
    stages = build.build_stages(spec, mesh)
    parameters = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    end = live_bytes() - before
    wanted = dict(build_reference(spec.model, seed=spec.run.seed).named_parameters())
    differ = [
        name
        for name, p in parameters.items()
        if not torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, wanted[name])
    ]
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters.values())
    return {
        "most": max(bytes_then),
        "end": end,
        "own": own * FLOAT32_BYTES,
        "whole": sum(p.numel() for p in parameters.values()) * FLOAT32_BYTES,
        "num_alive": num_alive,
        "num": len(made),
        "differ": differ,
    }


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(dp=4), Dtype.FLOAT32),
        (Case(dp=3, num_micro_batches=6), Dtype.BFLOAT16),  # 32 and 48 rows, the last rank's fewer
        (Case(tp=2, cp=2), Dtype.FLOAT32),
        (Case(tp=2), Dtype.FLOAT32),
        (Case(pp=2, v=2, dp=2, num_micro_batches=8), Dtype.FLOAT32),
    ],
    ids=str,
)
def test_a_rank_holds_its_shards_and_one_whole_parameter_at_a_time(
    case: Case, dtype: Dtype
) -> None:
    results = run_local(built, case.world, case, dtype, start_group=True, timeout_s=600)
    for found in results:
        assert found["differ"] == []
        assert found["num"] > 0
        assert found["num_alive"] == 0
        # Shards are padded to the first rank's rows: at most a row a parameter.
        padding = found["num"] * 48 * FLOAT32_BYTES
        assert found["own"] <= found["end"] <= found["own"] + padding
        assert found["most"] <= found["own"] + padding
        assert found["own"] < 0.6 * found["whole"]
