"""Gated delta net, the linear-attention layer of Qwen3-Next and Qwen3.5, over packed spans.

The projections of each token go through a short causal convolution over the latest tokens of its
document, and then through the gated delta rule (`delta_rule`), which keeps one state per document.
A gated norm and an output projection follow. Nothing passes from one document to another.

If context parallelism cuts a document, a span needs two things from the tokens before it: the last
few rows, which the convolution reads, and the state. `Before` provides both. Without it, spans are
whole documents.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, rms_norm, silu, softplus

from wlb.model.delta_rule import DeltaRule, SpanLayout, delta_rule
from wlb.plan import digest
from wlb.spec import LinearBackend, ModelSpec


class Before(Protocol):
    """Gives a layer what it needs of the tokens before each span in the span's document.

    It needs the last few rows, which the convolution reads, and the recurrent state. A layer calls
    `rows` first and `states` later.
    """

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        """For each span, return the `count` rows before it in its document, shape [S, count, D].

        Rows that would lie before the document's beginning are zero.

        Args:
            rows_TD: The convolution's input rows on this process.
            layout: Which rows form which span.
            count: Number of earlier rows that the convolution reads for each row.
        """
        ...

    def states(self, rule: DeltaRule, layout: SpanLayout) -> Tensor:
        """Return the state before each of the S spans, from the summaries of earlier spans.

        The shape is [S, H, K, V]: H heads, K channels of a key and V channels of a value.

        Args:
            rule: Computes the summaries of this process's spans.
            layout: Which rows form which span.
        """
        ...


class GatedDeltaNet(nn.Module):
    """The gated delta net, which takes the place of attention in a layer.

    Its projections are separate modules, so that tensor parallelism can divide their heads.

    Args:
        spec: Sizes and options of the model.
        ops: Computes linear layers, also with tensor parallelism (`wlb.model.llama.Ops`).
    """

    def __init__(self, spec: ModelSpec, ops: Any) -> None:
        super().__init__()
        self.spec, self.ops = spec.linear, ops
        hidden, keys, values = spec.hidden_size, self.spec.key_dim, self.spec.value_dim
        heads, kernel = self.spec.num_value_heads, self.spec.conv_kernel_dim
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.z_proj = nn.Linear(hidden, values, bias=False)
        self.a_proj = nn.Linear(hidden, heads, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.q_conv = nn.Parameter(torch.empty(keys, kernel))
        self.k_conv = nn.Parameter(torch.empty(keys, kernel))
        self.v_conv = nn.Parameter(torch.empty(values, kernel))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(self.spec.value_head_dim, eps=spec.norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(
        self,
        x_TC: Tensor,
        layout: SpanLayout,
        before: Before | None = None,
        backend: LinearBackend = LinearBackend.TORCH,
    ) -> Tensor:
        """Return what the layer adds to the residual stream, [T, C].

        Args:
            x_TC: Rows of the spans, one span after the other.
            layout: Which rows form which span.
            before: Gives each span the rows and state before it. None if all are whole documents.
            backend: The implementation of the recurrence; not `auto`.
        """
        own, linears = self.ops.own, (self.q_proj, self.k_proj, self.v_proj)
        linears = (*linears, self.z_proj, self.a_proj, self.b_proj)
        q, k, v, z, a, b = self.ops.fan_out(x_TC, *linears)
        # Take the widths from the results, because a TP rank has only some of the heads.
        widths = [q.shape[1], k.shape[1], v.shape[1]]
        # Convolve queries, keys and values in one call instead of three.
        weights = torch.cat([own(self.q_conv), own(self.k_conv), own(self.v_conv)])
        mixed = silu(self._convolved(torch.cat([q, k, v], -1), weights, layout, before))
        # Compute the recurrence in float32 or wider, because rounding errors of the state would add
        # up over the tokens of a document.
        exact = torch.promote_types(mixed.dtype, torch.float32)
        q, k, v = (x.to(exact) for x in mixed.split(widths, -1))
        key_dim = self.spec.key_head_dim
        q, k = (_unit(_heads(x, key_dim)) for x in (q, k))
        v = _heads(v, self.spec.value_head_dim)
        beta = b.sigmoid().to(exact)
        step = softplus(a.to(exact) + own(self.dt_bias))
        g = -own(self.A_log).to(exact).exp() * step
        rule = delta_rule((q * key_dim**-0.5, k, v, g, beta), layout, backend, x_TC.dtype)
        state = None if before is None else before.states(rule, layout)
        out = rule.outputs(state).to(exact)
        # Normalise each head, then apply the gate.
        normed = rms_norm(out, self.norm.normalized_shape, eps=self.norm.eps)
        gate = silu(z.to(exact)).view_as(out)
        gated = own(self.norm.weight) * normed.to(x_TC.dtype) * gate
        return self.ops.fan_in(gated.to(x_TC.dtype).flatten(1), self.o_proj)

    def _convolved(
        self, rows_TD: Tensor, weights_DL: Tensor, layout: SpanLayout, before: Before | None
    ) -> Tensor:
        """Convolve each row with the rows before it in its document, channel by channel, [T, D].

        Args:
            rows_TD: Rows of the spans.
            weights_DL: Weights of the convolution, for L rows.
            layout: Which rows form which span.
            before: Gives each span the rows before it. None if spans are whole documents.
        """
        count, width = weights_DL.shape[1] - 1, rows_TD.shape[1]
        if before is None:
            latest = rows_TD.new_zeros(len(layout.lengths), count, width)
        else:
            latest = before.rows(rows_TD, layout, count)
        # Make one sequence in which each span follows the rows before it.
        spans = rows_TD.split(list(layout.lengths))
        parts = [part for pair in zip(latest, spans, strict=True) for part in pair]
        if not parts:
            # There are no rows, but let the result depend on both tensors, because all ranks must
            # run the same backward pass.
            return torch.cat([rows_TD, latest.flatten(0, 1)])
        made = conv1d(torch.cat(parts).t()[None], weights_DL[:, None], groups=width)[0].t()
        # Drop the results at the inserted rows, because they mix two spans.
        ends = torch.tensor([count + n for n in layout.lengths]).cumsum(0).tolist()
        kept = [
            made[end - count - n : end - count] for end, n in zip(ends, layout.lengths, strict=True)
        ]
        return torch.cat(kept)


def _heads(rows_TF: Tensor, size: int) -> Tensor:
    return rows_TF.unflatten(-1, (rows_TF.shape[-1] // size, size))


def _unit(rows: Tensor) -> Tensor:
    """Scale each head to unit length, with the epsilon 1e-6 of the models' published code."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def initial_delta_net(name: str, shape: torch.Size, seed: int) -> Tensor | None:
    """Make the initial value of a gated delta net's parameter, as Hugging Face's transformers does.

    Decay rates are drawn uniformly from 0.001 to 16 and stored as logarithms. Convolutions are
    initialised like torch's.

    Args:
        name: Name of the parameter.
        shape: The parameter's whole shape.
        seed: Seed of the run.

    Returns:
        The value. None for projections, and for parameters of other layers, which are initialised
        elsewhere.
    """
    if ".linear_attn." not in f".{name}":
        return None
    generator = torch.Generator().manual_seed(digest(name, seed))
    match name.rpartition("linear_attn.")[-1]:
        case "A_log":
            return torch.empty(shape).uniform_(1e-3, 16, generator=generator).log()
        case "dt_bias" | "norm.weight":
            return torch.ones(shape)
        case "q_conv" | "k_conv" | "v_conv":
            bound = shape[1] ** -0.5
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        case _:
            return None
