"""Context parallelism: attention over the keys and values of all CP ranks, for any sharding.

The ranks exchange K and V before attention: by an all-gather, as Llama 3 does (Section 2.1 of the
paper), or by an all-to-all of the rows that each rank reads. The sharding plan says which. A
variable-length kernel then computes all local spans in one call. With `cp.overlap_stages` there
are several calls, and the first one reads local keys only, so it needs no exchange.

In forward, `begin` starts the exchange, which hides behind the query projection. Backward begins
at the layer's end. There `add`, the layer's last residual addition, starts the exchange, which
hides behind the MLP. No layer loops over documents or waits for the device.

Shapes: T local rows, S packed tokens, G key/value heads and H query heads of this TP rank, D head
size.
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
    """Shapes of attention's inputs on one TP rank; raises UserError if they do not fit each other.

    q has shape [T, num_heads, head_dim], and k and v have shape [T, num_kv_heads, head_dim].
    """

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
                f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"dtype = {self.dtype} must be one of {', '.join(map(str, DTYPES))}")


class KvGather(NamedTuple):
    """K and V of other ranks, still in transfer: the results of `gather_kv`."""

    rows_R2GD: list[Tensor]  # for each transfer, the buffer into which K and V travel
    # placeholders without memory; their gradients carry dK and dV in backward
    slots: list[Tensor]


class GatherAgain(NamedTuple):
    """What the end of a layer needs so that its backward can gather K and V a second time."""

    # Placeholders without memory. In backward, the end of the layer gathers the rows of K and V,
    # and returns them as the placeholders' gradients to pass them to attention's backward.
    slots_R2GD: list[Tensor]
    k_TGD: Tensor  # local keys, which are sent
    v_TGD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention for one rank's rows of one micro-batch; every layer calls it with its q, k and v.

    `from_plan` first checks that all ranks pass the same arguments. The executor uses `from_rows`,
    which checks nothing, because the executor compares the digests of whole plans.
    """

    segments: Segments  # segments of the first attention call, which has all queries
    num_rows: int  # T, the number of this rank's rows, padding included
    heads: HeadShape
    backend: str  # name of the attention kernel, a key of `BACKENDS`
    exchange: FlatExchange | None  # the exchange of K and V; None with one CP rank
    group_name: str  # name of the CP process group; "" with one CP rank
    keep_gathered_kv: bool  # keep K and V of all ranks for backward instead of gathering them twice
    fused: bool = False  # let a Triton kernel add the gradients of K and V

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> KvGather | None:
        """Start the exchange of K and V, and return it; None with one CP rank.

        Pass the result to `attend` (or `__call__`) with the same k and v. That call waits for the
        transfers and frees their buffers.
        """
        self._check_keys(k_TGD, v_TGD)
        if self.exchange is None:
            return None
        rows, slots = gather_kv(k_TGD, v_TGD, *self.exchange, self.group_name, self.fused)
        return KvGather([x.detach() for x in rows], slots)

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: KvGather | None = None
    ) -> Tensor:
        """Return attention's output, [T, H, D].

        Args:
            q_THD: Queries of this rank's rows.
            k_TGD: Keys of this rank's rows.
            v_TGD: Values of this rank's rows.
            begun: Result of `begin` for the same k and v. With None this call starts the exchange.

        Raises:
            UserError: q, k or v do not have the declared shape, dtype or device. The error is
                raised before this rank starts a collective.
        """
        return self.attend(q_THD, k_TGD, v_TGD, begun)[0]

    def attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: KvGather | None
    ) -> tuple[Tensor, GatherAgain | None]:
        """Return attention's output [T, H, D], and what `add` needs to gather K and V again.

        The second result is None if received rows are kept for backward or there is one CP rank.
        Arguments and errors are those of `__call__`.
        """
        try:
            self._check("q", q_THD, self.heads.num_heads)
            self._check_keys(k_TGD, v_TGD)
        except UserError:
            # Wait for the transfers before raising, because their buffers must not be freed while
            # data still arrive.
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
        """Return x + y. In backward this operation starts to gather K and V a second time.

        It is the last operation of a layer, or of its attention half. So its backward comes first,
        and the gather runs while the backward of the other operations is computed.

        Args:
            x_SC: Residual stream.
            y_SC: Output of the layer's last branch.
            attended: The local K and V, and placeholders for the gathered rows, as `attend` returns
                them. With None this is a plain sum, and attention's backward starts the gather if
                it needs one.
        """
        if attended is None or self.exchange is None:
            return x_SC + y_SC
        slots, *local = attended
        tensors, *static = self.exchange
        arguments = (*local, *static, self.group_name, len(slots), *slots, *tensors)
        out: Tensor = AddAndGatherAgain.apply(x_SC, y_SC, *arguments)  # pyright: ignore[reportAssignmentType]
        return out

    @property
    def indices(self) -> list[Tensor]:
        """All tensors of offsets and indices on the device that attention's custom ops read."""
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
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype} on {x.device}, "
                f"but this attention needs shape {shape} and dtype {self.heads.dtype} "
                f"on {device}"
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
        """Make attention from one rank's index arrays. This is not a collective call.

        All ranks of the group must pass arguments that were made from the same plan; this is not
        checked.

        Args:
            rows: Index arrays of this rank.
            group: The CP group. None means one rank.
            heads: Shapes of q, k and v.
            backend: Name of the attention kernel.
            device: Where q, k and v are.
            keep_gathered_kv: Keep the received K and V for backward instead of gathering them
                twice.
            fused: Let a Triton kernel add the gradients of K and V.
            on_device: `rows.arrays()` as tensors on the device. With None they are copied here.
            scores: The mask's window and the cap on scores. The window must equal that of `rows`.
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
        """Make the attention of a micro-batch that `sharding_plan` divides among the group's ranks.

        This is a collective call: if one rank has a bad argument or the arguments differ, every
        rank raises an error instead of hanging. The call waits for the device, so call it once per
        micro-batch and not once per layer.

        Args:
            sharding_plan: The spans of all CP ranks.
            group: The CP group. None means one rank.
            num_heads: Query heads of this TP rank, H.
            num_kv_heads: Key/value heads of this TP rank, G.
            head_dim: Size of a head, D.
            dtype: Dtype of q, k and v.
            device: Where q, k and v are.
            backend: An attention kernel, or a value of `kernels.attention` that selects one.
            deterministic: As `kernels.deterministic`. Used only if `backend` is a value of
                `kernels.attention`.
            row_multiple: T, the number of rows, is padded to a multiple of this.
            keep_gathered_kv: Keep the gathered K and V for backward instead of gathering them
                twice.
            fused: As `kernels.fused`: whether a Triton kernel adds the gradients of K and V.
            overlap: Compute attention over local keys during the exchange, as with
                `cp.overlap_stages` > 0.
            stages: Number of stages of the exchange if `overlap` is set. With a sliding window the
                exchange always has one stage.
            scores: The mask's window and the cap on scores.

        Raises:
            UserError: An argument is bad, or the ranks of the group disagree.
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
            # Catch every error and pass it to `agree`, in which the other ranks wait for this one.
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
    """Return T, the rows of each rank, or raise UserError if the group cannot execute the plan."""
    if plan.cp != num_ranks:
        raise UserError(
            f"the plan is for {plan.cp} CP ranks, but the group has {num_ranks} ranks; "
            f"make the plan for {num_ranks} CP ranks"
        )
    if plan.num_tokens < plan.cp:
        raise UserError(
            f"cp = {plan.cp} must be at most {plan.num_tokens}, the number of tokens of the "
            "micro-batch, because each CP rank needs a token; use fewer CP ranks"
        )
    plan.validate()
    return local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=row_multiple)


