"""Executor: runs the forward and backward passes of a planned step on this rank.

The executor follows a `PipelinePlan` and makes no decisions. It reads this rank's tokens and
labels, makes the index tensors and rotary tables of each micro-batch once, and runs the pipeline,
or a plain loop if there is one pipeline rank. Only first-stage ranks read tokens, and only
last-stage ranks read labels.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from wlb.kernels import Scores
from wlb.model import ExpertRows, LayerRows, Llama, Rows, inverse_frequencies, rope_tables
from wlb.parallel.build import build_stages, compute_dtype, fused_of, kernel_of, linear_of
from wlb.parallel.compiled import mark_lengths
from wlb.parallel.context.attention import ContextAttention, HeadShape
from wlb.parallel.context.exchange import to_device
from wlb.parallel.context.linear import linear_rows
from wlb.parallel.context.rows import RankExchange, rank_exchange
from wlb.parallel.data import finish_gradients
from wlb.parallel.expert_parallel import add_up_loads
from wlb.parallel.mesh import Mesh
from wlb.parallel.observe import Part, Pass, Progress, Timer, Watchers, watch_ends
from wlb.parallel.pipeline import Pipeline, VarLenStage
from wlb.parallel.rows import TokenReader, rank_labels, rank_tokens
from wlb.parallel.tied import add_tied_gradients, without_copy
from wlb.plan import PipelinePlan, exchange_of, rank_summaries
from wlb.spec import Recompute, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's inputs on the device. Lists have one entry per micro-batch."""

    # shape [T_local] each, for a CP rank's T_local rows with padding; None except on the first
    # stage
    tokens: list[Tensor] | None
    rows: list[Rows]  # all other inputs of the model
    # Every tensor of `tokens` and `rows`. A caller that loads on another CUDA stream must call
    # `record_stream` on them for the stream that computes, or their memory may be reused too early.
    tensors: list[Tensor]


