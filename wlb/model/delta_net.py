"""Gated delta net: the linear layer of Qwen3-Next and Qwen3.5, over packed spans of documents.

Projections of each token go through a short causal convolution, which reads the latest tokens of
its document, and then through the gated delta rule (`delta_rule`), whose state is that of the
document. A norm with a gate and a projection follow. Nothing passes between documents.

Where context parallelism cuts a document, a span needs what is before it: the latest rows for the
convolution, and then the state. `Before` brings both; without it, spans are whole documents.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from wlb.model.delta_rule import SpanLayout, Summary, chunks_of, outputs_of, summaries_of


class DeltaNetShape(NamedTuple):
    """Sizes of a layer, as a Hugging Face config.json names them with `linear_` in front."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int = 4
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim


class Before(Protocol):
    """What spans find before them, in the order in which a layer asks for it."""

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        """The `count` latest rows of each span's document before it, shape [S, count, D]; zeros
        where there are none."""
        ...

    def states(self, made: Summary) -> Tensor:
        """The state before each span, from the summaries of all, shape [S, H, K, V]."""
        ...


class GatedDeltaNet(nn.Module):
    """The layer. Projections are apart by head, so that tensor parallelism can divide them."""

    def __init__(self, shape: DeltaNetShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, keys, values = shape.hidden_size, shape.key_dim, shape.value_dim
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.z_proj = nn.Linear(hidden, values, bias=False)
        self.a_proj = nn.Linear(hidden, shape.num_value_heads, bias=False)
        self.b_proj = nn.Linear(hidden, shape.num_value_heads, bias=False)
        kernel = shape.conv_kernel_dim
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Parameter(torch.empty(size, kernel).uniform_(-1, 1) / kernel**0.5)
            for size in (keys, keys, values)
        )
        self.A_log = nn.Parameter(torch.empty(shape.num_value_heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(shape.num_value_heads))
        self.norm = nn.Parameter(torch.ones(shape.value_head_dim))
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_TC: Tensor, layout: SpanLayout, before: Before | None = None) -> Tensor:
        """Rows of packed spans [T, C] to rows.

        Args:
            x_TC: Rows of the spans, one span after the other.
            layout: Of the spans.
            before: What spans find before them; None: nothing, as whole documents do.
        """
        shape, rows = self.shape, x_TC.shape[0]
        # Queries, keys and values of a token also read the latest tokens.
        mixed = torch.cat([self.q_proj(x_TC), self.k_proj(x_TC), self.v_proj(x_TC)], -1)
        weights = torch.cat([self.q_conv, self.k_conv, self.v_conv])
        mixed = silu(self._convolved(mixed, weights, layout, before))
        sizes = [shape.key_dim, shape.key_dim, shape.value_dim]
        # The recurrence is computed in float32 at least.
        exact = torch.promote_types(x_TC.dtype, torch.float32)
        q, k, v = (x.to(exact) for x in mixed.split(sizes, -1))
        q, k = (x.view(rows, shape.num_key_heads, shape.key_head_dim) for x in (q, k))
        v = v.view(rows, shape.num_value_heads, shape.value_head_dim)
        q, k = (
            _unit(x).repeat_interleave(shape.num_value_heads // shape.num_key_heads, 1)
            for x in (q, k)
        )
        beta = self.b_proj(x_TC).sigmoid().to(exact)
        step = softplus(self.a_proj(x_TC).to(exact) + self.dt_bias)
        g = -self.A_log.to(exact).exp() * step
        chunks = chunks_of(q * shape.key_head_dim**-0.5, k, v, g, beta, layout)
        state = None if before is None else before.states(summaries_of(chunks, layout))
        out = outputs_of(chunks, layout, state)
        # RMSNorm of each head, then the gate.
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + shape.norm_eps)
        gate = silu(self.z_proj(x_TC).to(exact)).view_as(out)
        return self.o_proj((self.norm * normed.to(x_TC.dtype) * gate).to(x_TC.dtype).flatten(1))

    def _convolved(
        self, rows_TD: Tensor, weights_DL: Tensor, layout: SpanLayout, before: Before | None
    ) -> Tensor:
        """Each row and the latest rows of its document, weighed by channel."""
        count, width = weights_DL.shape[1] - 1, rows_TD.shape[1]
        if before is None:
            latest = rows_TD.new_zeros(len(layout.lengths), count, width)
        else:
            latest = before.rows(rows_TD, layout, count)
        # One sequence in which the rows before a span stand in front of it.
        spans = rows_TD.split(list(layout.lengths))
        parts = [part for pair in zip(latest, spans, strict=True) for part in pair]
        if not parts:
            return torch.cat([rows_TD, latest.flatten(0, 1)])  # none, but part of the graph
        made = conv1d(torch.cat(parts).t()[None], weights_DL[:, None], groups=width)[0].t()
        # Results that begin in the rows before a span, except its first ones, belong to none.
        ends = torch.tensor([count + n for n in layout.lengths]).cumsum(0).tolist()
        kept = [
            made[end - count - n : end - count] for end, n in zip(ends, layout.lengths, strict=True)
        ]
        return torch.cat(kept)


def _unit(rows: Tensor) -> Tensor:
    """Heads of unit length; the small constant is that of the families' own code."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
