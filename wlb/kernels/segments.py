"""Segments: where the attention segments of one variable-length call begin and end.

The offsets exist twice: on the device for kernels, and on the host for backends that loop over
segments. So no backend has to wait for the device. A custom op can take only tensors and numbers,
so the host's offsets cannot be passed to it. Inside an op the host's offsets are looked up in a
dictionary whose keys are the device tensors (`Segments.of`). An entry lives as long as its tensor
cu_seqlens_q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from wlb.plan import UserError
from wlb.spec import ModelSpec

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class HostPart:
    """The data of `Segments` on the host, looked up by the device tensor cu_seqlens_q."""

    cu_seqlens_k: TensorWeakRef  # the tensor of key offsets that was made with cu_seqlens_q
    # torch's in-place version counters of cu_seqlens_q and cu_seqlens_k when this record was made;
    # other counters later mean that a tensor was changed
    versions: tuple[int, int]
    # Offsets of queries and of keys; None until a backend has to read them from the device.
    offsets: tuple[tuple[int, ...], tuple[int, ...]] | None
    # Some backends read keys from a buffer that has other rows too: key i is then row key_rows[i]
    # of that buffer. None if key i is row i of the tensor of keys.
    key_rows: np.ndarray | None = None
    derived: dict[str, Any] = field(default_factory=dict)  # results of `Segments.derive` by name


# The `HostPart` of each tensor cu_seqlens_q. The dictionary is module-level state because a custom
# op can take no argument that carries a `HostPart`. Its keys are weak, so it keeps no tensor alive.
_HOST_PARTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a layer changes attention's scores, besides the causal mask."""

    # A query attends to this many latest keys, its own position included; 0 means all keys.
    sliding: int = 0
    # A score s becomes softcap * tanh(s / softcap) before the mask is applied; 0 means no cap.
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.sliding < 0 or not 0 <= self.softcap < float("inf"):
            raise UserError(
                f"sliding = {self.sliding} must be at least 0, and softcap = {self.softcap} must "
                "be a finite number of at least 0"
            )

    @classmethod
    def of(cls, model: ModelSpec, *, slides: bool) -> "Scores":
        """Return the window and the softcap of attention scores in some of a model's layers.

        Args:
            model: Sizes and options of the model.
            slides: True for the layers with a sliding window, False for all others.
        """
        return cls(sliding=model.sliding_window if slides else 0, softcap=model.attention_softcap)

    def __str__(self) -> str:
        said = [f"a sliding window of {self.sliding}"] if self.sliding else []
        said += [f"scores capped at {self.softcap:g}"] if self.softcap else []
        return " and ".join(said)


