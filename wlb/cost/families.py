"""The layers of transformers models, and their FLOPs and parameters, from a config.json.

`FAMILIES` has one entry per model family with three functions: the kind of each layer, the cost of
attention (or of what replaces it), and the cost of the MLP or experts. All facts are taken from
transformers' models: tests count the parameters and FLOPs of a small model of each family and
compare.

families.json has the defaults of fields that a config.json leaves out, and alternative names of
fields. `python -m tests.cost.transformers_defaults` writes it from transformers' classes.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from wlb.cost.flops import delta_rule_flops
from wlb.plan import UserError
from wlb.plan.read_file import Fields

MOST = 1 << 32
"""Largest size that a field of a config.json may have; a larger size must be a mistake."""
LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "indexed_attention": "sparse",
    "deepseek_sparse_attention": "sparse",
    "hybrid": "hybrid",
    "mlp": "none",
    "moe": "none",
}
"""Our kind of layer (a key of `KIND_NAMES`) for each kind that a config.json may name."""


class Pairs(NamedTuple):
    """The cost of one query-key pair in attention, and which keys a query sees."""

    flops: float  # forward FLOPs of a pair
    window: int = 0  # keys that a query sees, or tokens of a chunk; 0 means no limit
    chunked: bool = False  # whether a query sees the keys of its chunk rather than the latest keys


class Layer(NamedTuple):
    """The costs of one layer."""

    kind: str  # a key of `wlb.cost.config_json.KIND_NAMES`
    active: int  # number of parameters that one token uses
    total: int  # number of all parameters; more than `active` in a layer with experts
    # Costs of a query-key pair, one entry for each attention in the layer; empty without attention.
    pairs: tuple[Pairs, ...] = ()
    token_flops: int = 0  # forward FLOPs of a token that `active` and `pairs` do not count
    # Number of values in the summary that a span passes on to the next one (`wlb.plan.summaries`).
    summary: int = 0


class Mixer(NamedTuple):
    """The part of a layer through which tokens see each other: attention or a recurrence."""

    weights: int  # number of parameters of the projections
    # Costs of a query-key pair, one entry for each attention in the layer; empty without attention.
    pairs: tuple[Pairs, ...] = ()
    token_flops: int = 0  # forward FLOPs of a token that `weights` and `pairs` do not count
    summary: int = 0  # number of values in the summary that a span passes on to the next one


class MlpWeights(NamedTuple):
    """Numbers of parameters of a layer's MLP or experts."""

    active: int  # number of parameters that one token uses
    total: int  # number of all parameters; more than `active` with experts


