"""Tests context parallelism on GPUs: the kernels of all ranks on one GPU, the overlap on two.

The overlap test needs two GPUs; where there are fewer it is skipped and the overlap is untested.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.test_context import Case, Tensors, one_process
from wlb.kernels import Segments
from wlb.kernels.op import SavedTensors, backward, forward
from wlb.launch.local import run_local
from wlb.model import Rows, inverse_frequencies, rope_tables
from wlb.model.llama import Attention, Ops
from wlb.parallel.context.attention import ContextAttention, take_rows
from wlb.parallel.context.exchange import to_device
from wlb.parallel.context.op import gradients_by_row, segment_keys
from wlb.parallel.context.rows import rank_exchange
from wlb.parallel.world import World
from wlb.plan import exchange_of, local_tokens
from wlb.sharding.paper import per_document
from wlb.spec import ModelSpec

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: none here"),
]


def all_ranks(
    case: Case, cp: int, dtype: torch.dtype, backend: str, device: torch.device
) -> Tensors:
    """Returns output and gradients of the packed sequence by every rank's kernels, one after the
    other.

    Concatenation stands for the all-gather, a sum for the reduce-scatter.
    """
    plan = case.plan(cp)
    num_rows = local_tokens(plan.num_tokens, cp=cp, row_multiple=case.row_multiple)
    q, k, v, grad = (x.to(device) for x in case.qkvg(dtype))

    def taken(x: Tensor) -> list[Tensor]:
        return [take_rows(x, plan, rank=r, num_rows=num_rows) for r in range(cp)]

    gathered = torch.stack([torch.cat(taken(k)), torch.cat(taken(v))], 1)
    out, dq, total = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(gathered.float())
    for rank, (q_THD, grad_THD) in enumerate(zip(taken(q), taken(grad), strict=True)):
        rows = rank_exchange(exchange_of(plan, local_tokens=num_rows), rank)
        moved = to_device(dict(rows.arrays()), device)
        segments = Segments.from_offsets(
            rows.only.cu_seqlens_q, rows.only.cu_seqlens_k, device=device
        )
        keys = segment_keys(gathered, moved["kv_index 0"], segments, backend)
        out_THD, lse = forward(backend, q_THD, *keys, segments)
        saved = SavedTensors(q_THD, *keys, out_THD, lse)
        dq_THD, dk, dv = backward(backend, grad_THD, saved, segments)
        index = torch.from_numpy(plan.for_rank(rank).token_index).to(device)
        out[index], dq[index] = out_THD[: index.numel()], dq_THD[: index.numel()]
        total += gradients_by_row(dk, dv, moved["inverse 0"])
    row_of = torch.empty(plan.num_tokens, dtype=torch.long, device=device)
    for rank in range(cp):
        index = torch.from_numpy(plan.for_rank(rank).token_index).to(device)
        row_of[index] = rank * num_rows + torch.arange(index.numel(), device=device)
    by_token = total[row_of]
    return out, dq, by_token[:, 0], by_token[:, 1]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.bfloat16, "torch_varlen_deterministic"), (torch.float32, "sdpa_deterministic")],
)
def test_the_kernels_of_all_ranks_are_one_process(
    cp: int, dtype: torch.dtype, backend: str
) -> None:
    """The bits are also the same twice, as `kernels.deterministic` asks for."""
    case = Case(
        lengths=(300, 1, 17, 513, 64), strategy="per_document", heads=(4, 2), row_multiple=16
    )
    device = torch.device("cuda", 0)
    expected = one_process(case, torch.float64, "reference")
    limits = [1e-5] * 4
    if dtype == torch.bfloat16:
        alone = one_process(case, dtype, "reference")
        pairs = zip(alone, expected, strict=True)
        limits = [2 * (a.double() - e).square().mean().sqrt().item() for a, e in pairs]
    got = all_ranks(case, cp, dtype, backend, device)
    for g, e, limit in zip(got, expected, limits, strict=True):
        assert (g.cpu().double() - e).square().mean().sqrt().item() <= limit
    again = all_ranks(case, cp, dtype, backend, device)
    assert all(map(torch.equal, got, again))


def traced_layer(world: World, path: str) -> None:
    """Writes rank 0's trace of an attention layer's forward pass."""
    device = torch.device("cuda", world.local_rank)
    spec = ModelSpec(vocab_size=256, hidden_size=8192, num_layers=1, num_heads=64, num_kv_heads=8)
    plan = per_document([32768] * 2, cp=world.world_size)
    attention = ContextAttention.from_plan(
        plan,
        group=dist.group.WORLD,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=torch.bfloat16,
        device=device,
    )
    positions = torch.from_numpy(plan.for_rank(world.rank).positions).to(device)
    cos, sin = rope_tables(positions, inverse_frequencies(spec, device))
    rows = Rows(cos=cos, sin=sin, attend=attention)
    layer = Attention(spec, Ops()).to(device, torch.bfloat16)
    name_kernels(layer.q_proj, "q_proj")
    x_TC = torch.randn(attention.num_rows, spec.hidden_size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        layer(x_TC, rows)
    torch.cuda.synchronize()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(x_TC, rows)
        torch.cuda.synchronize()
    if world.rank == 0:
        profile.export_chrome_trace(path)


def name_kernels(module: nn.Module, name: str) -> None:
    """Puts the module's kernels in an annotation of this name in a trace."""
    open_ranges: list[Any] = []

    def enter(*_: Any) -> None:
        open_ranges.append(torch.profiler.record_function(name))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def intervals(trace: dict[str, Any], category: str, part: str) -> list[tuple[float, float]]:
    """Returns (begin, end) in microseconds of a category's events whose name has this part."""
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") == category and part in event["name"]
    ]


@pytest.mark.dist
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs to move keys between")
def test_keys_travel_while_queries_are_projected(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_local(traced_layer, 2, str(path), device="cuda", start_group=True, timeout_s=600)
    trace = json.loads(path.read_text())
    gathers = intervals(trace, "kernel", "AllGather")
    projections = intervals(trace, "gpu_user_annotation", "q_proj")
    assert len(gathers) == len(projections) == 1
    (gather,), (projection,) = gathers, projections
    shared = min(gather[1], projection[1]) - max(gather[0], projection[0])
    assert shared > 0.5 * min(gather[1] - gather[0], projection[1] - projection[0])
