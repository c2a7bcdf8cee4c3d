"""The exchange of one rank as arguments of custom ops.

A custom op takes only tensors, strings and numbers. `flatten` turns a rank's stages into three such
arguments, and `stages_of` restores the stages inside an op. Everything that differs between
micro-batches is in tensors, so one compiled graph serves all of them: index arrays on the device,
and the numbers that the host needs (splits of all-to-alls, lengths of the longest segments) in one
tensor on the host, so reading them never waits for the device.
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
    """A rank's exchange as three arguments of custom ops."""

    # On the device: the tensors of every stage, in the order of `DeviceStage`'s fields. With the
    # `needed` exchange `RankExchange.returned` follows.
    tensors: list[Tensor]
    # On the host, one row for each stage: max_q, max_k, sliding window, rows received from each
    # rank, rows sent to each rank.
    numbers: Tensor
    # The number of ranks and each stage's `Transfer`, such as "2 own needed needed".
    layout: str


class DeviceStage(NamedTuple):
    """A `RankStage` inside a custom op. Fields that are None are absent from the flat form."""

    transfer: Transfer
    cp: int  # number of CP ranks
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    index_K: Tensor  # row of each key, `RankStage.kv_index`
    inverse_UR: Tensor  # key that uses each row, `RankStage.inverse`
    query_rows: Tensor | None  # local rows of the call's queries; None means all rows
    sent_N: Tensor | None  # local rows that are sent; None unless the transfer is NEEDED

    @property
    def num_rows(self) -> int:
        """R, the rows in which the call looks up its keys: those received, or the local rows."""
        return self.inverse_UR.shape[1]

    @property
    def num_sent(self) -> int:
        """Local rows that this rank sends and whose gradients return to it."""
        return self.num_rows // self.cp if self.sent_N is None else self.sent_N.shape[0]

    def segments(self, numbers: list[int], softcap: float) -> Segments:
        """Return the segments of the stage's attention call.

        Args:
            numbers: The stage's row of `FlatExchange.numbers`.
            softcap: Cap on scores, 0 for none.
        """
        max_q, max_k, sliding = numbers[:3]
        offsets, is_causal = (self.cu_seqlens_q, self.cu_seqlens_k), self.query_rows is None
        return Segments.of(*offsets, max_q, max_k, sliding, softcap, is_causal=is_causal)

    def splits(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return the numbers of rows received from each rank and sent to each rank."""
        return numbers[3 : 3 + self.cp], numbers[3 + self.cp :]


def flatten(
    rows: RankExchange,
    on_device: Mapping[str, Tensor],
    *,
    backend: str,
    device: torch.device,
    scores: Scores,
) -> tuple[FlatExchange, Segments]:
    """Return the flat form of an exchange, and the segments of its first attention call.

    Args:
        rows: Index arrays of one rank.
        on_device: The same arrays as tensors on the device, by the names of `RankExchange.arrays`.
        backend: Name of the attention kernel.
        device: Where offsets are copied to.
        scores: The mask's window and the cap on scores.
    """
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
    """Restore the stages, in the order of their calls, and `RankExchange.returned`.

    Reads only shapes, so it also works on fake tensors.
    """
    cp, *transfers = layout.split()
    left, stages = list(tensors), list[DeviceStage]()
    for transfer in map(Transfer, transfers):
        # The order is the one in which `flatten` appends: two offsets, then `ON_DEVICE`.
        fixed = (left.pop(0), left.pop(0), left.pop(0), left.pop(0))
        query_rows = left.pop(0) if stages else None
        sent = left.pop(0) if transfer == Transfer.NEEDED else None
        stages.append(DeviceStage(transfer, int(cp), *fixed, query_rows, sent))
    return stages, left.pop() if left else None


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """Copy int64 arrays to `device` in one asynchronous transfer from pinned memory."""
    if not arrays:
        return {}
    flat = copy_to_device(np.concatenate([a.reshape(-1) for a in arrays.values()]), device)
    parts = flat.split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}
