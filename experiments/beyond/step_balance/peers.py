"""Calls the balancing functions of other frameworks through one signature.

A peer is another framework. It divides the samples of a step among ranks and micro-batches:
`divide(lengths, ranks, cap)` returns result[rank][micro-batch], a list of samples.

The framework's functions are called as its trainer calls them, but in one process. Where the ranks
would agree on a number by a collective, the number is computed here from the values of all ranks.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from experiments.beyond.step_balance.sources import Missing, NoLogger, Nothing, Sources

Division = list[list[list[int]]]
"""Samples of each micro-batch, indexed as division[rank][micro-batch]."""
Divide = Callable[[list[int], int, int], Division]
"""Function of (lengths of the samples, number of ranks, cap on the tokens of a micro-batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The balancing functions of another framework."""

    name: str
    version: str
    divide: Divide
    # Divides the samples into several optimiser steps, whose number is the last argument. None: it
    # is not compared.
    into_mini_batches: Callable[[list[int], int, int, int], list[Division]] | None = None


def pip(name: str) -> str:
    return f"pip download --no-deps -d FOLDER {name}"


def clone(url: str) -> str:
    return f"git clone --depth 1 {url} FOLDER/{url.rsplit('/', 1)[1]}"


def found_peers(sources: Sources) -> tuple[list[Peer], dict[str, str]]:
    """Returns the peers that could be loaded, and the commands that get the missing ones."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for name, make in MAKERS.items():
        try:
            peers.append(make(sources))
        except Missing as error:
            missing[name] = str(error)
    return peers, missing


class Nested:
    """Replaces the batch that verl's function reads; it has only the offsets of its sequences."""

    is_nested = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __getitem__(self, name: str) -> "Nested":
        return self

    def offsets(self) -> Any:
        import torch

        return torch.tensor([0, *itertools.accumulate(self.lengths)])


def verl(sources: Sources) -> Peer:
    utils: Any = Nothing("verl.utils.tensordict_utils")
    utils.index_select_tensor_dict = lambda batch, part: part
    package: Any = Nothing("verl.utils")
    package.tensordict_utils = utils
    module, version = sources.load(
        "verl/utils/seqlen_balancing.py", pip("verl"),
        nothing=("verl", "verl.protocol", "verl.utils.device"),
        beside={"verl.utils": package, "verl.utils.tensordict_utils": utils},
    )  # fmt: skip
    weigh = module.calculate_workload

    def micro_batches(ranks: list[list[int]], lengths: list[int], cap: int) -> Division:
        least = None
        # All ranks must have equally many micro-batches. So raise the minimum to the most that any
        # rank makes, until all make as many.
        while True:
            parts = [
                module.rearrange_micro_batches(
                    Nested([lengths[i] for i in mine]), cap, min_num_micro_batch=least
                )[1]
                for mine in ranks
            ]
            most = max(map(len, parts))
            if all(len(part) == most for part in parts):
                return [
                    [[mine[i] for i in one] for one in part]
                    for mine, part in zip(ranks, parts, strict=True)
                ]
            least = most

    def over_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
        return module.get_seqlen_balanced_partitions(
            weigh(np.array(lengths)).tolist(), ranks, equal_size=True
        )

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        return micro_batches(over_ranks(lengths, ranks), lengths, cap)

    def into(lengths: list[int], ranks: int, cap: int, num: int) -> list[Division]:
        """Cuts the samples of each rank, in their order, into mini-batches."""
        mine = over_ranks(lengths, ranks)
        size = len(lengths) // (ranks * num)
        return [
            micro_batches([r[k * size : (k + 1) * size] for r in mine], lengths, cap)
            for k in range(num)
        ]

    return Peer(name="verl", version=version, divide=divide, into_mini_batches=into)


def slime(sources: Sources) -> Peer:
    how = clone("https://github.com/THUDM/slime")
    flops, _ = sources.load("slime/utils/flops_utils.py", how)
    balancing, _ = sources.load("slime/utils/seqlen_balancing.py", how)
    module, version = sources.load(
        "slime/utils/dp_schedule.py", how,
        beside={"slime.utils.flops_utils": flops, "slime.utils.seqlen_balancing": balancing},
        nothing=("slime", "slime.utils"),
    )  # fmt: skip
    model = {
        "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32, "num_query_groups": 32,
        "kv_channels": 128, "ffn_hidden_size": 11008, "vocab_size": 32000, "num_experts": None,
    }  # fmt: skip

    def schedule(lengths: list[int], ranks: int, cap: int, num: int) -> list[Division]:
        args = Namespace(
            micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=cap,
            balance_data=True, balance_by_flops=False, **model,
        )  # fmt: skip
        layout = {
            "dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
        }  # fmt: skip
        parts, indices, nums, _ = module.build_dp_schedule(
            args, layout, lengths, global_batch_size=len(lengths) // num,
            rollout_indices=list(range(len(lengths))),
        )  # fmt: skip
        ends = [0, *itertools.accumulate(nums)]
        return [
            [
                [[part[i] for i in one] for one in index[a:b]]
                for part, index in zip(parts, indices, strict=True)
            ]
            for a, b in itertools.pairwise(ends)
        ]

    return Peer(
        name="slime",
        version=version,
        divide=lambda lengths, ranks, cap: schedule(lengths, ranks, cap, 1)[0],
        into_mini_batches=schedule,
    )


def nemo_rl(sources: Sources) -> Peer:
    module, version = sources.load(
        "nemo_rl/data/packing/algorithms.py", clone("https://github.com/NVIDIA-NeMo/RL")
    )

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        packer = module.get_packer(
            "modified_first_fit_decreasing", cap, min_bin_count=ranks, bin_count_multiple=ranks
        )
        bins = packer.pack(lengths)
        return [bins[rank::ranks] for rank in range(ranks)]

    return Peer(name="NeMo-RL", version=version, divide=divide)


def torchtitan(sources: Sources) -> Peer:
    rl = "torchtitan.experiments.rl"
    module, version = sources.load(
        "torchtitan/experiments/rl/components/batcher.py", pip("torchtitan"),
        nothing=("torchtitan", "torchtitan.config", "torchtitan.experiments", rl, f"{rl}.types",
                 f"{rl}.observability"),
    )  # fmt: skip

    class Rows(module.Batcher):
        """torchtitan's batcher, which here returns sample numbers instead of tensors."""

        def __init__(self, ranks: int, cap: int) -> None:
            self.local_batch_size, self.seq_len, self._dp_degree = 1, cap, ranks
            self._per_sample_pad_multiple = None

        def _pack_training_sample_row(self, samples: list[Any]) -> list[int]:
            return [sample.number for sample in samples]

        @staticmethod
        def collate(rows: list[list[int]]) -> list[int]:
            return list(itertools.chain(*rows))

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        batcher = Rows(ranks, cap)
        samples = [Namespace(number=i, token_ids=range(n + 1)) for i, n in enumerate(lengths)]
        rows = [
            [s.number for s in row] for row in batcher._assign_training_samples_to_rows(samples)
        ]
        grid = batcher._build_microbatch_grid(rows)
        return [[slot[rank] for slot in grid] for rank in range(ranks)]

    return Peer(name="torchtitan", version=version, divide=divide)


def trl(sources: Sources) -> Peer:
    text, version = sources.text("trl/trainer/utils.py", pip("trl"))
    module = functions(text, "split_tensor_dict", "shuffle_sequence_dict")

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        """Shuffles each rank's samples and cuts them into equally many slices, as TRL does.

        TRL has no cap on tokens. So the number of slices is the smallest that the cap would allow
        if all slices had equally many tokens.
        """
        import torch

        torch.manual_seed(0)
        share = len(lengths) // ranks
        num = -(-sum(lengths) // (cap * ranks))
        num = next(n for n in range(num, share + 1) if share % n == 0)
        out = []
        for rank in range(ranks):
            mine = {"sample": torch.arange(rank * share, (rank + 1) * share)}
            slices = module["split_tensor_dict"](module["shuffle_sequence_dict"](mine), num)
            out.append([part["sample"].tolist() for part in slices])
        return out

    return Peer(name="TRL", version=version, divide=divide)


def functions(text: str, *names: str) -> dict[str, Any]:
    """Executes only the named functions of a module's source, without its imports."""
    import ast
    from collections.abc import Sequence as Several

    import torch

    tree = ast.parse(text)
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    space: dict[str, Any] = {"torch": torch, "Sequence": Several}
    exec(compile(ast.Module(wanted, []), "fetched", "exec"), space)
    return space


def areal(sources: Sources) -> Peer:
    names = ("areal.utils.logging", "numba", "areal.utils")
    logging, numba, utils = (cast(Any, Nothing(name)) for name in names)
    logging.getLogger = lambda name: NoLogger()
    numba.njit = lambda *args, **kwargs: args[0] if args else (lambda f: f)
    utils.logging = logging
    module, version = sources.load(
        "areal/utils/seqpack.py", pip("areal"), nothing=("areal",),
        beside={"areal.utils": utils, "areal.utils.logging": logging, "numba": numba},
    )  # fmt: skip

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        mine = module.balanced_greedy_partition(lengths, ranks)
        num = 1
        # All ranks must have equally many micro-batches: raise the minimum until they do.
        while True:
            parts = [module.ffd_allocate([lengths[i] for i in m], cap, num) for m in mine]
            num = max(map(len, parts))
            if all(len(part) == num for part in parts):
                return [
                    [[m[i] for i in one] for one in part]
                    for m, part in zip(mine, parts, strict=True)
                ]

    return Peer(name="AReaL", version=version, divide=divide)


def openrlhf(sources: Sources) -> Peer:
    balancing, version = sources.load("openrlhf/utils/seqlen_balancing.py", pip("openrlhf"))
    module, _ = sources.load(
        "openrlhf/trainer/ppo_utils/experience.py", pip("openrlhf"),
        nothing=("openrlhf", "openrlhf.utils", "openrlhf.utils.utils"),
    )  # fmt: skip
    module.split_experience_batch = lambda item: [item]
    module.make_experience_batch = lambda items: items

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        size = Namespace(ring_attn_size=1, tensor_parallel_size=1)
        args = Namespace(actor=Namespace(num_nodes=1, num_gpus_per_node=ranks), ds=size)
        items = [Namespace(total_length=n, number=i) for i, n in enumerate(lengths)]
        mine = [[item.number for item in m] for m in module.balance_experiences(items, args)]
        num = max(
            balancing.get_minimum_num_micro_batch_size([lengths[i] for i in m], cap, 1, 1)
            for m in mine
        )
        return [
            [
                [m[i] for i in one]
                for one in balancing.get_seqlen_balanced_partitions(
                    [lengths[i] for i in m], num, False
                )
            ]
            for m in mine
        ]

    return Peer(name="OpenRLHF", version=version, divide=divide)


def veomni(sources: Sources) -> Peer:
    package: Any = Nothing("fetched.utils")
    package.logging = Namespace(get_logger=lambda name: NoLogger())
    text, version = sources.text("veomni/data/dynamic_batching.py", pip("veomni"))
    text = text.replace("from ..utils import logging", "")
    space: dict[str, Any] = {"logging": package.logging, "__name__": "fetched"}
    try:
        exec(compile(text, "fetched", "exec"), space)
    except ImportError as error:
        raise Missing(f"{pip('veomni')} (it needs {error.name})") from None

    def divide(lengths: list[int], ranks: int, cap: int) -> Division:
        """Cuts each rank's stream of samples into micro-batches by VeOmni's buffer."""
        return [
            list(_stream(space, lengths, range(rank, len(lengths), ranks), cap))
            for rank in range(ranks)
        ]

    return Peer(name="VeOmni", version=version, divide=divide)


def _stream(
    space: dict[str, Any], lengths: list[int], mine: range, cap: int
) -> Iterator[list[int]]:
    strategy = space["TextBatchingStrategy"](
        cap, buffer_size=200, get_length_fn=lambda item: item["length"]
    )
    for i in mine:
        strategy.put_item({"length": lengths[i], "number": i, "input_ids": np.zeros(2)})
        if strategy.is_ready_for_micro_batch():
            yield [item["number"] for item in strategy.get_micro_batch(0)]
    while not strategy.empty():
        yield [item["number"] for item in strategy.get_micro_batch(0)]


MAKERS: dict[str, Callable[[Sources], Peer]] = {
    "verl": verl, "slime": slime, "NeMo-RL": nemo_rl, "torchtitan": torchtitan, "TRL": trl,
    "AReaL": areal, "OpenRLHF": openrlhf, "VeOmni": veomni,
}  # fmt: skip
