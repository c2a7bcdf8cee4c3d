"""Tests the explicit TP+SP against torch's `parallelize_module`, and gradient norms over layouts.

Both start from the same weights and see the same rows; between blocks both hold 1/tp of the rows.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.parity.body import run_step, whole
from tests.parity.case import Case, fresh_reference, packing, reference_loss, spec_of
from tests.sets import full, nightly
from wlb.kernels import Segments, attend
from wlb.launch.local import run_local
from wlb.model import Llama, LocalAttend, Rows, inverse_frequencies, rope_tables
from wlb.parallel.build import build_stages
from wlb.parallel.data import finish_gradients, gradient_square, needs_fsdp, scale_gradients
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import RunSpec, Schedule

pytestmark = pytest.mark.dist

CU_SEQLENS = [0, 3, 24, 32, 48]  # four documents in 48 rows, which 4 ranks divide


def micro_batch(spec: RunSpec) -> tuple[Tensor, Tensor, Rows]:
    """Returns tokens, labels (every fifth is not trained) and rows of one micro-batch."""
    num = CU_SEQLENS[-1]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, spec.model.vocab_size, (num,), generator=generator)
    labels = torch.randint(0, spec.model.vocab_size, (num,), generator=generator)
    labels[::5] = -100
    sizes = torch.tensor(CU_SEQLENS).diff().tolist()
    positions = torch.cat([torch.arange(size) for size in sizes])
    cos, sin = rope_tables(positions, inverse_frequencies(spec.model))
    segments = Segments.from_offsets(CU_SEQLENS, CU_SEQLENS, device="cpu")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, segments, backend="reference")

    return tokens, labels, Rows(cos=cos, sin=sin, attend=LocalAttend(attention), labels=labels)


def torch_tensor_parallel(spec: RunSpec, mesh: Any) -> Llama:
    """Returns the plain model under torch's own TP+SP, with rows sharded between blocks."""
    model = fresh_reference(spec)
    norm = SequenceParallel(sequence_dim=0, use_local_output=False)
    rows = Shard(0)

    def gathered(**names: Any) -> PrepareModuleInput:
        return PrepareModuleInput(
            input_layouts=(rows,) + (None,) * len(names),
            desired_input_layouts=(Replicate(),) + (None,) * len(names),
        )

    block = {
        "input_layernorm": norm,
        "self_attn": gathered(rows=None),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=rows),
        "post_attention_layernorm": norm,
        "mlp": gathered(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=rows),
    }
    for layer in model.model.layers.values():
        parallelize_module(layer, mesh, block)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)  # pyright: ignore[reportReturnType]


def reference_loss_of(model: Llama, tokens: Tensor, labels: Tensor, rows: Rows) -> Tensor:
    """Returns cross-entropy of the gathered logits without the entries that pad the vocabulary."""
    assert model.lm_head is not None
    logits = model.lm_head(model.model(tokens, rows))[:, : model.spec.vocab_size]
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def compare(world: World, tp: int) -> tuple[float, float, dict[str, float]]:
    """Returns losses of the explicit and torch's TP, and max|diff| / max|ref| of every gradient."""
    spec = spec_of(Case(tp=tp, layers=2))
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    assert not needs_fsdp(mesh, torch.float32)  # tensor parallelism alone
    tokens, labels, rows = micro_batch(spec)
    (ours,) = build_stages(spec, mesh).values()
    loss = ours(tokens, rows=rows)
    loss.backward()
    finish_gradients(dict(ours.named_parameters()), mesh)
    theirs = torch_tensor_parallel(spec, mesh.device_mesh["tp"])
    expected = reference_loss_of(theirs, tokens, labels, rows)
    expected.backward()
    errors: dict[str, float] = {}
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert isinstance(parameter, DTensor)
        reference = wanted[name].grad
        assert reference is not None
        got, reference = whole(parameter.grad), whole(reference)
        errors[name] = ((got - reference).abs().max() / reference.abs().max()).item()
    assert errors.keys() == wanted.keys()
    return loss.item(), whole(expected).item(), errors


