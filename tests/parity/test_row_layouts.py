"""Tests that padded and joined micro-batches compute what examples do alone (fp32, CPU, Gloo).

Joined ones compute what their examples do as one. The reference knows neither plans' segments nor
collation: it is one process, one example after the other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parity.body import global_loss, gradient_error
from tests.parity.case import WINDOW, Case, Reader, fresh_reference, packing, pipeline_plan, spec_of
from tests.sets import full, nightly
from wlb.kernels import Segments, attend
from wlb.launch.local import run_local
from wlb.model import Llama, LocalAttend, Rows, inverse_frequencies, rope_tables
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.plan import Layout, PackingPlan
from wlb.spec import RunSpec, Schedule

pytestmark = pytest.mark.dist
IGNORE = -100


def examples_of(plan: PackingPlan) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (tokens, labels) of each sequence that the model is to see by itself."""
    reader = Reader()
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in plan.micro_batches:
        row: list[tuple[np.ndarray, np.ndarray]] = []
        for piece in batch.pieces:
            length = reader.length(piece.document)
            document = reader.read(piece.document, 0, length)
            following = np.append(document[1:], IGNORE)
            row.append((document[piece.start : piece.stop], following[piece.start : piece.stop]))
        if plan.layout != Layout.JOINED:
            out += row
        elif row:
            tokens = np.concatenate([t for t, _ in row])
            labels = np.concatenate([x for _, x in row])
            unknown = np.flatnonzero(labels[:-1] == IGNORE)
            labels[unknown] = tokens[unknown + 1]
            out.append((tokens, labels))
    return out


def alone(model: Llama, spec: RunSpec, plan: PackingPlan) -> tuple[float, int]:
    """Returns (mean loss, labels) of the examples one by one, with gradients added to `model`."""
    frequencies = inverse_frequencies(spec.model)
    examples = examples_of(plan)
    num = sum(int((labels != IGNORE).sum()) for _, labels in examples)
    total = 0.0
    for tokens, labels in examples:
        ends = np.array([0, tokens.size])
        segments = Segments.from_offsets(ends, ends, device="cpu")
        cos, sin = rope_tables(torch.arange(tokens.size), frequencies)
        rows = Rows(
            cos=cos,
            sin=sin,
            attend=LocalAttend(lambda q, k, v, s=segments: attend(q, k, v, s, backend="reference")),
            labels=torch.from_numpy(labels.astype(np.int64)),
            loss_scale=1.0 / num,
        )
        loss = model(torch.from_numpy(tokens.astype(np.int64)), rows=rows)
        loss.backward()
        total += loss.item()
    return total, num


def body(world: World, case: Case, layout: Layout) -> dict[str, object]:
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    executor = Executor(spec, mesh)
    reference = fresh_reference(spec)
    plan = laid_out(packing(case.num_micro_batches), layout)
    expected, num = alone(reference, spec, plan)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    mine = replace(mine, local_tokens=local_rows(plan, spec, mesh.at.dp))
    loss = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    return {
        "loss": global_loss(executor, loss),
        "expected": expected,
        "targets": (plan.num_targets, num),
        "gradient": gradient_error(executor, reference),
    }


def local_rows(plan: PackingPlan, spec: RunSpec, pipeline: int) -> tuple[int, ...]:
    rows = plan.rows[pipeline :: spec.parallel.dp]
    size = spec.parallel.cp * spec.row_multiple
    return tuple(-(-int(n) // size) * spec.row_multiple for n in rows)


def laid_out(plan: PackingPlan, layout: Layout) -> PackingPlan:
    """Returns `plan` with that layout; joined, a document that ends before another has one label
    more.
    """
    if layout != Layout.JOINED:
        return replace(plan, layout=layout)
    reader = Reader()
    joined = 0
    for batch in plan.micro_batches:
        inner = [batch.pieces[i] for i in range(len(batch.pieces) - 1)]
        joined += sum(p.stop == reader.length(p.document) for p in inner)
    return replace(plan, layout=layout, num_joined_targets=joined)


@pytest.mark.parametrize("layout", list(Layout), ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_micro_batches=8),
        *full(Case(cp=2, strategy="per_sequence", row_multiple=3)),
        *nightly(
            Case(cp=2, num_micro_batches=8),
            Case(tp=2, pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
        ),
    ],
    ids=str,
)
def test_examples_train_as_they_do_alone(case: Case, layout: Layout) -> None:
    for result in run_local(body, case.world, case, layout, start_group=True, timeout_s=600):
        assert result["targets"][0] == result["targets"][1]
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
        error, name = result["gradient"]
        assert error <= 1e-5, name


def test_padding_is_computed() -> None:
    """Every micro-batch has its longest piece times its pieces as rows."""
    plan = laid_out(packing(4), Layout.PADDED)
    assert plan.tokens.tolist() == [21, 37, 0, 41]
    assert plan.rows.tolist() == [3 * 17, 2 * WINDOW, 0, 3 * WINDOW]
    batch = plan.micro_batch(0)
    assert batch.lengths.tolist() == [17, 17, 17]
    assert batch.cu_seqlens.tolist() == [0, 17, 34, 51]
