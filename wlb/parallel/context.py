"""Context parallelism by all-gather of K and V (Section 2.1; as in Llama 3), for any spans.

Forward: one all-gather of K and V, one gather that lays out the keys of each local span (skipped
for backends that read a buffer's rows), one varlen attention call. Backward gathers K and V again
unless `keep_gathered_kv`; inverse gathers without atomics and one reduce-scatter bring the keys'
gradients back, in float32. The forward all-gather starts in `begin` and hides behind the query
projection. No layer loops over documents or waits for the device. Memory: `context_op`. Shapes: T
local rows, S packed tokens, G key/value and H query heads of this tp rank, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels import BACKENDS, Segments, attend, select_backend
from wlb.parallel.collectives import agree, wait
from wlb.parallel.context_op import context_attend, gather_kv
from wlb.parallel.rows import AttentionRows, attention_rows
from wlb.plan import ShardingPlan, UserError, local_tokens
from wlb.spec import AttentionBackend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Heads of every call: q is [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} = {value!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"dtype = {self.dtype} is not one of {', '.join(map(str, DTYPES))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention over one rank's rows of one micro-batch; call it with q, k, v of every layer.

    index [K] and inverse [U, cp * T]: see `AttentionRows`; None with one CP rank. Users make it by
    `from_plan`, which compares the ranks' arguments; the executor by `from_rows`, because its
    plans' digests have been compared already.
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
        """Start the all-gather; pass the result to the call with the same k and v.

        Every result must reach a call: torch never frees a collective that nobody waits for.
        """
        self._check_keys(k_TGD, v_TGD)
        if self.cp == 1:
            return None
        return gather_kv(k_TGD.detach(), v_TGD.detach(), self.cp, self.group_name)

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, kv_gather: Tensor | None = None
    ) -> Tensor:
        """Output, [T, H, D]. UserError for tensors of another shape, dtype or device, raised before
        this call starts a collective."""
        try:
            self._check("q", q_THD, self.heads.num_heads)
            self._check_keys(k_TGD, v_TGD)
        except UserError:
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
        """Tensors that the custom ops take besides q, k and v."""
        found = (self.index, self.inverse, self.segments.cu_seqlens_q, self.segments.cu_seqlens_k)
        return [tensor for tensor in found if tensor is not None]

    def _check_keys(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self._check("k", k_TGD, self.heads.num_kv_heads)
        self._check("v", v_TGD, self.heads.num_kv_heads)

    def _check(self, name: str, x: Tensor, num_heads: int) -> None:
        shape = (self.num_rows, num_heads, self.heads.head_dim)
        device = self.segments.cu_seqlens_q.device
        if x.shape != shape or x.dtype != self.heads.dtype or x.device.type != device.type:
            raise UserError(
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
        on_device: Mapping[str, Tensor] | None = None,
    ) -> "ContextAttention":
        """Compares nothing across ranks. on_device: `index_arrays` if they are there already."""
        arrays = index_arrays(rows)
        if on_device is None:
            on_device = to_device(arrays, device)
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
            index=on_device.get("kv_index"),
            inverse=on_device.get("inverse"),
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

        A collective call: ranks compare their arguments in one small all-gather, so that bad or
        different arguments raise a UserError on every rank instead of hanging. It waits for the
        device; make one per micro-batch, not per layer.

        row_multiple: T is padded to a multiple of it.
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
            # Catch everything: the other ranks are about to wait for this one in `agree`.
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
    """The values that from_plan's arguments resolve to."""
    if plan.cp != num_ranks:
        raise UserError(f"the plan is for cp = {plan.cp} ranks, the group has {num_ranks}")
    if plan.num_tokens < plan.cp:
        raise UserError(f"cp = {plan.cp} ranks are more than the {plan.num_tokens} tokens")
    plan.validate()
    shape = HeadShape(**heads)
    if backend in {str(b) for b in AttentionBackend}:
        backend = select_backend(
            AttentionBackend(backend), device=device, dtype=shape.dtype, head_size=shape.head_dim
        )
    elif backend not in BACKENDS:
        raise UserError(f"backend = {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    return {
        "plan digest": plan.digest(),
        "rows": local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=row_multiple),
        "heads": shape,
        "device": device.type,
        "backend": str(backend),
    }


def index_arrays(rows: AttentionRows) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays that attention needs on the device; empty with one CP rank."""
    if rows.kv_index is None or rows.inverse is None:
        return {}
    return {"kv_index": rows.kv_index, "inverse": rows.inverse}


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """int64 arrays as tensors on `device`, in one pinned, asynchronous transfer."""
    if not arrays:
        return {}
    flat = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays.values()]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}


def take_rows(packed: Tensor, plan: ShardingPlan, *, rank: int, num_rows: int) -> Tensor:
    """A rank's T = num_rows rows of a packed [S, ...] tensor; padding is zero."""
    index = torch.from_numpy(plan.for_rank(rank).token_index).to(packed.device)
    out = packed.new_zeros((num_rows, *packed.shape[1:]))
    return out.index_copy(0, torch.arange(index.numel(), device=packed.device), packed[index])


def put_rows(parts: Sequence[Tensor], plan: ShardingPlan) -> Tensor:
    """The packed [S, ...] tensor, without padding, from the rows of all ranks."""
    out = parts[0].new_empty((plan.num_tokens, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        index = torch.from_numpy(plan.for_rank(rank).token_index).to(part.device)
        out[index] = part[: index.numel()]
    return out
