"""A mixture of experts in place of a layer's MLP: router, grouped products, shared experts.

Dropless: an expert computes all rows that choose it, in one order (expert, source rank, token), so
that sums never depend on timing. A score multiplies its expert's hidden values, not its output, so
that backward needs no outputs. Shapes: T real rows, K experts a token, N = T K rows at experts, E
experts, C width, F hidden size of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, pad, silu

from wlb.plan import digest
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec, Scoring

BALANCE = "mlp.balance"
"""End of the name of a layer's buffer, `MixtureMlp.balance`."""

Compute = Callable[[], Sequence[Tensor]]
Defer = Callable[[Sequence[Tensor], Compute], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """What experts are told of a micro-batch. num: rows of this process before padding, which goes
    to no expert. loss_scale: of the auxiliary loss of a row. counts: they leave the rows of each
    expert here, [E], by layer; a recomputed layer writes the same again."""

    num: int
    loss_scale: float = 1.0
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows where their experts are, expert by expert. x_MC; scores_M, float32; ends_E: index after
    each held expert's last row, int32. way: what `ExpertExchange.back` needs."""

    x_MC: Tensor
    scores_M: Tensor
    ends_E: Tensor
    way: Any = None


class ExpertExchange(Protocol):
    """Brings rows to the processes of their experts and back."""

    def there(self, x_NC: Tensor, scores_N: Tensor, ends_E: Tensor) -> RoutedRows: ...

    def back(self, y_MC: Tensor, routed: RoutedRows) -> Tensor: ...


class LocalExperts:
    """All experts are in this process."""

    def there(self, x_NC: Tensor, scores_N: Tensor, ends_E: Tensor) -> RoutedRows:
        return RoutedRows(x_NC, scores_N, ends_E)

    def back(self, y_MC: Tensor, routed: RoutedRows) -> Tensor:
        return y_MC


class MatrixStack(nn.Module):
    """The matrices of a layer's experts in one parameter, [E, out, in]."""

    def __init__(self, num: int, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, columns, rows))


class GroupedMlp(nn.Module):
    """SwiGLU MLPs of experts, each over its rows. defer: receives the weights' gradients, if they
    are computed later. local: the process's part of a parameter."""

    defer: Defer | None = None

    def __init__(self, experts: ExpertsSpec, width: int) -> None:
        super().__init__()
        hidden = experts.hidden_size
        self.gate_proj = MatrixStack(experts.num, hidden, width)
        self.up_proj = MatrixStack(experts.num, hidden, width)
        self.down_proj = MatrixStack(experts.num, width, hidden)
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter

    def forward(self, x_MC: Tensor, scores_M: Tensor, ends_E: Tensor) -> Tensor:
        """Outputs times scores, [M, C]; arguments as in `RoutedRows`."""
        stacks = (self.gate_proj, self.up_proj, self.down_proj)
        # Parameters are read in forward, because FSDP exchanges a module's parameters.
        parameters = [stack.weight for stack in stacks]
        weights = [self.local(parameter) for parameter in parameters]
        out: Tensor = _GroupedSwiGlu.apply(  # pyright: ignore[reportAssignmentType]
            self.defer, parameters, x_MC, scores_M, ends_E, *weights
        )
        return out


