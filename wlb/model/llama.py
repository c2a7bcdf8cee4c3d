"""A decoder over packed rows, without batch axis, with the weight names of Hugging Face.

Hidden states are [T, C]: T rows and C channels. Inputs that depend on the micro-batch (rotary
tables, attention, labels) come in a `Rows` record. The model is LLaMA's; options of `ModelSpec` add
features of Qwen and Gemma.

Nothing in this file communicates. Modules do not apply their weights directly but call methods of
an `Ops` object. The base class `Ops` calls the modules, and tensor parallelism overrides it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wlb.model.delta_net import Before, GatedDeltaNet, initial_delta_net
from wlb.model.delta_rule import SpanLayout
from wlb.model.elementwise import gated, norm_of, normalise, rotate
from wlb.model.expert_layer import ExpertRows, MixtureMlp, initial_experts
from wlb.model.loss import WHOLE, VocabularyShard, head_loss
from wlb.plan import digest
from wlb.spec import Activation, LinearBackend, ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Parameter names of the embedding and of the output head."""


class Attend(Protocol):
    """Attention over a micro-batch's rows, in three calls so that communication can overlap.

    A layer calls `begin` with k and v, computes q while the exchange of keys runs, and passes the
    result of `begin` to `attend`. The last operation of the layer is `add`, which gets the second
    result of `attend`. So the layer's backward begins with the backward of `add`, which starts the
    exchange of k and v for backward.
    """

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> Any:
        """Start to exchange k and v between CP ranks, and return a record to pass to `attend`."""
        ...

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: Any) -> tuple[Tensor, Any]:
        """Return attention's output, [T, H, D], and a record that the caller passes to `add`.

        Args:
            q_THD: Queries.
            k_TGD: Keys.
            v_TGD: Values.
            begun: The exchange of the same keys and values, as `begin` returned it.
        """
        ...

    def add(self, x_TC: Tensor, y_TC: Tensor, attended: Any, /) -> Tensor:
        """Return x_TC + y_TC, the layer's output; `attended` is the second result of `attend`."""
        ...


@dataclass(frozen=True, slots=True)
class LocalAttend:
    """Attention in one process, which needs no exchange of keys; implements `Attend`."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]  # computes attention from q, k and v

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Do nothing, because there is no exchange."""

    def attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: None
    ) -> tuple[Tensor, None]:
        """Return attention's output, [T, H, D], and None in place of the record for `add`."""
        return self.call(q_THD, k_TGD, v_TGD), None

    def add(self, x_TC: Tensor, y_TC: Tensor, attended: None) -> Tensor:
        """Return x_TC + y_TC. `attended` is the None that `attend` returned, and is not used."""
        return x_TC + y_TC


class LayerRows(NamedTuple):
    """What attention layers of one kind (full or sliding) need of a micro-batch."""

    cos: Tensor  # table of RoPE, shape [T, 1, D / 2]
    sin: Tensor  # table of RoPE, shape [T, 1, D / 2]
    attend: Attend  # computes attention over the micro-batch


class LinearRows(NamedTuple):
    """What linear-attention layers need of a micro-batch."""

    layout: SpanLayout  # which rows form which span of a document
    # gives each span the state and rows before it; None if all spans are whole documents
    before: Before | None
    backend: LinearBackend = LinearBackend.TORCH  # implementation of the recurrence; not `auto`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs of a micro-batch's forward pass besides its tokens or hidden states."""

    # RoPE tables and attention of layers without a sliding window (see `LayerRows`)
    cos: Tensor
    sin: Tensor
    attend: Attend
    labels: Tensor | None = None  # target of each row, [T]; None before the last pipeline stage
    loss_scale: float = 1.0  # the last stage multiplies the summed loss by this
    # which rows are real, for layers with experts; with None these layers treat padding like real
    # rows
    experts: ExpertRows | None = None
    sliding: LayerRows | None = None  # for layers with a sliding window; None without such layers
    linear: LinearRows | None = None  # for linear-attention layers; None without such layers

    def of(self, *, slides: bool) -> LayerRows:
        """Return the inputs of layers with a sliding window if `slides`, else of the others."""
        if not slides:
            return LayerRows(self.cos, self.sin, self.attend)
        assert self.sliding is not None, "the model has layers with a sliding window"
        return self.sliding