class Executor:
    """Runs training and evaluation steps on this rank's pipeline stages.

    Gradients accumulate in the parameters of the stages. The caller clips them and runs the
    optimiser.

    Args:
        spec: Configuration of the run.
        mesh: The ranks.
        progress: Is told of each pass when the pass begins (`wlb.parallel.observe`).
        timer: Times the passes.
        draws: Whether to draw initial weights; False leaves them uninitialised (`build_stages`).
    """

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        *,
        progress: Progress | None = None,
        timer: Timer | None = None,
        draws: bool = True,
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self._at, self._overlap, self._stages = mesh.at, spec.cp.overlap, spec.cp.stages
        self._cp_group = mesh.group("cp") if mesh.parallel.cp > 1 else None
        is_watched = progress is not None or timer is not None
        self._watchers = Watchers(progress, timer) if is_watched else None
        self.stages: dict[int, Llama] = build_stages(spec, mesh, draws=draws)
        if timer is not None:
            for stage in self.stages.values():
                watch_ends(stage, timer)
        dtype = compute_dtype(spec)
        self.backend = kernel_of(spec, mesh.device).kernel
        self._fused = fused_of(spec, mesh.device).fused
        self._linear = (
            linear_of(spec, mesh.device)[0] if spec.model.linear.num_value_heads else None
        )
        self._heads = HeadShape(
            num_heads=spec.model.num_heads // mesh.parallel.tp,
            num_kv_heads=spec.model.with_kv_copies(mesh.parallel.tp).num_kv_heads
            // mesh.parallel.tp,
            head_dim=spec.model.head_size,
            dtype=dtype,
        )
        self._recomputes_attention = spec.training.recompute == Recompute.FULL
        model = spec.model
        # The model's kinds of attention layers: False for layers without a sliding window, True for
        # layers with one.
        self._kinds = sorted({model.slides(layer) for layer in range(model.num_layers)})
        self._frequencies = {
            slides: inverse_frequencies(model, mesh.device, slides=slides) for slides in self._kinds
        }
        self.pipeline: Pipeline | None = None
        if mesh.parallel.pp > 1:
            stages = [
                VarLenStage(
                    module,
                    index,
                    spec.num_stages,
                    mesh=mesh,
                    width=spec.model.hidden_size,
                    dtype=dtype,
                    queue=getattr(module.ops, "queue", None),
                    watchers=self._watchers,
                )
                for index, module in self.stages.items()
            ]
            delay = spec.pp.weight_delay
            self.pipeline = Pipeline(stages=stages, schedule=spec.pp.schedule, weight_delay=delay)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's parameters by their names in the whole model."""
        return {n: p for stage in self.stages.values() for n, p in stage.named_parameters()}

    def counted_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return `named_parameters` without the head if it is a copy of another rank's embedding.

        A sum over all ranks then counts a tied embedding once.
        """
        return without_copy(self.named_parameters(), self.spec.model)

    def load(self, plan: PipelinePlan, reader: TokenReader, *, loss_scale: float) -> StepInputs:
        """Read this rank's tokens and labels of a step, and make all inputs of the model.

        This method starts no collective, so any thread may call it.

        Args:
            plan: The plan of this rank's pipeline.
            reader: Source of tokens.
            loss_scale: The model multiplies the summed loss by this.
        """
        made = StepInputs(tokens=None if self._at.pp else [], rows=[], tensors=[])
        for i in range(len(plan.micro_batches)):
            self._add_micro_batch(made, plan, i, reader, loss_scale)
        return made

    def train_step(
        self,
        plan: PipelinePlan,
        reader: TokenReader,
        *,
        loss_scale: float,
        inputs: StepInputs | None = None,
    ) -> Tensor:
        """Run forward and backward of all micro-batches, and sum the gradients over all ranks.

        Args:
            plan: The plan of this rank's pipeline.
            reader: Source of tokens. Unused if `inputs` is given.
            loss_scale: The summed loss is multiplied by this.
            inputs: Result of `load` for the same plan. With None this method loads the inputs.

        Returns:
            The sum of token losses over this rank's rows, times loss_scale, as a float32 scalar.
            The sum is zero on ranks without the last stage, and equal on all TP ranks of a stage.
        """
        made = inputs or self.load(plan, reader, loss_scale=loss_scale)
        with nullcontext() if self._watchers is None else self._watchers.step():
            losses = self._run(plan, made, train=True)
        model, parallel = self.spec.model, self.mesh.parallel
        if parallel.tp > 1:
            finish_gradients(self.named_parameters(), self.mesh)
        if parallel.pp > 1 and model.tied_embeddings:
            add_tied_gradients(self.named_parameters(), self.mesh)
        if model.experts.num:
            add_up_loads(self.stages.values(), made.rows, self.mesh)
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, plan: PipelinePlan, reader: TokenReader) -> Tensor:
        """Run forward passes only, and return the sum of token losses over this rank's rows.

        Args:
            plan: The plan of this rank's pipeline.
            reader: Source of tokens.
        """
        made = self.load(plan, reader, loss_scale=1.0)
        return self._sum(self._run(plan, made, train=False))

    def _run(self, plan: PipelinePlan, made: StepInputs, *, train: bool) -> list[Tensor]:
        if self.pipeline is not None:
            # With sequence parallelism, stages exchange 1/tp of the rows.
            exchanged = [rows // self.mesh.parallel.tp for rows in plan.local_tokens]
            return self.pipeline.run(made.tokens, made.rows, exchanged, train=train)
        assert made.tokens is not None
        (module,) = self.stages.values()

        def watched(kind: Pass, i: int, first: Part) -> AbstractContextManager[None]:
            watchers = self._watchers
            return nullcontext() if watchers is None else watchers.chunk(kind, 0, i, first)

        losses: list[Tensor] = []
        for i, (tokens, rows) in enumerate(zip(made.tokens, made.rows, strict=True)):
            if train and isinstance(module, FSDPModule):
                # Let FSDP reduce gradients only in the step's last backward pass.
                is_last = i == len(made.rows) - 1
                module.set_requires_gradient_sync(is_last)
                module.set_is_last_backward(is_last)
                module.set_reshard_after_backward(is_last)
            with watched(Pass.FORWARD, i, Part.EMBEDDING):
                loss = module(tokens, rows=rows)
            if train:
                with watched(Pass.BACKWARD, i, Part.HEAD):
                    loss.backward()
            losses.append(loss)
        return losses

    def _sum(self, losses: list[Tensor]) -> Tensor:
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.mesh.device))

    def _expert_rows(self, plan: PipelinePlan, i: int) -> ExpertRows:
        """Return what layers with experts need to know about the rows of micro-batch `i`.

        This is how many of this TP rank's rows are not padding, and the weight of a row in
        auxiliary losses.
        """
        each = plan.local_tokens[i] // self.mesh.parallel.tp
        real = int(plan.shardings[i].tokens[self._at.cp]) - self._at.tp * each
        return ExpertRows(num=min(max(0, real), each), row_weight=1 / max(1, plan.step_rows))

    def _add_micro_batch(
        self, made: StepInputs, plan: PipelinePlan, i: int, reader: TokenReader, loss_scale: float
    ) -> None:
        batch, sharding, local = plan.micro_batches[i], plan.shardings[i], plan.local_tokens[i]
        cp_rank = self._at.cp
        # 1. Plan the exchange of K and V, for each kind of attention layer.
        by_kind = {
            slides: rank_exchange(
                exchange_of(
                    sharding,
                    local_tokens=local,
                    own_first=self._overlap,
                    stages=self._stages,
                    sliding=self.spec.model.sliding_window if slides else 0,
                ),
                cp_rank,
            )
            for slides in self._kinds
        }
        # 2. Collect all arrays, and copy them to the device in one transfer.
        arrays = {"positions": by_kind[self._kinds[0]].positions}
        for slides, index in by_kind.items():
            arrays |= {_name(name, slides): a for name, a in index.arrays()}
        if made.tokens is not None:
            arrays["tokens"] = rank_tokens(batch, sharding, cp_rank, local, reader)
        if self._at.pp == self.mesh.parallel.pp - 1:
            arrays["labels"] = rank_labels(batch, sharding, cp_rank, local, reader)
        on_device = to_device(arrays, self.mesh.device)
        # 3. Make attention and rotary tables for each kind of attention layer. Kinds with the same
        # RoPE base share their tables.
        attentions = {
            slides: self._attention(index, on_device, slides=slides)
            for slides, index in by_kind.items()
        }
        positions, bases = on_device["positions"], self._frequencies
        made_tables = {slides: rope_tables(positions, base) for slides, base in bases.items()}
        if not self.spec.model.sliding_rope_theta:
            made_tables = dict.fromkeys(bases, made_tables[self._kinds[0]])
        of_kind = {
            slides: LayerRows(*made_tables[slides], attention)
            for slides, attention in attentions.items()
        }
        tables = [table for pair in made_tables.values() for table in pair]
        # 4. Make the inputs of linear-attention layers.
        linear, of_linear = None, list[Tensor]()
        if self._linear is not None:
            latest = self.spec.model.linear.latest
            spans = rank_summaries(sharding, cp_rank, latest=latest)
            linear, of_linear = linear_rows(
                spans, local, self._cp_group, self.mesh.device, self._linear
            )
        # 5. Put everything into one record. If all layers have a sliding window, the fields for
        # other layers get the same values, and nothing reads them.
        rows = Rows(
            **of_kind[self._kinds[0]]._asdict(),
            labels=on_device.get("labels"),
            loss_scale=loss_scale,
            sliding=of_kind.get(True),
            linear=linear,
            experts=self._expert_rows(plan, i) if self.spec.model.experts.num else None,
        )
        indices = [index for made in attentions.values() for index in made.indices]
        if self.spec.training.compile:
            mark_lengths(tables, indices)
        if made.tokens is not None:
            made.tokens.append(on_device["tokens"])
        made.rows.append(rows)
        made.tensors.extend([*on_device.values(), *tables, *indices, *of_linear])

    def _attention(
        self, index: RankExchange, on_device: dict[str, Tensor], *, slides: bool
    ) -> ContextAttention:
        return ContextAttention.from_rows(
            index,
            group=self._cp_group,
            heads=self._heads,
            backend=self.backend,
            device=self.mesh.device,
            # If backward recomputes the whole layer, the recomputation gathers K and V right before
            # the layer's backward runs. So keep them until then instead of gathering them once
            # more.
            keep_gathered_kv=self._recomputes_attention,
            fused=self._fused,
            on_device={name: on_device[_name(name, slides)] for name, _ in index.arrays()},
            scores=Scores.of(self.spec.model, slides=slides),
        )


def _name(name: str, slides: bool) -> str:
    return f"sliding {name}" if slides else name
