"""Context parallelism by exchange of K and V, for any spans: an all-gather (Section 2.1; as in
Llama 3), or an all-to-all of the rows that each rank reads, as the sharding plan says.

The keys of each local span are laid out (unless the backend reads a buffer's rows) for one varlen
call, or with `own` for several, of which the first needs no exchange. The exchange starts in
`begin` and hides behind the query projection, backward's at the layer's end (`add`) behind the MLP;
no layer loops over documents or waits for the device. Shapes: T local rows, S packed tokens, G
key/value and H query heads of this tp rank, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels import BACKENDS, Scores, Segments, attend, select_backend
from wlb.kernels.fused import choose_fused
from wlb.kernels.segments import PLAIN, copy_to_device
from wlb.parallel.collectives import agree, wait
from wlb.parallel.context_op import AddAndGatherAgain, context_attend, gather_kv
from wlb.parallel.overlap_op import attend_while_gathering
from wlb.parallel.rows import AttentionRows, CallRows, attention_rows
from wlb.plan import ShardingPlan, UserError, local_tokens
from wlb.spec import AttentionBackend, FusedKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GRADIENT_DTYPES = (torch.float32, torch.bfloat16)


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


class KvGather(NamedTuple):
    """A gather of K and V that has started, and slots for their gradients (`context_op`); a tensor
    for each stage."""

    rows_R2GD: list[Tensor]
    slots: list[Tensor]
    own_slot: Tensor


class CallOnDevice(NamedTuple):
    """`CallRows`, on the device."""

    segments: Segments
    index: Tensor
    inverse: Tensor
    query_rows: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        found = [*self.segments.lengths, *self[1:]]
        return [x for x in found if isinstance(x, Tensor)]


class GatherAgain(NamedTuple):
    """The rows that backward gathers again, and the slots that bring them to attention's
    backward."""

    slots_R2GD: list[Tensor]
    k_TGD: Tensor
    v_TGD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention over one rank's rows of one micro-batch; call it with q, k, v of every layer.

    segments: of the call that reads the rank's own keys: with all others, or of `own`. calls, own:
    see `AttentionRows`; calls is empty with one CP rank. sent (of each stage [N]), returned [W, T]
    and, on the host, splits [stages, 2, cp]: see `SentRows`; without entries or None with an
    all-gather. `from_plan` compares the ranks' arguments; the executor, whose plans' digests are
    compared, uses `from_rows`.
    """

    segments: Segments
    num_rows: int
    heads: HeadShape
    backend: str
    cp: int
    group_name: str
    calls: tuple[CallOnDevice, ...]
    keep_gathered_kv: bool
    fused: bool = False
    gradient_dtype: torch.dtype = torch.float32
    sent: tuple[Tensor, ...] = ()
    returned: Tensor | None = None
    splits: Tensor | None = None
    own: CallOnDevice | None = None

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> KvGather | None:
        """Start the exchange. Its result must reach a call with the same k and v, to be freed."""
        self._check_keys(k_TGD, v_TGD)
        if not self.calls:
            return None
        rows, slots, own_slot = gather_kv(
            k_TGD,
            v_TGD,
            [call.inverse for call in self.calls],
            list(self.sent),
            self.returned,
            self.splits,
            *(self.cp, self.group_name),
            self.wire_dtype,
            self.fused,
        )
        return KvGather([x.detach() for x in rows], slots, own_slot)

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: KvGather | None = None
    ) -> Tensor:
        """Output, [T, H, D]. UserError for other tensors than agreed, before a collective."""
        return self.attend(q_THD, k_TGD, v_TGD, begun)[0]

    def attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: KvGather | None
    ) -> tuple[Tensor, GatherAgain | None]:
        """`__call__`, and the argument of `add` if backward is to gather K and V again."""
        try:
            self._check("q", q_THD, self.heads.num_heads)
            self._check_keys(k_TGD, v_TGD)
        except UserError:
            if begun is not None:
                for rows in begun.rows_R2GD:
                    wait(rows)
            raise
        if not self.calls:
            return attend(q_THD, k_TGD, v_TGD, self.segments, backend=self.backend), None
        begun = self.begin(k_TGD, v_TGD) if begun is None else begun
        assert begun is not None
        local = k_TGD.detach(), v_TGD.detach()
        kept = (self.keep_gathered_kv, self.fused)
        if self.own is None:
            (call,) = self.calls
            indices = (call.index, call.inverse, list(self.sent), self.splits)
            of_call = (self.backend, self.cp, self.group_name, *kept)
            arguments = (*indices, *call.segments.arguments, *of_call)
            out_THD, _, slots = context_attend(
                q_THD, *local, begun.rows_R2GD, begun.slots, *arguments
            )
        else:
            out_THD, _, slots = attend_while_gathering(
                *(q_THD, *local, *begun, *self._own_and_stages(self.own)),
                *(self.backend, self.cp, self.group_name, *kept),
            )
        return out_THD, None if self.keep_gathered_kv else GatherAgain(slots, *local)

    def _own_and_stages(self, own: CallOnDevice) -> tuple[Any, ...]:
        """Arguments of `attend_while_gathering` that describe its calls."""
        cu_q, cu_k, max_q, max_k = zip(*(x.segments.lengths for x in self.calls), strict=True)
        stages = ([x.query_rows for x in self.calls], [x.index for x in self.calls])
        inverses = [x.inverse for x in self.calls]
        of_own, softcap = own.segments.lengths, self.segments.scores.softcap
        tensors = (own.index, own.inverse, *of_own[:2], *stages, inverses)
        exchanged = (list(cu_q), list(cu_k), list(self.sent), self.splits)
        return *tensors, *exchanged, *of_own[2:], list(max_q), list(max_k), softcap

    def add(self, x_SC: Tensor, y_SC: Tensor, attended: GatherAgain | None) -> Tensor:
        """x + y, where backward starts gathering K and V again; else attention's backward does."""
        if attended is None:
            return x_SC + y_SC
        slots, *local = attended
        exchange = (self.splits, self.cp, self.group_name, len(slots))
        stages = (*slots, *(call.inverse for call in self.calls), *self.sent)
        out: Tensor = AddAndGatherAgain.apply(x_SC, y_SC, *local, *exchange, *stages)  # pyright: ignore[reportAssignmentType]
        return out

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which gradients of K and V are added over ranks."""
        if self.gradient_dtype == torch.float32:
            return torch.promote_types(self.heads.dtype, torch.float32)
        return self.gradient_dtype

    @property
    def indices(self) -> list[Tensor]:
        """Tensors on the device that the custom ops take besides q, k and v."""
        if not self.calls:
            return [x for x in self.segments.lengths if isinstance(x, Tensor)]
        calls = self.calls if self.own is None else (*self.calls, self.own)
        found = [x for call in calls for x in call.tensors] + list(self.sent)
        return found if self.returned is None else [*found, self.returned]

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
        gradient_dtype: torch.dtype = torch.float32,
        fused: bool = False,
        on_device: Mapping[str, Tensor] | None = None,
        scores: Scores = PLAIN,
    ) -> "ContextAttention":
        """Compares nothing across ranks. fused: Triton adds the gradients of K and V. on_device:
        `index_arrays` if they are there already. scores: their window is that of `rows`."""
        arrays = index_arrays(rows)
        if on_device is None:
            on_device = to_device(arrays, device)
        calls = [
            _call(call, on_device, str(s), backend, device, scores, is_causal=rows.own is None)
            for s, call in enumerate(rows.calls)
            if arrays
        ]
        own = None
        if rows.own is not None:
            _check_gives_lse(backend, device)
            own = _call(rows.own, on_device, "own", backend, device, scores)
        if calls:
            segments = (own or calls[0]).segments
        else:
            (alone,) = rows.calls
            segments = Segments.from_offsets(
                alone.cu_seqlens_q, alone.cu_seqlens_k, device=device, scores=scores
            )
        stages = range(0 if rows.sent is None else len(rows.sent.index))
        return cls(
            segments=segments,
            calls=tuple(calls),
            own=own,
            num_rows=rows.positions.size,
            heads=heads,
            backend=backend,
            cp=1 if group is None or not arrays else group.size(),
            group_name="" if group is None else group.group_name,
            sent=tuple(on_device[f"sent {s}"] for s in stages),
            returned=on_device.get("returned"),
            splits=None if rows.sent is None else torch.from_numpy(rows.sent.splits),
            keep_gathered_kv=keep_gathered_kv,
            gradient_dtype=gradient_dtype,
            fused=fused,
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
        deterministic: bool = False,
        row_multiple: int = 1,
        keep_gathered_kv: bool = False,
        gradient_dtype: torch.dtype = torch.float32,
        fused: FusedKernels = FusedKernels.AUTO,
        overlap: bool = False,
        stages: int = 1,
        scores: Scores = PLAIN,
    ) -> "ContextAttention":
        """Attention over `group` (None: one rank) of a micro-batch sharded by `sharding_plan`.

        A collective call: bad or different arguments raise a UserError on every rank instead of
        hanging. It waits for the device; make one per micro-batch, not per layer. deterministic:
        as `kernels.deterministic`, for backends of the configuration. row_multiple: T is padded to
        a multiple of it. overlap, stages: as in `[cp]`, for scores without a sliding window.
        """
        declared: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        declared |= {"head_dim": head_dim, "dtype": dtype}
        exchange: dict[str, Any] = {"keep_gathered_kv": keep_gathered_kv}
        exchange |= {"gradient_dtype": gradient_dtype}
        options: dict[str, Any] = {"overlap": overlap, "stages": stages}
        heads, num_rows, adds_fused, problem = None, 0, False, None
        num_ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
        try:
            device = torch.device(device)
            num_rows = _num_rows(sharding_plan, num_ranks, row_multiple)
            heads = HeadShape(**declared)
            _check_gradient_dtype(gradient_dtype)
            backend = _resolved(backend, device, heads, deterministic, scores)
            adds_fused = choose_fused(fused, device=device, dtype=dtype).fused
            declared |= _identity(sharding_plan) | {"rows": num_rows} | options
            declared |= {"device": device.type, "backend": backend, "scores": str(scores)}
        except Exception as error:
            # Catch everything: the other ranks are about to wait for this one in `agree`.
            problem = error
        agree(declared | exchange, problem, group=group)
        assert heads is not None
        return cls.from_rows(
            attention_rows(sharding_plan, rank, num_rows, **options, sliding=scores.sliding),
            group=group,
            heads=heads,
            backend=backend,
            device=torch.device(device),
            **exchange,
            fused=adds_fused,
            scores=scores,
        )


def _num_rows(plan: ShardingPlan, num_ranks: int, row_multiple: int) -> int:
    """T of each rank; UserError for a plan that the group's ranks cannot execute."""
    if plan.cp != num_ranks:
        raise UserError(f"the plan is for cp = {plan.cp} ranks, the group has {num_ranks}")
    if plan.num_tokens < plan.cp:
        raise UserError(f"cp = {plan.cp} ranks are more than the {plan.num_tokens} tokens")
    plan.validate()
    return local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=row_multiple)