class ConfigFields:
    """The checked fields of a config.json; transformers' defaults replace absent fields.

    Methods find a field by its usual name or by an alternative name, whichever of them the file
    uses.
    """

    def __init__(self, keys: Fields, defaults: Mapping[str, Any]) -> None:
        self._defaults: dict[str, Any] = defaults["defaults"]
        self._names: dict[str, str] = defaults["names"]
        values = {self._names.get(name, name): value for name, value in keys.values.items()}
        self._keys = Fields(values, keys.where, remedy=keys.remedy)

    def get(self, name: str) -> Any:
        """Return a field's value: transformers' default if it is absent, None if it is null."""
        values, name = self._keys.values, self._names.get(name, name)
        return values[name] if name in values else self._defaults.get(name)

    def whole(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Return the value of an integer field.

        Args:
            name: The field.
            default: Value if the field is null; None means that null is an error.
            at_least: Smallest valid value.
        """
        if self.get(name) is None and default is not None:
            return default
        name = self._names.get(name, name)
        given = {} if self.get(name) is None else {name: self.get(name)}
        checked = Fields(given, self._keys.where, remedy=self._keys.remedy)
        return checked.whole(name, at_least=at_least, at_most=MOST)

    def flag(self, name: str) -> bool:
        """Return the value of a field that is true or false; null counts as false."""
        value = self.get(name)
        if value not in (None, True, False):
            raise self.error(name, "must be true or false")
        return bool(value)

    def indices(self, name: str) -> list[int]:
        """Return a field that lists indices of layers, counted from 0; empty if it is null."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(i) is not int for i in cast("list[Any]", value)):
            raise self.error(name, "must be a list of layer indices (whole numbers)")
        return cast("list[int]", value)

    def names(self, name: str, length: int | None = None) -> list[str] | None:
        """Return a field that lists strings; None if it is null.

        Args:
            name: The field.
            length: Number of entries that the list must have; None allows any number above 0.
        """
        value = self.get(name)
        if value is None:
            return None
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if not items or any(not isinstance(item, str) for item in items):
            raise self.error(name, "must be a list of strings with at least one entry")
        if length is not None and len(items) != length:
            raise self.error(name, f"must have one entry for each of {length} layers")
        return items

    def nested(self, name: str) -> Fields:
        """Return the fields of an object inside the config.json; no fields if it is absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "must be a JSON object")
        where = f"{self._keys.where}: {name}"
        return Fields(cast("dict[str, Any]", value), where, remedy=self._keys.remedy)

    def error(self, name: str, why: str) -> UserError:
        """Return a UserError about a field's value.

        Args:
            name: The field.
            why: What is wrong, as the end of the sentence: "must be ...".
        """
        values, name = {**self._defaults, **self._keys.values}, self._names.get(name, name)
        return Fields(values, self._keys.where, remedy=self._keys.remedy).error(name, why)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.whole("num_hidden_layers")

    @property
    def hidden(self) -> int:
        """Size of a token's vector between layers."""
        return self.whole("hidden_size")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; the number of query heads if the field is null."""
        return self.whole("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Size of a head; hidden / heads if the field is null."""
        return self.whole("head_dim", max(self.hidden // self.heads, 1))


@cache
def _all_defaults() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Return what families.json says about a family's fields.

    Returns:
        A mapping with two entries: "defaults" has the default of each field, and "names" has the
        usual name for each alternative name.
    """
    return _all_defaults()[model_type]


Kinds = Callable[[ConfigFields], list[str]]
"""Function from a config.json to the kind of each layer."""
MixerOf = Callable[[ConfigFields, str], Mixer]
"""Function from a config.json and a kind of layer to the costs of attention or recurrence."""
MlpOf = Callable[[ConfigFields, int], MlpWeights]
"""Function from a config.json and a layer's index to the parameters of its MLP or experts."""


def _family(mixer: MixerOf, mlp: MlpOf, kinds: Kinds) -> Callable[[ConfigFields], list[Layer]]:
    """Combine three functions into one that lists the layers of a config.json.

    Args:
        mixer: Returns the costs of attention or recurrence in a layer of a given kind.
        mlp: Returns the parameters of a layer's MLP or experts.
        kinds: Returns the kind of each layer.
    """

    def layers(config: ConfigFields) -> list[Layer]:
        made: dict[str, Mixer] = {}
        out: list[Layer] = []
        for i, kind in enumerate(kinds(config)):
            # Layers of one kind have equal attention (or recurrence), so each kind is counted once.
            if kind not in made:
                made[kind] = mixer(config, kind)
            weights, pairs, flops, summary = made[kind]
            rest = mlp(config, i)
            # A sliding layer whose window is null sees all keys. The kind "reused" is sparse
            # attention over the keys that an earlier layer's indexer chose.
            is_full = kind == "sliding" and not pairs[0].window
            seen = "full" if is_full else "sparse" if kind == "reused" else kind
            sizes = weights + rest.active, weights + rest.total
            out.append(Layer(seen, *sizes, pairs, flops, summary))
        return out

    return layers


# ---- Functions for the kind of each layer


def _all(kind: str) -> Kinds:
    """Return a function that gives every layer of a model the kind `kind`."""
    return lambda config: [kind] * config.layers


def _listed(otherwise: Kinds, name: str = "layer_types") -> Kinds:
    """Return a function that reads each layer's kind from a field of the config.json.

    Args:
        otherwise: Returns the kinds if the field is null.
        name: The field.
    """

    def kinds(config: ConfigFields) -> list[str]:
        names = config.names(name, config.layers)
        if names is None:
            return otherwise(config)
        for given in names:
            if given not in LAYER_TYPES:
                raise config.error(name, f"has {given!r}, a kind of layer that wlb cannot count")
        return [LAYER_TYPES[given] for given in names]

    return kinds


def _every(field: str, default: int = 0, *, other: str = "sliding", kind: str = "full") -> Kinds:
    """Return a function that gives the last of every n layers one kind, and the others another.

    Args:
        field: Name of the field that has n; "" if n is `default` for all models of the family.
        default: Value of n if `field` is "" or the field is null; 0 if the field is never null.
        other: Kind of the first n - 1 layers.
        kind: Kind of the last layer.
    """

    def kinds(config: ConfigFields) -> list[str]:
        n = config.whole(field, default) if field else default
        return [other if (i + 1) % n else kind for i in range(config.layers)]

    return kinds


def _first_of(n: int) -> Kinds:
    """Return a function that lists layers' kinds, "full" or "sliding".

    Args:
        n: The first of every n layers is "full".
    """
    return lambda config: ["sliding" if i % n else "full" for i in range(config.layers)]


def _if_window(kinds: Kinds) -> Kinds:
    """Return a function that lists layers' kinds: all are "full" unless `sliding_window` is set.

    Args:
        kinds: Returns the kinds if the field `sliding_window` of the config.json is set.
    """
    return lambda c: kinds(c) if c.get("sliding_window") else ["full"] * c.layers


def _from_layer(field: str) -> Kinds:
    """Return a function that lists layers' kinds: "full" at first, "sliding" from some layer on.

    Args:
        field: Field of config.json with the index of the first "sliding" layer. If it is null, all
            layers are "full".
    """

    def kinds(config: ConfigFields) -> list[str]:
        first = config.whole(field, config.layers, at_least=0)
        return ["sliding" if i >= first else "full" for i in range(config.layers)]

    return kinds


def _where(kinds: Kinds, flag: str = "use_sliding_window") -> Kinds:
    """Return a function that lists layers' kinds: "full" for all unless a config field is true.

    Args:
        kinds: Returns the kinds if the field of config.json is true.
        flag: Name of the field.
    """
    return lambda c: kinds(c) if c.flag(flag) else ["full"] * c.layers


def _unsaid(config: ConfigFields) -> list[str]:
    """Raise UserError that says that the config.json must list layers' kinds in `layer_types`.

    This is for families in which no other field tells the kinds.
    """
    raise config.error("layer_types", "must list the kind of each layer")


def _qwen2_moe_windows(config: ConfigFields) -> list[str]:
    first = config.whole("max_window_layers", config.layers, at_least=0)
    return ["full" if i % 2 or i >= first else "sliding" for i in range(config.layers)]


def _without_rope(kind: str) -> Kinds:
    """Return a function that lists the layers' kinds of Llama 4 or SmolLM3.

    In these models every n-th layer has no RoPE. In Llama 4 the layers with RoPE have chunked
    attention. In SmolLM3 the layers without RoPE may have a sliding window. All other layers have
    full attention.

    Args:
        kind: "chunked" for Llama 4, "sliding" for SmolLM3.
    """

    def kinds(config: ConfigFields) -> list[str]:
        step = config.whole("no_rope_layer_interval", 4)
        ropes = config.get("no_rope_layers") or [(i + 1) % step != 0 for i in range(config.layers)]
        if kind == "chunked":
            has_chunks = config.get("attention_chunk_size") is not None
            return ["chunked" if rope and has_chunks else "full" for rope in ropes]
        has_window = config.flag("use_sliding_window") and config.get("sliding_window")
        return ["sliding" if not rope and has_window else "full" for rope in ropes]

    return kinds


def _olmo_hybrid_kinds(config: ConfigFields) -> list[str]:
    """Return the kinds of OLMo Hybrid's layers: every fourth is "full", the others are "linear".

    A model of fewer than four layers has full attention in its last layer.
    """
    kinds = _every("", 4, other="linear")(config)
    return kinds if "full" in kinds else [*kinds[:-1], "full"]


def _kimi_kinds(config: ConfigFields) -> list[str]:
    """Return the kinds of Kimi Linear's layers, whose config.json counts layers from 1.

    If the config.json does not list the layers with full attention, layers 4, 8, 12, ... (counted
    from 0) have full attention, as in transformers.
    """
    full = config.nested("linear_attn_config").values.get("full_attn_layers")
    if isinstance(full, list):
        return ["full" if i + 1 in full else "linear" for i in range(config.layers)]
    return ["full" if i and i % 4 == 0 else "linear" for i in range(config.layers)]


def _glm_indexers(config: ConfigFields) -> list[str]:
    """Return the kind of each GLM-5 layer: "sparse" with an indexer, "reused" without one.

    An indexer chooses the keys that attention reads. A layer without one reads the keys that the
    indexer of an earlier layer chose. The config.json lists the layers with indexers by name, as a
    pattern of letters, or by how often they occur.
    """
    names, pattern = config.names("indexer_types", config.layers), config.get("index_topk_pattern")
    if names is None and isinstance(pattern, str) and len(pattern) == config.layers:
        names = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if names is None:
        every = config.whole("index_topk_freq", 1)
        skipped = config.whole("index_skip_topk_offset", 2, at_least=0)
        places = (max(i - skipped + 1, 0) for i in range(config.layers))
        return ["reused" if place % every else "sparse" for place in places]
    if not set(names) <= {"full", "shared"}:
        raise config.error("indexer_types", "must have only the entries full and shared")
    return ["sparse" if name == "full" else "reused" for name in names]


def _jamba_kinds(config: ConfigFields) -> list[str]:
    """Return the kinds of Jamba's layers: one layer of each period is "full", the others "linear".

    The config.json gives the period, and the offset of the "full" layer within it.
    """
    period, offset = (
        config.whole("attn_layer_period"),
        config.whole("attn_layer_offset", at_least=0),
    )
    return ["full" if i % period == offset else "linear" for i in range(config.layers)]


def _at(field: str) -> Kinds:
    """Return a function from a config.json to the kind of each layer: "full" or "linear".

    Args:
        field: Field of config.json with the indices of the layers with full attention.
    """

    def kinds(config: ConfigFields) -> list[str]:
        full = config.indices(field)
        return ["full" if i in full else "linear" for i in range(config.layers)]

    return kinds


def _lfm2_kinds(config: ConfigFields) -> list[str]:
    if config.get("full_attn_idxs") is None:
        return ["full"] * config.layers
    return _at("full_attn_idxs")(config)


def _nemotron_h_kinds(config: ConfigFields) -> list[str]:
    """Return the kinds of Nemotron-H's layers, which a config.json gives as letters or as names."""
    pattern = config.get("hybrid_override_pattern")
    names = config.names("layers_block_type")
    if names is not None or pattern is None:
        return [LAYER_TYPES.get(name, name) for name in _nemotron_h_blocks(config)]
    kinds = {"M": "linear", "*": "full", "-": "none", "E": "none"}
    if not isinstance(pattern, str) or not set(pattern) <= set(kinds):
        raise config.error(
            "hybrid_override_pattern", "must be a string of only the letters M, E, * and -"
        )
    return [kinds[letter] for letter in pattern]


def _nemotron_h_blocks(config: ConfigFields) -> list[str]:
    """Return the kind of each Nemotron-H layer; older files have a letter such as E for "moe"."""
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    pattern, names = config.get("hybrid_override_pattern"), config.names("layers_block_type")
    if names is None and isinstance(pattern, str):
        return [letters.get(letter, letter) for letter in pattern]
    names = names or ["linear_attention", "moe", "full_attention", "mlp"]
    for name in names:
        if name not in LAYER_TYPES:
            raise config.error(
                "layers_block_type", f"has {name!r}, a kind of layer that wlb cannot count"
            )
    return names


# ---- Costs of attention, or of a recurrence in its place


def _softmax(config: ConfigFields, kind: str, flops: int) -> tuple[Pairs, ...]:
    """Return the FLOPs of a query-key pair, and which keys a query attends to.

    Args:
        config: The model.
        kind: Kind of the layer. In "sliding" layers a query attends to the keys of the window, in
            "chunked" layers to those of its chunk, and in all others to all keys.
        flops: Forward FLOPs of one pair.
    """
    match kind:
        case "sliding":
            # If the window is null, a query sees all keys.
            return (Pairs(flops, config.whole("sliding_window", 0)),)
        case "chunked":
            return (Pairs(flops, config.whole("attention_chunk_size"), True),)
        case _:
            return (Pairs(flops),)


def _heads(config: ConfigFields, kind: str) -> Mixer:
    """Return the costs of grouped-query attention.

    Args:
        config: The model.
        kind: Kind of the layer: "sliding" and "chunked" limit the keys that a query sees.
    """
    heads, kv, dim = config.heads, config.kv_heads, config.head_dim
    weights = config.hidden * dim * 2 * (heads + kv)
    # QK^T and PV take one multiply-add each per head dimension.
    return Mixer(weights, _softmax(config, kind, 4 * heads * dim))


def _gated_heads(config: ConfigFields, kind: str) -> Mixer:
    """Return the costs of grouped-query attention whose output has elementwise gates.

    Args:
        config: The model.
        kind: Kind of the layer: "sliding" and "chunked" limit the keys that a query sees.
    """
    made = _heads(config, kind)
    gate = config.hidden * config.heads * config.head_dim
    return made._replace(weights=made.weights + gate)


def _fused_heads(config: ConfigFields, kind: str) -> Mixer:
    """Return the costs of attention whose projections of Q, K and V are one matrix.

    GPT-2 and GPT-NeoX have it. There are as many KV heads as query heads.

    Args:
        config: The model.
        kind: Kind of the layer: "sliding" and "chunked" limit the keys that a query sees.
    """
    return Mixer(4 * config.hidden * config.hidden, _softmax(config, kind, 4 * config.hidden))


def _latent(config: ConfigFields, kind: str) -> Mixer:
    """Return the costs of multi-head latent attention (DeepSeek-V2, Section 2.1).

    In training, the keys and values of all heads are computed from the latents before attention. In
    layers of kind "sparse", attention reads only the keys that the layer's indexer chose. In layers
    of kind "reused", it reads those that the indexer of an earlier layer chose.
    """
    hidden, heads = config.hidden, config.heads
    nope, rope = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim", at_least=0)
    value, kv_rank = config.whole("v_head_dim", hidden // heads), config.whole("kv_lora_rank")
    q_rank, width = config.get("q_lora_rank"), heads * (nope + rope)
    rank = None if q_rank is None else config.whole("q_lora_rank")
    # Without q_lora_rank, queries are projected directly.
    query = hidden * width if rank is None else rank * (hidden + width)
    keys = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    weights = query + keys + heads * value * hidden
    pair = 2 * heads * (nope + rope + value)
    if kind not in ("sparse", "reused"):
        return Mixer(weights, _softmax(config, kind, pair))
    # Sparse attention: an indexer with small heads scores all keys, and attention reads only the
    # keys with the best scores.
    index_heads, index_dim = config.whole("index_n_heads"), config.whole("index_head_dim")
    indexer = (rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
    chosen = Pairs(pair, config.whole("index_topk"))
    if kind == "reused":
        return Mixer(weights, (chosen,))
    # The indexer also adds up the weighted scores of its heads, with one multiply-add per head.
    return Mixer(weights + indexer, (Pairs(2 * index_heads * (index_dim + 1)), chosen))


def _delta_net(config: ConfigFields) -> Mixer:
    """Return the costs of a gated delta net (Qwen3-Next).

    A layer has projections to Q, K, V, an output gate, and two gates of each value head.
    """
    k_heads, v_heads = (
        config.whole(f"linear_num_{x}_heads", config.heads) for x in ("key", "value")
    )
    k_dim = config.whole("linear_key_head_dim", int(0.75 * config.hidden / k_heads))
    v_dim = config.whole("linear_value_head_dim", 2 * k_dim)
    keys, values = k_heads * k_dim, v_heads * v_dim
    # In this order: the projections of Q and K; of V, the output gate and the output; and of the
    # two gates of each value head.
    projections = config.hidden * (2 * keys + 3 * values + 2 * v_heads)
    kernel, channels = config.whole("linear_conv_kernel_dim"), 2 * keys + values
    summary = v_heads * k_dim * (k_dim + v_dim) + (kernel - 1) * channels
    flops = 2 * channels * kernel + v_heads * delta_rule_flops(k_dim, v_dim)
    return Mixer(projections, (), flops, summary)


def _kimi_delta(config: ConfigFields) -> Mixer:
    """Return the costs of Kimi delta attention, in which each key dimension has a gate.

    The gates come from low-rank projections.
    """
    given = config.nested("linear_attn_config")
    heads = given.whole("num_heads", config.whole("linear_num_heads"))
    dim = given.whole("head_dim", config.whole("linear_head_dim"))
    kernel = given.whole("short_conv_kernel_size", config.whole("linear_conv_kernel_dim"))
    width = heads * dim
    low_rank = 2 * dim * (config.hidden + width)
    projections = config.hidden * (4 * width + heads) + low_rank
    flops = 6 * width * kernel + heads * delta_rule_flops(dim, dim)
    return Mixer(projections, (), flops, 2 * heads * dim * dim + 3 * width * (kernel - 1))


def _lightning(config: ConfigFields) -> Mixer:
    """Return the costs of MiniMax's lightning attention.

    Lightning attention attends within blocks of tokens, and passes a state matrix from block to
    block.
    """
    heads, dim, block = config.heads, config.head_dim, config.whole("block_size")
    width = heads * dim
    flops = heads * (4 * dim * block + 4 * dim * dim)
    return Mixer(config.hidden * 5 * width, (), flops, heads * (dim * dim + 1))


def _mamba1(hidden: int, *, inner: int, state: int, rank: int, kernel: int) -> Mixer:
    """Return the costs of Mamba's selective scan: 9 FLOPs per token and element of the state.

    The authors of Mamba count the same number.

    Args:
        hidden: Size of a token's vector between layers.
        inner: Channels of the scan.
        state: State elements of a channel.
        rank: Rank of the projection that gives each channel's time step.
        kernel: Tokens that the convolution reads.
    """
    weights = hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
    flops = 9 * inner * state + 2 * inner * kernel
    return Mixer(weights, (), flops, 2 * inner * state + inner * (kernel - 1))


def _mamba2(
    hidden: int, *, heads: int, dim: int, state: int, groups: int, kernel: int, chunk: int
) -> Mixer:
    """Return the costs of Mamba 2 (Dao and Gu 2024).

    Mamba 2 has two products within each chunk, and two products with the chunk's state.

    Args:
        hidden: Size of a token's vector between layers.
        heads: Number of heads.
        dim: Size of a head.
        state: State elements of a channel.
        groups: Number of groups of heads; the heads of a group share B and C.
        kernel: Tokens that the convolution reads.
        chunk: Tokens of a chunk.
    """
    # B and C are shared by the heads of a group.
    inner, shared = heads * dim, 2 * groups * state
    weights = hidden * (2 * inner + shared + heads) + inner * hidden
    scan = heads * (2 * chunk * dim + 4 * dim * state) + groups * 2 * chunk * state
    summary = heads * (dim * state + 1) + (inner + shared) * (kernel - 1)
    return Mixer(weights, (), scan + 2 * (inner + shared) * kernel, summary)


def _mamba_layer(config: ConfigFields) -> Mixer:
    """Return the costs of Mamba 2, read from the fields that Bamba, Granite 4 and Falcon H1 use."""
    heads, inner = config.whole("mamba_n_heads"), config.whole("mamba_expand") * config.hidden
    inner = config.whole("mamba_d_ssm", inner)
    dim = inner // heads if config.get("mamba_d_head") == "auto" else config.whole("mamba_d_head")
    return _mamba2(
        config.hidden,
        heads=heads,
        dim=dim,
        state=config.whole("mamba_d_state"),
        groups=config.whole("mamba_n_groups"),
        kernel=config.whole("mamba_d_conv"),
        chunk=config.whole("mamba_chunk_size"),
    )


def _rank_of(config: ConfigFields, name: str) -> int:
    """Return the rank of a low-rank projection from a field of the config.json.

    Args:
        config: The model.
        name: The field. The value "auto" means hidden size / 16, rounded up.
    """
    return -(-config.hidden // 16) if config.get(name) == "auto" else config.whole(name)


def _mamba(config: ConfigFields, kind: str) -> Mixer:
    return _mamba1(
        config.hidden,
        inner=config.whole("expand") * config.hidden,
        state=config.whole("state_size"),
        rank=_rank_of(config, "time_step_rank"),
        kernel=config.whole("conv_kernel"),
    )


def _mamba_two(config: ConfigFields, kind: str) -> Mixer:
    return _mamba2(
        config.hidden,
        heads=config.whole("num_heads"),
        dim=config.whole("head_dim"),
        state=config.whole("state_size"),
        groups=config.whole("n_groups"),
        kernel=config.whole("conv_kernel"),
        chunk=config.whole("chunk_size"),
    )


def _jamba_mixer(config: ConfigFields) -> Mixer:
    return _mamba1(
        config.hidden,
        inner=config.whole("mamba_expand") * config.hidden,
        state=config.whole("mamba_d_state"),
        rank=_rank_of(config, "mamba_dt_rank"),
        kernel=config.whole("mamba_d_conv"),
    )


def _nemotron_h_mixer(config: ConfigFields) -> Mixer:
    return _mamba2(
        config.hidden,
        heads=config.whole("mamba_num_heads"),
        dim=config.whole("mamba_head_dim"),
        state=config.whole("ssm_state_size"),
        groups=config.whole("n_groups"),
        kernel=config.whole("conv_kernel"),
        chunk=config.whole("chunk_size"),
    )


def _short_conv(config: ConfigFields) -> Mixer:
    """Return the costs of LFM2's gated convolution over the latest tokens."""
    kernel = config.whole("conv_L_cache")
    flops, summary = 2 * config.hidden * kernel, config.hidden * (kernel - 1)
    return Mixer(4 * config.hidden * config.hidden, (), flops, summary)


def _or_linear(softmax: MixerOf, linear: Callable[[ConfigFields], Mixer]) -> MixerOf:
    """Return a function that gives the costs of a layer's attention or recurrence, from its kind.

    Layers of kind "none" have neither. Layers of kind "linear" have a recurrence, and all others
    attention.

    Args:
        softmax: Returns the costs of attention.
        linear: Returns the costs of the recurrence.
    """

    def mixer(config: ConfigFields, kind: str) -> Mixer:
        if kind == "none":
            return Mixer(0)
        return linear(config) if kind == "linear" else softmax(config, kind)

    return mixer


def _both(config: ConfigFields, kind: str) -> Mixer:
    """Return the costs of a Falcon H1 layer, which has attention and Mamba side by side."""
    attention, scan = _heads(config, "full"), _mamba_layer(config)
    return Mixer(attention.weights + scan.weights, attention.pairs, scan.token_flops, scan.summary)


# ---- Costs of MLPs and experts


def _gated(width: str = "intermediate_size") -> MlpOf:
    """Return a function that counts the parameters of an MLP with gate, up and down matrices.

    The field `width` has the MLP's width.
    """

    def mlp(config: ConfigFields, _: int) -> MlpWeights:
        weights = 3 * config.hidden * config.whole(width)
        return MlpWeights(weights, weights)

    return mlp


def _plain(width: str = "intermediate_size") -> MlpOf:
    """Return a function that counts the parameters of an MLP with up and down matrices.

    The field `width` has the MLP's width. The width is 4 * hidden if the field is null.
    """

    def mlp(config: ConfigFields, _: int) -> MlpWeights:
        weights = 2 * config.hidden * config.whole(width, 4 * config.hidden)
        return MlpWeights(weights, weights)

    return mlp


def _no_mlp(config: ConfigFields, _: int) -> MlpWeights:
    return MlpWeights(0, 0)


def _experts(
    count: str = "num_experts",
    width: str = "moe_intermediate_size",
    *,
    per_token: str = "num_experts_per_tok",
    shared: Callable[[ConfigFields], int] | None = None,
    is_dense: Callable[[ConfigFields, int], bool] | None = None,
    dense: MlpOf | None = None,
) -> MlpOf:
    """Return a function that counts the parameters of a layer's router and experts.

    A routed expert has gate, up and down matrices.

    Args:
        count: Field of config.json with the number of experts.
        width: Field with the width of an expert.
        per_token: Field with the number of experts per token.
        shared: Returns the parameters of shared experts; None if the family has none.
        is_dense: Returns whether the layer with a given index has `dense` instead of experts; None
            if all layers have experts.
        dense: The MLP of layers without experts.
    """

    def mlp(config: ConfigFields, layer: int) -> MlpWeights:
        without = config.get(count) is None or (is_dense and is_dense(config, layer))
        if dense and without:
            return dense(config, layer)
        experts = config.whole(count)
        chosen = config.whole(per_token)
        if chosen > experts:
            raise config.error(per_token, f"must be at most {count} = {experts}")
        one = 3 * config.hidden * config.whole(width)
        always = config.hidden * experts + (shared(config) if shared else 0)
        return MlpWeights(always + chosen * one, always + experts * one)

    return mlp


def _shared(count: str, width: str) -> Callable[[ConfigFields], int]:
    """Return a function that counts the parameters of shared experts.

    Args:
        count: Field of config.json with the number of shared experts.
        width: Field with the width of each shared expert.
    """
    return lambda c: 3 * c.hidden * c.whole(count, 0, at_least=0) * c.whole(width)


def _shared_of_width(width: str, *, gate: bool = False) -> Callable[[ConfigFields], int]:
    """Return a function that counts the parameters of one shared MLP.

    Args:
        width: Field of config.json with the MLP's width; 0 there means no shared MLP.
        gate: Whether the MLP has an output gate, as in Qwen's models.
    """
    return lambda c: 3 * c.hidden * c.whole(width, 0, at_least=0) + (c.hidden if gate else 0)


def _first(field: str, default: int = 0) -> Callable[[ConfigFields, int], bool]:
    """Return a function that says whether a layer is dense (without experts): the first n are.

    Args:
        field: Field of the config.json that has n.
        default: n if the field is null.
    """
    return lambda c, i: i < c.whole(field, default, at_least=0)


def _mlp_types(
    otherwise: Callable[[ConfigFields, int], bool],
) -> Callable[[ConfigFields, int], bool]:
    """Return a function that says whether a layer is dense (without experts).

    It reads the field `mlp_layer_types` of the config.json, which has an entry for each layer.

    Args:
        otherwise: The function that says whether a layer is dense if `mlp_layer_types` is null.
    """

    def is_dense(config: ConfigFields, layer: int) -> bool:
        names = config.names("mlp_layer_types", config.layers)
        if names is None:
            return otherwise(config, layer)
        if names[layer] not in ("dense", "sparse"):
            raise config.error(
                "mlp_layer_types", f"has {names[layer]!r}, a kind of layer that wlb cannot count"
            )
        return names[layer] == "dense"

    return is_dense


def _qwen_dense(config: ConfigFields, layer: int) -> bool:
    step = config.whole("decoder_sparse_step", 1)
    return layer in config.indices("mlp_only_layers") or (layer + 1) % step != 0


def _ernie_dense(config: ConfigFields, layer: int) -> bool:
    end = config.whole("moe_layer_end_index", -1, at_least=-1)
    start = config.whole("moe_layer_start_index", at_least=0)
    within = start <= layer <= (config.layers - 1 if end == -1 else end)
    return not within or (layer + 1) % config.whole("moe_layer_interval") != 0


def _llama4_dense(config: ConfigFields, layer: int) -> bool:
    if config.get("moe_layers") is not None:
        return layer not in config.indices("moe_layers")
    return (layer + 1) % config.whole("interleave_moe_layer_step") != 0


def _jamba_dense(config: ConfigFields, layer: int) -> bool:
    period, offset = (
        config.whole("expert_layer_period"),
        config.whole("expert_layer_offset", at_least=0),
    )
    return config.whole("num_experts") == 1 or layer % period != offset


def _granite_mlp(config: ConfigFields, layer: int) -> MlpWeights:
    """Count the MLP parameters of one Granite 4 layer.

    Every layer has a shared MLP. If the model has experts, their parameters are added.
    """
    shared = _shared_of_width("shared_intermediate_size")
    if not config.whole("num_local_experts", 0, at_least=0):
        weights = shared(config)
        return MlpWeights(weights, weights)
    return _experts("num_local_experts", "intermediate_size", shared=shared)(config, layer)


def _lfm2_mlp(config: ConfigFields, _: int) -> MlpWeights:
    """Count the parameters of LFM2's MLP.

    If `block_auto_adjust_ff_dim` is false, the MLP's width is `intermediate_size`. Otherwise it is
    two thirds of `intermediate_size` times `block_ffn_dim_multiplier`, rounded up to a multiple of
    `block_multiple_of`.
    """
    width = config.whole("intermediate_size")
    if config.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        multiplier = config.get("block_ffn_dim_multiplier")
        width = int(float(multiplier) * width) if isinstance(multiplier, int | float) else width
        multiple = config.whole("block_multiple_of")
        width = multiple * -(-width // multiple)
    return MlpWeights(3 * config.hidden * width, 3 * config.hidden * width)


def _nemotron_h_mlp(config: ConfigFields, layer: int) -> MlpWeights:
    """Count the parameters of a Nemotron-H layer's MLP or experts (up and down matrices only).

    Layers with attention or Mamba have neither.
    """
    name, hidden = _nemotron_h_blocks(config)[layer], config.hidden
    if name == "mlp":
        return _plain()(config, layer)
    if name != "moe":
        return MlpWeights(0, 0)
    experts, chosen = config.whole("n_routed_experts"), config.whole("num_experts_per_tok")
    latent = config.whole("moe_latent_size", 0)
    one = 2 * (latent or hidden) * config.whole("moe_intermediate_size")
    shared = 2 * hidden * config.whole("moe_shared_expert_intermediate_size")
    always = hidden * experts + shared + 2 * hidden * latent
    return MlpWeights(always + chosen * one, always + experts * one)


# ---- The families

_DEEPSEEK = _experts(
    "n_routed_experts",
    shared=_shared("n_shared_experts", "moe_intermediate_size"),
    is_dense=_mlp_types(_first("first_k_dense_replace")),
    dense=_gated(),
)
_DEEPSEEK_FROM_SECOND = _experts(
    "n_routed_experts",
    shared=_shared("n_shared_experts", "moe_intermediate_size"),
    is_dense=_mlp_types(_first("first_k_dense_replace", 1)),
    dense=_gated(),
)
_DEEPSEEK_ALL = _experts(
    "n_routed_experts", shared=_shared("n_shared_experts", "moe_intermediate_size")
)
_SHARED_FROM_SECOND = _experts(
    shared=_shared("num_shared_experts", "moe_intermediate_size"),
    is_dense=_mlp_types(_first("first_k_dense_replace", 1)),
    dense=_gated(),
)
_QWEN_EXPERTS = _experts(is_dense=_qwen_dense, dense=_gated())
_QWEN_SHARED = _experts(
    shared=_shared_of_width("shared_expert_intermediate_size", gate=True),
    is_dense=_qwen_dense,
    dense=_gated(),
)
_LLAMA = _family(_heads, _gated(), _all("full"))
_QWEN_WINDOWS = _listed(_where(_if_window(_from_layer("max_window_layers"))))
_DELTA_NET = _or_linear(_gated_heads, _delta_net)
_FULL_EVERY = _listed(_every("full_attention_interval", 4, other="linear"))

FAMILIES: dict[str, Callable[[ConfigFields], list[Layer]]] = {
    # Dense models in which every layer sees all keys.
    "llama": _LLAMA,
    "ministral3": _family(_heads, _gated(), _if_window(_all("sliding"))),
    "mistral": _family(_heads, _gated(), _if_window(_all("sliding"))),
    "phi3": _family(_heads, _gated(), _if_window(_all("sliding"))),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "gemma": _LLAMA,
    "glm": _LLAMA,
    "glm4": _LLAMA,
    "granite": _LLAMA,
    "cohere": _LLAMA,
    "ernie4_5": _LLAMA,
    "hunyuan_v1_dense": _LLAMA,
    "seed_oss": _LLAMA,
    "qwen2_vl_text": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3_vl_text": _LLAMA,
    "helium": _LLAMA,
    "internlm3": _LLAMA,
    "stablelm": _LLAMA,
    "nemotron": _family(_heads, _plain(), _all("full")),
    "apertus": _family(_heads, _plain(), _all("full")),
    "arcee": _family(_heads, _plain(), _all("full")),
    "phi": _family(_heads, _plain(), _all("full")),
    "nanochat": _family(_heads, _plain(), _all("full")),
    "starcoder2": _family(_heads, _plain(), _if_window(_all("sliding"))),
    "gpt2": _family(_fused_heads, _plain("n_inner"), _all("full")),
    "gpt_neox": _family(_fused_heads, _plain(), _all("full")),
    # Dense models with sliding windows in some layers.
    "qwen2": _family(_heads, _gated(), _QWEN_WINDOWS),
    "qwen3": _family(_heads, _gated(), _QWEN_WINDOWS),
    "ministral": _family(_heads, _gated(), _listed(_if_window(_all("sliding")))),
    "gemma2": _family(_heads, _gated(), _listed(_every("", 2))),
    "gemma3_text": _family(_heads, _gated(), _listed(_every("sliding_window_pattern", 6))),
    "vaultgemma": _family(_heads, _gated(), _listed(_every("", 2))),
    "olmo3": _family(_heads, _gated(), _listed(_every("", 4))),
    "cwm": _family(_heads, _gated(), _listed(_first_of(4))),
    "cohere2": _family(_heads, _gated(), _listed(_every("sliding_window_pattern", 4))),
    "exaone4": _family(_heads, _gated(), _listed(_if_window(_every("sliding_window_pattern", 4)))),
    "smollm3": _family(_heads, _gated(), _listed(_without_rope("sliding"))),
    # Models with experts.
    "mixtral": _family(
        _heads, _experts("num_local_experts", "intermediate_size"), _if_window(_all("sliding"))
    ),
    "qwen2_moe": _family(_heads, _QWEN_SHARED, _listed(_where(_qwen2_moe_windows))),
    "qwen3_moe": _family(_heads, _QWEN_EXPERTS, _where(_if_window(_all("sliding")))),
    "qwen3_vl_moe_text": _family(_heads, _QWEN_EXPERTS, _all("full")),
    "olmoe": _family(_heads, _experts(width="intermediate_size"), _all("full")),
    "flex_olmo": _family(_heads, _experts(width="intermediate_size"), _all("full")),
    "granitemoe": _family(_heads, _experts("num_local_experts", "intermediate_size"), _all("full")),
    "granitemoeshared": _family(_heads, _granite_mlp, _all("full")),
    "phimoe": _family(
        _heads, _experts("num_local_experts", "intermediate_size"), _if_window(_all("sliding"))
    ),
    "glm4_moe": _family(_heads, _DEEPSEEK, _all("full")),
    "solar_open": _family(_heads, _DEEPSEEK_ALL, _all("full")),
    "hy_v3": _family(_heads, _SHARED_FROM_SECOND, _all("full")),
    "exaone_moe": _family(
        _heads, _SHARED_FROM_SECOND, _listed(_if_window(_every("sliding_window_pattern", 4)))
    ),
    "afmoe": _family(
        _gated_heads,
        _experts(
            shared=_shared("num_shared_experts", "moe_intermediate_size"),
            is_dense=_first("num_dense_layers"),
            dense=_gated(),
        ),
        _listed(_every("global_attn_every_n_layers")),
    ),
    "dots1": _family(_heads, _DEEPSEEK, _listed(_if_window(_from_layer("max_window_layers")))),
    "gpt_oss": _family(
        _heads, _experts("num_local_experts", "intermediate_size"), _listed(_every("", 2))
    ),
    "ernie4_5_moe": _family(
        _heads,
        _experts(
            "moe_num_experts",
            per_token="moe_k",
            shared=_shared("moe_num_shared_experts", "moe_intermediate_size"),
            is_dense=_ernie_dense,
            dense=_gated(),
        ),
        _all("full"),
    ),
    "minimax_m2": _family(_heads, _experts("num_local_experts", "intermediate_size"), _all("full")),
    "llama4_text": _family(
        _heads,
        _experts(
            "num_local_experts",
            "intermediate_size",
            shared=_shared_of_width("intermediate_size"),
            is_dense=_llama4_dense,
            dense=_gated("intermediate_size_mlp"),
        ),
        _listed(_without_rope("chunked")),
    ),
    # Models with latent attention.
    "deepseek_v2": _family(_latent, _DEEPSEEK, _all("full")),
    "deepseek_v3": _family(_latent, _DEEPSEEK, _all("full")),
    "glm4_moe_lite": _family(_latent, _DEEPSEEK_FROM_SECOND, _all("full")),
    "youtu": _family(_latent, _gated(), _all("full")),
    "minicpm3": _family(_latent, _gated(), _all("full")),
    # Models with latent attention over the keys that an indexer chooses.
    "deepseek_v32": _family(_latent, _DEEPSEEK, _listed(_all("sparse"))),
    "glm_moe_dsa": _family(_latent, _DEEPSEEK, _glm_indexers),
    # Models with linear attention or recurrences, and with full attention in some layers or none.
    "qwen3_next": _family(_DELTA_NET, _QWEN_SHARED, _FULL_EVERY),
    "qwen3_5_text": _family(_DELTA_NET, _gated(), _FULL_EVERY),
    "qwen3_5_moe_text": _family(
        _DELTA_NET,
        _experts(shared=_shared_of_width("shared_expert_intermediate_size", gate=True)),
        _FULL_EVERY,
    ),
    "olmo_hybrid": _family(_or_linear(_heads, _delta_net), _gated(), _listed(_olmo_hybrid_kinds)),
    "kimi_linear": _family(
        _or_linear(_latent, _kimi_delta),
        _experts(
            "num_local_experts",
            shared=_shared("n_shared_experts", "moe_intermediate_size"),
            is_dense=_mlp_types(_first("first_k_dense_replace", 1)),
            dense=_gated(),
        ),
        _listed(_kimi_kinds),
    ),
    "minimax": _family(
        _or_linear(_heads, _lightning),
        _experts("num_local_experts", "intermediate_size"),
        _listed(_every("", 2, kind="linear", other="full")),
    ),
    "mamba": _family(_mamba, _no_mlp, _all("linear")),
    "falcon_mamba": _family(_mamba, _no_mlp, _all("linear")),
    "mamba2": _family(_mamba_two, _no_mlp, _all("linear")),
    "jamba": _family(
        _or_linear(_heads, _jamba_mixer),
        _experts(width="intermediate_size", is_dense=_jamba_dense, dense=_gated()),
        _jamba_kinds,
    ),
    "bamba": _family(_or_linear(_heads, _mamba_layer), _gated(), _at("attn_layer_indices")),
    "granitemoehybrid": _family(
        _or_linear(_heads, _mamba_layer), _granite_mlp, _listed(_all("linear"))
    ),
    "falcon_h1": _family(_both, _gated(), _all("hybrid")),
    "nemotron_h": _family(
        _or_linear(_heads, _nemotron_h_mixer), _nemotron_h_mlp, _nemotron_h_kinds
    ),
    "lfm2": _family(_or_linear(_heads, _short_conv), _lfm2_mlp, _listed(_lfm2_kinds)),
    "lfm2_moe": _family(
        _or_linear(_heads, _short_conv),
        _experts(is_dense=_first("num_dense_layers"), dense=_gated()),
        _listed(_unsaid),
    ),
}
"""For each `model_type`, the function from a config.json of that family to its layers."""
FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Language model of each family whose older files have no `text_config`.

These files have the fields of the language model at the top level.
"""
COUNTED = tuple(sorted(FAMILIES))
"""All values of `model_type` that can be counted."""
