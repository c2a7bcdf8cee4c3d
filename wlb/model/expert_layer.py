"""A mixture of experts in place of a layer's MLP: router, grouped products, shared experts.

The mixture drops no tokens: an expert computes every row that chooses it. Rows are always sorted by
(expert, source rank, token), so sums never depend on timing. A row's score multiplies the expert's
hidden values instead of its output, so backward does not need the outputs.

Shapes: T real rows, K experts per token, N = T K rows sent to experts, E experts, C channels, F
hidden size of an expert, M rows received for this process's experts, P of them in one stage
(`wlb.model.expert_dispatch`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, pad, silu

from wlb.kernels.grouped import weight_gradients
from wlb.model.expert_dispatch import ExpertExchange, FirstPass, LocalExperts, Way, during_pass
from wlb.plan import digest
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec, Scoring

BALANCE = "mlp.balance"
"""End of the names of `MixtureMlp.balance`, the buffers that checkpoints store with the weights."""
BIAS_RATE = 1e-3
"""Change of an expert's bias per step with `experts.balance = bias`, as in DeepSeek-V3.

A larger rate balances sooner but oscillates more.
"""

Compute = Callable[[], Sequence[Tensor]]
Defer = Callable[[Sequence[Tensor], Compute], None]
"""A function that is given parameters and a `Compute`, which it calls later for their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """What layers with experts need to know about a micro-batch."""

    num: int  # number of this process's real rows; padding follows them and goes to no expert
    # Weight of one row in the auxiliary loss and the z-loss: 1 / (rows of the step on all ranks).
    # So both losses are means over all rows of a step, whether or not the rows have a label.
    row_weight: float = 1.0
    # By layer, the number of rows that chose each expert, shape [E]. Layers store these numbers in
    # forward; a recomputed layer stores the same numbers once more.
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)


class MatrixStack(nn.Module):
    """The matrices of all experts of a layer in one parameter, [E, out, in]."""

    def __init__(self, num: int, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, columns, rows))


class GroupedMlp(nn.Module):
    """The SwiGLU MLPs of a layer's experts; each expert computes the rows that chose it."""

    # If set, backward passes the computation of the weights' gradients to this function, which runs
    # it later. With None, backward itself computes the gradients.
    defer: Defer | None = None

    def __init__(self, experts: ExpertsSpec, width: int) -> None:
        super().__init__()
        hidden = experts.hidden_size
        self.gate_proj = MatrixStack(experts.num, hidden, width)
        self.up_proj = MatrixStack(experts.num, hidden, width)
        self.down_proj = MatrixStack(experts.num, width, hidden)
        # Returns this process's part of a parameter. Expert parallelism replaces this function.
        self.local: Callable[[Tensor], Tensor] = lambda parameter: parameter

    def forward(self, under_way: Tensor, way: Way, *, needs_outputs: bool = True) -> Tensor:
        """Compute the rows that arrive at this process's experts, and send the results back.

        Rows arrive, and results leave, through `way`, stage by stage.

        Args:
            under_way: An empty tensor that stands for the rows in autograd's graph.
            way: The routing of the rows.
            needs_outputs: False if the layer is recomputed only to get the tensors that backward
                needs, so that no results are sent.

        Returns:
            An empty tensor that stands for the results in autograd's graph.
        """
        stacks = (self.gate_proj, self.up_proj, self.down_proj)
        # Read the parameters in every forward, because FSDP replaces a module's parameters.
        parameters = [stack.weight for stack in stacks]
        weights = [self.local(parameter) for parameter in parameters]
        out: Tensor = _GroupedSwiGlu.apply(  # pyright: ignore[reportAssignmentType]
            self.defer, parameters, way, needs_outputs, under_way, *weights
        )
        return out