PLAIN = Scores()
"""Scores with neither a window nor a cap."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Where the segments of one attention call begin and end. Use `from_offsets` to make it."""

    cu_seqlens_q: torch.Tensor  # int32 on the device, shape [num_segments + 1]
    cu_seqlens_k: torch.Tensor  # int32 on the device, shape [num_segments + 1]
    max_q: int  # number of queries of the segment that has most
    max_k: int  # number of keys of the segment that has most
    host: HostPart = field(repr=False)  # the same offsets on the host
    # True: a segment's last keys are at the positions of its queries, and the mask is causal.
    # False: all keys come before all queries, as in a prefix, and each query sees all keys.
    is_causal: bool = True
    scores: Scores = PLAIN  # sliding window of the mask, and cap on scores

    @classmethod
    def from_offsets(
        cls,
        cu_q: Sequence[int] | np.ndarray,
        cu_k: Sequence[int] | np.ndarray,
        *,
        device: torch.device | str,
        key_rows: np.ndarray | None = None,
        is_causal: bool = True,
        scores: Scores = PLAIN,
    ) -> "Segments":
        """Make segments from the offsets of their queries and keys.

        For example cu_q = [0, 3, 5] and cu_k = [0, 3, 9] are two segments: one with 3 queries and 3
        keys, and one with 2 queries and 6 keys.

        Args:
            cu_q: Offsets of queries, shape [num_segments + 1].
            cu_k: Offsets of keys, shape [num_segments + 1].
            device: Where the kernel runs.
            key_rows: For backends with `takes_key_rows`, which read keys from a buffer that has
                other rows too: key i is row key_rows[i] of that buffer. With None key i is row i of
                the tensor of keys.
            is_causal: Whether the mask is causal, see `Segments`.
            scores: The mask's window and the cap on scores.

        Raises:
            UserError: The offsets are not valid.
        """
        q, k = np.asarray(cu_q), np.asarray(cu_k)
        _check("cu_q", q)
        _check("cu_k", k)
        if q.size != k.size:
            raise UserError(
                f"cu_q has {q.size - 1} segments, but cu_k has {k.size - 1}; give the offsets of "
                "every segment in both"
            )
        num_q, num_k = np.diff(q), np.diff(k)
        short = np.flatnonzero(num_k < num_q) if is_causal else np.flatnonzero(num_k < 1)
        if scores.sliding and not is_causal:
            raise UserError(
                f"{scores} needs a causal mask, but {is_causal = }; set is_causal = "
                "True or remove the sliding window"
            )
        if short.size and not is_causal:
            raise UserError(
                f"segment {short[0]} has no keys, so its queries have nothing to attend to; remove "
                "this segment"
            )
        if short.size:
            i = int(short[0])
            raise UserError(
                f"segment {i} has {num_q[i]} queries but only {num_k[i]} keys; with a "
                "causal mask the keys must include the positions of all queries"
            )
        if key_rows is not None:
            _check_key_rows(key_rows, int(k[-1]))
        on_device = copy_to_device(np.stack([q, k]).astype(np.int32), torch.device(device))
        # Clone the two rows, because compiled code saves views as new tensor objects for backward,
        # and `of` would not recognise those.
        cu_seqlens_q, cu_seqlens_k = on_device[0].clone(), on_device[1].clone()
        host = HostPart(
            cu_seqlens_k=TensorWeakRef(cu_seqlens_k),
            versions=_versions(cu_seqlens_q, cu_seqlens_k),
            offsets=(tuple(q.tolist()), tuple(k.tolist())),
            key_rows=key_rows,
        )
        _HOST_PARTS[cu_seqlens_q] = host
        max_q, max_k = int(num_q.max(initial=0)), int(num_k.max(initial=0))
        return cls(cu_seqlens_q, cu_seqlens_k, max_q, max_k, host, is_causal, scores)

    @classmethod
    def of(
        cls,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_q: int,
        max_k: int,
        sliding: int = 0,
        softcap: float = 0.0,
        *,
        is_causal: bool = True,
    ) -> "Segments":
        """Return the segments for which `from_offsets` made these two tensors.

        For other tensors, such as copies or tensors changed in place, new segments without key_rows
        are made. A backend that needs their offsets on the host then waits for the device.

        Args:
            cu_seqlens_q: Offsets of queries, on the device.
            cu_seqlens_k: Offsets of keys, on the device.
            max_q: Number of queries of the segment that has most.
            max_k: Number of keys of the segment that has most.
            sliding: As `Scores.sliding`.
            softcap: As `Scores.softcap`.
            is_causal: As `Segments.is_causal`.
        """
        host = _HOST_PARTS.get(cu_seqlens_q)
        versions = _versions(cu_seqlens_q, cu_seqlens_k)
        is_changed = host is not None and host.versions[0] != versions[0]
        if host is None or host.cu_seqlens_k() is not cu_seqlens_k or host.versions != versions:
            is_new = host is None or is_changed
            host = HostPart(
                cu_seqlens_k=TensorWeakRef(cu_seqlens_k), versions=versions, offsets=None
            )
            # If cu_seqlens_q is known and unchanged but comes with another cu_seqlens_k, keep the
            # entry of the segments with which cu_seqlens_q was made.
            if is_new:
                _HOST_PARTS[cu_seqlens_q] = host
        scores = Scores(sliding=sliding, softcap=softcap)
        return cls(cu_seqlens_q, cu_seqlens_k, max_q, max_k, host, is_causal, scores)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Segments":
        """Return self. `Segments.of` knows the offsets of these tensors, but not of copies."""
        return self

    @property
    def offsets_q(self) -> tuple[int, ...]:
        """Offsets of queries, on the host; reading them may have to wait for the device."""
        return self._offsets[0]

    @property
    def offsets_k(self) -> tuple[int, ...]:
        """Offsets of keys, on the host; reading them may have to wait for the device."""
        return self._offsets[1]

    @property
    def _offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.host.offsets is None:
            q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
            self.host.offsets = tuple(q), tuple(k)
        return self.host.offsets

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, int, int, float]:
        """These segments as a custom op takes them; inside the op, `Segments.of` restores them.

        The values are (cu_seqlens_q, cu_seqlens_k, max_q, max_k, sliding, softcap).
        """
        return *self.lengths, self.scores.sliding, self.scores.softcap

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """(cu_seqlens_q, cu_seqlens_k, max_q, max_k), the arguments of variable-length kernels."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_q, self.max_k

    @property
    def key_rows(self) -> np.ndarray | None:
        """Row of each key in a larger buffer; None if key i is row i of the tensor of keys."""
        return self.host.key_rows

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def num_queries(self) -> int:
        """Number of queries of all segments."""
        return self.offsets_q[-1]

    @property
    def num_keys(self) -> int:
        """Number of keys of all segments."""
        return self.offsets_k[-1]

    def derive(self, name: str, make: Callable[["Segments"], T]) -> T:
        """Return make(self), which is computed once and then kept for all layers.

        Args:
            name: Key under which the result is kept; another function needs another name.
            make: Computes the result from these segments.
        """
        derived, name = self.host.derived, f"{name} {self.is_causal} {self.scores}"
        if name not in derived:
            derived[name] = make(self)
        return derived[name]


def _versions(*tensors: torch.Tensor) -> tuple[int, int]:
    """Return torch's in-place version counters of two tensors; 0 for inference tensors."""
    q, k = (0 if x.is_inference() else x._version for x in tensors)
    return q, k


