"""Section [model]: the shapes and parts of a decoder.

The defaults describe a LLaMA decoder. Further keys add features of Mistral, Qwen, Gemma and OLMoE,
experts, and linear-attention layers. Cost and memory estimates take parameter counts and the kinds
of layers from here.
"""

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
    """Activation function of the gated MLP: SiLU (SwiGLU) or the tanh form of GELU (GeGLU)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class RopeKind(StrEnum):
    """Rule that scales RoPE frequencies: Llama 3's, linear (all by one factor), or YaRN's."""

    LLAMA3 = "llama3"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Section [model.rope_scaling]: scaling of RoPE frequencies for longer contexts."""

    kind: RopeKind = key(
        RopeKind.LLAMA3,
        "rule that scales RoPE frequencies: llama3 = that of Llama 3.1; linear = all by one "
        "factor; yarn = YaRN; no effect while factor is 1",
    )
    factor: float = key(
        1.0,
        "context length of this run divided by the context length in pre-training; 1 = no scaling",
        above=0,
        at_most=1e6,
    )
    turns: tuple[float, ...] = key(
        (),
        "with kind = llama3 or yarn: [low, high], two limits for the number of full turns that a "
        "pair of channels makes within original_context; pairs with fewer than low turns are "
        "scaled by the whole factor, pairs with more than high turns are not scaled, and all "
        "others are scaled in part; empty = [1, 4] for llama3 and [1, 32] for yarn",
        above=0,
        at_most=1e9,
    )
    attention_factor: float = key(
        0.0,
        "with kind = yarn: factor by which Q and K are multiplied; 0 = 0.1 ln(factor) + 1",
        at_least=0,
        at_most=1000,
    )
    original_context: int = key(
        8192,
        "with kind = llama3 or yarn: context length in pre-training, before RoPE was scaled",
        unit="tokens",
        at_least=1,
        at_most=2**40,
    )

    @property
    def is_on(self) -> bool:
        """Whether RoPE frequencies are scaled."""
        return self.factor != 1.0

    @property
    def score_factor(self) -> float:
        """Factor by which YaRN changes attention scores; 1 for other kinds of scaling.

        YaRN multiplies both Q and K by attention_factor, so this is the square of attention_factor.
        """
        if self.kind != RopeKind.YARN or not self.is_on:
            return 1.0
        return (self.attention_factor or 0.1 * math.log(max(1.0, self.factor)) + 1.0) ** 2

    @property
    def bounds(self) -> tuple[float, float]:
        """Limits (low, high): channel pairs with a number of turns between them are scaled in part.

        The full turns within the original context are counted. The limits are those of the key
        `turns`, or the defaults of YaRN or Llama 3 if it is empty.
        """
        if not self.turns:
            return (1.0, 32.0) if self.kind == RopeKind.YARN else (1.0, 4.0)
        low, high = self.turns
        return low, high

    def check(self) -> None:
        """Raise UserError unless the key `turns` is empty or has two increasing numbers above 0."""
        if not self.turns:
            return
        if len(self.turns) != 2 or not 0 < self.turns[0] < self.turns[1]:
            raise UserError(
                f"model.rope_scaling.turns = {list(self.turns)} must be two numbers above 0, the "
                f"smaller one first"
            )


