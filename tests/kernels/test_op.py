"""Tests the custom ops: registered correctly, compiled once for many lengths, and found again."""

import gc

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from wlb.kernels import Segments, attend, sdpa
from wlb.kernels.op import attend_backward_op, attend_op, kernel_name
from wlb.kernels.segments import _HOST_PARTS

ON_CPU = ("sdpa", "reference")
LENGTHS = [
    [(5, 5), (9, 17), (3, 3)],
    [(30, 30)],
    [(4, 20), (4, 4), (11, 11), (2, 2), (1, 1)],
    [(17, 17), (17, 40)],
    [(1, 1)] * 8,
    [(64, 64), (0, 5), (7, 9)],
    [(12, 31)],
]

# The first has no two sizes that are equal, for which torch would compile a graph of their own.
UNEQUAL = [
    [(5, 5), (9, 14), (7, 7), (3, 3), (10, 10)],
    [(30, 30), (4, 7), (1, 1), (6, 6), (2, 2), (3, 9)],
]


def segments_of(lengths: list[tuple[int, int]]) -> Segments:
    cu_q, cu_k = np.concatenate([[(0, 0)], np.cumsum(lengths, axis=0)]).T
    return Segments.from_offsets(cu_q, cu_k, device="cpu")


def inputs(segments: Segments) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns q, k and v, four query heads and two key heads of 8, and the gradient of the
    output.
    """
    random = torch.Generator().manual_seed(0)
    shapes = [(segments.num_queries, 4, 8), *[(segments.num_keys, 2, 8)] * 2]
    qkv = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    return qkv, torch.randn(shapes[0], generator=random)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("lengths", [LENGTHS[0], [(0, 4), (0, 0)]], ids=["rows", "no query rows"])
def test_ops_are_registered_correctly(backend, lengths):
    segments = segments_of(lengths)
    qkv, grad = inputs(segments)
    where = (*segments.arguments, backend)
    torch.library.opcheck(attend_op, (*qkv, *where))
    with torch.no_grad():
        out, lse = attend_op(*qkv, *where)
        torch.library.opcheck(
            attend_backward_op, (grad, *[x.detach() for x in qkv], out, lse, *where)
        )


def results(call, segments: Segments) -> list[torch.Tensor]:
    qkv, grad = inputs(segments)
    out = call(*qkv, segments)
    return [out, *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [True, None])
def test_few_graphs_serve_micro_batches_of_any_lengths(dynamic):
    """There are seven micro-batches, and graphs beyond one are torch.compile's own.

    They are for first sizes as constants (None, its default), sizes that were equal at first, and
    sizes of one.
    """

    def block(q, k, v, segments):
        return attend(2 * q, k, v, segments, backend="sdpa") + q

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, dynamic=dynamic, fullgraph=True)
    for lengths in LENGTHS:
        segments = segments_of(lengths)
        for x, y in zip(results(compiled, segments), results(block, segments), strict=True):
            assert torch.equal(x, y), lengths
    assert counter.frame_count <= 3


@pytest.mark.full
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_compiled_graph_keeps_the_order_of_additions(monkeypatch, deterministic):
    """The kernel's name is a constant of one graph, so backward asks for what was configured."""
    asked: list[bool] = []
    plain = sdpa.fixed_order
    monkeypatch.setattr(sdpa, "fixed_order", lambda on: asked.append(on) or plain(on))
    backend = kernel_name("sdpa", deterministic=deterministic)

    def block(q, k, v, segments):
        return attend(2 * q, k, v, segments, backend=backend) + q

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, dynamic=True, fullgraph=True)
    for lengths in UNEQUAL:
        results(compiled, segments_of(lengths))
    # torch takes a float (the soft cap) for a symbol at first, and then compiles once more.
    assert counter.frame_count <= 2
    assert asked == [deterministic] * 2


@pytest.mark.full
def test_compiled_layers_work_out_the_hosts_part_once(monkeypatch):
    """Forward and backward of all layers: what compiled code saves for backward leads back to it
    too.
    """
    calls = []
    classify = sdpa._classify
    monkeypatch.setattr(sdpa, "_classify", lambda s, **k: calls.append(s) or classify(s, **k))

    def layers(q, k, v, segments):
        for _ in range(3):
            q = attend(q.sin(), k, v, segments, backend="sdpa")
        return q

    torch.compiler.reset()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    for count, lengths in enumerate(LENGTHS[:3], 1):
        results(compiled, segments_of(lengths))
        assert len(calls) == count


@pytest.mark.full
def test_the_hosts_part_outlives_segments_until_backward():
    """Backward finds again what forward worked out, and nothing stays after it."""
    gc.collect()
    before = len(_HOST_PARTS)
    segments = segments_of(LENGTHS[0])
    qkv, grad = inputs(segments)
    out = attend(*qkv, segments, backend="sdpa")
    host = segments.host
    del segments
    gc.collect()
    made = dict(host.derived)
    torch.autograd.grad(out, qkv, grad)
    assert made
    assert host.derived == made
    del out
    gc.collect()
    assert len(_HOST_PARTS) == before


@pytest.mark.parametrize("backend", ON_CPU)
def test_copies_of_offsets_give_the_same_results(backend):
    segments = segments_of(LENGTHS[2])
    copies = Segments.of(
        segments.cu_seqlens_q.clone(), segments.cu_seqlens_k.clone(), segments.max_q, segments.max_k
    )

    def call(q, k, v, segments):
        return attend(q, k, v, segments, backend=backend)

    for x, y in zip(results(call, copies), results(call, segments), strict=True):
        assert torch.equal(x, y)


def test_activation_checkpoints():
    segments = segments_of(LENGTHS[0])

    def call(q, k, v, segments):
        return attend(q.sin(), k, v, segments, backend="sdpa")

    def checkpointed(*args):
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False)

    for x, y in zip(results(checkpointed, segments), results(call, segments), strict=True):
        assert torch.equal(x, y)


def test_gradients_of_gradients_are_refused():
    segments = segments_of(LENGTHS[0])
    qkv, grad = inputs(segments)
    out = attend(*qkv, segments, backend="sdpa")
    dq, _, _ = torch.autograd.grad(out, qkv, grad, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        dq.sum().backward()


def test_key_rows_are_refused():
    segments = Segments.from_offsets([0, 2], [0, 3], device="cpu", key_rows=np.array([4, 5, 6]))
    q, k = torch.zeros(2, 1, 8), torch.zeros(9, 1, 8)
    with pytest.raises(ValueError, match="segments with key_rows"):
        attend(q, k, k, segments, backend="sdpa")
