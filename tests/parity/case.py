"""Defines the runs of parity tests: a small model, literal micro-batches, the reference."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wlb.model import ExpertRows, Llama, build_reference, local_rows
from wlb.parallel.rows import IGNORE, rank_labels, rank_tokens
from wlb.plan import KeyExchange, PackingPlan, Pieces, PipelinePlan, local_tokens, offsets_of
from wlb.sharding.paper import per_document, per_sequence
from wlb.spec import (
    EpSection,
    ExchangeChoice,
    ExpertsSpec,
    FsdpSection,
    ModelSpec,
    ParallelSpec,
    Recompute,
    RopeKind,
    RopeScaling,
    RunSpec,
    Schedule,
    check,
)

WINDOW = 24

# Lengths of documents by their ids. They include one token, fewer tokens than 2 * CP, lengths that
# 2 * CP does not divide, and documents longer than the window (40 and 61 tokens), whose pieces are
# in different micro-batches. One micro-batch is empty. "d:a-b" means tokens [a, b) of document d.
DOCUMENTS = {0: 1, 1: 3, 2: 17, 3: 40, 4: 24, 5: 2, 6: 13, 7: 61, 8: 1, 9: 9, 10: 5, 11: 30}
MICRO_BATCHES = [
    ["0:0-1", "2:0-17", "1:0-3"],
    ["3:0-24", "6:0-13"],
    [],
    ["7:0-24", "3:24-40", "8:0-1"],
    ["4:0-24"],
    ["7:48-61", "5:0-2", "9:0-9", "10:0-5"],
    ["7:24-48"],
    ["11:24-30", "11:0-24"],
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, schedule and model to compare with one process."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    v: int = 1
    schedule: Schedule = Schedule.INTERLEAVED_1F1B
    strategy: str = "per_document"
    num_micro_batches: int = 4
    row_multiple: int = 1
    layers: int = 4
    rope_factor: float = 1.0
    rope_kind: RopeKind = RopeKind.LLAMA3
    head_dim: int = 4
    recompute: Recompute = Recompute.NONE
    weight_delay: int = 1
    stage_layers: tuple[int, ...] = ()
    shard_size: int = 0
    reshard: bool = False
    compile_backend: str = ""
    own_first: bool = False
    stages: int = 1
    exchange: KeyExchange = KeyExchange.GATHER
    parts: tuple[str, ...] = ()
    """Keys of the model that are set to true."""
    ep: int = 1
    ep_stages: int = 1
    experts: ExpertsSpec = ExpertsSpec()
    keys: tuple[tuple[str, Any], ...] = ()
    """Other keys of the model and their values."""

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        layout = f"tp{self.tp}-cp{self.cp}-pp{self.pp}-dp{self.dp}"
        name = f"{layout}-v{self.v}-{self.schedule}-{self.strategy}-n{self.num_micro_batches}"
        name += "" if self.weight_delay == 1 else f"-w{self.weight_delay}"
        name += "".join(f"-{layers}" for layers in self.stage_layers)
        name += f"-shard{self.shard_size}" if self.shard_size else ""
        name += "-reshard" if self.reshard else ""
        name += f"-{self.compile_backend}" if self.compile_backend else ""
        name += "-own_first" if self.own_first else ""
        name += "" if self.stages == 1 else f"-stages{self.stages}"
        name += "" if self.exchange == KeyExchange.GATHER else f"-{self.exchange}"
        name += "".join(f"-{part}" for part in self.parts)
        if self.experts.num:
            name += f"-ep{self.ep}-e{self.experts.num}-{self.experts.shared}-{self.experts.scoring}"
            name += f"-{self.experts.balance}"
            name += "" if self.ep_stages == 1 else f"-in{self.ep_stages}"
            name += "" if self.experts.every == 1 else f"-every{self.experts.every}"
            name += "".join(f"-dense{layer}" for layer in self.experts.dense_layers)
        name += "".join(f"-{key}{value}" for key, value in self.keys)
        name += "" if self.rope_kind == RopeKind.LLAMA3 else f"-{self.rope_kind}"
        return name if self.recompute == Recompute.NONE else f"{name}-{self.recompute}"


def spec_of(case: Case) -> RunSpec:
    spec = RunSpec()
    model = ModelSpec(
        vocab_size=250,
        hidden_size=32,
        num_layers=case.layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=case.head_dim,
        ffn_hidden_size=48,
        init_std=0.2,
        rope_scaling=RopeScaling(
            kind=case.rope_kind,
            factor=case.rope_factor,
            original_context=16,
            turns=(1.0, 8.0) if case.rope_kind == RopeKind.YARN else (),
        ),
    )
    values: dict[str, Any] = dict(case.keys)
    model = replace(model, **dict.fromkeys(case.parts, True), **values, experts=case.experts)
    return check(
        replace(
            spec,
            model=model,
            parallel=ParallelSpec(tp=case.tp, cp=case.cp, pp=case.pp, dp=case.dp, ep=case.ep),
            cp=replace(spec.cp, overlap_stages=case.stages if case.own_first else 0),
            sharding=replace(spec.sharding, exchange=ExchangeChoice(case.exchange)),
            ep=EpSection(stages=case.ep_stages),
            fsdp=FsdpSection(shard_size=case.shard_size, reshard_after_forward=case.reshard),
            pp=replace(
                spec.pp,
                schedule=case.schedule,
                virtual_stages=case.v,
                weight_delay=case.weight_delay,
                stage_layers=case.stage_layers,
            ),
            data=replace(
                spec.data,
                context_window=WINDOW,
                num_windows=case.num_micro_batches,
                row_multiple=case.row_multiple,
            ),
            training=replace(
                spec.training,
                loss_chunk=7,
                recompute=case.recompute,
                compile=bool(case.compile_backend),
                compile_backend=case.compile_backend or spec.training.compile_backend,
            ),
        )
    )


@dataclass(frozen=True)
class Reader:
    """Reads random tokens, which are the same for a document whenever it is read."""

    vocab_size: int = 250
    lengths: dict[int, int] = field(default_factory=lambda: DOCUMENTS)

    def length(self, document: int) -> int:
        return self.lengths[document]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        rng = np.random.default_rng(document)
        return rng.integers(0, self.vocab_size, self.length(document))[start:stop]


READER = Reader()


class Masked(Reader):
    """A reader that labels only every seventh token, as fine-tuning labels only answers."""

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.where(np.arange(start, stop) % 7 == 2, self.read(document, start, stop), IGNORE)


def packing(num_micro_batches: int, *, shift: int = 0) -> PackingPlan:
    """Returns the plan of `num_micro_batches` literal micro-batches from number `shift` on.

    After the last of MICRO_BATCHES comes the first.
    """
    chosen = [MICRO_BATCHES[(i + shift) % len(MICRO_BATCHES)] for i in range(num_micro_batches)]
    return packing_of(chosen, step=shift)


def packing_of(micro_batches: list[list[str]], *, step: int = 0) -> PackingPlan:
    rows: list[tuple[int, int, int]] = []
    counts: list[int] = []
    for members in micro_batches:
        counts.append(len(members))
        for text in members:
            document, _, span = text.partition(":")
            start, _, stop = span.partition("-")
            rows.append((int(document), int(start), int(stop)))
    table = np.array(rows, np.int64).reshape(-1, 3)
    ends = np.array([DOCUMENTS[d] for d in table[:, 0].tolist()], np.int64)
    length = table[:, 2] - table[:, 1]
    zeros = np.zeros(len(table), np.int64)
    pieces = Pieces(
        document=table[:, 0],
        start=table[:, 1],
        stop=table[:, 2],
        num_targets=length - (table[:, 2] == ends),
        source=zeros,
        arrival_step=zeros,
    )
    return PackingPlan(
        step=step,
        policy="literal",
        pieces=pieces,
        offsets=offsets_of(counts),
        workload_ns=np.zeros(len(counts), np.int64),
    )


def pipeline_plan(plan: PackingPlan, spec: RunSpec, pipeline: int, strategy: str) -> PipelinePlan:
    """Returns the plan of a pipeline, which gets micro-batches pipeline, pipeline + dp, ..."""
    batches = tuple(plan.micro_batches[pipeline :: spec.parallel.dp])
    cp = spec.parallel.cp
    made = {"per_sequence": per_sequence, "per_document": per_document}[strategy]
    shardings = (made(b.lengths, cp=cp) for b in batches)
    exchange = KeyExchange(spec.sharding.exchange)
    return PipelinePlan(
        step=plan.step,
        pipeline=pipeline,
        micro_batches=batches,
        shardings=tuple(replace(s, exchange=exchange) for s in shardings),
        local_tokens=tuple(
            local_tokens(b.num_tokens, cp=cp, row_multiple=spec.row_multiple) for b in batches
        ),
        step_rows=int(plan.rows.sum()),
    )


def reference_loss(
    model: Llama,
    spec: RunSpec,
    plan: PackingPlan,
    *,
    backward: bool,
    reader: Reader = READER,
    loss_scale: float | None = None,
) -> float:
    """Computes the mean loss of a step in one process, without padding.

    Args:
        model: The reference model. With `backward`, its gradients are added to.
        spec: The run.
        plan: The step.
        backward: Whether to compute gradients.
        reader: Reader of tokens.
        loss_scale: Factor of the summed loss. Defaults to 1 / number of labels.
    """
    one = replace(spec, parallel=ParallelSpec(dp=1), data=replace(spec.data, row_multiple=1))
    pipeline = pipeline_plan(plan, one, 0, "per_sequence")
    total = 0.0
    for batch, sharding in zip(pipeline.micro_batches, pipeline.shardings, strict=True):
        num = batch.num_tokens
        if not num:
            continue
        rows = local_rows(
            spec.model,
            sharding.for_rank(0).cu_seqlens_q,
            labels=torch.from_numpy(rank_labels(batch, sharding, 0, num, reader)),
            loss_scale=1.0 / plan.num_targets if loss_scale is None else loss_scale,
        )
        if spec.model.experts.num:
            expert_rows = ExpertRows(num=num, row_weight=1 / plan.num_tokens)
            rows = replace(rows, experts=expert_rows)
        tokens = torch.from_numpy(rank_tokens(batch, sharding, 0, num, reader))
        loss: Tensor = model(tokens, rows=rows)
        if backward:
            loss.backward()
        total += loss.item()
    return total


def fresh_reference(spec: RunSpec) -> Llama:
    return build_reference(spec.model, seed=spec.run.seed)
