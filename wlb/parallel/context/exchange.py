"""One rank's exchange of keys and values in a form that custom ops can take as arguments.

A custom op takes only tensors, strings and numbers. `flatten` turns a rank's stages into three such
arguments, and `stages_of` restores the stages inside an op. Everything that differs between
micro-batches is in tensors, so one compiled graph serves all micro-batches. Index arrays are on the
device. Values that the host needs (splits of all-to-alls, lengths of the longest segments) are in
one tensor on the host, so reading them never waits for the device.
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
    """A rank's exchange of keys and values, as three arguments that custom ops can take."""

    # On the device: the tensors of every stage, in the order of `DeviceStage`'s fields. With the
    # `needed` exchange, the last tensor is `RankExchange.returned`, by which backward adds up the
    # gradients that other ranks send back.
    tensors: list[Tensor]
    # int64 on the host, with one row for each stage. The columns are: largest number of queries of
    # a segment, largest number of keys, size of the sliding window, then for each rank the number
    # of rows received from it, then for each rank the number of rows sent to it.
    numbers: Tensor
    # The number of CP ranks, then the `Transfer` of each stage: "2 own needed needed" is an
    # exchange over two ranks whose first stage has only local rows.
    layout: str


class DeviceStage(NamedTuple):
    """A `RankStage` as a custom op sees it, with tensors on the device in place of arrays."""

    transfer: Transfer
    cp: int  # number of CP ranks
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    # `RankStage.kv_index`: for each of K keys, the index of the row from which the key is copied.
    index_K: Tensor
    # `RankStage.inverse`: for each of R rows, the indices of the keys that are copied from the row,
    # up to U of them, filled up with the index K.
    inverse_UR: Tensor
    query_rows: Tensor | None  # local rows of the attention call's queries; None means all rows
    sent_N: Tensor | None  # indices of the local rows to send; None unless the transfer is NEEDED

    @property
    def num_rows(self) -> int:
        """R, the number of rows, received or local, from which the keys of attention are copied."""
        return self.inverse_UR.shape[1]

    @property
    def num_sent(self) -> int:
        """Number of local rows that this rank sends, and whose gradients return to it."""
        return self.num_rows // self.cp if self.sent_N is None else self.sent_N.shape[0]

    def segments(self, numbers: list[int], softcap: float) -> Segments:
        """Return the segments of the stage's attention call.

        Args:
            numbers: The row of `FlatExchange.numbers` for this stage. It begins with the most
                queries of a segment, the most keys of a segment, and the size of the sliding
                window.
            softcap: Cap on scores, 0 for none.
        """
        max_q, max_k, sliding = numbers[:3]
        offsets, is_causal = (self.cu_seqlens_q, self.cu_seqlens_k), self.query_rows is None
        return Segments.of(*offsets, max_q, max_k, sliding, softcap, is_causal=is_causal)

    def splits(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return how many rows come from each rank, and how many go to each rank.

        Args:
            numbers: Three sizes that are not used here, then the number of rows from each rank,
                then the number of rows to each rank (a row of `FlatExchange.numbers`).
        """
        return numbers[3 : 3 + self.cp], numbers[3 + self.cp :]


def flatten(
    rows: RankExchange,
    on_device: Mapping[str, Tensor],
    *,
    backend: str,
    device: torch.device,
    scores: Scores,
) -> tuple[FlatExchange, Segments]:
    """Return a rank's exchange as arguments of custom ops, and the first stage's segments.

    Args:
        rows: The exchange of one rank, as numpy arrays.
        on_device: The same arrays as tensors on the device, by the names of `RankExchange.arrays`.
        backend: Name of the attention kernel.
        device: Device to which the offsets of segments are copied.
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
    """Return the stages of a rank's exchange inside a custom op, from two of the op's arguments.

    This reads only shapes, so it also works on fake tensors.

    Args:
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).

    Returns:
        The stages in the order of their attention calls, and `RankExchange.returned` (None for an
        all-gather).
    """
    cp, *transfers = layout.split()
    left, stages = list(tensors), list[DeviceStage]()
    for transfer in map(Transfer, transfers):
        # `flatten` appends tensors in this order: two tensors of offsets, kv_index and inverse, and
        # then query_rows (all stages but the first) and sent_rows (only for `needed`).
        fixed = (left.pop(0), left.pop(0), left.pop(0), left.pop(0))
        query_rows = left.pop(0) if stages else None
        sent = left.pop(0) if transfer == Transfer.NEEDED else None
        stages.append(DeviceStage(transfer, int(cp), *fixed, query_rows, sent))
    return stages, left.pop() if left else None


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """Copy int64 arrays to `device` in one asynchronous transfer; returns tensors by name."""
    if not arrays:
        return {}
    flat = copy_to_device(np.concatenate([a.reshape(-1) for a in arrays.values()]), device)
    parts = flat.split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}
