"""The exchange on the device, and its flat form, which custom ops take.

A custom op takes tensors, strings and numbers, no records. `flatten` turns a rank's stages into
three arguments, and `stages_of` restores them inside an op. What differs between micro-batches is
in tensors, so that one compiled graph serves all: index arrays are on the device, numbers that the
host needs (splits of all-to-alls, lengths of the longest segments) in one tensor on the host, which
is read without waiting for the device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wlb.kernels import BACKENDS, Scores, Segments
from wlb.kernels.segments import copy_to_device
from wlb.parallel.context.rows import ON_DEVICE, RankExchange, Transfer


class FlatExchange(NamedTuple):
    """A rank's exchange as arguments of custom ops."""

    tensors: list[Tensor]  # of every stage in order, see `DeviceStage`, and `returned` if by need
    numbers: Tensor  # host; a row a stage: max_q, max_k, window, rows received and sent by rank
    layout: str  # the number of ranks and each stage's `Transfer`, such as "2 own needed needed"


class DeviceStage(NamedTuple):
    """A `RankStage` inside a custom op. What a stage does not have is not in the flat form."""

    transfer: Transfer
    cp: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    index_K: Tensor
    inverse_UR: Tensor
    query_rows: Tensor | None
    sent_N: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows that the call chooses its keys from: those that arrive, or own ones."""
        return self.inverse_UR.shape[1]

    @property
    def num_sent(self) -> int:
        """Own rows that this rank sends, whose gradients come back."""
        return self.num_rows // self.cp if self.sent_N is None else self.sent_N.shape[0]

    def segments(self, numbers: list[int], softcap: float) -> Segments:
        """Of the stage's call. numbers: its row of `FlatExchange.numbers`."""
        max_q, max_k, sliding = numbers[:3]
        offsets, is_causal = (self.cu_seqlens_q, self.cu_seqlens_k), self.query_rows is None
        return Segments.of(*offsets, max_q, max_k, sliding, softcap, is_causal=is_causal)

    def splits(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Rows received of each rank, and rows sent to each."""
        return numbers[3 : 3 + self.cp], numbers[3 + self.cp :]


def flatten(
    rows: RankExchange,
    on_device: Mapping[str, Tensor],
    *,
    backend: str,
    device: torch.device,
    scores: Scores,
) -> tuple[FlatExchange, Segments]:
    """The flat form, and the segments of the first call. on_device: `RankExchange.arrays`."""
    tensors: list[Tensor] = []
    numbers: list[list[int]] = []
    first = None
    for s, stage in enumerate(rows.stages):
        segments = Segments.from_offsets(
            stage.cu_seqlens_q,
            stage.cu_seqlens_k,
            device=device,
            key_rows=stage.kv_index if BACKENDS[backend].takes_key_rows else None,
            is_causal=stage.query_rows is None,
            scores=scores,
        )
        first = first or segments
        cu_q, cu_k, max_q, max_k = segments.lengths
        names = (f"{name} {s}" for name in ON_DEVICE)
        tensors += [cu_q, cu_k, *(on_device[name] for name in names if name in on_device)]
        splits = (*stage.received.tolist(), *stage.sent.tolist())
        numbers.append([max_q, max_k, scores.sliding, *splits])
    if rows.returned is not None:
        tensors.append(on_device["returned"])
    layout = " ".join([str(rows.stages[0].received.size), *(x.transfer for x in rows.stages)])
    assert first is not None
    return FlatExchange(tensors, torch.tensor(numbers, dtype=torch.int64), layout), first


def stages_of(tensors: list[Tensor], layout: str) -> tuple[list[DeviceStage], Tensor | None]:
    """The stages in the order of their calls, and `RankExchange.returned`, from the flat form.

    Reads only shapes, so that it serves ops without values (fakes) too.
    """
    cp, *transfers = layout.split()
    left, stages = list(tensors), list[DeviceStage]()
    for transfer in map(Transfer, transfers):
        fixed = (left.pop(0), left.pop(0), left.pop(0), left.pop(0))
        query_rows = left.pop(0) if stages else None
        sent = left.pop(0) if transfer == Transfer.NEEDED else None
        stages.append(DeviceStage(transfer, int(cp), *fixed, query_rows, sent))
    return stages, left.pop() if left else None


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """int64 arrays as tensors on `device`, in one pinned, asynchronous transfer."""
    if not arrays:
        return {}
    flat = copy_to_device(np.concatenate([a.reshape(-1) for a in arrays.values()]), device)
    parts = flat.split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}