class _GroupedSwiGlu(torch.autograd.Function):
    """The SwiGLU of `GroupedMlp`; saves rows, gate and up, and recomputes the rest in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        defer: Defer | None,
        parameters: Sequence[Tensor],
        way: Way,
        needs_outputs: bool,
        under_way: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        gate, up, down = weights
        products: list[Tensor] = []
        for i, (experts, _, ends) in enumerate(way.stages):
            x_PC, scores_P = way.there.arrived(i)
            gate_PF = grouped_mm(x_PC, gate[experts].transpose(-2, -1), offs=ends)
            up_PF = grouped_mm(x_PC, up[experts].transpose(-2, -1), offs=ends)
            products += [gate_PF, up_PF]
            if needs_outputs:
                assert scores_P is not None
                hidden_PF = silu(gate_PF).mul_(up_PF).mul_(scores_P[:, None])
                out_PC = grouped_mm(hidden_PF, down[experts].transpose(-2, -1), offs=ends)
                way.there.answer(i, out_PC)
                del hidden_PF, out_PC
        x_MC, scores_M = way.there.whole()
        ctx.defer, ctx.parameters, ctx.way = defer, parameters, way
        ctx.save_for_backward(x_MC, scores_M, *products, *weights)
        return under_way.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_MC, scores_M, *products, gate, up, down = ctx.saved_tensors
        way: Way = ctx.way
        way.back.start()
        # Allocate buffers for the rows of all stages, so that each weight's gradient is one
        # product.
        hidden_MF, dgate_MF, dup_MF = (
            x_MC.new_empty(x_MC.shape[0], gate.shape[1]) for _ in range(3)
        )
        for i, (experts, rows, ends) in enumerate(way.stages):
            gate_PF, up_PF, scores_P1 = *products[2 * i : 2 * i + 2], scores_M[rows, None]
            grad_PC = way.back.arrived(i)[0]
            product_PF = silu(gate_PF).mul_(up_PF)
            torch.mul(product_PF, scores_P1, out=hidden_MF[rows])
            dhidden_PF = grouped_mm(grad_PC, down[experts], offs=ends)
            dscores_P = (dhidden_PF * product_PF).sum(-1, dtype=scores_M.dtype)
            dhidden_PF = dhidden_PF.mul_(scores_P1)
            torch.mul(dhidden_PF, silu(gate_PF), out=dup_MF[rows])
            torch.ops.aten.silu_backward.grad_input(
                dhidden_PF.mul_(up_PF), gate_PF, grad_input=dgate_MF[rows]
            )
            del product_PF, dhidden_PF
            # Argument 4 is `under_way`, which stands for the rows. Compute their gradients if they
            # are needed.
            if ctx.needs_input_grad[4]:
                dx_PC = grouped_mm(dgate_MF[rows], gate[experts], offs=ends)
                dx_PC.add_(grouped_mm(dup_MF[rows], up[experts], offs=ends))
                way.back.answer(i, dx_PC, dscores_P)
                del dx_PC
        # Compute the weights' gradients while the last stage's rows travel back.
        grad_MC, ends_E = way.back.whole()[0], way.ends_E

        def of_down() -> list[Tensor]:
            return weight_gradients([grad_MC], hidden_MF, ends_E)

        def of_gate_and_up() -> list[Tensor]:
            return weight_gradients([dgate_MF, dup_MF], x_MC, ends_E)

        dweights: list[Tensor | None] = [None] * 3
        if ctx.defer is None:
            dweights = [*of_gate_and_up(), *of_down()]
        else:
            ctx.defer(ctx.parameters[2:], of_down)
            ctx.defer(ctx.parameters[:2], of_gate_and_up)
        return None, None, None, None, x_MC.new_empty(0), *dweights


class _Spread(torch.autograd.Function):
    """Copies each row once for each of its K experts, and passes the copies to `way` to send.

    Returns an empty tensor that stands for the rows in autograd's graph, because the rows may still
    be in transfer.
    """

    @staticmethod
    def forward(ctx: Any, way: Way, x_TC: Tensor, scores_TK: Tensor) -> Tensor:
        ctx.way, ctx.x, ctx.scores = way, x_TC.new_empty(0), scores_TK.new_empty(0)
        ctx.shape = (*scores_TK.shape, x_TC.shape[1])
        rows_N = way.order_N // scores_TK.shape[1]
        scores_N = scores_TK.flatten().index_select(0, way.order_N)
        way.there.send(x_TC, rows_N, scores_N)
        return x_TC.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        num_tokens, per_token, width = ctx.shape
        dx_NC = ctx.x.new_empty(num_tokens * per_token, width)
        dscores_N = ctx.scores.new_empty(num_tokens * per_token)
        for i, rows in enumerate(way.sent):
            dx_PC, dscores_P = way.back.answers(i)
            assert dscores_P is not None
            dx_NC.index_copy_(0, way.order_N[rows], dx_PC)
            dscores_N.index_copy_(0, way.order_N[rows], dscores_P)
        return None, dx_NC.view(num_tokens, per_token, width).sum(1), dscores_N.view(ctx.shape[:2])


class _Gather(torch.autograd.Function):
    """Waits until the experts' outputs are back, and sums the K outputs of each row, [T, C]."""

    @staticmethod
    def forward(ctx: Any, way: Way, per_token: int, width: int, under_way: Tensor) -> Tensor:
        ctx.way, ctx.per_token = way, per_token
        out_NC = under_way.new_empty(way.order_N.shape[0], width)
        for i, rows in enumerate(way.sent):
            out_NC.index_copy_(0, way.order_N[rows], way.there.answers(i)[0])
        return out_NC.view(-1, per_token, width).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        way.back.send(grads[0], way.order_N // ctx.per_token)
        if not way.starts_late:
            way.back.start()
        return None, None, None, grads[0].new_empty(0)


class _WithLoss(torch.autograd.Function):
    """Returns the scores unchanged, and in backward gives `loss` a gradient of one.

    This adds an auxiliary loss to the training loss, although the layer does not return it.
    """

    @staticmethod
    def forward(ctx: Any, scores_TK: Tensor, loss: Tensor) -> Tensor:
        return scores_TK.view_as(scores_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones(())


class MixtureMlp(nn.Module):
    """A mixture of experts: a router, the experts, and optionally experts that process all tokens.

    Args:
        spec: Sizes and options of the model.
        ops: Computes linear layers, also with tensor parallelism (`wlb.model.llama.Ops`).
        shared: An MLP that processes all tokens (shared experts), or None.

    Attributes:
        balance: A value for each expert, shape [E]. With `ExpertBalance.BIAS` it is the bias of the
            router. With an auxiliary loss it is the expert's share of the tokens of the previous
            step on all ranks. Shares over all ranks are known only after a step, so the loss uses
            those of the previous step. This makes the loss the same in every parallel layout.
        exchange: Sends rows to the processes that have their experts
            (`wlb.parallel.expert_parallel`).
        load: Number of rows of each expert in the most recent step, over all ranks; None before the
            first step.
        slowest: Rows of the EP rank that has most rows in a micro-batch, summed over the
            micro-batches and EP groups of the most recent step; None before the first step.
    """

    balance: Tensor

    def __init__(self, spec: ModelSpec, ops: Any, shared: nn.Module | None) -> None:
        super().__init__()
        self.spec, self.ops = spec.experts, ops
        self.shared_expert_gate: nn.Linear | None = None
        if spec.experts.shared_gate:
            self.shared_expert_gate = nn.Linear(spec.hidden_size, 1, bias=False)
        self.gate = nn.Linear(spec.hidden_size, self.spec.num, bias=False)
        self.experts = GroupedMlp(self.spec, spec.hidden_size)
        self.shared_experts = shared
        self.exchange: ExpertExchange = LocalExperts()
        self._has_branch_norms = spec.branch_norms
        self._first: FirstPass | None = None
        self.load: Tensor | None = None
        self.slowest: Tensor | None = None
        if self.spec.balance != ExpertBalance.NONE:
            self.register_buffer("balance", torch.zeros(self.spec.num))

    def forward(self, x_TC: Tensor, rows: ExpertRows | None = None) -> Tensor:
        """Return the mixture's output, [T, C], which the layer adds to its residual stream.

        Args:
            x_TC: Rows. Padding rows at the end are computed by shared experts only.
            rows: Says how many rows are real, which are the first ones. The layer writes to
                `rows.counts` how many rows chose each expert. None means that all rows are real.
        """
        num = x_TC.shape[0] if rows is None else rows.num
        way, scores_TK = self._choose(x_TC[:num], rows)
        if rows is not None:
            rows.counts[self] = way.counts_E
        # In `begin` the host waits until it knows how many rows go to which rank. Before that,
        # issue all work that does not depend on these numbers, so that the GPU is busy meanwhile.
        under_way: Any = _Spread.apply(way, x_TC[:num], scores_TK)
        shared_TC = None if self.shared_experts is None else self._shared(x_TC)
        way.begin()
        under_way = self.experts(under_way, way, needs_outputs=self._needs_outputs)
        out_TC: Any = _Gather.apply(way, self.spec.per_token, x_TC.shape[1], under_way)
        out_TC = pad(out_TC, (0, 0, 0, x_TC.shape[0] - num))
        return out_TC if shared_TC is None else out_TC + shared_TC

    def _shared(self, x_TC: Tensor) -> Tensor:
        """Return the shared experts' output, multiplied by each token's gate if there is one."""
        assert self.shared_experts is not None
        made_TC = self.shared_experts(x_TC)
        if self.shared_expert_gate is None:
            return made_TC
        return linear(x_TC, self.ops.weight(self.shared_expert_gate)).sigmoid() * made_TC

    def _choose(self, x_TC: Tensor, rows: ExpertRows | None) -> tuple[Way, Tensor]:
        """Return the routing of rows to their experts, and the scores of these experts, [T, K].

        Each row has K experts. A recomputed layer uses the experts that its first pass chose.

        Args:
            x_TC: Rows without padding.
            rows: Has the weight of a row in the auxiliary loss and the z-loss. With None these
                losses are left out.
        """
        first = self._first
        if first is not None and first.is_over:
            way, chosen_TK = first.kept()
            return way, self.route(x_TC, rows, chosen_TK)[0]
        scores_TK, chosen_TK = self.route(x_TC, rows)
        way = self.exchange.way(chosen_TK, self.spec.num)
        if first is not None:
            first.keep(way, chosen_TK)
        return way, scores_TK

    @property
    def _needs_outputs(self) -> bool:
        """Whether this pass must compute the outputs of experts.

        A first pass must compute them. A recomputation must compute them only if a later operator
        saves them for backward. The only such operator is the norm at the end of the branch, which
        is recomputed only together with the whole layer.
        """
        first = self._first
        if first is None or not first.is_over:
            return True
        return self._has_branch_norms and first.whole_layer

    def passes(self, *, whole_layer: bool) -> tuple[Any, Any]:
        """Return the two contexts that torch's checkpoint wants from its `context_fn`.

        The first one surrounds the first forward pass, and the second one the recomputation. With
        these contexts the recomputation uses the experts that the first pass chose (see
        `FirstPass`).

        Args:
            whole_layer: Whether the whole layer is recomputed, or only the half after attention.
        """
        first = FirstPass(whole_layer=whole_layer)
        return (
            during_pass(self._set_first, first, is_second=False),
            during_pass(self._set_first, first, is_second=True),
        )

    def _set_first(self, first: FirstPass | None) -> None:
        self._first = first

    def route(
        self, x_TC: Tensor, rows: ExpertRows | None = None, chosen_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose K experts for each row; returns the experts' scores (float32) and numbers, [T, K].

        Args:
            x_TC: Rows.
            rows: Has the weight of a row in the auxiliary loss and the z-loss. With None these
                losses are left out.
            chosen_TK: Numbers of the experts that an earlier pass chose. With None they are chosen
                here.
        """
        logits_TE = linear(x_TC, self.ops.weight(self.gate)).float()
        is_softmax = self.spec.scoring == Scoring.SOFTMAX
        scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        if chosen_TK is None:
            is_biased = self.spec.balance == ExpertBalance.BIAS
            # The bias changes only the choice, not the score that multiplies the result.
            ranked_TE = scores_TE.detach() + self.balance if is_biased else scores_TE.detach()
            chosen_TK = ranked_TE.topk(self.spec.per_token, -1).indices
        scores_TK = scores_TE.gather(-1, chosen_TK)
        if self.spec.normalised:
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        if rows is not None and (loss := self._loss(logits_TE, scores_TE)) is not None:
            scores_TK = _WithLoss.apply(scores_TK, loss * rows.row_weight)
        return scores_TK, chosen_TK  # pyright: ignore[reportReturnType]

    def _loss(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor | None:
        """Return the auxiliary loss plus the z-loss, summed over rows; None if both are off.

        Args:
            logits_TE: Logits of the router.
            scores_TE: Scores, which are the softmax or sigmoid of the logits.
        """
        losses: list[Tensor] = []
        if self.spec.balance == ExpertBalance.AUX_LOSS:
            is_softmax = self.spec.scoring == Scoring.SOFTMAX
            share_TE = scores_TE if is_softmax else scores_TE / scores_TE.sum(-1, keepdim=True)
            loss = (share_TE.sum(0) * self.balance).sum() * self.spec.num
            losses.append(loss * self.spec.aux_coefficient)
        if self.spec.z_loss:
            losses.append(logits_TE.logsumexp(-1).square().sum() * self.spec.z_loss)
        return sum(losses[1:], losses[0]) if losses else None

    @torch.no_grad()
    def rebalance(self) -> None:
        """Update `balance` from the `load` of the last step, after the optimiser's update.

        `balance` has each expert's bias, or with the load-balancing loss its share of the rows.
        """
        if self.load is None or self.spec.balance == ExpertBalance.NONE:
            return
        load = self.load.double()
        if self.spec.balance == ExpertBalance.BIAS:
            self.balance += BIAS_RATE * (load.mean() - load).sign().float()
        else:
            self.balance.copy_(load / load.sum().clamp(min=1))


Initial = Callable[[str, torch.Size, int], Tensor]


def initial_experts(name: str, shape: torch.Size, first: int, seed: int, one: Initial) -> Tensor:
    """Make the initial weights of consecutive experts of a layer, shape [experts, out, in].

    An expert's weights depend only on the parameter's name, the expert's number and the seed.

    Args:
        name: Name of the parameter.
        shape: Shape of the result.
        first: Number of the first expert.
        seed: Seed of the run.
        one: A function that makes one expert's matrix from a name, a shape and a seed.
    """
    made = [one(name, shape[1:], digest("expert", first + i, seed)) for i in range(shape[0])]
    return torch.stack(made)
