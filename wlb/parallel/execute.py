"""Executor: runs the forward and backward passes of a step that was planned elsewhere.

It takes no decision. From a PipelinePlan it reads this rank's tokens and labels, builds index
tensors and rotary tables once per micro-batch, and runs the pipeline, or a plain loop if there is
one pipeline rank. Only first-stage ranks read tokens, only last-stage ranks labels.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from wlb.kernels import select_backend
from wlb.model import Llama, Rows, inverse_frequencies, rope_tables
from wlb.parallel.build import build_stages, compute_dtype
from wlb.parallel.compiled import mark_lengths
from wlb.parallel.context import ContextAttention, HeadShape, index_arrays, to_device
from wlb.parallel.data import finish_gradients, set_gradient_sync
from wlb.parallel.mesh import Mesh
from wlb.parallel.observe import NoProgress, Part, Pass, Progress, Timer, watch_ends
from wlb.parallel.pipeline import Pipeline, VarLenStage
from wlb.parallel.rows import TokenReader, attention_rows, rank_labels, rank_tokens
from wlb.plan import PipelinePlan
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's inputs on the rank's device, one entry per micro-batch.

    tokens: on the first stage, else None. tensors: every tensor inside, for callers that load on a
    stream of their own and must record it.
    """

    tokens: list[Tensor] | None
    rows: list[Rows]
    tensors: list[Tensor]


