"""Times context parallelism of packed documents in transformers, and looks for leaks.

A leak is attention from one document to another of the same packed row.

`python -m experiments.hosts.transformers_cp [--quick]` needs the extra [hf]. It trains a tiny LLaMA
on the same documents in four ways, on two Gloo processes with one thread each. The time of a step
is the CPU time of the slowest rank, because two busy processes may share a core.

accelerate and TRL use torch's ring attention, which has no CPU kernel; the program first prints
torch's error. So the ways that stand for the ring are computed by wlb's attention, from plans that
attend to the same keys as the ring.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.harness.arguments import experiment_parser
from wlb.adapters.collate import PaddingFreeCollator
from wlb.adapters.collate.sharded import ROWS_KEY, ContextSharder
from wlb.adapters.transformers_cp import ContextParallel
from wlb.launch.local import run_local
from wlb.parallel.world import World

VOCABULARY = 256
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train all documents on two ranks."""

    name: str
    # Padding-free batches that both ranks share; with `mask`, one batch for each rank.
    batches: list[dict[str, Any]]
    strategy: str = "adaptive"  # sharding strategy over the CP ranks
    mask: bool = False  # data parallelism with the attention mask of transformers, instead of CP


def documents(num_tokens: int) -> list[list[int]]:
    """Returns documents of log-normal lengths, the longest of which has half of all tokens."""
    draw = np.random.default_rng(0)
    lengths = [num_tokens // 2]
    while sum(lengths) < num_tokens:
        length = int(draw.lognormal(4.5, 1.0)) + 2
        lengths.append(min(length, max(2, num_tokens - sum(lengths))))
    return [draw.integers(0, VOCABULARY, n).tolist() for n in lengths]


def packed(rows: Sequence[list[int]]) -> dict[str, Any]:
    return PaddingFreeCollator()([{"input_ids": row} for row in rows])


def as_one_document(rows: Sequence[list[int]]) -> dict[str, Any]:
    """Returns a packed row in which attention crosses documents, as in a ring.

    Positions still restart in every document.
    """
    batch = packed(rows)
    offsets = torch.tensor([0, batch["input_ids"].shape[1]])
    return batch | {"cu_seq_lens_q": offsets}


def dealt(rows: Sequence[list[int]]) -> list[list[list[int]]]:
    """Divides the documents between the ranks, with about equally many tokens on each."""
    out: list[list[list[int]]] = [[] for _ in range(RANKS)]
    for row in sorted(rows, key=len, reverse=True):
        min(out, key=lambda of: sum(map(len, of))).append(row)
    return out


def ways(rows: Sequence[list[int]]) -> list[Way]:
    each = [packed([row]) for row in rows]
    return [
        Way(name="cp 2, packed, ours", batches=[packed(rows)]),
        Way(name="cp 2, packed, one causal row as in a ring", batches=[as_one_document(rows)],
            strategy="per_sequence"),
        Way(name="cp 2, unpacked, a document a micro-batch", batches=each, strategy="per_sequence"),
        Way(name="dp 2, packed, transformers' SDPA with a mask",
            batches=[packed(of) for of in dealt(rows)], mask=True),
    ]  # fmt: skip


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1 << 16,
            use_cache=False,
        )
    )


def stepped(trained: LlamaForCausalLM, sharder: ContextSharder | None, way: Way) -> None:
    """Runs forward and backward of all micro-batches of a step on this rank.

    Args:
        trained: The model.
        sharder: Shards a batch over the CP ranks; None for data parallelism.
        way: How to train.
    """
    batches = way.batches if sharder is not None else [way.batches[dist.get_rank()]]
    for batch in batches:
        given = batch if sharder is None else replace(sharder, strategy=way.strategy)(batch)
        trained(**given, num_items_in_batch=1).loss.backward()
    trained.zero_grad()


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Returns the shortest CPU time of `repeats` steps, each the time of its slowest rank."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        begin = time.thread_time()
        run()
        took = torch.tensor(time.thread_time() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        best = min(best, float(took))
    return best


def changed(trained: LlamaForCausalLM, sharder: ContextSharder, batch: dict[str, Any]) -> float:
    """Returns how much of the other documents changes when the first document's tokens change.

    Without leaks this is 0.

    Returns:
        Share of the other documents' positions at which any logit differs in any bit.
    """
    first = int((batch["position_ids"][0] == 0).nonzero()[1])
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :first] = (other["input_ids"][0, :first] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (sharder(x) for x in (batch, other))
        differs = (trained(**before).logits != trained(**after).logits).any(-1)[0]
    index = torch.from_numpy(before[ROWS_KEY].plan.for_rank(sharder.rank).token_index)
    others = index >= first
    counts = torch.stack([differs[: index.numel()][others].sum(), others.sum()])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def measured(world: World, num_tokens: int, repeats: int) -> list[tuple[str, float, float | None]]:
    """Returns the name of each way, its tokens per second, and its share of changed positions.

    The share is None where only one document is in a batch, or no context parallelism is used.
    """
    torch.set_num_threads(1)
    rows, plain, ours = documents(num_tokens), model(), model()
    sharder = ContextParallel(ours, cp=world.world_size).sharder
    out = []
    for way in ways(rows):
        of = (plain, None) if way.mask else (ours, sharder)
        took = seconds(lambda of=of, way=way: stepped(*of, way), repeats)
        leak = None
        if not way.mask and len(way.batches) == 1:
            leak = changed(ours, replace(sharder, strategy=way.strategy), way.batches[0])
        out.append((way.name, num_tokens / took, leak))
    return out


def ring_on_cpu(world: World) -> str:
    """Runs torch's context parallelism, which accelerate uses, on the CPU; returns its error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("cp",))
    qkv: list[Tensor] = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
            mine = [x.clone().requires_grad_() for x in qkv]
            out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
            out.sum().backward()
    except Exception as error:  # whatever the error is, it is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return "it computes"


def main() -> None:
    options = experiment_parser(__doc__, quick="take fewer tokens and steps").parse_args()
    num_tokens, repeats = (512, 1) if options.quick else (4096, 5)
    start = {"start_group": True, "timeout_s": 1800}
    print("torch's ring on CPU:", run_local(ring_on_cpu, RANKS, **start)[0])
    results = run_local(measured, RANKS, num_tokens, repeats, **start)[0]
    print(f"{num_tokens} tokens, the longest document half of them; tokens/s of {RANKS} processes")
    for name, rate, leak in results:
        leaks = "" if leak is None else f", {leak:.0%} of other documents' positions change"
        print(f"{name}: {rate:,.0f}, {rate / results[0][1]:.2f} of ours{leaks}")


if __name__ == "__main__":
    main()