def _identity(plan: ShardingPlan) -> dict[str, Any]:
    return {"exchange": plan.exchange, "plan digest": plan.digest()}


def _resolved(
    backend: str, device: torch.device, heads: HeadShape, deterministic: bool, scores: Scores
) -> str:
    """Return the name of the kernel that `backend` selects, or raise UserError if it cannot run."""
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
        raise UserError(f"backend = {backend!r} must be one of auto, {', '.join(BACKENDS)}")
    return backend


def _check_gives_lse(backend: str, device: torch.device) -> None:
    # Results of several calls can be merged only if each comes with its log-sum-exp.
    if device.type != "cpu" and backend.startswith("sdpa"):
        raise UserError(
            "cp.overlap_stages needs a kernel that returns the log-sum-exp of scores, "
            f"but {backend} does not return it on {device.type}; set cp.overlap_stages "
            "= 0 or another kernels.attention"
        )


def take_rows(packed: Tensor, plan: ShardingPlan, *, rank: int, num_rows: int) -> Tensor:
    """Return a CP rank's rows of a packed tensor [S, ...], shape [num_rows, ...].

    Args:
        packed: A tensor with one row for each token of the micro-batch.
        plan: The sharding of the micro-batch.
        rank: The CP rank whose rows are taken.
        num_rows: Rows of the result, T. The rows after the rank's tokens are zero.
    """
    index = torch.from_numpy(plan.for_rank(rank).token_index).to(packed.device)
    out = packed.new_zeros((num_rows, *packed.shape[1:]))
    return out.index_copy(0, torch.arange(index.numel(), device=packed.device), packed[index])
