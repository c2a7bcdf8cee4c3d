"""Times context parallelism of packed documents in transformers, and counts what leaks.

`python -m experiments.hosts.transformers_cp [--quick]` needs the extra [hf] and runs two Gloo
processes of one thread. One tiny LLaMA trains the same documents in each way; a step's time is the
slowest rank's processor time, as two busy processes may share a core. accelerate's own context
parallelism (TRL's too) is tried first: torch's ring has no CPU kernel, so its ways are computed by
our attention from the plans that it stands for.
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
    """A way to train the documents. batches: padding-free batches of all of them, or with `mask`
    one of each rank. positions that leak: share of other documents' positions that change.
    """

    name: str
    batches: list[dict[str, Any]]
    strategy: str = "adaptive"
    mask: bool = False


def documents(num_tokens: int) -> list[list[int]]:
    """Returns documents of log-normal lengths, the longest half of all tokens."""
    draw = np.random.default_rng(0)
    lengths = [num_tokens // 2]
    while sum(lengths) < num_tokens:
        length = int(draw.lognormal(4.5, 1.0)) + 2
        lengths.append(min(length, max(2, num_tokens - sum(lengths))))
    return [draw.integers(0, VOCABULARY, n).tolist() for n in lengths]


def packed(rows: Sequence[list[int]]) -> dict[str, Any]:
    return PaddingFreeCollator()([{"input_ids": row} for row in rows])


def as_one_document(rows: Sequence[list[int]]) -> dict[str, Any]:
    """Returns the packed row as a ring sees it: positions restart, attention does not."""
    batch = packed(rows)
    offsets = torch.tensor([0, batch["input_ids"].shape[1]])
    return batch | {"cu_seq_lens_q": offsets}


def dealt(rows: Sequence[list[int]]) -> list[list[list[int]]]:
    """Returns the documents for two ranks, of about as many tokens."""
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
    """Runs forward and backward of all micro-batches of this rank."""
    batches = way.batches if sharder is not None else [way.batches[dist.get_rank()]]
    for batch in batches:
        given = batch if sharder is None else replace(sharder, strategy=way.strategy)(batch)
        trained(**given, num_items_in_batch=1).loss.backward()
    trained.zero_grad()


def seconds(run: Callable[[], None], repeats: int) -> float:
    """Returns the least time of a step; a step takes what its slowest rank does."""
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
    """Returns which share of the other documents' positions changes, in any bit of their logits,
    when the first document's tokens do.
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
    """Returns each way's name, tokens per second, and share of changed positions."""
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
    """Returns what torch's context parallelism, which accelerate calls, says on CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("cp",))
    qkv: list[Tensor] = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    try:
        with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
            mine = [x.clone().requires_grad_() for x in qkv]
            out = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
            out.sum().backward()
    except Exception as error:  # any of its errors is the answer
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