@pytest.mark.parametrize("tp", [2, *nightly(4)])
def test_loss_and_gradients_are_those_of_parallelize_module(tp: int) -> None:
    for ours, theirs, errors in run_local(compare, tp, tp, start_group=True, timeout_s=600):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert len(errors) == 2 * 9 + 3
        assert {name: e for name, e in errors.items() if e > 1e-5} == {}


def saved_bytes(layer: nn.Module, x_SC: Tensor, rows: Rows) -> tuple[int, int]:
    """Returns bytes that one block keeps for backward: rows of the whole micro-batch wide C, and
    all.

    Weights are not counted and a storage that several operations keep counts once.
    """
    weights = {whole_storage(p) for p in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (address := whole_storage(tensor)) not in weights:
            kept[address] = local(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x_SC, rows)
    assert out.requires_grad
    gathered = [t for t in kept.values() if t.shape == (CU_SEQLENS[-1], x_SC.shape[1])]
    return len(gathered), sum(t.untyped_storage().nbytes() for t in kept.values())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def memory(world: World, tp: int) -> list[tuple[int, int]]:
    spec = spec_of(Case(tp=tp, layers=2))
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    _, _, rows = micro_batch(spec)
    (ours,) = build_stages(spec, mesh).values()
    theirs = torch_tensor_parallel(spec, mesh.device_mesh["tp"])
    out: list[tuple[int, int]] = []
    for model in (ours, theirs):
        x_SC = torch.randn(CU_SEQLENS[-1] // tp, spec.model.hidden_size, requires_grad=True)
        out.append(saved_bytes(model.model.layers["0"], x_SC, rows))
    return out


@pytest.mark.parametrize("tp", [2, *nightly(4)])
def test_a_block_keeps_sharded_inputs_and_gathers_them_again(tp: int) -> None:
    """parallelize_module keeps the gathered rows that attention and MLP read; the explicit TP does
    not.

    It thus keeps exactly 2 x (T - T / tp) rows of C float32 numbers less per block.
    """
    for ours, theirs in run_local(memory, tp, tp, start_group=True, timeout_s=600):
        assert (ours[0], theirs[0]) == (0, 2)
        assert theirs[1] - ours[1] == 2 * (48 - 48 // tp) * 32 * 4


def norms(world: World, case: Case) -> tuple[float, float, float]:
    """Returns the squared gradient norm of the layout, of one process, and of the layout after
    clipping.
    """
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, torch.device("cpu"), model=spec.model)
    executor = Executor(spec, mesh)
    run_step(executor, case, shift=0)
    square = gradient_square(executor.named_parameters(), mesh)
    dist.all_reduce(square)
    reference = fresh_reference(spec)
    reference_loss(reference, spec, packing(case.num_micro_batches), backward=True)
    grads = [p.grad.double() for p in reference.parameters() if p.grad is not None]
    expected = sum(grad.square().sum().item() for grad in grads)
    scale_gradients(executor.named_parameters().values(), norm=square.item() ** 0.5, max_norm=0.125)
    clipped = gradient_square(executor.named_parameters(), mesh)
    dist.all_reduce(clipped)
    return square.item(), expected, clipped.item()


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2),
        *full(Case(dp=2), Case(tp=2, cp=2, pp=2, v=2)),
        # Copies of KV heads count once.
        *full(Case(tp=4, keys=(("num_kv_heads", 2),))),
        *nightly(Case(cp=2), Case(pp=2, schedule=Schedule.ONE_F_ONE_B)),
    ],
    ids=str,
)
def test_the_gradient_norm_is_that_of_one_process(case: Case) -> None:
    for square, expected, clipped in run_local(
        norms, case.world, case, start_group=True, timeout_s=600
    ):
        assert square == pytest.approx(expected, rel=1e-5)
        assert square > 0.25  # so that clipping does something
        assert clipped == pytest.approx(0.125**2, rel=1e-4)
