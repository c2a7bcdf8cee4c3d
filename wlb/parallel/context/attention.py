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

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels import BACKENDS, Scores, Segments, attend, select_backend
from wlb.kernels.fused import choose_fused
from wlb.kernels.segments import PLAIN
from wlb.parallel.collectives import agree, wait
from wlb.parallel.context.exchange import FlatExchange, flatten, to_device
from wlb.parallel.context.op import AddAndGatherAgain, context_attend, gather_kv
from wlb.parallel.context.rows import RankExchange, rank_exchange
from wlb.plan import ShardingPlan, UserError, exchange_of, local_tokens
from wlb.spec import AttentionBackend, FusedKernels

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


class KvGather(NamedTuple):
    """`gather_kv`'s results: K and V of each stage on their way, and slots for their gradients."""

    rows_R2GD: list[Tensor]
    slots: list[Tensor]


class GatherAgain(NamedTuple):
    """The rows that backward gathers again, and the slots that bring them to attention's
    backward.
    """

    slots_R2GD: list[Tensor]
    k_TGD: Tensor
    v_TGD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention over one rank's rows of one micro-batch; call it with q, k, v of every layer.

    `from_plan` compares the ranks' arguments; the executor, whose plans' digests are compared, uses
    `from_rows`.
    """

    segments: Segments  # of the first call, which has all queries
    num_rows: int
    heads: HeadShape
    backend: str
    exchange: FlatExchange | None  # None with one CP rank
    group_name: str
    keep_gathered_kv: bool
    fused: bool = False

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> KvGather | None:
        """Start the exchange. Its result must reach a call with the same k and v, to be freed."""
        self._check_keys(k_TGD, v_TGD)
        if self.exchange is None:
            return None
        rows, slots = gather_kv(k_TGD, v_TGD, *self.exchange, self.group_name, self.fused)
        return KvGather([x.detach() for x in rows], slots)

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
        if self.exchange is None:
            return attend(q_THD, k_TGD, v_TGD, self.segments, backend=self.backend), None
        begun = self.begin(k_TGD, v_TGD) if begun is None else begun
        assert begun is not None
        local = k_TGD.detach(), v_TGD.detach()
        out_THD, _, slots = context_attend(
            q_THD,
            *local,
            [*begun.rows_R2GD, *begun.slots],
            *self.exchange,
            self.segments.scores.softcap,
            self.backend,
            self.group_name,
            self.keep_gathered_kv,
            self.fused,
        )
        return out_THD, None if self.keep_gathered_kv else GatherAgain(slots, *local)

    def add(self, x_SC: Tensor, y_SC: Tensor, attended: GatherAgain | None) -> Tensor:
        """X + y, where backward starts gathering K and V again; else attention's backward does."""
        if attended is None or self.exchange is None:
            return x_SC + y_SC
        slots, *local = attended
        tensors, *static = self.exchange
        arguments = (*local, *static, self.group_name, len(slots), *slots, *tensors)
        out: Tensor = AddAndGatherAgain.apply(x_SC, y_SC, *arguments)  # pyright: ignore[reportAssignmentType]
        return out

    @property
    def indices(self) -> list[Tensor]:
        """Tensors on the device that the custom ops take besides q, k and v."""
        if self.exchange is None:
            return [self.segments.cu_seqlens_q, self.segments.cu_seqlens_k]
        return self.exchange.tensors

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
        rows: RankExchange,
        *,
        group: dist.ProcessGroup | None,
        heads: HeadShape,
        backend: str,
        device: torch.device,
        keep_gathered_kv: bool = False,
        fused: bool = False,
        on_device: Mapping[str, Tensor] | None = None,
        scores: Scores = PLAIN,
    ) -> "ContextAttention":
        """Compares nothing across ranks. fused: Triton adds the gradients of K and V. on_device:
        `rows.arrays()` if they are there already. scores: their window is that of `rows`.
        """
        if len(rows.stages) > 1:
            _check_gives_lse(backend, device)
        if on_device is None:
            on_device = to_device(dict(rows.arrays()), device)
        flat, segments = flatten(rows, on_device, backend=backend, device=device, scores=scores)
        return cls(
            segments=segments,
            num_rows=rows.positions.size,
            heads=heads,
            backend=backend,
            exchange=flat if on_device else None,
            group_name="" if group is None else group.group_name,
            keep_gathered_kv=keep_gathered_kv,
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
        options: dict[str, Any] = {"overlap": overlap, "stages": stages}
        heads, num_rows, adds_fused, problem = None, 0, False, None
        num_ranks, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
        try:
            device = torch.device(device)
            num_rows = _num_rows(sharding_plan, num_ranks, row_multiple)
            heads = HeadShape(**declared)
            backend = _resolved(backend, device, heads, deterministic, scores)
            adds_fused = choose_fused(fused, device=device, dtype=dtype).fused
            declared |= _identity(sharding_plan) | {"rows": num_rows} | options
            declared |= {"device": device.type, "backend": backend, "scores": str(scores)}
        except Exception as error:
            # Catch everything: the other ranks are about to wait for this one in `agree`.
            problem = error
        agree(declared | {"keep_gathered_kv": keep_gathered_kv}, problem, group=group)
        assert heads is not None
        exchange = exchange_of(
            sharding_plan,
            local_tokens=num_rows,
            own_first=overlap,
            stages=stages,
            sliding=scores.sliding,
        )
        return cls.from_rows(
            rank_exchange(exchange, rank),
            group=group,
            heads=heads,
            backend=backend,
            device=torch.device(device),
            keep_gathered_kv=keep_gathered_kv,
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
            f"cp.overlap_stages needs the log-sum-exp of attention's rows, which {backend} does "
            f"not give on {device.type}; set cp.overlap_stages = 0 or another kernels.attention"
        )


def take_rows(packed: Tensor, plan: ShardingPlan, *, rank: int, num_rows: int) -> Tensor:
    """A rank's T = num_rows rows of a packed [S, ...] tensor; padding is zero."""
    index = torch.from_numpy(plan.for_rank(rank).token_index).to(packed.device)
    out = packed.new_zeros((num_rows, *packed.shape[1:]))
    return out.index_copy(0, torch.arange(index.numel(), device=packed.device), packed[index])
