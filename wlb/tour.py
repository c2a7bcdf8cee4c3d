"""From the lengths of documents to a loss, on two ranks of this machine, with every step printed.

`python -m wlb.tour` takes ten seconds. Read this file from the top to the bottom: it calls the same
functions as a run on a cluster, in the same order, and prints what goes from one to the next. The
numbers in brackets are sections of the WLB-LLM paper (OSDI'25).
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from wlb import Planner
from wlb.cost import FlopsWorkload
from wlb.launch.local import run_local
from wlb.model import build_reference, local_rows
from wlb.parallel.context.rows import rank_exchange
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.rows import rank_labels, rank_tokens
from wlb.parallel.world import World
from wlb.plan import PipelinePlan, StepPlan, exchange_of
from wlb.spec import RunSpec, apply, check

LENGTHS = [38, 6, 4, 9, 12, 11, 3, 40, 5, 20, 7, 5]
"""Tokens of each document. A corpus has millions of them; twelve show everything."""
WINDOW = 40  # tokens of a context window: no document attends over more
NUM_MICRO_BATCHES = 2
CP = 2  # ranks that share a micro-batch (context parallelism)

COST = FlopsWorkload(quadratic_ns=1.0, linear_ns_per_token=15.0)
"""What a document costs. In LLaMA2-7B attention costs as much as all other layers in a document of
48,800 tokens. The documents here are short, so that it does here in one of 15."""

SPEC = check(
    apply(
        RunSpec(),
        {
            "model": {
                "vocab_size": 64,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_hidden_size": 64,
            },
            "parallel": {"cp": CP, "dp": 1},
            "data": {"context_window": WINDOW, "num_windows": NUM_MICRO_BATCHES, "row_multiple": 1},
        },
        source="the tour",
    )
)
"""The run: a decoder of two layers. A preset or a TOML file says the same things."""


class NoiseTokens:
    """Where a rank reads the tokens of its rows. A run has a token store here."""

    def length(self, document: int) -> int:
        return LENGTHS[document]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document: noise, the same on every rank."""
        return np.random.default_rng(document).integers(0, 64, LENGTHS[document])[start:stop]


def say(title: str, *lines: object) -> None:
    print(f"\n== {title}", *(f"   {line}" for line in lines), sep="\n")  # noqa: T201


# -- 1. What a document costs (Section 4.1, Eq. 2) ------------------------------------------------


def costs() -> None:
    """W(d) = W_a(d) + W_l(d): attention is quadratic in a document's length, the rest is linear.

    Here a ratio of FLOPs prices both. A run takes a profile of its GPU's kernels instead.
    """
    attention, linear = COST.attention_ns(LENGTHS), COST.linear_ns(LENGTHS)
    say(
        "1. What a document costs",
        *(
            f"{d:>2} tokens: attention {a:>5} ns, linear layers {w:>4} ns"
            for d, a, w in zip(LENGTHS, attention, linear, strict=True)
        ),
        "Equal tokens are unequal work: one document of 40 tokens costs more than ten of 4.",
    )


# -- 2. Packing: which documents share a micro-batch (Section 4) ----------------------------------


def packed() -> tuple[Planner, StepPlan]:
    """Balances work over micro-batches of unequal lengths; long documents may wait for a step."""
    planner = Planner.for_lengths(
        LENGTHS,
        context_window=WINDOW,
        num_micro_batches=NUM_MICRO_BATCHES,
        cp=CP,
        cost=COST,
        strategy="per_document",
    )
    step = next(iter(planner.steps()))
    say(
        "2. The first step's micro-batches",
        *(
            f"micro-batch {batch.index}: documents {batch.pieces.document.tolist()}, lengths "
            f"{batch.lengths.tolist()}, {batch.num_tokens} tokens, work {batch.workload_ns:,} ns"
            for batch in step.packing.micro_batches
        ),
        f"{step.packing.num_held_tokens} tokens wait for a later step",
        f"slowest over mean: {step.predicted.imbalance:.3f} (the usual loader, which "
        f"fills windows in order: {step.baseline.imbalance if step.baseline else 1:.3f})",
    )
    return planner, step


# -- 3. Sharding: which rank computes which rows (Section 5) ---------------------------------------


