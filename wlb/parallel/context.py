"""Context parallelism by all-gather (Section 2.1; Llama 3's way), for any sharding's spans.

Forward: one all-gather of K and V together, one gather that lays the keys of every local span out
one after the other (none for backends that read rows of a buffer), one varlen attention call.
Backward: K and V are gathered again, so that nothing larger than the local rows is kept (or kept
gathered, `keep_gathered_kv`); the keys' gradients are brought back by inverse gathers, without
atomics, and one reduce-scatter returns them to their ranks, all added in float32. With one rank the
local rows are the keys: no collective, no gather. No layer loops over documents, makes an index
or waits for the device. Bytes kept and bytes at work: `wlb.parallel.context_op`.

The all-gather starts in `begin`, as soon as a layer has K and V, and runs under what is computed
before the call (the queries' projection and rotation). Backward has nothing to run under: its
gather comes first.

`ContextAttention.from_plan` is for users of the library; it compares the ranks' arguments. The
executor uses `from_rows`: its plans' digests were compared two steps before they run.

Shapes: T local rows, S tokens of the packed sequence, G key/value heads and H query heads of this
tp rank, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels import BACKENDS, Segments, attend, select_backend
from wlb.parallel.agreement import agree
from wlb.parallel.collectives import wait
from wlb.parallel.context_op import context_attend, gather_kv
from wlb.parallel.rows import AttentionRows, attention_rows
from wlb.plan import ShardingPlan, local_tokens
from wlb.spec import AttentionBackend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What every call's tensors are: q [T, num_heads, head_dim], k and v [T, num_kv_heads, ...]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype} is not one of {', '.join(map(str, DTYPES))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention of one rank's rows of one micro-batch; call it with q, k, v of every layer.

    index: [K] and inverse: [U, cp * T] (`AttentionRows`), or None with one CP rank.
    """

    segments: Segments
    num_rows: int
    heads: HeadShape
    backend: str
    cp: int
    group_name: str
    index: Tensor | None
    inverse: Tensor | None
    keep_gathered_kv: bool

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> Tensor | None:
        """Start the all-gather; give what this returns to the call that has the same k and v.

        Each has to reach its call: what nobody waits for, torch keeps.
        """
        self._check_keys(k_TGD, v_TGD)
        if self.cp == 1:
            return None
        return gather_kv(k_TGD.detach(), v_TGD.detach(), self.cp, self.group_name)

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, kv_gather: Tensor | None = None
    ) -> Tensor:
        """Output [T, H, D]. ValueError for tensors of another shape, dtype or device.

        Before any collective, but for the one that `begin` started.
        """
        try:
            self._check("q", q_THD, self.heads.num_heads)
            self._check_keys(k_TGD, v_TGD)
        except ValueError:
            if kv_gather is not None:
                wait(kv_gather)
            raise
        if self.index is None or self.inverse is None:
            return attend(q_THD, k_TGD, v_TGD, self.segments, backend=self.backend)
        if kv_gather is None:
            kv_gather = gather_kv(k_TGD.detach(), v_TGD.detach(), self.cp, self.group_name)
        out_THD, _ = context_attend(
            q_THD,
            k_TGD,
            v_TGD,
            kv_gather,
            self.index,
            self.inverse,
            self.segments.cu_seqlens_q,
            self.segments.cu_seqlens_k,
            self.segments.max_q,
            self.segments.max_k,
            self.backend,
            self.cp,
            self.group_name,
            self.keep_gathered_kv,
        )
        return out_THD

    @property
    def indices(self) -> list[Tensor]:
        """The tensors that custom ops take besides q, k and v."""
        found = (self.index, self.inverse, self.segments.cu_seqlens_q, self.segments.cu_seqlens_k)
        return [tensor for tensor in found if tensor is not None]

    def _check_keys(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self._check("k", k_TGD, self.heads.num_kv_heads)
        self._check("v", v_TGD, self.heads.num_kv_heads)

    def _check(self, name: str, x: Tensor, num_heads: int) -> None:
        shape = (self.num_rows, num_heads, self.heads.head_dim)
        device = self.segments.cu_seqlens_q.device
        if x.shape != shape or x.dtype != self.heads.dtype or x.device.type != device.type:
            raise ValueError(
                f"{name} is {tuple(x.shape)}, {x.dtype} on {x.device}, but this attention was "
                f"made for {shape}, {self.heads.dtype} on {device}"
            )

    @classmethod
    def from_rows(
        cls,
        rows: AttentionRows,
        *,
        group: dist.ProcessGroup | None,
        heads: HeadShape,
        backend: str,
        device: torch.device,
        keep_gathered_kv: bool = False,
        moved: Mapping[str, Tensor] | None = None,
    ) -> "ContextAttention":
        """Without any check across ranks. moved: arrays of `index_arrays` that are on `device`."""
        arrays = index_arrays(rows)
        if moved is None:
            moved = to_device(arrays, device)
        reads_buffer = bool(arrays) and BACKENDS[backend].takes_key_rows
        return cls(
            segments=Segments.from_offsets(
                rows.cu_seqlens_q,
                rows.cu_seqlens_k,
                device=device,
                key_rows=rows.kv_index if reads_buffer else None,
            ),
            num_rows=rows.positions.size,
            heads=heads,
            backend=backend,
            cp=1 if group is None or not arrays else group.size(),
            group_name="" if group is None else group.group_name,
            index=moved.get("kv_index"),
            inverse=moved.get("inverse"),
            keep_gathered_kv=keep_gathered_kv,
        )

    @classmethod
    def from_plan(
        cls,
        sharding_plan: ShardingPlan,
        *,
        group: dist.ProcessGroup | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str = "auto",
        row_multiple: int = 1,
        keep_gathered_kv: bool = False,
    ) -> "ContextAttention":
        """Attention over `group` (None: one rank) of a micro-batch sharded by `sharding_plan`.

        A collective call: ranks compare their arguments in one small all-gather, so that a rank
        with other arguments, or with bad ones, is a ValueError with the values on every rank and
        not a hang. It waits for the device, so make one for each micro-batch, not for each layer.

        row_multiple: the T rows of a rank are a multiple of it; those past its tokens are padding.
        """
        made: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            made = _checked(
                sharding_plan,
                num_ranks=1 if group is None else group.size(),
                row_multiple=row_multiple,
                backend=backend,
                device=torch.device(device),
                heads=dict(
                    num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
                ),
            )
        except Exception as error:
            # Whatever it is, the other ranks are about to wait for this one.
            problem = error
        declared = {
            "plan digest": made.get("plan digest"),
            "rows": made.get("rows"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "device": made.get("device"),
            "backend": made.get("backend", backend),
            "keep_gathered_kv": keep_gathered_kv,
        }
        agree(declared, problem, group=group)
        rank = 0 if group is None else dist.get_rank(group)
        return cls.from_rows(
            attention_rows(sharding_plan, rank, made["rows"]),
            group=group,
            heads=made["heads"],
            backend=made["backend"],
            device=torch.device(device),
            keep_gathered_kv=keep_gathered_kv,
        )


def _checked(
    plan: ShardingPlan,
    *,
    num_ranks: int,
    row_multiple: int,
    backend: str,
    device: torch.device,
    heads: dict[str, Any],
) -> dict[str, Any]:
    """What from_plan's arguments come to; ValueError for bad ones."""
    if plan.cp != num_ranks:
        raise ValueError(f"the plan is for cp = {plan.cp} ranks, the group has {num_ranks}")
    if plan.num_tokens < plan.cp:
        raise ValueError(f"cp = {plan.cp} ranks are more than the {plan.num_tokens} tokens")
    plan.validate()
    shape = HeadShape(**heads)
    if backend in {str(b) for b in AttentionBackend}:
        backend = select_backend(
            AttentionBackend(backend), device=device, dtype=shape.dtype, head_size=shape.head_dim
        )
    elif backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    return {
        "plan digest": plan.digest(),
        "rows": local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=row_multiple),
        "heads": shape,
        "device": device.type,
        "backend": str(backend),
    }


def index_arrays(rows: AttentionRows) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays that attention needs on the device; none with one CP rank."""
    if rows.kv_index is None or rows.inverse is None:
        return {}
    return {"kv_index": rows.kv_index, "inverse": rows.inverse}


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """int64 arrays as tensors on `device`, moved in one (pinned, asynchronous) transfer."""
    if not arrays:
        return {}
    flat = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays.values()]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}


def take_rows(packed: Tensor, plan: ShardingPlan, *, rank: int, num_rows: int) -> Tensor:
    """The T = num_rows rows of a rank from a packed [S, ...] tensor; padding is zero."""
    index = torch.from_numpy(plan.for_rank(rank).token_index).to(packed.device)
    out = packed.new_zeros((num_rows, *packed.shape[1:]))
    return out.index_copy(0, torch.arange(index.numel(), device=packed.device), packed[index])


def put_rows(parts: Sequence[Tensor], plan: ShardingPlan) -> Tensor:
    """The packed [S, ...] tensor from every rank's rows (all-gathered before); no padding."""
    out = parts[0].new_empty((plan.num_tokens, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        index = torch.from_numpy(plan.for_rank(rank).token_index).to(part.device)
        out[index] = part[: index.numel()]
    return out