class Ops:
    """Embeddings, norms and linear layers; `wlb.parallel` overrides them for tensor parallelism."""

    vocabulary: VocabularyShard = WHOLE  # part of the vocabulary on this process
    fused: bool = False  # compute norms, RoPE and gated MLPs with one Triton kernel each

    def embed(self, embedding: nn.Embedding, tokens_T: Tensor) -> Tensor:
        """Return the embeddings of tokens, [T, C]."""
        return embedding(tokens_T)

    def norm(self, norm: nn.RMSNorm, x_TC: Tensor) -> Tensor:
        """Apply RMSNorm to the last axis of x_TC, which has rows [T, C] or heads [T, H, D]."""
        # Call the module where possible, because torch's parallelize_module may have added hooks.
        return normalise(norm, x_TC, norm.weight, fused=True) if self.fused else norm(x_TC)

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """Return an iterator over the outputs of linear layers that all read the same rows.

        Each layer is computed when the caller takes its output. With tensor parallelism these
        layers are column-parallel.
        """
        return (linear(x_TC) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        """Apply the last linear layer of a residual branch; with TP it is row-parallel."""
        return linear(x_TC)

    def weight(self, module: nn.Linear | nn.Embedding) -> Tensor:
        """Return this process's part of a module's weight as a plain tensor."""
        return self.own(module.weight)

    def own(self, parameter: Tensor) -> Tensor:
        """Return this process's part of a parameter as a plain tensor."""
        return parameter


class Attention(nn.Module):
    """Self-attention with RoPE and grouped key/value heads.

    Options of `spec` add norms of Q and K, an output gate, and RoPE on only some channels.

    Args:
        spec: Sizes and options of the model.
        ops: Computes embeddings, norms and linear layers.
        slides: Whether the layer has a sliding window.
    """

    def __init__(self, spec: ModelSpec, ops: Ops, *, slides: bool = False) -> None:
        super().__init__()
        self.head_size, self.ops = spec.head_size, ops
        self.query_factor, self.turned_factor = spec.query_factor(slides=slides), 1.0
        if spec.rotary_share != 1.0:
            # If only some channels are rotated, the factor of RoPE's scaling applies to these
            # channels alone. So multiply the RoPE tables by it instead of the whole queries.
            self.turned_factor = spec.rope_scaling.score_factor
            self.query_factor /= self.turned_factor
        self.has_gate = spec.attention_gate
        # With an output gate, the columns of q_proj are sorted by head: for each head the columns
        # of its queries, then the columns of its gate.
        columns = spec.q_dim * (1 + spec.attention_gate)
        self.q_proj = nn.Linear(spec.hidden_size, columns, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_dim, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_dim, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_dim, spec.hidden_size, bias=False)
        self.q_norm, self.k_norm = _head_norms(spec)
        self.norms_rows = spec.qk_norm_rows

    def forward(self, x_TC: Tensor, rows: LayerRows) -> tuple[Tensor, Any]:
        """Return attention's output, [T, C], and what to pass to `Attend.add` as `attended`."""
        # Do not bind q, k and v to names, so that they are freed when the call returns.
        gates: list[Tensor] = []
        out_THD, attended = rows.attend.attend(*self._project(x_TC, rows, gates))
        for gate_THD in gates:
            out_THD = out_THD * gate_THD.sigmoid()
        return self.ops.fan_in(out_THD.flatten(1), self.o_proj), attended

    def _project(
        self, x_TC: Tensor, rows: LayerRows, gates: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Compute k and v, start their exchange, and compute q while the exchange runs.

        Args:
            x_TC: Normalised input of the layer.
            rows: Inputs of the micro-batch.
            gates: If the layer has an output gate, its values are appended to this list.

        Returns:
            q, k, v and the result of `Attend.begin`.
        """
        projected = self.ops.fan_out(x_TC, self.k_proj, self.v_proj, self.q_proj)
        k_TGD = self._rotated(next(projected), rows, self.k_norm)
        v_TGD = self._heads(next(projected))
        begun = rows.attend.begin(k_TGD, v_TGD)
        q_TF = next(projected)
        if self.has_gate:
            q_THD, gate_THD = q_TF.unflatten(-1, (-1, 2, self.head_size)).unbind(-2)
            q_TF = q_THD.flatten(1)
            gates.append(gate_THD)
        if self.turned_factor != 1.0:
            rows = rows._replace(
                cos=rows.cos * self.turned_factor, sin=rows.sin * self.turned_factor
            )
        q_THD = self._rotated(q_TF, rows, self.q_norm)
        if self.query_factor != 1.0:
            q_THD = q_THD * self.query_factor
        return q_THD, k_TGD, v_TGD, begun

    def _rotated(self, x_TF: Tensor, rows: LayerRows, norm: nn.RMSNorm | None) -> Tensor:
        if self.norms_rows and norm is not None:
            x_TF, norm = self.ops.norm(norm, x_TF), None
        x_THD = self._heads(x_TF)
        if norm is not None:
            x_THD = self.ops.norm(norm, x_THD)
        return rotate(x_THD, rows.cos, rows.sin, fused=self.ops.fused)

    def _heads(self, x_TF: Tensor) -> Tensor:
        return x_TF.unflatten(-1, (-1, self.head_size))


def _head_norms(spec: ModelSpec) -> tuple[nn.RMSNorm | None, nn.RMSNorm | None]:
    """Make the norms of Q and K, over each head or over all heads of a row.

    Returns (None, None) if the model does not normalise Q and K.
    """
    if not spec.norms_keys:
        return None, None
    sizes = (spec.q_dim, spec.kv_dim) if spec.qk_norm_rows else (spec.head_size, spec.head_size)
    q_norm, k_norm = (norm_of(spec, size) for size in sizes)
    return q_norm, k_norm


class Mlp(nn.Module):
    """A gated MLP: SwiGLU or GeGLU."""

    def __init__(self, width: int, hidden_size: int, activation: Activation, ops: Ops) -> None:
        super().__init__()
        self.ops, self.activation = ops, activation
        self.gate_proj = nn.Linear(width, hidden_size, bias=False)
        self.up_proj = nn.Linear(width, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, width, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, [T, C]."""
        gate, up = self.ops.fan_out(x_TC, self.gate_proj, self.up_proj)
        made = gated(gate, up, self.activation, fused=self.ops.fused)
        return self.ops.fan_in(made, self.down_proj)


class DecoderLayer(nn.Module):
    """A decoder layer: attention (or linear attention), then an MLP (or a mixture of experts).

    Args:
        spec: Sizes and options of the model.
        ops: Computes embeddings, norms and linear layers.
        slides: Whether the layer's attention has a sliding window.
        has_experts: Whether the layer has a mixture of experts instead of an MLP.
        is_linear: Whether the layer has a gated delta net (linear attention) instead of attention.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        *,
        slides: bool = False,
        has_experts: bool = False,
        is_linear: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.slides, self.has_experts = ops, slides, has_experts
        self.input_layernorm = norm_of(spec, spec.hidden_size)
        # A layer has one of these two modules, named as in Hugging Face's checkpoints.
        self.self_attn = None if is_linear else Attention(spec, ops, slides=slides)
        self.linear_attn = GatedDeltaNet(spec, ops) if is_linear else None
        # Hugging Face uses this name for two norms: Gemma's is applied to attention's output,
        # LLaMA's to the input of the MLP.
        self.post_attention_layernorm = norm_of(spec, spec.hidden_size)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if spec.branch_norms:
            self.pre_feedforward_layernorm = norm_of(spec, spec.hidden_size)
            self.post_feedforward_layernorm = norm_of(spec, spec.hidden_size)
        self.mlp = _mixture(spec, ops) if has_experts else _mlp(spec, ops, spec.ffn_hidden_size)

    def forward(self, x_TC: Tensor, rows: Rows) -> Tensor:
        """Return the layer's output, [T, C]."""
        x_TC, attended = self.first_half(x_TC, rows)
        branch_TC = self.second_half(x_TC, rows.experts)
        if self.post_feedforward_layernorm is not None:
            branch_TC = self.ops.norm(self.post_feedforward_layernorm, branch_TC)
        if self.self_attn is None:
            return x_TC + branch_TC
        return rows.of(slides=self.slides).attend.add(x_TC, branch_TC, attended)

    def first_half(self, x_TC: Tensor, rows: Rows, *, ends: bool = False) -> tuple[Tensor, Any]:
        """Return x_TC plus attention's output, and what to pass to `Attend.add` as `attended`.

        Args:
            x_TC: Residual stream.
            rows: Inputs of the micro-batch.
            ends: Whether to compute this sum by `Attend.add`, instead of the sum at the end of the
                layer. The exchange of k and v in backward then starts when backward reaches this
                half of the layer, and the second result is None.
        """
        mine, normed_TC = rows.of(slides=self.slides), self.ops.norm(self.input_layernorm, x_TC)
        if self.self_attn is not None:
            branch_TC, attended = self.self_attn(normed_TC, mine)
        else:
            assert self.linear_attn is not None
            assert rows.linear is not None, "the model has linear layers"
            branch_TC, attended = self.linear_attn(normed_TC, *rows.linear), None
        if self.pre_feedforward_layernorm is not None:
            branch_TC = self.ops.norm(self.post_attention_layernorm, branch_TC)
        if ends and self.self_attn is not None:
            return mine.attend.add(x_TC, branch_TC, attended), None
        return x_TC + branch_TC, attended

    def second_half(self, x_TC: Tensor, experts: ExpertRows | None = None) -> Tensor:
        """Return what the second norm and the MLP add to the residual stream, [T, C].

        This is a separate method so that activations of this half alone can be recomputed.

        Args:
            x_TC: Residual stream.
            experts: Which rows are real, for a layer with experts; None means all rows.
        """
        norm = self.pre_feedforward_layernorm or self.post_attention_layernorm
        normed_TC = self.ops.norm(norm, x_TC)
        routes_rows = experts is not None and self.has_experts
        return self.mlp(normed_TC, experts) if routes_rows else self.mlp(normed_TC)


def _mlp(spec: ModelSpec, ops: Ops, hidden_size: int) -> Mlp:
    return Mlp(spec.hidden_size, hidden_size, spec.activation, ops)


def _mixture(spec: ModelSpec, ops: Ops) -> MixtureMlp:
    shared = spec.experts.shared_hidden_size
    return MixtureMlp(spec, ops, _mlp(spec, ops, shared) if shared else None)


class Decoder(nn.Module):
    """The decoder layers of one pipeline stage, and its embedding or final norm if it has one.

    Args:
        spec: Sizes and options of the model.
        layers: Numbers of the stage's layers.
        ops: Computes embeddings, norms and linear layers.
        is_first: Whether the stage has the embedding.
        is_last: Whether the stage has the final norm.
    """

    def __init__(
        self, spec: ModelSpec, layers: range, ops: Ops, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.ops = ops
        size = (spec.padded_vocab_size, spec.hidden_size)
        self.embed_tokens = nn.Embedding(*size) if is_first else None
        self.layers = nn.ModuleDict()
        for i in layers:
            self.layers[str(i)] = DecoderLayer(
                spec,
                ops,
                slides=spec.slides(i),
                has_experts=spec.has_experts(i),
                is_linear=spec.is_linear(i),
            )
        self.norm = norm_of(spec, spec.hidden_size) if is_last else None
        self.embedding_scale = spec.hidden_size**0.5 if spec.scaled_embeddings else 1.0

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Return rows [T, C]; x is tokens [T] on the first stage, rows [T, C] on others."""
        if self.embed_tokens is not None:
            x = self.ops.embed(self.embed_tokens, x)
            if self.embedding_scale != 1.0:
                # Gemma was trained with a factor that was rounded to the dtype of the activations.
                x = x * _rounded(self.embedding_scale, x.dtype)
        for layer in self.layers.values():
            x = layer(x, rows)
        return x if self.norm is None else self.ops.norm(self.norm, x)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Round a positive number to the precision of `dtype`, without making a tensor."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


class Llama(nn.Module):
    """A whole model, or one pipeline stage of it with the same parameter names.

    Args:
        spec: Sizes and options of the model.
        layers: Layers of the stage, possibly none. None means all layers.
        is_first: Whether the stage has the embedding.
        is_last: Whether the stage has the final norm, the head and the loss. With tied embeddings,
            the head is the embedding itself if the stage has both; otherwise it is a second
            parameter, which `wlb.parallel.tied` keeps equal to the embedding.
        ops: Computes embeddings, norms and linear layers. None means without parallelism.
        loss_chunk: Number of rows whose logits are in memory at a time.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range | None = None,
        is_first: bool = True,
        is_last: bool = True,
        ops: Ops | None = None,
        loss_chunk: int = 8192,
    ) -> None:
        super().__init__()
        self.spec, self.loss_chunk = spec, loss_chunk
        self.ops = ops or Ops()
        layers = range(spec.num_layers) if layers is None else layers
        self.model = Decoder(spec, layers, self.ops, is_first=is_first, is_last=is_last)
        self.is_last, self.lm_head = is_last, None
        if is_last and not (spec.tied_embeddings and is_first):
            self.lm_head = nn.Linear(spec.hidden_size, spec.padded_vocab_size, bias=False)

    @property
    def head(self) -> nn.Linear | nn.Embedding:
        """The module whose weight is the output head; exists only on the last stage."""
        assert self.is_last
        found = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert found is not None
        return found

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Run the stage's forward pass.

        Args:
            x: Tokens [T] on the first stage, rows [T, C] on others.
            rows: Inputs of the micro-batch.

        Returns:
            Rows [T, C]; on the last stage the loss summed over rows, times `rows.loss_scale`.
        """
        x = self.model(x, rows)
        if not self.is_last:
            return x
        assert rows.labels is not None
        loss = head_loss(
            x,
            self.ops.weight(self.head),
            rows.labels,
            vocab_size=self.spec.vocab_size,
            chunk=self.loss_chunk,
            vocabulary=self.ops.vocabulary,
            softcap=self.spec.logit_softcap,
        )
        return loss * rows.loss_scale


def initial_weight(
    name: str, shape: torch.Size, spec: ModelSpec, *, seed: int, first_expert: int = 0
) -> Tensor:
    """Make the whole initial value of a parameter, in float32 on the CPU.

    The value depends only on name and seed, so every parallel layout starts from the same model.
    (A GPU's generator would give other numbers.) Matrices are drawn from a normal distribution with
    standard deviation `spec.init_std`; those at the end of a residual branch are multiplied by
    1 / sqrt(2 * num_layers), as in GPT-2. Norms are one (zero if they are zero-centred), biases are
    zero, and a tied head equals the embedding. Parameters of linear-attention layers are made by
    `initial_delta_net`.

    Args:
        name: Name of the parameter.
        shape: The parameter's whole shape; for experts [number of experts to make, out, in].
        spec: Sizes and options of the model.
        seed: Seed of the run.
        first_expert: Number of the first expert to make. Unused for other parameters.
    """
    if (made := initial_delta_net(name, shape, seed)) is not None:
        return made
    if len(shape) == 3:
        return initial_experts(
            name, shape, first_expert, seed, lambda n, s, k: initial_weight(n, s, spec, seed=k)
        )
    if len(shape) == 1:
        is_zero = name.endswith(".bias") or spec.zero_centred_norms
        return torch.zeros(shape) if is_zero else torch.ones(shape)
    if spec.tied_embeddings and name == HEAD:
        name = EMBEDDING
    ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = (2 * spec.num_layers) ** -0.5 if ends_branch else 1.0
    generator = torch.Generator().manual_seed(digest(name, seed))
    return torch.empty(shape).normal_(0.0, spec.init_std * scale, generator=generator)


def build_reference(spec: ModelSpec, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Llama:
    """Build the whole initialised model in one process; tests compare every layout with it."""
    model = Llama(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, spec, seed=seed))
    return model.to(dtype)