class _GroupedSwiGlu(torch.autograd.Function):
    """Saves the rows, gate and up; backward computes the rest of the hidden values again."""

    @staticmethod
    def forward(
        ctx: Any,
        defer: Defer | None,
        parameters: Sequence[Tensor],
        x_MC: Tensor,
        scores_M: Tensor,
        ends_E: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        gate, up, down = weights
        gate_MF = grouped_mm(x_MC, gate.transpose(-2, -1), offs=ends_E)
        up_MF = grouped_mm(x_MC, up.transpose(-2, -1), offs=ends_E)
        hidden_MF = silu(gate_MF).mul_(up_MF).mul_(scores_M[:, None])
        ctx.defer, ctx.parameters = defer, parameters
        ctx.save_for_backward(x_MC, scores_M, ends_E, gate_MF, up_MF, *weights)
        return grouped_mm(hidden_MF, down.transpose(-2, -1), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MC, scores_M, ends_E, gate_MF, up_MF, gate, up, down = ctx.saved_tensors
        grad_MC = grads[0].contiguous()
        product_MF = silu(gate_MF).mul_(up_MF)
        hidden_MF = product_MF.clone().mul_(scores_M[:, None])
        dhidden_MF = grouped_mm(grad_MC, down, offs=ends_E)
        dscores_M = (dhidden_MF * product_MF).sum(-1, dtype=scores_M.dtype)
        dhidden_MF = dhidden_MF.mul_(scores_M[:, None])
        dup_MF = dhidden_MF * silu(gate_MF)
        dgate_MF = torch.ops.aten.silu_backward(dhidden_MF.mul_(up_MF), gate_MF)
        dx_MC = grouped_mm(dgate_MF, gate, offs=ends_E).add_(grouped_mm(dup_MF, up, offs=ends_E))

        def of_down() -> list[Tensor]:
            return [grouped_mm(grad_MC.t(), hidden_MF, offs=ends_E)]

        def of_gate_and_up() -> list[Tensor]:
            return [grouped_mm(grad.t(), x_MC, offs=ends_E) for grad in (dgate_MF, dup_MF)]

        dweights: list[Tensor | None] = [None] * 3
        if ctx.defer is None:
            dweights = [*of_gate_and_up(), *of_down()]
        else:
            ctx.defer(ctx.parameters[2:], of_down)
            ctx.defer(ctx.parameters[:2], of_gate_and_up)
        return None, None, dx_MC, dscores_M, None, *dweights


class _Spread(torch.autograd.Function):
    """A copy of each row for each of its experts, in the order of experts, and its score."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, order_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.order_N, ctx.shape = order_N, scores_TK.shape
        rows_N = order_N // scores_TK.shape[1]
        return x_TC.index_select(0, rows_N), scores_TK.flatten().index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_NC, dscores_N = grads
        inverse_N = inverse_of(ctx.order_N)
        dx_TKC = dx_NC.index_select(0, inverse_N).view(*ctx.shape, dx_NC.shape[1])
        return dx_TKC.sum(1), dscores_N.index_select(0, inverse_N).view(ctx.shape), None


class _Gather(torch.autograd.Function):
    """The sum of the rows that a token's experts made; K a token."""

    @staticmethod
    def forward(ctx: Any, y_NC: Tensor, order_N: Tensor, per_token: int) -> Tensor:
        ctx.order_N, ctx.per_token = order_N, per_token
        num, width = y_NC.shape
        made_NC = y_NC.index_select(0, inverse_of(order_N))
        return made_NC.view(num // per_token, per_token, width).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.order_N // ctx.per_token), None, None


def inverse_of(order_N: Tensor) -> Tensor:
    """The permutation that undoes `order_N`."""
    places = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


class _WithLoss(torch.autograd.Function):
    """The scores; backward also differentiates `loss`, which no stage returns."""

    @staticmethod
    def forward(ctx: Any, scores_TK: Tensor, loss: Tensor) -> Tensor:
        return scores_TK.view_as(scores_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


class MixtureMlp(nn.Module):
    """A layer's experts. shared: the MLP of all tokens, if there is one. exchange: the way to the
    experts (`wlb.parallel.experts`). load: rows of each expert in the last step, all ranks';
    slowest: of its micro-batches, the rows of the ranks of experts that had most.

    balance: the bias of each expert, or its share of the step before (`ExpertBalance`): the
    auxiliary loss takes the shares of all ranks' tokens, which are known a step later, so that it
    is the same in every layout.
    """

    balance: Tensor

    def __init__(self, spec: ModelSpec, ops: Any, shared: nn.Module | None) -> None:
        super().__init__()
        self.spec, self.ops = spec.experts, ops
        self.gate = nn.Linear(spec.hidden_size, self.spec.num, bias=False)
        self.experts = GroupedMlp(self.spec, spec.hidden_size)
        self.shared_experts = shared
        self.exchange: ExpertExchange = LocalExperts()
        self.load: Tensor | None = None
        self.slowest: Tensor | None = None
        if self.spec.balance != ExpertBalance.NONE:
            self.register_buffer("balance", torch.zeros(self.spec.num))

    def forward(self, x_TC: Tensor, rows: ExpertRows | None = None) -> Tensor:
        """The residual branch of x, [T, C] and padding; zero without shared experts there."""
        num = x_TC.shape[0] if rows is None else rows.num
        scores_TK, chosen_TK = self.route(x_TC[:num], rows)
        sorted_N, order_N = chosen_TK.flatten().sort(stable=True)
        every_E = torch.arange(self.spec.num, device=x_TC.device)
        ends_E = torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)
        if rows is not None:
            rows.counts[self] = ends_E.diff(prepend=ends_E.new_zeros(1))
        spread: Any = _Spread.apply(x_TC[:num], scores_TK, order_N)
        routed = self.exchange.there(spread[0], spread[1], ends_E)
        made_MC = self.experts(routed.x_MC, routed.scores_M, routed.ends_E)
        made_NC = self.exchange.back(made_MC, routed)
        out_TC: Tensor = _Gather.apply(made_NC, order_N, self.spec.per_token)  # pyright: ignore[reportAssignmentType]
        out_TC = pad(out_TC, (0, 0, 0, x_TC.shape[0] - num))
        return out_TC if self.shared_experts is None else out_TC + self.shared_experts(x_TC)

    def route(self, x_TC: Tensor, rows: ExpertRows | None = None) -> tuple[Tensor, Tensor]:
        """Scores, float32, and numbers of each row's experts, [T, K] both."""
        logits_TE = linear(x_TC, self.ops.weight(self.gate)).float()
        is_softmax = self.spec.scoring == Scoring.SOFTMAX
        scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        is_biased = self.spec.balance == ExpertBalance.BIAS
        seen_TE = scores_TE.detach() + self.balance if is_biased else scores_TE.detach()
        chosen_TK = seen_TE.topk(self.spec.per_token, -1).indices
        scores_TK = scores_TE.gather(-1, chosen_TK)
        if self.spec.normalised:
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        if rows is not None and self.spec.balance == ExpertBalance.AUX_LOSS:
            share_TE = scores_TE if is_softmax else scores_TE / scores_TE.sum(-1, keepdim=True)
            loss = (share_TE.sum(0) * self.balance).sum() * self.spec.num
            factor = self.spec.aux_coefficient * rows.loss_scale
            scores_TK = _WithLoss.apply(scores_TK, loss * factor)
        return scores_TK, chosen_TK  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def rebalance(self) -> None:
        """Move `balance` by the last step's load; after the step's update of the weights."""
        if self.load is None or self.spec.balance == ExpertBalance.NONE:
            return
        load = self.load.double()
        if self.spec.balance == ExpertBalance.BIAS:
            self.balance += self.spec.bias_rate * (load.mean() - load).sign().float()
        else:
            self.balance.copy_(load / load.sum().clamp(min=1))


Initial = Callable[[str, torch.Size, int], Tensor]


def initial_experts(name: str, shape: torch.Size, first: int, seed: int, one: Initial) -> Tensor:
    """Initial values of a stack's experts `first`, ..., shape [n, out, in]; each is a function of
    its name, number and seed alone, by `one(name, shape, seed)`."""
    made = [one(name, shape[1:], digest("expert", first + i, seed)) for i in range(shape[0])]
    return torch.stack(made)