def sharded(planner: Planner, step: StepPlan) -> PipelinePlan:
    """Divides each document over the CP ranks, two spans a rank: an early one and a late one.

    A span is a range of a document's rows that one rank computes. Late rows see more keys, so a
    pair of an early and a late span costs the same on every rank. A run chooses between this
    strategy and one that divides the whole micro-batch in this way ("adaptive"), by predicted time.
    """
    pipeline = planner.shard(step, pipeline=0)
    for batch, sharding, rows in zip(
        pipeline.micro_batches, pipeline.shardings, pipeline.local_tokens, strict=True
    ):
        say(
            f"3. Micro-batch {batch.index} is sharded {sharding.strategy}, {rows} rows a rank",
            *(
                f"rank {rank}: "
                + ", ".join(
                    f"document {batch.pieces.document[piece]} rows [{start}, {stop})"
                    for piece, start, stop in zip(spans.piece, spans.start, spans.stop, strict=True)
                )
                for rank in range(CP)
                for spans in [sharding.for_rank(rank)]
            ),
        )
    return pipeline


# -- 4. The exchange: whose keys a rank needs (Section 2.1; Llama 3's all-gather) ------------------


def exchanged(pipeline: PipelinePlan) -> None:
    """A row sees the earlier rows of its document, and some of them lie on other ranks."""
    sharding, rows = pipeline.shardings[0], pipeline.local_tokens[0]
    exchange = exchange_of(sharding, local_tokens=rows)
    say("4. Rows of keys that micro-batch 0 moves, [receiver, sender]", exchange.rows[0].tolist())
    for rank in range(CP):
        stage = rank_exchange(exchange, rank).only
        say(
            f"4. What rank {rank}'s attention kernel is given",
            f"cu_seqlens_q {stage.cu_seqlens_q.tolist()}: where each span's queries begin",
            f"cu_seqlens_k {stage.cu_seqlens_k.tolist()}: where its keys begin",
            f"keys are these of the {CP} x {rows} rows that the all-gather brings:",
            [] if stage.kv_index is None else stage.kv_index.tolist(),
        )


# -- 5. Execution: forward and backward on two ranks -----------------------------------------------


def execute(world: World, pipeline: PipelinePlan, num_labels: int) -> tuple[float, float]:
    """Trains the step on one rank of two; returns the loss of all ranks and a norm of gradients.

    The executor decides nothing. All shapes follow from the plan, which every rank has.
    """
    mesh = build_mesh(SPEC.parallel, torch.device("cpu"))
    executor = Executor(SPEC, mesh)
    loss = executor.train_step(pipeline, NoiseTokens(), loss_scale=1 / num_labels)
    dist.all_reduce(loss)  # each rank has the loss of its own rows
    weight = executor.named_parameters()["model.layers.0.self_attn.q_proj.weight"]
    assert weight.grad is not None
    # FSDP2 has summed gradients over the ranks and keeps each rank's part of them.
    grad = weight.grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return loss.item(), grad.norm().item()


def rows_of_ranks(pipeline: PipelinePlan) -> None:
    """Prints the inputs of each rank: tokens of its rows, and as labels the tokens after them."""
    place = pipeline.micro_batches[0], pipeline.shardings[0]
    for rank in range(CP):
        inputs = (rank, pipeline.local_tokens[0], NoiseTokens())
        say(
            f"5. Inputs of rank {rank}, micro-batch 0 (label -100: the document ends)",
            f"tokens {rank_tokens(*place, *inputs).tolist()}",
            f"labels {rank_labels(*place, *inputs).tolist()}",
        )


def one_process(pipeline: PipelinePlan, num_labels: int) -> tuple[float, float]:
    """The same documents in one process, one after the other, without any plan."""
    model = build_reference(SPEC.model, seed=SPEC.run.seed)
    total = 0.0
    for document in np.concatenate([b.pieces.document for b in pipeline.micro_batches]).tolist():
        length = LENGTHS[document]
        tokens = torch.from_numpy(NoiseTokens().read(document, 0, length))
        labels = torch.cat([tokens[1:], torch.tensor([-100])])
        rows = local_rows(SPEC.model, [0, length], labels=labels, loss_scale=1 / num_labels)
        loss = model(tokens, rows=rows)
        loss.backward()
        total += loss.item()
    grad = model.get_parameter("model.layers.0.self_attn.q_proj.weight").grad
    assert grad is not None
    return total, grad.norm().item()


def main() -> None:
    costs()
    planner, step = packed()
    pipeline = sharded(planner, step)
    exchanged(pipeline)
    rows_of_ranks(pipeline)
    ((loss, norm), *_) = run_local(execute, CP, pipeline, step.num_targets, start_group=True)
    alone, alone_norm = one_process(pipeline, step.num_targets)
    say(
        "6. The loss, and the norm of the first query projection's gradient",
        f"two ranks:   {loss:.6f}, {norm:.6f}",
        f"one process: {alone:.6f}, {alone_norm:.6f}",
    )


if __name__ == "__main__":
    main()