def _check(name: str, offsets: np.ndarray) -> None:
    if offsets.ndim != 1 or offsets.size == 0 or offsets.dtype.kind not in "iu":
        raise UserError(
            f"{name} must be a one-dimensional array of whole numbers with at least one entry, "
            f"not {offsets.dtype} of shape {offsets.shape}"
        )
    if offsets[0] != 0:
        raise UserError(f"{name} must begin with 0, but begins with {offsets[0]}")
    down = np.flatnonzero(offsets[1:] < offsets[:-1])
    if down.size:
        i = int(down[0])
        raise UserError(
            f"{name} must never decrease, but falls from {offsets[i]} to "
            f"{offsets[i + 1]} at segment {i}"
        )
    if offsets[-1] > np.iinfo(np.int32).max:
        raise UserError(
            f"{name} ends at {offsets[-1]}, but must end at 2147483647 or less, because "
            "kernels number rows with 32-bit integers; give fewer tokens"
        )


def _check_key_rows(key_rows: np.ndarray, num_keys: int) -> None:
    if key_rows.shape != (num_keys,) or key_rows.dtype.kind not in "iu":
        raise UserError(
            f"key_rows must be an array of {num_keys} whole numbers, one row number "
            f"for each key, not {key_rows.dtype} of shape {key_rows.shape}"
        )
    if key_rows.min(initial=0) < 0:
        raise UserError(
            f"key_rows[{key_rows.argmin()}] = {key_rows.min()} must be at least 0, because it is "
            "the index of a row of keys"
        )


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a copy of an array on the device; copies to a GPU are asynchronous (pinned memory)."""
    tensor = torch.from_numpy(array)
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