class Executor:
    """One rank's stages, and how to run a step on them.

    stages: modules by stage index. backend: attention kernel in use. Gradients accumulate in the
    stages' parameters; the caller owns the optimiser. progress, timer: see `wlb.parallel.observe`.
    """

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        *,
        progress: Progress | None = None,
        timer: Timer | None = None,
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self._progress = progress or NoProgress()
        self._timer = timer
        self.stages: dict[int, Llama] = build_stages(spec, mesh)
        if timer is not None:
            for stage in self.stages.values():
                watch_ends(stage, timer)
        dtype = compute_dtype(spec)
        self.backend = select_backend(
            spec.kernels.attention,
            device=mesh.device,
            dtype=dtype,
            head_size=spec.model.head_size,
        )
        self._heads = HeadShape(
            num_heads=spec.model.num_heads // mesh.tp_size,
            num_kv_heads=spec.model.num_kv_heads // mesh.tp_size,
            head_dim=spec.model.head_size,
            dtype=dtype,
        )
        self._frequencies = inverse_frequencies(spec.model, mesh.device)
        self.pipeline: Pipeline | None = None
        if mesh.pp_size > 1:
            self.pipeline = Pipeline(
                stages=[
                    VarLenStage(
                        module,
                        index,
                        spec.num_stages,
                        width=spec.model.hidden_size,
                        device=mesh.device,
                        group=mesh.pp_group,
                        dtype=dtype,
                        queue=getattr(module.ops, "queue", None),
                        timer=timer,
                        progress=self._progress,
                    )
                    for index, module in self.stages.items()
                ],
                schedule=spec.pp.schedule,
                weight_delay=spec.pp.weight_delay,
            )

    @property
    def is_first(self) -> bool:
        return self.mesh.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.mesh.pp_rank == self.mesh.pp_size - 1

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters under their names in the whole model."""
        return {n: p for stage in self.stages.values() for n, p in stage.named_parameters()}

    def load(self, plan: PipelinePlan, reader: TokenReader, *, loss_scale: float) -> StepInputs:
        """Read this rank's part of a step. Runs no collective, so any thread may call it."""
        tokens: list[Tensor] = []
        rows: list[Rows] = []
        tensors: list[Tensor] = []
        for i in range(len(plan.micro_batches)):
            token_row, made, used = self._micro_batch(plan, i, reader, loss_scale)
            tokens += [] if token_row is None else [token_row]
            rows.append(made)
            tensors += used
        return StepInputs(tokens=tokens if self.is_first else None, rows=rows, tensors=tensors)

    def train_step(
        self,
        plan: PipelinePlan,
        reader: TokenReader,
        *,
        loss_scale: float,
        inputs: StepInputs | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are summed over all ranks.

        inputs: result of `load` for this plan if it was loaded ahead. Returns the sum of token
        losses over this rank's rows times loss_scale, float32 scalar: zero on ranks without the
        last stage, equal on all tp ranks.
        """
        made = inputs or self.load(plan, reader, loss_scale=loss_scale)
        tokens, rows = made.tokens, made.rows
        with nullcontext() if self._timer is None else self._timer.step():
            if self.pipeline is not None:
                losses = self.pipeline.run(tokens, rows, self._rows_exchanged(plan), train=True)
            else:
                losses = self._accumulate(tokens, rows)
        finish_gradients(self.named_parameters().values())
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, plan: PipelinePlan, reader: TokenReader) -> Tensor:
        """Forward only: the sum of token losses over this rank's rows."""
        made = self.load(plan, reader, loss_scale=1.0)
        tokens, rows = made.tokens, made.rows
        if self.pipeline is not None:
            losses = self.pipeline.run(tokens, rows, self._rows_exchanged(plan), train=False)
        else:
            assert tokens is not None
            (module,) = self.stages.values()
            losses: list[Tensor] = []
            for i, (t, r) in enumerate(zip(tokens, rows, strict=True)):
                self._progress.chunk(Pass.FORWARD, 0, i)
                losses.append(module(t, rows=r))
        return self._sum(losses)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=self.mesh.device)
        for loss in losses:
            total += loss.detach()
        return total

    def _accumulate(self, tokens: list[Tensor] | None, rows: list[Rows]) -> list[Tensor]:
        assert tokens is not None
        (module,) = self.stages.values()
        losses: list[Tensor] = []
        for i, (t, r) in enumerate(zip(tokens, rows, strict=True)):
            set_gradient_sync(module, is_last=i == len(rows) - 1)
            with self._timed(Pass.FORWARD, i, Part.EMBEDDING):
                loss = module(t, rows=r)
            with self._timed(Pass.BACKWARD, i, Part.HEAD):
                loss.backward()
            losses.append(loss)
        return losses

    def _timed(self, kind: Pass, i: int, first: Part) -> AbstractContextManager[None]:
        self._progress.chunk(kind, 0, i)
        if self._timer is None:
            return nullcontext()
        return self._timer.chunk(kind, stage=0, micro_batch=i, first=first)

    def _rows_exchanged(self, plan: PipelinePlan) -> list[int]:
        return [rows // self.mesh.tp_size for rows in plan.local_tokens]

    def _micro_batch(
        self, plan: PipelinePlan, i: int, reader: TokenReader, loss_scale: float
    ) -> tuple[Tensor | None, Rows, list[Tensor]]:
        batch, sharding, local = plan.micro_batches[i], plan.shardings[i], plan.local_tokens[i]
        cp_rank = self.mesh.cp_rank
        index = attention_rows(sharding, cp_rank, local)
        arrays = {"positions": index.positions, **index_arrays(index)}
        if self.is_first:
            arrays["tokens"] = rank_tokens(batch, sharding, cp_rank, local, reader)
        if self.is_last:
            arrays["labels"] = rank_labels(batch, sharding, cp_rank, local, reader)
        on_device = to_device(arrays, self.mesh.device)
        cos, sin = rope_tables(on_device["positions"], self._frequencies)
        attention = ContextAttention.from_rows(
            index,
            group=self.mesh.cp_group if self.mesh.cp_size > 1 else None,
            heads=self._heads,
            backend=self.backend,
            device=self.mesh.device,
            keep_gathered_kv=self.spec.cp.keep_gathered_kv,
            on_device=on_device,
        )
        made = Rows(
            cos=cos,
            sin=sin,
            attend=attention,
            labels=on_device.get("labels"),
            loss_scale=loss_scale,
        )
        if self.spec.training.compile:
            mark_lengths(made, attention.indices)
        return on_device.get("tokens"), made, [*on_device.values(), cos, sin, *attention.indices]
