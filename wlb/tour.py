"""A tour from document lengths to a loss on two local ranks, with every step printed.

Run `python -m wlb.tour`; it takes ten seconds on a CPU. The file is meant to be read from top to
bottom. It calls the same functions in the same order as a run on a cluster, and prints what each
step passes to the next. Numbers in brackets are sections of the WLB-LLM paper (OSDI'25).
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
"""Tokens of each document. A corpus has millions of documents; twelve show every step."""
WINDOW = 40  # the context window: the longest document, in tokens
NUM_MICRO_BATCHES = 2  # per step
CP = 2  # context-parallel ranks, which share the tokens of each micro-batch

COST = FlopsWorkload(quadratic_ns=1.0, linear_ns_per_token=15.0)
"""Cost model: attention of an n-token document takes n^2 ns here, all other layers 15 n ns.

Both are equal at 15 tokens. In LLaMA2-7B they are equal at 48,800 tokens; the documents of this
tour are short, so attention is made expensive enough to matter."""

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
"""Configuration of the run, whose model has two layers. Real runs use a preset or a TOML file."""


class NoiseTokens:
    """Reader of random tokens, in place of the token store that a real run reads."""

    def length(self, document: int) -> int:
        """Return the number of tokens of a document."""
        return LENGTHS[document]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of a document; they are the same on every rank."""
        return np.random.default_rng(document).integers(0, 64, LENGTHS[document])[start:stop]


def say(title: str, *lines: object) -> None:
    """Print a heading and its lines."""
    print(f"\n== {title}", *(f"   {line}" for line in lines), sep="\n")  # noqa: T201


# -- 1. What a document costs (Section 4.1, Eq. 2) ------------------------------------------------


def costs() -> None:
    """Print what each document costs: W(d) = W_a(d) + W_l(d) (Eq. 2).

    W_a is the time of attention, quadratic in the document's length. W_l is the time of all other
    layers, which is linear. Here both come from FLOPs; a real run takes them from a profile of its
    GPU's kernels.
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
    """Pack the documents into micro-batches of unequal lengths but nearly equal work.

    Long documents may be delayed to a later step. Returns the planner and its first step.
    """
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
        f"slowest micro-batch over mean: {step.predicted.imbalance:.3f} (the usual loader, which "
        f"fills windows in order: {step.baseline.imbalance if step.baseline else 1:.3f})",
    )
    return planner, step


# -- 3. Sharding: which rank computes which rows (Section 5) ---------------------------------------


def sharded(planner: Planner, step: StepPlan) -> PipelinePlan:
    """Divide each document over the CP ranks: every rank gets an early and a late span.

    A span is a range of a document's rows that one rank computes. Late rows attend to more keys
    than early rows, so an early span and a late span together cost the same on every rank. A real
    run uses the strategy "adaptive": it predicts the time of this strategy (per document) and of
    dividing the whole micro-batch in the same way (per sequence), and takes the faster.
    """
    pipeline = planner.shard(step, pipeline=0)
    for batch, sharding, rows in zip(
        pipeline.micro_batches, pipeline.shardings, pipeline.local_tokens, strict=True
    ):
        say(
            f"3. Micro-batch {batch.index} is sharded {sharding.strategy}, {rows} rows per rank",
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
    """Print which rows of keys travel between ranks, and what the attention kernel receives.

    A row attends to the earlier rows of its document, and other ranks have some of these rows.
    """
    sharding, rows = pipeline.shardings[0], pipeline.local_tokens[0]
    exchange = exchange_of(sharding, local_tokens=rows)
    say("4. Rows of keys that micro-batch 0 moves, [receiver, sender]", exchange.rows[0].tolist())
    for rank in range(CP):
        stage = rank_exchange(exchange, rank).only
        say(
            f"4. What the attention kernel of rank {rank} gets",
            f"cu_seqlens_q {stage.cu_seqlens_q.tolist()}: where each span's queries begin",
            f"cu_seqlens_k {stage.cu_seqlens_k.tolist()}: where its keys begin",
            f"the all-gather brings {CP} x {rows} rows; the kernel's keys are these of them:",
            [] if stage.kv_index is None else stage.kv_index.tolist(),
        )


# -- 5. Execution: forward and backward on two ranks -----------------------------------------------


def execute(world: World, pipeline: PipelinePlan, num_labels: int) -> tuple[float, float]:
    """Train the step on this rank, and return two numbers to compare with those of one process.

    The executor decides nothing: every rank has the plan, and all shapes follow from it.

    Args:
        world: Ranks that train together.
        pipeline: The plan of the step.
        num_labels: Number of labels on all ranks, by which the loss is divided.

    Returns:
        The loss of all ranks, and the norm of the gradient of the first layer's query projection.
    """
    mesh = build_mesh(SPEC.parallel, torch.device("cpu"))
    executor = Executor(SPEC, mesh)
    loss = executor.train_step(pipeline, NoiseTokens(), loss_scale=1 / num_labels)
    dist.all_reduce(loss)  # each rank has computed the loss of its own rows
    weight = executor.named_parameters()["model.layers.0.self_attn.q_proj.weight"]
    assert weight.grad is not None
    # FSDP2 has summed the gradients over the ranks, and each rank keeps a shard of the sum.
    grad = weight.grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return loss.item(), grad.norm().item()


def rows_of_ranks(pipeline: PipelinePlan) -> None:
    """Print the inputs of each rank: the tokens of its rows, and as labels the next tokens."""
    place = pipeline.micro_batches[0], pipeline.shardings[0]
    for rank in range(CP):
        inputs = (rank, pipeline.local_tokens[0], NoiseTokens())
        say(
            f"5. Inputs of rank {rank}, micro-batch 0 (label -100: the document ends)",
            f"tokens {rank_tokens(*place, *inputs).tolist()}",
            f"labels {rank_labels(*place, *inputs).tolist()}",
        )


def one_process(pipeline: PipelinePlan, num_labels: int) -> tuple[float, float]:
    """Train the step's documents one by one in one process; return loss and gradient norm.

    The loss is divided by `num_labels`, as in `execute`, so the results of both must agree.
    """
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
    """Run the tour."""
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
