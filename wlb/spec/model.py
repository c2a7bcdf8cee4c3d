"""The [model] section: shapes and parts of a decoder (LLaMA, Mistral, Qwen, Gemma, hybrids)."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from wlb.plan import UserError
from wlb.spec.experts import ExpertsSpec
from wlb.spec.keys import check_declared, key
from wlb.spec.linear import LinearSpec


class Activation(StrEnum):
    """What the MLP's gate goes through: SiLU (SwiGLU), or GELU's tanh approximation (GeGLU)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class RopeKind(StrEnum):
    """How RoPE's frequencies are scaled: as Llama 3 does; all by the factor; YaRN."""

    LLAMA3 = "llama3"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for longer texts; off while factor is 1."""

    kind: RopeKind = key(RopeKind.LLAMA3, "what scales the frequencies; off while factor is 1")
    factor: float = key(
        1.0, "context length relative to the length in pre-training; 1 = off", above=0, at_most=1e6
    )
    turns: tuple[float, ...] = key(
        (),
        "llama3, yarn: channel pairs that turn less often than the first number in "
        "original_context are scaled by the whole factor, those that turn more often than the "
        "second not at all; empty = 1 and 4 for llama3, 1 and 32 for yarn",
        above=0,
        at_most=1e9,
    )
    attention_factor: float = key(
        0.0, "yarn: factor of Q and K; 0 = 0.1 ln(factor) + 1", at_least=0, at_most=1000
    )
    original_context: int = key(
        8192, "context length in pre-training", unit="tokens", at_least=1, at_most=2**40
    )

    @property
    def is_on(self) -> bool:
        return self.factor != 1.0

    @property
    def score_factor(self) -> float:
        """A factor of attention's scores: YaRN's of Q times that of K."""
        if self.kind != RopeKind.YARN or not self.is_on:
            return 1.0
        return (self.attention_factor or 0.1 * math.log(max(1.0, self.factor)) + 1.0) ** 2

    @property
    def bounds(self) -> tuple[float, float]:
        """Turns in the original context below which pairs are scaled whole, and above which not."""
        if not self.turns:
            return (1.0, 32.0) if self.kind == RopeKind.YARN else (1.0, 4.0)
        low, high = self.turns
        return low, high

    def check(self) -> None:
        if not self.turns:
            return
        if len(self.turns) != 2 or not 0 < self.turns[0] < self.turns[1]:
            raise UserError(
                f"model.rope_scaling.turns = {list(self.turns)} must be two numbers above 0, the "
                f"smaller one first"
            )


class LayerKind(NamedTuple):
    """The layers of a model that are of one kind."""

    model: "ModelSpec"  # a model that has such layers alone
    has_experts: bool  # instead of an MLP
    is_linear: bool  # a gated delta net instead of attention
    layers: int  # of the whole model that are of this kind

    @property
    def share(self) -> float:
        """Of all layers."""
        return self.layers / self.model.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A LLaMA decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention; keys add parts of others."""

    vocab_size: int = key(
        0, "vocabulary size; 0 = that of the token store", unit="tokens", at_least=0, at_most=2**27
    )
    hidden_size: int = key(512, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = key(8, "decoder layers", at_least=1, at_most=10_000)
    num_heads: int = key(8, "query heads", at_least=1, at_most=65_536)
    num_kv_heads: int = key(8, "key/value heads; must divide num_heads", at_least=1, at_most=65_536)
    head_dim: int = key(
        0, "size of an attention head; 0 = hidden_size / num_heads", at_least=0, at_most=65_536
    )
    ffn_hidden_size: int = key(1408, "hidden size of the gated MLP", at_least=1, at_most=2**24)
    activation: Activation = key(Activation.SILU, "what the MLP's gate goes through")
    qkv_bias: bool = key(False, "projections to Q, K and V have biases (Qwen2)")
    qk_norm: bool = key(False, "each head of Q and K goes through an RMSNorm before RoPE (Qwen3)")
    attention_gate: bool = key(
        False,
        "attention's output is multiplied by the sigmoid of a gate, which the query projection "
        "gives beside each head of Q (Qwen3-Next)",
    )
    qk_norm_rows: bool = key(
        False, "rows of Q and K, all heads together, go through an RMSNorm before RoPE (OLMoE)"
    )
    query_scale_size: int = key(
        0,
        "attention's scores are divided by the square root of this; 0 = the size of a head",
        at_least=0,
        at_most=2**20,
    )
    branch_norms: bool = key(
        False, "attention and MLP go through another RMSNorm before they are added (Gemma)"
    )
    zero_centred_norms: bool = key(False, "RMSNorm multiplies by 1 + its weight (Gemma)")
    scaled_embeddings: bool = key(
        False, "embeddings are multiplied by the square root of hidden_size (Gemma)"
    )
    sliding_window: int = key(
        0,
        "keys that a query sees in layers whose window slides, its own included; 0 = all keys in "
        "all layers",
        unit="tokens",
        at_least=0,
        at_most=2**40,
    )
    full_every: int = key(
        0,
        "with sliding_window or model.linear: each n-th layer sees all keys (Gemma 2: 2, Gemma 3: "
        "6, Qwen3-Next: 4); 0 = none",
        at_least=0,
        at_most=10_000,
    )
    full_first: int = key(
        0,
        "with sliding_window: so many first layers see all keys (Qwen2's max_window_layers)",
        at_least=0,
        at_most=10_000,
    )
    attention_softcap: float = key(
        0.0,
        "attention's scores s become this * tanh(s / this); 0 = they stay",
        at_least=0,
        at_most=1e9,
    )
    logit_softcap: float = key(
        0.0,
        "the head's logits s become this * tanh(s / this); 0 = they stay",
        at_least=0,
        at_most=1e9,
    )
    tied_embeddings: bool = key(
        False, "the head is the embedding; with pipeline stages both ends add their gradients"
    )
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0, at_most=1)
    init_std: float = key(
        0.02, "standard deviation of the initial weights", at_least=0, at_most=1000
    )
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0, at_most=1e15)
    rotary_share: float = key(
        1.0,
        "share of a head's channels, the first ones, that RoPE rotates (Qwen3-Next: 0.25)",
        above=0,
        at_most=1,
    )
    sliding_rope_theta: float = key(
        0.0,
        "base of the rotary frequencies in layers whose window slides, which are not scaled "
        "(Gemma 3); 0 = as in the others",
        at_least=0,
        at_most=1e15,
    )
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    linear: LinearSpec = field(default_factory=LinearSpec)
    experts: ExpertsSpec = field(default_factory=ExpertsSpec)

    def with_kv_copies(self, tp: int) -> "ModelSpec":
        """The model that `tp` TP ranks compute together. Where it has fewer KV heads than they are,
        each rank has a copy of one, so this model has `tp` of them; otherwise it is this model.
        What a rank computes, keeps and exchanges is 1 / tp of it.
        """
        return self if tp <= self.num_kv_heads else replace(self, num_kv_heads=tp)

    def kv_copies(self, tp: int) -> int:
        """TP ranks that hold the same KV head."""
        return max(1, tp // self.num_kv_heads)

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_size

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotated_size(self) -> int:
        """Channels of a head that RoPE rotates, an even number."""
        return round(self.head_size * self.rotary_share / 2) * 2

    def slides(self, layer: int) -> bool:
        """Whether a query of this layer sees the latest `sliding_window` keys alone."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return self.sliding_window > 0 and layer >= self.full_first and not is_full

    def is_linear(self, layer: int) -> bool:
        """Whether this layer has a gated delta net instead of attention."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return self.linear.num_value_heads > 0 and not is_full

    @property
    def num_linear_layers(self) -> int:
        return sum(map(self.is_linear, range(self.num_layers)))

    @property
    def attention_share(self) -> float:
        """Layers with attention over all."""
        return 1.0 - self.num_linear_layers / self.num_layers

    def sees_all(self, layer: int) -> bool:
        """Whether a query of this layer sees all keys before it."""
        return not self.slides(layer) and not self.is_linear(layer)

    @property
    def num_full_layers(self) -> int:
        """Layers whose queries see all keys before them."""
        return self.num_layers - self.num_sliding_layers - self.num_linear_layers

    @property
    def num_sliding_layers(self) -> int:
        return sum(map(self.slides, range(self.num_layers)))

    def query_factor(self, *, slides: bool = False) -> float:
        """What a layer's queries are multiplied with before attention, whose scores are over
        sqrt(head size). slides: its window does.
        """
        is_scaled = not (slides and self.sliding_rope_theta)
        factor = self.rope_scaling.score_factor if is_scaled else 1.0
        return factor * math.sqrt(self.head_size / (self.query_scale_size or self.head_size))

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts instead of an MLP."""
        return self.experts.num > 0 and self.experts.are_in(layer)

    @property
    def num_expert_layers(self) -> int:
        experts, layers = self.experts, range(self.num_layers)
        if not experts.num:
            return 0
        left_out = {i for i in experts.dense_layers if i in layers and (i + 1) % experts.every == 0}
        return self.num_layers // experts.every - len(left_out)

    @property
    def layer_kinds(self) -> "tuple[LayerKind, ...]":
        """Layers with experts before those with an MLP, and of both those with attention before
        linear ones; one entry if all layers are alike.
        """
        return _layer_kinds(self)

    @property
    def is_all_linear(self) -> bool:
        """Whether no layer has attention, as in the model of a `LayerKind`."""
        return self.linear.num_value_heads > 0 and not self.full_every

    @property
    def active_ffn_size(self) -> int:
        """Hidden size of the MLPs that compute a token in a layer: of its experts, if there are
        any.
        """
        return self.experts.active_hidden_size if self.experts.num else self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary size rounded up to a multiple of 256, independent of tp."""
        return -(-self.vocab_size // 256) * 256

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of a layer, where all are alike (`layer_kinds`)."""
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        if self.experts.num:
            mlp = self.experts.parameters_of(self.hidden_size)
        norms = self.norms_per_layer * self.hidden_size
        if self.is_all_linear:
            return self.linear.parameters_of(self.hidden_size) + mlp + norms
        gate = self.q_dim * self.attention_gate
        attention = self.hidden_size * (2 * self.q_dim + 2 * self.kv_dim + gate)
        biases = self.qkv_bias * (self.q_dim + 2 * self.kv_dim + gate)
        return attention + mlp + biases + self.num_layer_norm_parameters

    @property
    def num_layer_norm_parameters(self) -> int:
        """Of a layer's norms, which tensor parallelism does not divide."""
        rows = self.norms_per_layer * self.hidden_size
        if self.is_all_linear:
            return rows + self.linear.value_head_dim
        of_heads = 2 * self.head_size if self.qk_norm else 0
        of_heads += (self.q_dim + self.kv_dim) * self.qk_norm_rows
        return rows + of_heads

    @property
    def norms_keys(self) -> bool:
        """Whether Q and K are normalised, by head or by row."""
        return self.qk_norm or self.qk_norm_rows

    @property
    def norm_width(self) -> int:
        """Columns of the widest rows that a norm takes."""
        return max(self.hidden_size, self.q_dim * self.qk_norm_rows)

    @property
    def norms_per_layer(self) -> int:
        """Norms of rows in a layer."""
        return 4 if self.branch_norms else 2

    @property
    def num_parameters(self) -> int:
        ends = (2 - self.tied_embeddings) * self.padded_vocab_size * self.hidden_size
        ends += self.hidden_size
        kinds = self.layer_kinds
        return ends + sum(kind.layers * kind.model.num_layer_parameters for kind in kinds)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token: without those of experts that it does not choose."""
        experts = self.experts
        idle = (experts.num - experts.per_token) * 3 * self.hidden_size * experts.hidden_size
        return self.num_parameters - self.num_expert_layers * idle

    def _check_expert_layers(self) -> None:
        experts = self.experts
        if not experts.num:
            if experts.every != 1 or experts.dense_layers:
                raise UserError(
                    f"model.experts.every = {experts.every} and model.experts.dense_layers = "
                    f"{list(experts.dense_layers)} say which layers have experts, but "
                    f"model.experts.num = 0: there are none; leave them out"
                )
            return
        outside = [i for i in experts.dense_layers if not 0 <= i < self.num_layers]
        if outside:
            raise UserError(
                f"model.experts.dense_layers names layer {outside[0]}, but model.num_layers = "
                f"{self.num_layers}: layers are 0 to {self.num_layers - 1}"
            )
        if not self.num_expert_layers:
            raise UserError(
                f"model.experts.num = {experts.num}, but no layer has experts with "
                f"model.experts.every = {experts.every} and model.experts.dense_layers = "
                f"{list(experts.dense_layers)}; lower them, or set model.experts.num = 0"
            )

    def _check_windows(self) -> None:
        has_others = self.sliding_window or self.linear.num_value_heads
        if (self.full_every or self.full_first) and not has_others:
            raise UserError(
                f"model.full_every = {self.full_every} and model.full_first = {self.full_first} "
                f"say which layers see all keys, but with model.sliding_window = 0 and "
                f"model.linear.num_value_heads = 0 all of them do; leave them out"
            )
        if self.sliding_rope_theta and not self.sliding_window:
            raise UserError(
                f"model.sliding_rope_theta = {self.sliding_rope_theta}, but no layer slides: "
                f"model.sliding_window = 0"
            )
        if self.sliding_window and not self.num_sliding_layers:
            raise UserError(
                f"model.sliding_window = {self.sliding_window}, but no layer has a window with "
                f"model.full_every = {self.full_every} and model.full_first = {self.full_first}; "
                f"lower them, or set model.sliding_window = 0"
            )

    def _check_heads(self) -> None:
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size = {self.hidden_size} is not a multiple of model.num_heads = "
                f"{self.num_heads}; change one of them or set model.head_dim"
            )
        if self.head_size % 2:
            raise UserError(
                f"head size {self.head_size} is odd, but RoPE rotates pairs; set an even "
                f"model.head_dim"
            )
        if self.rotated_size != self.head_size * self.rotary_share or not self.rotated_size:
            raise UserError(
                f"model.rotary_share = {self.rotary_share} of heads of {self.head_size} channels "
                f"is {self.head_size * self.rotary_share:g}, but RoPE rotates pairs; use a share "
                f"that gives an even number"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}"
            )

    def _check_linear_layers(self) -> None:
        if not self.linear.num_value_heads:
            return
        self.linear.check()
        if self.sliding_window:
            raise UserError(
                f"model.sliding_window = {self.sliding_window} with model.linear.num_value_heads = "
                f"{self.linear.num_value_heads}: a model has layers with a sliding window or "
                f"linear ones, not both; set one of them to 0"
            )
        if not 1 < self.full_every <= self.num_layers:
            raise UserError(
                f"model.full_every = {self.full_every} with model.linear: it says which layers "
                f"have attention, of which a model needs some, and linear layers beside them; use "
                f"2 to model.num_layers = {self.num_layers} (Qwen3-Next: 4)"
            )

    def check(self) -> None:
        check_declared(self, prefix="model.")
        self.rope_scaling.check()
        self.experts.check(self.hidden_size)
        self._check_linear_layers()
        self._check_expert_layers()
        self._check_windows()
        self._check_heads()
        if self.qk_norm and self.qk_norm_rows:
            raise UserError(
                "model.qk_norm = true and model.qk_norm_rows = true: Q and K have one norm each, "
                "of heads or of rows; set one of them to false"
            )
        if self.experts.num and self.activation != Activation.SILU:
            raise UserError(
                f"model.activation = {self.activation} is not built for model.experts; use silu"
            )
        if self.rope_scaling.kind == RopeKind.YARN and self.rope_theta <= 1:
            raise UserError(
                f"model.rope_theta = {self.rope_theta} must be above 1 for model.rope_scaling.kind "
                f"= yarn, which takes its logarithm"
            )


@lru_cache(maxsize=64)
def _layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    found = [(model.has_experts(i), model.is_linear(i)) for i in range(model.num_layers)]
    if len(set(found)) == 1 and found[0] == (model.experts.num > 0, model.is_all_linear):
        return (LayerKind(model, *found[0], len(found)),)
    kinds: list[LayerKind] = []
    for has_experts, is_linear in sorted(set(found), key=lambda kind: (not kind[0], kind[1])):
        alone = model
        if model.linear.num_value_heads:
            linear = model.linear if is_linear else LinearSpec()
            alone = replace(model, linear=linear, full_every=0)
        experts = replace(model.experts, every=1, dense_layers=())
        alone = replace(alone, experts=experts if has_experts else ExpertsSpec())
        count = found.count((has_experts, is_linear))
        kinds.append(LayerKind(alone, has_experts, is_linear, count))
    return tuple(kinds)