def _identity(plan: ShardingPlan) -> dict[str, Any]:
    return {"exchange": plan.exchange, "plan digest": plan.digest()}


def _check_gradient_dtype(dtype: torch.dtype) -> None:
    if dtype not in GRADIENT_DTYPES:
        known = ", ".join(map(str, GRADIENT_DTYPES))
        raise UserError(f"gradient_dtype = {dtype!r} is not one of {known}")


def _resolved(
    backend: str, device: torch.device, heads: HeadShape, deterministic: bool, scores: Scores
) -> str:
    """The kernel that computes; UserError for one that cannot."""
    if backend in set(AttentionBackend):
        return select_backend(
            AttentionBackend(backend),
            device=device,
            dtype=heads.dtype,
            head_size=heads.head_dim,
            deterministic=deterministic,
            scores=scores,
        )
    if backend not in BACKENDS:
        raise UserError(f"backend = {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    return backend


def _check_gives_lse(backend: str, device: torch.device) -> None:
    if device.type != "cpu" and backend.startswith("sdpa"):
        raise UserError(
            f"cp.overlap needs the log-sum-exp of attention's rows, which {backend} does not give "
            f"on {device.type}; set cp.overlap = false or another kernels.attention"
        )


def _call(
    rows: CallRows,
    on_device: Mapping[str, Tensor],
    name: str,
    backend: str,
    device: torch.device,
    scores: Scores,
    *,
    is_causal: bool = True,
) -> CallOnDevice:
    """name: of its arrays among `index_arrays`."""
    segments = Segments.from_offsets(
        rows.cu_seqlens_q,
        rows.cu_seqlens_k,
        device=device,
        key_rows=rows.kv_index if BACKENDS[backend].takes_key_rows else None,
        is_causal=is_causal,
        scores=scores,
    )
    index, inverse = (on_device[f"{kind} {name}"] for kind in ("kv_index", "inverse"))
    return CallOnDevice(segments, index, inverse, on_device.get(f"query_rows {name}"))


def index_arrays(rows: AttentionRows) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays that attention needs on the device, named "kv_index 0" by stage or "kv_index own";
    empty with one CP rank."""
    found: dict[str, np.ndarray[Any, Any] | None] = {}
    named = [(str(s), call) for s, call in enumerate(rows.calls)]
    for name, call in named + ([("own", rows.own)] if rows.own is not None else []):
        found |= {f"kv_index {name}": call.kv_index, f"inverse {name}": call.inverse}
        found[f"query_rows {name}"] = call.query_rows
    if rows.sent is not None:
        found |= {f"sent {s}": index for s, index in enumerate(rows.sent.index)}
        found["returned"] = rows.sent.returned
    return {name: array for name, array in found.items() if array is not None}


def to_device(
    arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device
) -> dict[str, Tensor]:
    """int64 arrays as tensors on `device`, in one pinned, asynchronous transfer."""
    if not arrays:
        return {}
    flat = copy_to_device(np.concatenate([a.reshape(-1) for a in arrays.values()]), device)
    parts = flat.split([a.size for a in arrays.values()])
    return {name: part.view(a.shape) for part, (name, a) in zip(parts, arrays.items(), strict=True)}


def take_rows(packed: Tensor, plan: ShardingPlan, *, rank: int, num_rows: int) -> Tensor:
    """A rank's T = num_rows rows of a packed [S, ...] tensor; padding is zero."""
    index = torch.from_numpy(plan.for_rank(rank).token_index).to(packed.device)
    out = packed.new_zeros((num_rows, *packed.shape[1:]))
    return out.index_copy(0, torch.arange(index.numel(), device=packed.device), packed[index])