class LayerKind(NamedTuple):
    """A kind of decoder layer, and how many layers of a model are of this kind."""

    model: "ModelSpec"  # a copy of the model in which all layers are of this kind
    has_experts: bool  # whether the layers have experts instead of an MLP
    is_linear: bool  # whether the layers have a gated delta net instead of attention
    layers: int  # number of layers of this kind in the whole model

    @property
    def share(self) -> float:
        """Share of the model's layers that are of this kind."""
        return self.layers / self.model.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Section [model]: a LLaMA decoder. Options add features of other models (named in help)."""

    vocab_size: int = key(
        0,
        "vocabulary size; 0 = the vocabulary size of the token store",
        unit="tokens",
        at_least=0,
        at_most=2**27,
    )
    hidden_size: int = key(512, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = key(8, "number of decoder layers", at_least=1, at_most=10_000)
    num_heads: int = key(8, "number of query heads", at_least=1, at_most=65_536)
    num_kv_heads: int = key(
        8, "number of key/value heads; must divide num_heads", at_least=1, at_most=65_536
    )
    head_dim: int = key(
        0, "channels of an attention head; 0 = hidden_size / num_heads", at_least=0, at_most=65_536
    )
    ffn_hidden_size: int = key(
        1408, "intermediate (FFN) size of the gated MLP", at_least=1, at_most=2**24
    )
    activation: Activation = key(
        Activation.SILU, "activation of the gated MLP: silu = SwiGLU; gelu_tanh = GeGLU"
    )
    qkv_bias: bool = key(False, "the Q, K and V projections have biases (Qwen2)")
    qk_norm: bool = key(False, "apply an RMSNorm to each head of Q and K before RoPE (Qwen3)")
    attention_gate: bool = key(
        False,
        "the query projection also computes a gate for every channel; the output of attention is "
        "multiplied by the sigmoid of this gate (Qwen3-Next)",
    )
    qk_norm_rows: bool = key(
        False,
        "apply one RMSNorm to all heads of a token's Q together, and one to its K, before RoPE "
        "(OLMoE)",
    )
    query_scale_size: int = key(
        0,
        "attention scores are divided by the square root of this number (Gemma's "
        "query_pre_attn_scalar); 0 = the number of channels of a head",
        at_least=0,
        at_most=2**20,
    )
    branch_norms: bool = key(
        False,
        "apply a second RMSNorm to the outputs of attention and MLP, before they are added to the "
        "residual stream (Gemma)",
    )
    zero_centred_norms: bool = key(False, "RMSNorm multiplies by 1 + weight (Gemma)")
    scaled_embeddings: bool = key(
        False, "embeddings are multiplied by the square root of hidden_size (Gemma)"
    )
    sliding_window: int = key(
        0,
        "number of keys that a query of a sliding-window layer attends to, including the key of "
        "its own token; 0 = no layer has a sliding window",
        unit="tokens",
        at_least=0,
        at_most=2**40,
    )
    full_every: int = key(
        0,
        "with sliding_window or model.linear: every n-th layer has attention to all keys, as in "
        "Gemma 2 (n = 2), Gemma 3 (6) and Qwen3-Next (4); 0 = no such layers",
        at_least=0,
        at_most=10_000,
    )
    full_first: int = key(
        0,
        "with sliding_window: number of layers at the start of the model that attend to all keys "
        "(Qwen2's max_window_layers)",
        at_least=0,
        at_most=10_000,
    )
    attention_softcap: float = key(
        0.0,
        "soft cap of attention scores: a score s becomes cap * tanh(s / cap); 0 = off",
        at_least=0,
        at_most=1e9,
    )
    logit_softcap: float = key(
        0.0,
        "soft cap of the output logits: a logit s becomes cap * tanh(s / cap); 0 = off",
        at_least=0,
        at_most=1e9,
    )
    tied_embeddings: bool = key(
        False,
        "the output head uses the embedding's weight; with several pipeline stages, the first and "
        "the last stage sum their gradients of this weight",
    )
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0, at_most=1)
    init_std: float = key(
        0.02, "standard deviation of the initial weights", at_least=0, at_most=1000
    )
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0, at_most=1e15)
    rotary_share: float = key(
        1.0,
        "RoPE rotates this share of the channels of each head, beginning with the first channel "
        "(Qwen3-Next: 0.25)",
        above=0,
        at_most=1,
    )
    sliding_rope_theta: float = key(
        0.0,
        "base of the rotary frequencies in sliding-window layers, which are then not scaled by "
        "rope_scaling (Gemma 3); 0 = rope_theta, scaled as in other layers",
        at_least=0,
        at_most=1e15,
    )
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    linear: LinearSpec = field(default_factory=LinearSpec)
    experts: ExpertsSpec = field(default_factory=ExpertsSpec)

    def with_kv_copies(self, tp: int) -> "ModelSpec":
        """Return a model that has at least as many KV heads as TP ranks.

        If this model has fewer KV heads than TP ranks, several ranks have a copy of one KV head.
        The returned model counts every copy as a head, so that each rank has exactly one head and
        computes 1 / tp of the returned model. Otherwise this model is returned.

        Args:
            tp: TP degree.
        """
        return self if tp <= self.num_kv_heads else replace(self, num_kv_heads=tp)

    def kv_copies(self, tp: int) -> int:
        """Return how many TP ranks have a copy of the same KV head at TP degree `tp`."""
        return max(1, tp // self.num_kv_heads)

    @property
    def kv_dim(self) -> int:
        """Width of K, and of V: the channels of all KV heads together."""
        return self.num_kv_heads * self.head_size

    @property
    def q_dim(self) -> int:
        """Width of Q: the channels of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotated_size(self) -> int:
        """Channels of a head that RoPE rotates, rounded to the nearest even number."""
        return round(self.head_size * self.rotary_share / 2) * 2

    def slides(self, layer: int) -> bool:
        """Return whether layer `layer` has a sliding window."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return self.sliding_window > 0 and layer >= self.full_first and not is_full

    def is_linear(self, layer: int) -> bool:
        """Return whether layer `layer` has a gated delta net instead of attention."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return self.linear.num_value_heads > 0 and not is_full

    @property
    def num_linear_layers(self) -> int:
        """Number of layers with a gated delta net instead of attention."""
        return sum(map(self.is_linear, range(self.num_layers)))

    @property
    def attention_share(self) -> float:
        """Share of the layers that have attention; the others are linear."""
        return 1.0 - self.num_linear_layers / self.num_layers

    def sees_all(self, layer: int) -> bool:
        """Return whether queries of layer `layer` attend to all earlier keys."""
        return not self.slides(layer) and not self.is_linear(layer)

    @property
    def num_full_layers(self) -> int:
        """Number of layers whose queries attend to all earlier keys."""
        return self.num_layers - self.num_sliding_layers - self.num_linear_layers

    @property
    def num_sliding_layers(self) -> int:
        """Number of layers with a sliding window."""
        return sum(map(self.slides, range(self.num_layers)))

    def query_factor(self, *, slides: bool = False) -> float:
        """Return the factor by which a layer's queries are multiplied before attention.

        Attention kernels divide scores by sqrt(head_size). If query_scale_size is set, the factor
        makes this sqrt(query_scale_size). The factor also includes YaRN's factor of scores.

        Args:
            slides: Whether the layer has a sliding window.
        """
        is_scaled = not (slides and self.sliding_rope_theta)
        factor = self.rope_scaling.score_factor if is_scaled else 1.0
        return factor * math.sqrt(self.head_size / (self.query_scale_size or self.head_size))

    def has_experts(self, layer: int) -> bool:
        """Return whether layer `layer` has experts instead of an MLP."""
        return self.experts.num > 0 and self.experts.are_in(layer)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        experts, layers = self.experts, range(self.num_layers)
        if not experts.num:
            return 0
        # Subtract only those dense_layers to which `every` would give experts.
        left_out = {i for i in experts.dense_layers if i in layers and (i + 1) % experts.every == 0}
        return self.num_layers // experts.every - len(left_out)

    @property
    def layer_kinds(self) -> "tuple[LayerKind, ...]":
        """The kinds of layers of this model, with their numbers of layers.

        Kinds with experts come before kinds without. Within each of these two groups, layers with
        attention come before linear layers.
        """
        return _layer_kinds(self)

    @property
    def is_all_linear(self) -> bool:
        """Whether every layer is a linear-attention layer.

        This is true only for the model of a `LayerKind`, because `check` refuses a run whose whole
        model is like this.
        """
        return self.linear.num_value_heads > 0 and not self.full_every

    @property
    def active_ffn_size(self) -> int:
        """Intermediate size of the MLP; with experts, summed over those that process a token."""
        return self.experts.active_hidden_size if self.experts.num else self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary size rounded up to a multiple of 256, whatever the TP degree."""
        return -(-self.vocab_size // 256) * 256

    @property
    def num_layer_parameters(self) -> int:
        """Number of parameters of a layer. All layers must be equal, as in `LayerKind.model`."""
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
        """Number of parameters of a layer's norms, which tensor parallelism does not divide."""
        rows = self.norms_per_layer * self.hidden_size
        if self.is_all_linear:
            return rows + self.linear.value_head_dim
        of_heads = 2 * self.head_size if self.qk_norm else 0
        of_heads += (self.q_dim + self.kv_dim) * self.qk_norm_rows
        return rows + of_heads

    @property
    def norms_keys(self) -> bool:
        """Whether Q and K are normalised, either each head alone or all heads together."""
        return self.qk_norm or self.qk_norm_rows

    @property
    def norm_width(self) -> int:
        """Number of channels that the widest norm of the model normalises together."""
        return max(self.hidden_size, self.q_dim * self.qk_norm_rows)

    @property
    def norms_per_layer(self) -> int:
        """Number of norms of width hidden_size in a layer."""
        return 4 if self.branch_norms else 2

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, with the padded vocabulary."""
        # Count the embedding and the head, which share one weight if they are tied, and the final
        # norm.
        ends = (2 - self.tied_embeddings) * self.padded_vocab_size * self.hidden_size
        ends += self.hidden_size
        kinds = self.layer_kinds
        return ends + sum(kind.layers * kind.model.num_layer_parameters for kind in kinds)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: all except the experts not chosen for it."""
        experts = self.experts
        # Each expert has three weights of hidden_size x experts.hidden_size.
        idle = (experts.num - experts.per_token) * 3 * self.hidden_size * experts.hidden_size
        return self.num_parameters - self.num_expert_layers * idle

    def _check_expert_layers(self) -> None:
        experts = self.experts
        if not experts.num:
            if experts.every != 1 or experts.dense_layers:
                raise UserError(
                    f"model.experts.every = {experts.every} and model.experts.dense_layers = "
                    f"{list(experts.dense_layers)} select which layers have experts, but "
                    f"model.experts.num = 0; set model.experts.num, or remove both keys"
                )
            return
        outside = [i for i in experts.dense_layers if not 0 <= i < self.num_layers]
        if outside:
            raise UserError(
                f"model.experts.dense_layers names layer {outside[0]}, but model.num_layers = "
                f"{self.num_layers}; use layers from 0 to {self.num_layers - 1}"
            )
        if not self.num_expert_layers:
            raise UserError(
                f"model.experts.num = {experts.num}, but model.experts.every = {experts.every} and "
                f"model.experts.dense_layers = {list(experts.dense_layers)} leave no layer with "
                f"experts; lower every, remove layers from dense_layers, or set model.experts.num "
                f"= 0"
            )

    def _check_windows(self) -> None:
        has_others = self.sliding_window or self.linear.num_value_heads
        if (self.full_every or self.full_first) and not has_others:
            raise UserError(
                f"model.full_every = {self.full_every} and model.full_first = {self.full_first} "
                f"select layers that attend to all keys, but with model.sliding_window = 0 and "
                f"model.linear.num_value_heads = 0 all layers do; remove both keys, or set "
                f"model.sliding_window"
            )
        if self.sliding_rope_theta and not self.sliding_window:
            raise UserError(
                f"model.sliding_rope_theta = {self.sliding_rope_theta} applies to sliding-window "
                f"layers, but model.sliding_window = 0; set model.sliding_window, or remove "
                f"model.sliding_rope_theta"
            )
        if self.sliding_window and not self.num_sliding_layers:
            raise UserError(
                f"model.sliding_window = {self.sliding_window}, but model.full_every = "
                f"{self.full_every} and model.full_first = {self.full_first} leave no layer with a "
                f"sliding window; change these two keys, or set model.sliding_window = 0"
            )

    def _check_heads(self) -> None:
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size = {self.hidden_size} is not a multiple of model.num_heads = "
                f"{self.num_heads}; change one of them or set model.head_dim"
            )
        if self.head_size % 2:
            raise UserError(
                f"head size {self.head_size} is odd, but RoPE rotates pairs of channels; set "
                f"model.head_dim to an even number"
            )
        if self.rotated_size != self.head_size * self.rotary_share or not self.rotated_size:
            raise UserError(
                f"model.rotary_share = {self.rotary_share} of a head's {self.head_size} channels "
                f"is {self.head_size * self.rotary_share:g} channels, but RoPE rotates pairs of "
                f"channels; set a share that gives an even number of channels"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}; change one of them"
            )

    def _check_linear_layers(self) -> None:
        if not self.linear.num_value_heads:
            return
        self.linear.check()
        if self.sliding_window:
            raise UserError(
                f"model.sliding_window = {self.sliding_window} with model.linear.num_value_heads = "
                f"{self.linear.num_value_heads}: a model cannot have both sliding-window and "
                f"linear layers; set one of the two keys to 0"
            )
        if not 1 < self.full_every <= self.num_layers:
            raise UserError(
                f"model.full_every = {self.full_every} with model.linear leaves only one kind of "
                f"layer, but a model with linear layers also needs layers with attention; set it "
                f"to a number from 2 to model.num_layers = {self.num_layers} (Qwen3-Next: 4)"
            )

    def check(self) -> None:
        """Raise UserError for the first setting of the model that cannot work."""
        check_declared(self, prefix="model.")
        self.rope_scaling.check()
        self.experts.check(self.hidden_size)
        self._check_linear_layers()
        self._check_expert_layers()
        self._check_windows()
        self._check_heads()
        if self.qk_norm and self.qk_norm_rows:
            raise UserError(
                "model.qk_norm = true and model.qk_norm_rows = true exclude each other: Q and K "
                "are normalised either per head or over all heads; set one of the keys to false"
            )
        if self.experts.num and self.activation != Activation.SILU:
            raise UserError(
                f"model.activation = {self.activation} is not supported with model.experts; set "
                f"model.activation = silu"
            )
        if self.rope_scaling.kind == RopeKind.YARN and self.rope_theta <= 1:
            raise UserError(
                f"model.rope_theta = {self.rope_theta} must be above 1 for model.rope_scaling.kind "
                f"= yarn, because YaRN uses its logarithm"
            )


@lru_cache(maxsize=64)
def _layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    found = [(model.has_experts(i), model.is_linear(i)) for i in range(model.num_layers)]
    if len(set(found)) == 1 and found[0] == (model.experts.num > 0, model.is_all_linear):
        return (LayerKind(model, *found[0], len(found)),)
    kinds: list[LayerKind] = []
    for has_experts, is_linear in sorted(set(found), key=lambda kind: (not kind[0], kind[1])):
        # Build a model whose layers are all of this kind, from which the costs of one layer follow.
        alone = model
        if model.linear.num_value_heads:
            linear = model.linear if is_linear else LinearSpec()
            alone = replace(model, linear=linear, full_every=0)
        experts = replace(model.experts, every=1, dense_layers=())
        alone = replace(alone, experts=experts if has_experts else ExpertsSpec())
        count = found.count((has_experts, is_linear))
        kinds.append(LayerKind(alone, has_experts, is_linear, count))
    return tuple(kinds)
